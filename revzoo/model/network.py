"""The network as a module: stem, split into two streams, stages of reversible blocks with transitions, fuse, head."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from revzoo.bijection import Bijection
from revzoo.errors import InputError
from revzoo.model.tap import Tap, insert_taps
from revzoo.runtime.chain import invert_chain, run_chain
from revzoo.runtime.coupling import Coupling, Pair
from revzoo.runtime.exact import Grid
from revzoo.runtime.layer_chain import run_layers, run_layers_apart, run_layers_before
from revzoo.runtime.layer_rules import Layer, has_inverse, list_layers
from revzoo.runtime.layout import LayoutEntry, Scheduled, expand_schedule
from revzoo.runtime.lookahead import Lookahead, begin_lookahead
from revzoo.runtime.mode import Mode
from revzoo.runtime.node import require_tensors, run_node
from revzoo.runtime.seams import traces_backward
from revzoo.runtime.segment import InvertedSegment
from revzoo.runtime.traced_chain import trace_split
from revzoo.runtime.update import Step, make_step


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


class Network(Scheduled, nn.Module):
    """How a reversible network runs; `revzoo.Model` adds all that needs more than the parts, and checks what it is given.

    Reversible steps that follow each other form one chain. Stem, fuse, head, and the transitions that are not bijections, are
    nodes: ordinary modules, which keep their saved tensors unless their mode is `selective` or `recompute`. State-dict keys
    depend on the architecture alone, not on the schedule.

    Shapes: x: images (B, C, H, W), or ids (B, N). attention_mask: (B, N), True for tokens; None: all are.
        Returns logits, (B, outputs) or (B, N, outputs), depending on the head.
    """

    spec: Any  # what it was built from, a `revzoo.Spec`
    stem: Any  # it and the fuse have an `out_shape`; of the head, see `parts.layers.linear_head`
    fuse: Any
    head: Any

    def __init__(
        self,
        spec: Any,
        coupling: Coupling,
        stem: nn.Module,
        split: nn.Module,
        stages: Sequence[Stage],
        fuse: nn.Module,
        head: nn.Module,
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
        return bool(self.spec.coupling.type != "none")

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

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        lookahead = begin_lookahead(self._lookahead)
        features = self._compute_features(x, attention_mask, lookahead)
        masks = () if attention_mask is None else (attention_mask,)
        return cast(Tensor, run_node(self.head, "head", self._schedule[-1], features, *masks, lookahead=lookahead))

    @torch.no_grad()
    def inverse(self, features: Tensor) -> Tensor:
        """Compute the input of the network from its `forward_features`, if all of its parts are invertible.

        The result equals the input up to rounding errors, or bit for bit if `exact` is set. The features must have been
        computed in eval mode, because dropout and BatchNorm in training mode cannot be repeated.

        Raises:
            InputError: the model is in training mode, or one of its parts has no inverse (it is named).
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
        return cast(Tensor, stem(split(*invert_chain(chain, *fuse(features), exact=self.exact))))

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
            split = cast(Any, self.split)
            return trace_split(out, split, split.inverse) if traces_backward() else split(out), None
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
        return make_step(entry.module, entry.name, self.coupling, modes[entry.name], self.training)

    def _get_inverse(self, name: str) -> Callable[..., Any]:
        inverse: Callable[..., Any] | None = getattr(getattr(self, name), "inverse", None)
        if inverse is None:
            raise self._not_invertible(name)
        return inverse

    def _not_invertible(self, name: str) -> InputError:
        kind = type(self.get_submodule(name)).__name__
        return InputError(
            f"{self.spec.name} cannot be inverted as a whole: its {name} ({kind}) loses information. Of the shipped models, "
            "revzoo.list_models('irevnet*') can."
        )
