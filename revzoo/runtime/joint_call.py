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

    Until all parts have been called, it is recovered from its input, which it keeps; then `recoverer` says how.

    Args:
        f: the first part.
        name: of the whole, for messages.
        settings: of the first part.
        state: the input.
    """

    def __init__(self, f: Any, name: str, settings: Settings, state: Tensor):
        super().__init__(f, name, settings)
        self.recoverer: Recoverer = SavedInputs((state,))
        self._parts: list[RecordedCall] = []

    def add_part(self, call: RecordedCall) -> Recoverer:
        """Add the next part, which is about to be called; return its recoverer."""
        self._parts.append(call)
        return _WholeRecoverer(self)

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


class _WholeRecoverer:
    """Recovers all parts where one is asked for."""

    def __init__(self, whole: JointCall):
        self._whole = whole

    @property
    def lock(self) -> RLock:
        return self._whole.recoverer.lock

    @property
    def gives_same_bits(self) -> bool:
        return self._whole.recoverer.gives_same_bits

    def recover(self, call: RecordedCall, *, ahead: bool = False) -> None:
        self._whole.recoverer.recover(self._whole, ahead=ahead)

    def get_sources(self, call: RecordedCall) -> Iterable[Tensor]:
        return self._whole.recoverer.get_sources(self._whole)
