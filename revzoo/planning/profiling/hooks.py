"""Hooks that report how a training step proceeds: when each unit begins, forward and backward, and what it is given."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from revzoo.errors import InputError
from revzoo.model.network import Model
from revzoo.runtime.chain import ReversibleChain
from revzoo.runtime.layout import LayoutEntry
from revzoo.runtime.nested import tensors_in

PlannableModel = Model | ReversibleChain


def read_layout(model: nn.Module) -> list[LayoutEntry]:
    """Return the layout of a model that can be planned.

    Raises:
        InputError: neither a `revzoo.Model` nor a `ReversibleChain`.
    """
    if isinstance(model, PlannableModel):
        return model.layout()
    raise InputError(f"A revzoo.Model or a ReversibleChain can be planned. Received: {type(model).__name__}.")


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
        self._model = model
        self._listener = listener
        self._older: frozenset[int] = frozenset()  # identity of the older stream, where the forward is now
        self._streams_passed = 0  # through the bijection that runs now, which is called once for each stream
        self._in_forward = True
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "StepHooks":
        unit = 0
        if isinstance(self._model, ReversibleChain):
            register = partial(self._model.register_forward_pre_hook, with_kwargs=True)
            self._add_hook(register, self._on_chain_inputs)
        for entry in read_layout(self._model):
            if entry.kind == "bijection":
                self._add_hook(entry.module.register_forward_hook, self._on_bijection_output)
            elif entry.kind == "split":
                self._add_hook(entry.module.register_forward_hook, self._on_pair_output)
            else:
                self._add_hook(entry.module.register_forward_pre_hook, partial(self._on_unit_inputs, unit, entry.kind))
                self._add_hook(entry.module.register_forward_hook, partial(self._on_unit_output, unit, entry.kind))
                unit += 1
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def enter_backward(self) -> None:
        """Take later calls of the units for recoveries."""
        self._in_forward = False

    def _add_hook(self, register: Callable[[Any], RemovableHandle], hook: Callable[..., None]) -> None:
        def run_in_forward(*arguments: Any) -> None:
            if self._in_forward:
                hook(*arguments)

        self._handles.append(register(run_in_forward))

    def _on_unit_inputs(self, unit: int, kind: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        given = self._listener.identify(args[:1] if kind == "step" else args)  # a side input is not a state
        if kind == "step":
            self._listener.begin_forward(unit, given, given | self._older)
            self._older = given
        else:
            self._listener.begin_forward(unit, given, given)
            self._older = frozenset()
        self._streams_passed = 0

    def _on_unit_output(self, unit: int, kind: str, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self._listener.end_forward(unit)
        reported = False

        def report_first_gradient(_: Tensor) -> None:
            nonlocal reported
            if not reported:
                reported = True
                self._listener.begin_backward(unit)

        for t in tensors_in(out):
            if t.requires_grad:
                t.register_hook(report_first_gradient)
        if kind == "node":
            self._on_pair_output(module, args, out)

    def _on_chain_inputs(self, chain: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._older = self._listener.identify(args[0] if args else kwargs["x1"])

    def _on_pair_output(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self._older = self._listener.identify(out[0]) if isinstance(out, tuple) else frozenset()

    def _on_bijection_output(self, bijection: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        if self._streams_passed == 0:
            self._older = self._listener.identify(out)
        self._streams_passed += 1
