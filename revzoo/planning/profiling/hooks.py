"""Hooks that report how a training step proceeds: when each unit begins, forward and backward, and what it is given."""

from collections.abc import MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from revzoo.errors import InputError
from revzoo.model.network import Model
from revzoo.runtime.chain import ReversibleChain
from revzoo.runtime.layer_chain import LayerChain
from revzoo.runtime.layer_rules import has_inverse, is_made_of_layers
from revzoo.runtime.layout import LayoutEntry
from revzoo.runtime.nested import tensors_in
from revzoo.runtime.observation import observe_calls

PlannableModel = Model | ReversibleChain | LayerChain


def read_layout(model: nn.Module) -> list[LayoutEntry]:
    """Return the layout of a model that can be planned. Layers that a chain of layers only ever stores are nodes.

    Raises:
        InputError: no `revzoo.Model`, `ReversibleChain` or `LayerChain`; or a chain of layers that is inverted inside of one.
    """
    if isinstance(model, LayerChain):
        return [_read_layer(entry) for entry in model.layout()]
    if isinstance(model, PlannableModel):
        return model.layout()
    raise InputError(f"A revzoo.Model, a ReversibleChain or a LayerChain can be planned. Received: {type(model).__name__}.")


def _read_layer(entry: LayoutEntry) -> LayoutEntry:
    if entry.kind != "layer" or has_inverse(entry.module):
        return entry
    if is_made_of_layers(entry.module):
        raise InputError(
            f"A layer of a planned chain has one mode. Received: layer {entry.name}, a {type(entry.module).__name__} of layers "
            "that are inverted one by one. Give LayerChain these layers themselves."
        )
    return entry._replace(kind="node")


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

    Call `enter_backward` between forward and backward: from then on, a call of a unit is a recovery and not reported.

    Args:
        model: one that can be planned.
        listener: is called at every event.
    """

    def __init__(self, model: nn.Module, listener: Listener):
        self._units = {id(entry.module): unit for unit, entry in enumerate(list_units(model))}
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

    def enter_backward(self) -> None:
        """Take later calls of the units for recoveries."""
        self._in_forward = False

    def _begin_call(self, module: nn.Module, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """Report the beginning of a unit's forward."""
        unit = self._units.get(id(module))
        if unit is not None and self._in_forward:
            identify = self._listener.identify
            self._listener.begin_forward(unit, identify(inputs), identify(states))

    def _end_call(self, module: nn.Module, out: Any) -> None:
        """Report the end of a unit's forward, and wait for the first gradient of what it has returned."""
        unit = self._units.get(id(module))
        if unit is None or not self._in_forward:
            return
        self._listener.end_forward(unit)
        self._waiting.add(unit)
        for t in tensors_in(out):
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
