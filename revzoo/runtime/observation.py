"""Show the states of forward, and each of them once more as inversion rebuilds it, to whoever looks on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

# Called with the rebuilt state, and the relative error that rounding is predicted to have left in it.
Comparison = Callable[[Tensor, float | Tensor], None]
Observer = Callable[[str, Tensor], Comparison | None]

_observer: Observer | None = None


@contextmanager
def observe_states(observer: Observer) -> Iterator[None]:
    """Call `observer(name, state)` in the forwards inside, for each state that inversion will rebuild.

    The state is the one in front of the step or layer of this name, the older one of a pair. What the observer returns is
    called each time when the state has been rebuilt. The tensors are lent: who wants to keep one makes a copy.
    """
    global _observer
    previous, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = previous


def note_state(name: str, state: Tensor) -> Comparison | None:
    """Show a state of forward; return what to call with the rebuilt one, or None if nobody looks on."""
    return None if _observer is None else _observer(name, state.detach())
