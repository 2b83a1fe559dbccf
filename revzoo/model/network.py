"""The network as a module: stem, split into two streams, stages of reversible blocks with transitions, fuse, head."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from revzoo.bijection import Bijection
from revzoo.errors import InputError, PartArgumentError
from revzoo.model import inputs
from revzoo.model.hub_methods import HubMethods
from revzoo.model.tap import Tap, insert_taps
from revzoo.model.timm_methods import Head, TimmMethods
from revzoo.registry import couplings
from revzoo.runtime.chain import invert_chain, run_chain
from revzoo.runtime.coupling import Coupling, Pair
from revzoo.runtime.exact import Grid
from revzoo.runtime.layer_chain import run_layers, run_layers_apart, run_layers_before
from revzoo.runtime.layer_rules import Layer, has_inverse, list_layers
from revzoo.runtime.layout import LayoutEntry, Scheduled, expand_schedule
from revzoo.runtime.lookahead import Lookahead, begin_lookahead
from revzoo.runtime.mode import Mode
from revzoo.runtime.node import require_tensors, run_node
from revzoo.runtime.segment import InvertedSegment
from revzoo.runtime.update import Step
from revzoo.spec.edit import with_coupling, with_outputs
from revzoo.spec.schema import Spec


class Block(nn.Module):
    """One reversible block: the step `f` and, in most families, a second step `g`.

    A block only gives the steps their names; the chain calls them directly.
    """

    def __init__(self, f: nn.Module, g: nn.Module | None):
        super().__init__()
        self.f = f
        if g is not None:
            self.g = g


class Stage(nn.Module):
    """Blocks of one width and, before them, the transition that changes width or size: a node or a bijection."""

    def __init__(self, transition: nn.Module | None, blocks: Sequence[Block]):
        super().__init__()
        if transition is not None:
            self.transition = transition
        self.blocks = nn.ModuleList(blocks)


class Model(Scheduled, HubMethods, TimmMethods, nn.Module):
    """A reversible network built from a spec; make one with `revzoo.create` or `revzoo.build`.

    Reversible steps that follow each other form one chain. Stem, fuse, head, and the transitions that are not bijections, are
    nodes: ordinary modules, which keep their saved tensors unless their mode is `selective` or `recompute`. State-dict keys
    depend on the architecture alone, not on the schedule.

    Shapes: x: images (B, C, H, W) of the spec's channels and size, or ids (B, N) with N up to the spec's length.
        attention_mask: (B, N), 1 or True for tokens; by default all ids but the spec's padding. Texts only.
        Returns logits, (B, outputs) or (B, N, outputs), depending on the head.
    """

    def __init__(
        self,
        spec: Spec,
        coupling: Coupling,
        stem: nn.Module,
        split: nn.Module,
        stages: Sequence[Stage],
        fuse: nn.Module,
        head: Head,
    ):
        super().__init__()
        self.spec = spec
        self.coupling = coupling
        self.stem = stem
        self.split = split
        self.stages = nn.ModuleList(stages)
        self.fuse = fuse
        self.head = head
        self._exact = False
        self._class_names: tuple[str, ...] | None = None
        self.lookahead = 0
        for entry in self.layout():
            if entry.kind == "step":
                cast(Any, entry.module).name = entry.name
        self.schedule = Mode.INVERT

    def layout(self) -> list[LayoutEntry]:
        """Return every module that a forward pass calls, in order: stem, split, transitions and steps, fuse, head."""
        is_layered = isinstance(self.stem, nn.Sequential)
        entries = self._list_layers("stem", self.stem) if is_layered else [LayoutEntry("stem", self.stem, "node")]
        entries.append(LayoutEntry("split", self.split, "split"))
        for i, stage in enumerate(self.stages):
            transition = getattr(stage, "transition", None)
            if transition is not None:
                kind: Literal["bijection", "node"] = "bijection" if isinstance(transition, Bijection) else "node"
                entries.append(LayoutEntry(f"stages.{i}.transition", transition, kind, i))
            for j, block in enumerate(cast(Stage, stage).blocks):
                for branch, f in block.named_children():
                    name = f"stages.{i}.blocks.{j}.{branch}"
                    entries += [LayoutEntry(name, f, "step", i)] if self.has_streams else self._list_layers(name, f, i)
        return [*entries, LayoutEntry("fuse", self.fuse, "node"), LayoutEntry("head", self.head, "node")]

    @property
    def has_streams(self) -> bool:
        """Whether a coupling joins two streams. Without one, layers with an inverse of their own are inverted one by one."""
        return self.spec.coupling.type != "none"

    @property
    def steps(self) -> list[nn.Module]:
        """The reversible steps in order, as modules; each has its path in the model as `.name`."""
        return [entry.module for entry in self.layout() if entry.kind == "step"]

    @property
    def units(self) -> tuple[str, ...]:
        """Names of all steps and nodes in order; `schedule` has one mode for each."""
        return tuple(entry.name for entry in self.layout() if entry.is_unit)

    def _read_schedule(self, modes: Sequence[str] | str) -> list[Mode]:
        return expand_schedule(modes, [entry for entry in self.layout() if entry.is_unit])

    @property
    def exact(self) -> bool:
        """Whether the streams are rounded to a grid, which makes inversion exact; see `revzoo.runtime.exact`."""
        return self._exact

    @exact.setter
    def exact(self, exact: bool) -> None:
        if not isinstance(exact, bool):
            raise InputError(f"exact is True or False. Received: {exact!r}.")
        if exact:
            self.coupling.require_exact()
            Grid(next(self.parameters()).dtype)  # raises for a dtype without a grid
        self._exact = exact
        self._store_what_rounds()

    @property
    def num_outputs(self) -> int:
        """Size of the logits' last dimension: the number of classes or, for a language model, of ids."""
        return cast(Head, self.head).outputs

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes, in the order of the outputs; None where nobody has named them.

        They are saved with the weights. There may be fewer than outputs. A new head has none.

        Raises:
            InputError: another thing than names, or more of them than outputs, is assigned.
        """
        return self._class_names

    @class_names.setter
    def class_names(self, names: Sequence[str] | None) -> None:
        if names is not None and (isinstance(names, str) or not all(isinstance(name, str) for name in names)):
            raise InputError(f"class_names is a list of strings. Received: {names!r}.")
        if names is not None and len(names) > self.num_outputs:
            raise InputError(f"{self.spec.name} has {self.num_outputs} outputs. Received: {len(names)} class_names.")
        self._class_names = None if names is None else tuple(names)

    def set_coupling(self, **arguments: object) -> None:
        """Change arguments of the coupling, such as `kept_bits=4`, in the model and in its spec.

        The weights stay the same, but the function changes. Fine-tuning of a converted network moves its coupling this way.

        Args:
            **arguments: new values by name. None resets an argument to its default; arguments not given keep their values.

        Raises:
            InputError: an argument that the coupling does not have, or a value that it does not allow.
        """
        spec = with_coupling(self.spec, arguments)
        try:
            coupling: Coupling = couplings[spec.coupling.type](**spec.coupling.arguments)
        except PartArgumentError as error:
            raise InputError(f"The coupling {spec.coupling.type} cannot take these arguments. {error}") from error
        if self._exact:
            coupling.require_exact()
        self.spec, self.coupling = spec, coupling
        self._store_what_rounds()

    def reset_head(self, num_outputs: int) -> None:
        """Replace the last linear layer by a new one with random weights and `num_outputs` outputs, in the spec too.

        Raises:
            InputError: `num_outputs` is not an integer >= 1, or the head's outputs are the ids of a vocabulary.
        """
        like = None if self.num_classes else next(self.parameters())
        cast(Head, self.head).reset(check_num_outputs(num_outputs), like)
        self.spec, self.class_names = with_outputs(self.spec, num_outputs), None

    def example_input(self, batch_size: int = 1, device: torch.device | str | None = None) -> Tensor:
        """Return a random batch: images (batch_size, C, H, W), or ids (batch_size, length) without padding."""
        reference = next(self.parameters())
        return inputs.make_example(self.spec, batch_size, device or reference.device, reference.dtype)

    def forward_features(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the input of the head: the fused and normalised streams, before pooling unless the fuse pools.

        Shapes: x, attention_mask: as for the model. Returns (B, N, D) or (B, C', H', W'), depending on the fuse.
        Raises:
            InputError: `x` is not a batch of the spec's input, or not on the parameters' device, or images have another dtype
                than the parameters (without autocast), or the mask does not fit.
        """
        mask = inputs.make_mask(self.spec, x, attention_mask, next(self.parameters()))
        return self._compute_features(x, mask, begin_lookahead(self._lookahead))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = inputs.make_mask(self.spec, x, attention_mask, next(self.parameters()))
        lookahead = begin_lookahead(self._lookahead)
        features = self._compute_features(x, mask, lookahead)
        masks = () if mask is None else (mask,)
        return cast(Tensor, run_node(self.head, "head", self._schedule[-1], features, *masks, lookahead=lookahead))

    @torch.no_grad()
    def inverse(self, features: Tensor) -> Tensor:
        """Compute the input of the network from its `forward_features`, if all of its parts are invertible.

        The result equals the input up to rounding errors, or bit for bit if `exact` is set. The features must have been
        computed in eval mode, because dropout and BatchNorm in training mode cannot be repeated.

        Raises:
            InputError: the model is in training mode, one of its parts has no inverse (it is named), or `features` has another
                shape, dtype or device than `forward_features` returns.
        """
        if self.training:
            raise InputError("Features are inverted in eval mode, and must have been computed in it. Call model.eval() first.")
        layout, chain = self.layout(), list[Step | Bijection]()
        modes = self._modes(layout)
        for entry in layout:
            if entry.kind == "layer" or (entry.kind == "node" and entry.stage is not None):
                raise self._not_invertible(entry.name)
            if entry.kind in ("step", "bijection"):
                chain.append(self._chain_item(entry, modes))
        fuse, split, stem = (self._get_inverse(name) for name in ("fuse", "split", "stem"))
        self._check_features(features)
        return cast(Tensor, stem(split(*invert_chain(chain, *fuse(features), exact=self.exact))))

    def _compute_tapped_features(
        self, x: Tensor, attention_mask: Tensor | None, taps: Mapping[str, Tap], stop_early: bool
    ) -> Tensor:
        """Return what `forward_features` returns, and call each tap with the streams after the step or layer of its name."""
        mask = inputs.make_mask(self.spec, x, attention_mask, next(self.parameters()))
        return self._compute_features(x, mask, begin_lookahead(self._lookahead), taps, stop_early)

    def _compute_features(
        self,
        x: Tensor,
        mask: Tensor | None,
        lookahead: Lookahead | None,
        taps: Mapping[str, Tap] = MappingProxyType({}),
        stop_early: bool = False,
    ) -> Tensor:
        layout = self.layout()
        modes = self._modes(layout)
        entries = insert_taps(layout[:-1], taps, stop_early) if taps else layout[:-1]
        tensors: tuple[Tensor, ...] = (x,)  # after the split the two streams, unless there is no coupling
        chain: list[Step | Bijection] | None = None  # steps since the split or the last node
        layers: list[Layer] = []  # layers and bijections of one tensor, since the last node
        segment: InvertedSegment | None = None  # the layers before the split, which the chain after it goes on with
        del x  # a reference here would keep it alive for the whole forward pass
        for entry in entries:
            if entry.kind == "split" and not self.has_streams:
                continue  # the layers before it and after it are one chain
            if chain is not None and entry.kind != "node":
                chain.append(self._chain_item(entry, modes))
            elif entry.kind in ("layer", "bijection"):
                layers.append(Layer(entry.module, entry.name, modes.get(entry.name, Mode.INVERT)))
            else:
                if chain is not None:
                    pair = cast(Pair, tensors)
                    tensors = run_chain(chain, *pair, side=mask, exact=self.exact, lookahead=lookahead, segment=segment)
                    chain, segment = [], None
                    del pair
                if entry.kind == "split":
                    tensors, segment = self._split(layers, *tensors, lookahead=lookahead)
                    require_tensors(tensors, entry.name, 2)
                    chain, layers = [], []
                    continue
                if layers and getattr(entry.module, "takes_halves", False):
                    given, tensors = list(tensors), ()
                    tensors, layers = run_layers_apart(layers, given, lookahead=lookahead), []
                elif layers:
                    tensors, layers = (run_layers(layers, *tensors, lookahead=lookahead),), []
                out = run_node(entry.module, entry.name, modes.get(entry.name, Mode.STORE), *tensors, lookahead=lookahead)
                tensors = out if isinstance(out, tuple) else (out,)
                require_tensors(tensors, entry.name)
                del out
        return tensors[0]

    def _split(
        self, layers: Sequence[Layer], x: Tensor, *, lookahead: Lookahead | None
    ) -> tuple[tuple[Tensor, ...], InvertedSegment | None]:
        """Run the layers before the split, and split; return the streams, and a segment that a chain can go on with, if any."""
        if not layers or self.exact or self.coupling.is_exact or not has_inverse(self.split):
            return self.split(run_layers(layers, x, lookahead=lookahead) if layers else x), None
        out = run_layers_before(layers, [x], lookahead=lookahead)
        if isinstance(out, Tensor):
            return self.split(out), None
        return out.split(self.split), out.segment

    def _list_layers(self, name: str, module: nn.Module, stage: int | None = None) -> list[LayoutEntry]:
        """Return the entries of a module that is called with one tensor."""
        is_exact = self._exact or self.coupling.is_exact
        return [LayoutEntry(path, layer, kind, stage, is_exact) for path, layer, kind in list_layers(name, module)]

    def _modes(self, layout: Sequence[LayoutEntry]) -> dict[str, Mode]:
        """Return the mode of every unit by its name."""
        return dict(zip([entry.name for entry in layout if entry.is_unit], self._schedule, strict=True))

    def _store_what_rounds(self) -> None:
        """Let the schedule say that in exact arithmetic layers are stored: their inverses round."""
        units = [entry for entry in self.layout() if entry.is_unit]
        self._schedule = [m if m in unit.modes else Mode.STORE for m, unit in zip(self._schedule, units, strict=True)]

    def _chain_item(self, entry: LayoutEntry, modes: dict[str, Mode]) -> Step | Bijection:
        """Return a step or a bijection as an item of a chain."""
        if isinstance(entry.module, Bijection):
            return entry.module
        return Step(entry.module, entry.name, self.coupling, modes[entry.name])

    def _get_inverse(self, name: str) -> Callable[..., Any]:
        inverse: Callable[..., Any] | None = getattr(getattr(self, name), "inverse", None)
        if inverse is None:
            raise self._not_invertible(name)
        return inverse

    def _check_features(self, features: object) -> None:
        dims, parameter = cast(Any, self.fuse).out_shape.dims, next(self.parameters())
        if not isinstance(features, Tensor):
            raise InputError(f"Features are what forward_features returns. Received: {type(features).__name__}.")
        dtype, device = parameter.dtype, parameter.device
        if (tuple(features.shape[1:]), features.dtype, features.device) != (dims, dtype, device):
            raise InputError(
                f"Features of {self.spec.name} are (B, {', '.join(map(str, dims))}), {dtype} on {device}, as "
                f"forward_features returns them. Received: {tuple(features.shape)}, {features.dtype} on {features.device}."
            )

    def _not_invertible(self, name: str) -> InputError:
        kind = type(self.get_submodule(name)).__name__
        return InputError(
            f"{self.spec.name} cannot be inverted as a whole: its {name} ({kind}) loses information. Of the shipped models, "
            "revzoo.list_models('irevnet*') can."
        )


def check_num_outputs(num_outputs: object) -> int:
    """Return `num_outputs`, or raise InputError if it is not an integer >= 1."""
    if not isinstance(num_outputs, int) or isinstance(num_outputs, bool) or num_outputs < 1:
        raise InputError(f"num_outputs is an integer >= 1. Received: {num_outputs!r}.")
    return num_outputs
