"""Several calls that are one step: they are made at different times in forward, and recovered together."""

from collections.abc import Iterable
from threading import RLock
from typing import Any

from torch import Tensor

from revzoo.runtime.recorded_call import RecordedCall, Recoverer
from revzoo.runtime.settings import Settings
from revzoo.runtime.tape import SavedInputs
from revzoo.runtime.tripwire import Watch


class JointCall(RecordedCall):
    """The calls of a function that is made of parts, f = f_n(... f_1(w)), of which each is given what the last one returned.

    Args:
        f: the first part.
        name: of the whole, for messages.
        settings: of the first part.
    """

    def __init__(self, f: Any, name: str, settings: Settings):
        super().__init__(f, name, settings)
        self._parts: list[RecordedCall] = []

    def add_part(self, call: RecordedCall) -> None:
        """Add the next part, which is about to be called."""
        self._parts.append(call)

    def hand_over(self, *inputs: Tensor, output: Tensor | None = None) -> bool:
        return False

    def run_again(self, *inputs: Tensor, refill: bool = True, stop_early: bool = False, check_draws: bool = True) -> Any:
        *parts, last = self._parts
        for part in parts:
            inputs = (part.run_again(*inputs, refill=refill),)
        return last.run_again(*inputs, refill=refill, stop_early=stop_early, check_draws=check_draws)

    def free_refilled(self) -> None:
        for part in self._parts:
            part.free_refilled()

    def end_runs(self) -> None:
        for part in self._parts:
            part.end_runs()

    @property
    def is_in_graph(self) -> bool:
        return any(part.is_in_graph for part in self._parts)

    def free_kept(self) -> None:
        for part in self._parts:
            part.free_kept()

    @property
    def spacing(self) -> float:
        return max(part.spacing for part in self._parts)

    def compare_refilled(self, watch: Watch, explained: float | Tensor = 0.0, *, same_input: bool = True) -> None:
        for part in self._parts:
            part.compare_refilled(watch, explained, same_input=same_input)

    def require_same_draws(self) -> None:
        for part in self._parts:
            part.require_same_draws()


class WholeRecoverer:
    """Recovers all parts of a call where one is asked for.

    Until all parts have been called, it does so from the input of the first, which it keeps; then as `recoverer` says. That one
    may hold the call, and so the call holds neither of the two: all are freed with the graph.

    Args:
        whole: the call.
        state: its input.
    """

    def __init__(self, whole: JointCall, state: Tensor):
        self.whole = whole
        self.recoverer: Recoverer = SavedInputs((state,))

    @property
    def lock(self) -> RLock:
        return self.recoverer.lock

    @property
    def gives_same_bits(self) -> bool:
        return self.recoverer.gives_same_bits

    def recover(self, call: RecordedCall, *, ahead: bool = False) -> None:
        self.recoverer.recover(self.whole, ahead=ahead)

    def get_sources(self, call: RecordedCall) -> Iterable[Tensor]:
        return self.recoverer.get_sources(self.whole)
