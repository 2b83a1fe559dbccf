"""Build a network from a checked spec.

One pass over the spec builds part after part, and hands the shape that each one returns on to the next. Nothing here depends
on the family.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from revzoo.bijection import Bijection, SpaceToDepth
from revzoo.errors import InputError, PartArgumentError, RevzooError, SpecError, SpecProblem
from revzoo.model.model import Model
from revzoo.model.network import Block, Stage
from revzoo.parts.context import BuildContext, Shape
from revzoo.plugin import describe_failure
from revzoo.registry import Registry, branches, couplings, fuses, heads, inits, splits, stems, transitions
from revzoo.runtime.coupling import Coupling
from revzoo.spec import ImageInput, Input, Part, Spec, StageSpec, TextInput, to_plain


def build(spec: Spec) -> Model:
    """Build the network that a spec describes, with random initial weights (`torch.manual_seed` makes them repeatable).

    Raises:
        InputError: `spec` is not a spec.
        SpecError: parts cannot be built or do not fit each other; all of them are listed, each with its path in the spec.
    """
    if not isinstance(spec, Spec):
        raise InputError(
            f"build takes what revzoo.load_spec returns. Received: {spec!r}. Use revzoo.create(name), or "
            "revzoo.build(revzoo.load_spec(name))."
        )
    try:
        return _Builder(spec).build()
    except SpecError as error:
        if sizes := _find_fitting_sizes(spec):
            first, *others = error.problems
            hint = f" Images of {' or '.join(sizes)} pixels fit: img_size, or model.size in training."
            raise SpecError([replace(first, hint=hint), *others]) from error
        raise


def _find_fitting_sizes(spec: Spec) -> list[str]:
    """Return the next smaller and larger sizes of images that a network can be built for which this one's do not fit."""
    if not isinstance(spec.input, ImageInput):
        return []
    sizes = []
    for larger in (0, 1):
        for unit in (32, 28):  # the strides of most networks; patches of 14
            sides = tuple((side - (not larger)) // unit * unit + larger * unit for side in spec.input.size)
            if min(sides) and _can_build(replace(spec, input=replace(spec.input, size=sides))):
                sizes.append("x".join(map(str, sides)))
                break
    return sizes


def _can_build(spec: Spec) -> bool:
    try:
        with torch.device("meta"):
            _Builder(spec).build()
    except SpecError:
        return False
    return True


class _Builder:
    """One pass over a spec. A part that cannot be built is noted, and the pass goes on, so that all problems are reported."""

    def __init__(self, spec: Spec):
        self._spec = spec
        self._problems: dict[str, SpecProblem] = {}  # by path, the first of each path

    def build(self) -> Model:
        spec = self._spec
        stem = self._make(stems, spec.stem, _stem_context(spec.input))
        self._raise_problems()  # without a stem there is no shape to build the rest for
        split = self._make(splits, spec.split, BuildContext(stem.out_shape, stem.out_shape.width))
        self._check_streams()
        self._raise_problems()
        rates = _drop_path_rates(spec)
        shape, stages = split.out_shape, []
        # How many channels of the stem become one of a stream, for who changes the width of the first stage alone.
        self._stem_share = stem.out_shape.width // shape.width
        for i, stage in enumerate(spec.stages):
            shape, module = self._build_stage(i, stage, shape, rates)
            stages.append(module)
        streams = 1 if spec.split.type == "none" else 2
        fuse = self._make(fuses, spec.fuse, BuildContext(shape, shape.width, streams=streams))
        fused = fuse.out_shape if fuse is not None else shape
        head = self._make(heads, spec.head, BuildContext(fused, fused.width, embedding=getattr(stem, "embedding", None)))
        coupling = self._make(couplings, spec.coupling)
        init = self._make(inits, spec.init) if spec.init is not None else None
        self._raise_problems()
        model = Model(spec, coupling, stem, split, stages, fuse, head)
        return model if init is None else model.apply(init)

    def _build_stage(self, i: int, stage: StageSpec, shape: Shape, rates: Iterator[float]) -> tuple[Shape, Stage]:
        transition = None
        if stage.transition is not None:
            rate = next(rates) if self._spec.drop_path.transitions else 0.0
            transition = self._make(transitions, stage.transition, BuildContext(shape, stage.width, drop_path=rate))
            self._check_transition(stage.transition, transition)
            shape = transition.out_shape if transition is not None else replace(shape, width=stage.width)
        elif stage.width != shape.width:
            allowed = f"{shape.width}, the width of the part before it, or a transition that changes it"
            place, width = (f"stages.{i - 1}", stage.width) if i else (self._spec.stem.path, self._stem_share * stage.width)
            before = f" or {place}.width={width}" if i or "width" in self._spec.stem.arguments else ""
            hint = f" Set stages.{i}.width={shape.width}{before}."
            self._add_problem(f"stages.{i}.width", stage.width, allowed, hint)
            shape = replace(shape, width=stage.width)
        blocks = []
        for index in range(stage.depth):
            folded = transition if index == 0 and isinstance(transition, SpaceToDepth) else None
            context = BuildContext(shape, stage.width, index, next(rates), folded)
            f = self._make(branches, stage.f, context)
            g = self._make(branches, stage.g, context) if stage.g is not None else None
            if f is not None:
                blocks.append(Block(f, g))
                self._check_drop_path(stage.f, f)
        return shape, Stage(transition, blocks)

    def _check_streams(self) -> None:
        """Note what does not fit the split, which says whether there are two streams or one tensor."""
        spec, one = self._spec, self._spec.split.type == "none"
        for role, part in (("coupling", spec.coupling), ("fuse", spec.fuse)):
            takes_both = role == "fuse" and getattr(fuses[part.type], "takes_halves", False)
            if (part.type == "none") != one and not takes_both:
                allowed = f"none, because split: none leaves one tensor; or another split for a {role} of two streams"
                self._add_problem(part.path, part.type, allowed if one else f"a {role} of two streams; or split: none")
        if one and isinstance(spec.input, TextInput):
            self._add_problem(spec.split.path, "none", "two streams for texts, for example duplicate")
        for i, stage in enumerate(spec.stages):
            if one and stage.g is not None:
                self._add_problem(f"stages.{i}.g", stage.g.type, "no g: without a coupling, a block is y = f(x)")

    def _check_drop_path(self, part: Part, f: nn.Module) -> None:
        rate = self._spec.drop_path.max
        if rate and self._spec.split.type == "none" and not getattr(f, "has_shortcut", False):
            allowed = f"0: without a coupling nothing is left of a dropped {part.type}"
            self._add_problem("block.drop_path.max", rate, allowed)

    def _check_transition(self, part: Part, transition: nn.Module | None) -> None:
        one = self._spec.split.type == "none"
        if transition is None or isinstance(transition, Bijection) or getattr(transition, "takes_one_tensor", False) == one:
            return
        takes = "one tensor, or a split" if one else "two streams, or split: none"
        self._add_problem(f"{part.path}.type", part.type, f"a transition of {takes}")

    def _make(self, registry: Registry, part: Part, *context: BuildContext) -> Any:
        """Return the built part, or None if it cannot be built; the reason is then among the problems."""
        make = registry[part.type]
        try:
            made = make(*context, **part.arguments)
        except PartArgumentError as error:
            self._add_problem(f"{part.path}.{error.argument}", error.received, error.allowed)
        except RevzooError as error:
            self._add_problem(part.path, to_plain(part), str(error).rstrip("."))
        except Exception as error:
            if _is_own(make):  # its author wants to know the line
                allowed = f"a part that can be built ({describe_failure(error)})"
            elif isinstance(error, RuntimeError | TypeError | ValueError | ArithmeticError):
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                allowed = f"a size that torch can build ({reason})"  # torch does not say which argument is wrong
            else:
                raise
            self._add_problem(part.path, to_plain(part), allowed)
        else:
            if (wanted := _find_misfit(registry.kind, made)) is None:
                return made
            self._add_problem(f"{part.path}.type", part.type, wanted)
        return None

    def _add_problem(self, path: str, received: object, allowed: str, hint: str = "") -> None:
        file = self._spec.places.get(path, self._spec.file)
        self._problems.setdefault(path, SpecProblem(file, path, repr(received), allowed, hint))

    def _raise_problems(self) -> None:
        if self._problems:
            raise SpecError(list(self._problems.values()))


def _is_own(make: Callable[..., Any]) -> bool:
    """Return whether a user registered it."""
    return not str(getattr(make, "__module__", "")).startswith("revzoo.")


def _find_misfit(kind: str, made: Any) -> str | None:
    """Return what a part of this kind has to be, or None if `made` is that. Parts that ship always are."""
    if kind == "coupling":
        return None if isinstance(made, Coupling) else "a function that returns a revzoo.runtime.Coupling"
    if kind == "init":
        return None if callable(made) else "a function that returns a function of a module"
    if not isinstance(made, nn.Module) or "_modules" not in vars(made):
        return "an nn.Module whose __init__ calls super().__init__()"
    if kind == "head":
        has_size = isinstance(getattr(made, "outputs", None), int)
        return None if has_size else "a head with an integer attribute outputs, the size of the last dimension of the logits"
    if kind == "branch" or isinstance(getattr(made, "out_shape", None), Shape):
        return None
    return f"a {kind} with an attribute out_shape, the Shape of what it returns"


def _stem_context(input: Input) -> BuildContext:
    """Return the context of the stem: the shape of the network's input."""
    if isinstance(input, TextInput):
        return BuildContext(Shape(input.vocabulary, (input.length,), "text"), input.vocabulary, padding=input.padding)
    return BuildContext(Shape(input.channels, tuple(input.size), "image"), input.channels)


def _drop_path_rates(spec: Spec) -> Iterator[float]:
    """Yield the drop path probability of every block in order, and of transitions if the spec drops them too."""
    drop_path = spec.drop_path
    depth = sum(stage.depth + (drop_path.transitions and stage.transition is not None) for stage in spec.stages)
    for i in range(depth):
        yield drop_path.max if drop_path.rule == "constant" else drop_path.max * i / max(depth - 1, 1)
