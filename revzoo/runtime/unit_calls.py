"""Report the calls of steps, layers and nodes in forward to whoever looks on.

Hooks of the modules would not do: a layer may be called through `forward_keeping`, and an f made of layers layer by layer,
unless it has hooks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn


class CallObserver(Protocol):
    """Sees the calls of a forward."""

    def begin_call(self, module: nn.Module, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        """React to a step, layer or node that is about to be called.

        Args:
            module: the module.
            inputs: what it is called with, without a chain's side input.
            states: the inputs, and for a step the older stream.
        """

    def end_call(self, module: nn.Module, out: Any) -> None:
        """React to what it has returned."""


_observer: CallObserver | None = None


@contextmanager
def observe_calls(observer: CallObserver) -> Iterator[None]:
    """Tell the observer of every call of a step, layer or node in the forwards inside."""
    global _observer
    previous, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = previous


def begin_call(module: Any, inputs: Sequence[Tensor], states: Sequence[Tensor] = ()) -> None:
    """Tell the observer, if there is one, that a module is about to be called; `states` are its inputs unless given."""
    if _observer is not None:
        _observer.begin_call(module, inputs, states or inputs)


def end_call(module: Any, out: Any) -> None:
    """Tell the observer, if there is one, what a module has returned."""
    if _observer is not None:
        _observer.end_call(module, out)
