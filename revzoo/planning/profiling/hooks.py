"""Hooks that report how a training step proceeds: when each unit begins, forward and backward, and what it is given."""

from collections.abc import Container, Iterator, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from revzoo.analysis.chains import find_block_chains, find_chains
from revzoo.errors import InputError
from revzoo.model.network import Network
from revzoo.runtime.chain import ReversibleChain
from revzoo.runtime.layer_chain import LayerChain
from revzoo.runtime.layer_rules import has_inverse, is_made_of_layers
from revzoo.runtime.layout import LayoutEntry
from revzoo.runtime.lookahead import LookaheadOption
from revzoo.runtime.mode import Mode
from revzoo.runtime.nested import tensors_in
from revzoo.runtime.observation import observe_calls

PlannableModel = Network | ReversibleChain | LayerChain


def read_layout(model: nn.Module) -> list[LayoutEntry]:
    """Return the layout of a model that can be planned. Layers that a chain of layers only ever stores are nodes.

    For a network with reversible blocks: what it computes before them, the steps of every list, and what it computes after.

    Raises:
        InputError: no `revzoo.Model`, `ReversibleChain`, `LayerChain` or network that `reversible_` changed; a chain of layers
            that is inverted inside of one; or such a network that has other chains, too.
    """
    if isinstance(model, LayerChain):
        return [_read_layer(entry) for entry in model.layout()]
    if isinstance(model, PlannableModel):
        return model.layout()
    if find_block_chains(model):
        return list(_read_network(model))
    raise InputError(
        "The units of a revzoo.Model, a ReversibleChain, a LayerChain or a network that revzoo.reversible_ changed can be "
        f"profiled. Received: {type(model).__name__}. For any other module there is revzoo.plan(module, batch, budget, "
        "profile=True), which times it."
    )


def _read_network(model: nn.Module) -> Iterator[LayoutEntry]:
    chains = find_block_chains(model)
    if other := next((prefix for prefix, chain in find_chains(model).items() if isinstance(chain, nn.Module)), None):
        raise InputError(
            f"{other.removesuffix('.')} is a reversible chain, and {next(iter(chains))} a list of reversible blocks: a plan is "
            "for one kind of the two. Plan the modules that hold them one by one."
        )
    yield LayoutEntry(f"before {next(iter(chains))}", nn.Identity(), "rest")
    for path, chain in chains.items():
        for entry in chain.layout():
            yield replace(entry, name=f"{path}.{entry.name}".removeprefix("."))
        yield LayoutEntry(f"after {path}", chain.end, "rest")


def assign_schedule(model: nn.Module, modes: Sequence[Mode], lookahead: LookaheadOption = 0) -> None:
    """Give every unit of a model its mode, and the model its look-ahead; a network with reversible blocks has none."""
    if isinstance(model, PlannableModel):
        model.schedule = list(modes)
        model.lookahead = lookahead
        return
    steps = iter([mode for mode, entry in zip(modes, list_units(model), strict=True) if entry.can_drop])
    for chain in find_block_chains(model).values():
        chain.schedule = [next(steps) for _ in chain.names]


def _read_layer(entry: LayoutEntry) -> LayoutEntry:
    if entry.kind != "layer" or has_inverse(entry.module):
        return entry
    if is_made_of_layers(entry.module):
        raise InputError(
            f"A layer of a planned chain has one mode. Received: layer {entry.name}, a {type(entry.module).__name__} of layers "
            "that are inverted one by one. Give LayerChain these layers themselves."
        )
    return replace(entry, kind="node")


def list_units(model: nn.Module) -> list[LayoutEntry]:
    """Return the layout entries that have a mode, in the order of `model.units`. Raises as `read_layout` does."""
    return [entry for entry in read_layout(model) if entry.is_unit]


class Listener(Protocol):
    """Callbacks for the events of a training step; `unit` indexes `model.units`."""

    def begin_forward(self, unit: int, inputs: Any, pair: Any) -> None:
        """React to a unit that begins its forward.

        Args:
            unit: index of the unit.
            inputs: what `identify` returned for its inputs.
            pair: the same for its inputs and the older stream together.
        """

    def end_forward(self, unit: int) -> None:
        """React to a unit whose forward has returned."""

    def begin_backward(self, unit: int) -> None:
        """React to the first gradient of a unit's outputs."""

    def identify(self, tensors: Any) -> frozenset[int]:
        """Return ids that stand for the tensors without keeping them alive."""


class StepHooks:
    """A context in which a model reports the events of one training step to a listener.

    Call `enter_forward` when all is there that exists before forward, `end_forward` with what it has returned, and
    `enter_backward` before backward: from then on, a call of a unit is a recovery and not reported.

    Args:
        model: one that can be planned.
        listener: is called at every event.
    """

    def __init__(self, model: nn.Module, listener: Listener):
        units = list_units(model)
        self._units = {id(entry.module): unit for unit, entry in enumerate(units)}
        self._rests = {unit for unit, entry in enumerate(units) if not entry.can_drop}
        self._count = len(units)
        self._listener = listener
        self._in_forward = True
        self._waiting: set[int] = set()  # for the first gradient of what they have returned
        self._returned_by: MutableMapping[Tensor, list[int]] = WeakIdKeyDictionary()
        self._observing = ExitStack()

    def __enter__(self) -> "StepHooks":
        self._observing.enter_context(observe_calls(self._begin_call, self._end_call))
        return self

    def __exit__(self, *error: object) -> None:
        self._observing.close()

    def enter_forward(self) -> None:
        """Report the beginning of what a network computes before its blocks."""
        if 0 in self._rests:
            self._listener.begin_forward(0, self._listener.identify(()), self._listener.identify(()))

    def end_forward(self, outputs: Any) -> None:
        """Take the first gradient of a network's outputs as the beginning of backward of what it computes after its blocks."""
        self._await_gradient(self._count - 1, outputs, only=self._rests)

    def enter_backward(self) -> None:
        """Take later calls of the units for recoveries."""
        self._in_forward = False

    def _begin_call(self, module: nn.Module, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Report the beginning of a unit's forward."""
        unit = self._units.get(id(module))
        if unit is not None and self._in_forward:
            self._await_gradient(unit - 1, inputs, only=self._rests)
            identify = self._listener.identify
            self._listener.begin_forward(unit, identify(inputs), identify(states))

    def _end_call(self, module: nn.Module, out: Any) -> None:
        """Report the end of a unit's forward, and wait for the first gradient of what it has returned."""
        unit = self._units.get(id(module))
        if unit is None or not self._in_forward:
            return
        self._listener.end_forward(unit)
        self._await_gradient(unit, out)

    def _await_gradient(self, unit: int, tensors: Any, only: Container[int] | None = None) -> None:
        """Report the first gradient of tensors as the beginning of a unit's backward; with `only`, of these units alone."""
        if only is not None and unit not in only:
            return
        self._waiting.add(unit)
        for t in tensors_in(tensors):
            if t.requires_grad:
                units = self._returned_by.setdefault(t, [])
                if not units:
                    t.register_hook(partial(self._report_first_gradient, units))
                units.append(unit)

    def _report_first_gradient(self, units: Sequence[int], _: Tensor) -> None:
        """Report the beginning of backward of the units that returned one tensor: all but the first passed it on."""
        for unit in reversed(units):
            if unit in self._waiting:
                self._waiting.remove(unit)
                self._listener.begin_backward(unit)
