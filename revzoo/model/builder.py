"""From a checked spec to a network: one walk that carries the shape, with no branch per family."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from revzoo.bijection import SpaceToDepth
from revzoo.errors import InputError, PartArgumentError, RevzooError, SpecError, SpecProblem
from revzoo.model.network import Block, Model, Stage
from revzoo.parts.context import BuildContext, Shape
from revzoo.registry import Registry, branches, couplings, fuses, heads, inits, splits, stems, transitions
from revzoo.spec import Input, Part, Spec, StageSpec, TextInput, to_plain


def build(spec: Spec) -> Model:
    """Return the network that a spec describes, with fresh weights from torch's random stream.

    Raises:
        InputError: not a spec.
        SpecError: parts that cannot be built or do not fit each other; all at once, each with its path in the spec.
    """
    if not isinstance(spec, Spec):
        raise InputError(
            f"build takes what revzoo.load_spec returns. Received: {spec!r}. Use revzoo.create(name), or "
            "revzoo.build(revzoo.load_spec(name))."
        )
    return _Walk(spec).model()


class _Walk:
    """One pass over a spec, remembering every problem so that it can go on to the next part."""

    def __init__(self, spec: Spec):
        self._spec = spec
        self._problems: dict[str, SpecProblem] = {}  # by path, the first of each

    def model(self) -> Model:
        spec = self._spec
        stem = self._make(stems, spec.stem, _entrance(spec.input))
        self._stop_if_wrong()  # without a stem there is no shape to go on with
        split = self._make(splits, spec.split, BuildContext(stem.out_shape, stem.out_shape.width))
        self._stop_if_wrong()
        rates = _drop_path_rates(spec)
        shape, stages = split.out_shape, []
        for i, stage in enumerate(spec.stages):
            shape, built = self._stage(i, stage, shape, rates)
            stages.append(built)
        fuse = self._make(fuses, spec.fuse, BuildContext(shape, shape.width))
        fused = fuse.out_shape if fuse is not None else shape
        head = self._make(heads, spec.head, BuildContext(fused, fused.width, embedding=getattr(stem, "embedding", None)))
        coupling = self._make(couplings, spec.coupling)
        init = self._make(inits, spec.init) if spec.init is not None else None
        self._stop_if_wrong()
        model = Model(spec, coupling, stem, split, stages, fuse, head)
        return model if init is None else model.apply(init)

    def _stage(self, i: int, stage: StageSpec, shape: Shape, rates: Iterator[float]) -> tuple[Shape, Stage]:
        transition = None
        if stage.transition is not None:
            rate = next(rates) if self._spec.drop_path.transitions else 0.0
            transition = self._make(transitions, stage.transition, BuildContext(shape, stage.width, drop_path=rate))
            shape = transition.out_shape if transition is not None else replace(shape, width=stage.width)
        elif stage.width != shape.width:
            allowed = f"{shape.width}, which the part before hands over, or a transition that changes it"
            self._note(f"stages.{i}.width", stage.width, allowed)
            shape = replace(shape, width=stage.width)
        blocks = []
        for index in range(stage.depth):
            folded = transition if index == 0 and isinstance(transition, SpaceToDepth) else None
            site = BuildContext(shape, stage.width, index, next(rates), folded)
            f = self._make(branches, stage.f, site)
            g = self._make(branches, stage.g, site) if stage.g is not None else None
            if f is not None:
                blocks.append(Block(f, g))
        return shape, Stage(transition, blocks)

    def _make(self, registry: Registry, part: Part, *site: BuildContext) -> Any:
        """Return the built part, or None after noting why it cannot be built."""
        try:
            return registry[part.type](*site, **part.arguments)
        except PartArgumentError as misfit:
            self._note(f"{part.path}.{misfit.argument}", misfit.received, misfit.allowed)
        except RevzooError as error:
            self._note(part.path, to_plain(part), str(error).rstrip("."))
        except (RuntimeError, TypeError, ValueError, ArithmeticError) as error:  # torch's own checks, which name no argument
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._note(part.path, to_plain(part), f"a size that torch can build ({reason})")
        return None

    def _note(self, path: str, found: object, allowed: str) -> None:
        self._problems.setdefault(path, SpecProblem(self._spec.file, path, repr(found), allowed))

    def _stop_if_wrong(self) -> None:
        if self._problems:
            raise SpecError(list(self._problems.values()))


def _entrance(input: Input) -> BuildContext:
    """Return where the stem is built."""
    if isinstance(input, TextInput):
        return BuildContext(Shape(input.vocabulary, (input.length,), "text"), input.vocabulary, padding=input.padding)
    return BuildContext(Shape(input.channels, tuple(input.size), "image"), input.channels)


def _drop_path_rates(spec: Spec) -> Iterator[float]:
    """Yield one probability per block of the whole network, transitions included where the spec counts them."""
    drop_path = spec.drop_path
    depth = sum(stage.depth + (drop_path.transitions and stage.transition is not None) for stage in spec.stages)
    for i in range(depth):
        yield drop_path.max if drop_path.rule == "constant" else drop_path.max * i / max(depth - 1, 1)
