"""Show a forward to an observer: its calls, its states, each state again when it has been rebuilt, and inversions.

Hooks of the modules would miss calls: a layer may be called through `forward_keeping`, and an f that is made of layers and has
no hooks is called layer by layer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

T = TypeVar("T")

# Called with the rebuilt state, and the relative error that rounding is predicted to have left in it.
CompareFunction = Callable[[Tensor, float | Tensor], None]
# Called with the step or layer after a state, its name within the chain, and the state.
StateObserver = Callable[[nn.Module, str, Tensor], CompareFunction | None]
# Called with a step, layer or node, what it is about to be called with, without a chain's side input, and the states: these
# inputs, and for a step the older stream.
BeginObserver = Callable[[nn.Module, Sequence[Tensor], Sequence[Tensor]], None]
# Called with the module and what it has returned.
EndObserver = Callable[[nn.Module, Any], None]


class _Place(Generic[T]):
    """Where one observer at a time looks on."""

    def __init__(self) -> None:
        self.observer: T | None = None

    @contextmanager
    def take(self, observer: T) -> Iterator[None]:
        previous, self.observer = self.observer, observer
        try:
            yield
        finally:
            self.observer = previous


states: _Place[StateObserver] = _Place()
calls: _Place[tuple[BeginObserver, EndObserver | None]] = _Place()
_inversions: _Place[Callable[[nn.Module], None]] = _Place()


def observe_states(observer: StateObserver) -> AbstractContextManager[None]:
    """Call `observer` in the forwards inside, for each state that inversion will rebuild.

    The state is the one before a step or layer, the older one of a pair. A name alone does not identify a step: two chains may
    use the same. What the observer returns is called each time the state has been rebuilt. Clone a tensor to keep it.
    """
    return states.take(observer)


def observe_calls(begin: BeginObserver, end: EndObserver | None = None) -> AbstractContextManager[None]:
    """Call `begin` before and `end` after every call of a step, layer or node in the forwards inside."""
    return calls.take((begin, end))


def observe_inversions(report: Callable[[nn.Module], None]) -> AbstractContextManager[None]:
    """Call `report` with every step or layer whose call is undone only for the state before it: its own gradient is over.

    That happens when backward asks for the call before it, and belongs to neither of them alone.
    """
    return _inversions.take(report)


def note_state(module: Any, name: str, state: Tensor) -> CompareFunction | None:
    """Show a state of forward; return what to call with the rebuilt one, or None if nobody looks on."""
    return None if states.observer is None else states.observer(module, name, state.detach())


def begin_call(module: Any, inputs: Sequence[Tensor], states: Sequence[Tensor] = ()) -> None:
    """Tell the observer, if there is one, that a module is about to be called; `states` are its inputs unless given."""
    if calls.observer is not None:
        begin, _ = calls.observer
        begin(module, inputs, states or inputs)


def end_call(module: Any, out: Any) -> None:
    """Tell the observer, if there is one, what a module has returned."""
    if calls.observer is not None and (end := calls.observer[1]) is not None:
        end(module, out)


def note_inversion(module: Any) -> None:
    """Report that a call of this module has been undone."""
    if _inversions.observer is not None:
        _inversions.observer(module)
