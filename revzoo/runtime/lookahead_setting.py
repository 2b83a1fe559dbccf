"""Whether a chain or model looks ahead: 0, 1, or "auto", which times both and keeps the faster.

Look-ahead gains where the gradient of one step leaves a part of the device idle. Where it does not, gradient and recovery
compete for the device, and look-ahead loses. Published gains turn into losses above half of the largest batch (PaReprop, figure
5). So "auto" times the backwards of the first training steps, in turn with and without, for each shape, schedule and device.
Where the device waits for the host, look-ahead loses: it is more for the host to do. Nothing can be timed while a CUDA graph is
captured, which takes what the steps before it have chosen.
"""

import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from revzoo.errors import InputError
from revzoo.host_copy import has_streams, is_capturing
from revzoo.runtime import seams
from revzoo.runtime.compiling import exclude_from_compilation, is_exporting
from revzoo.runtime.lookahead import Lookahead
from revzoo.runtime.seams import LookaheadOption as LookaheadOption

_WARM_UPS = 1  # of each kind: first runs load kernels, and choose them
_TRIALS = 5
LARGEST_RATIO = 0.98  # to the serial time; a smaller gain is noise, and look-ahead takes more memory


class LookaheadSetting:
    """How many calls a chain or model recovers ahead of backward.

    Args:
        option: 0, 1 or "auto".

    Raises:
        InputError: another value.
    """

    def __init__(self, option: LookaheadOption):
        if isinstance(option, bool) or option not in (0, 1, "auto"):
            raise InputError(
                f'lookahead is 0 or 1, the number of steps recovered ahead of backward, or "auto". Received: {option!r}.'
            )
        self.option = option
        self._choices: dict[Any, _Choice] = {}

    def __reduce__(self) -> Any:
        return LookaheadSetting, (self.option,)  # times belong to the machine

    def begin_forward(self, schedule: Sequence[str], *inputs: Tensor) -> Lookahead | None:
        """Return what recovers calls ahead for one forward, None for nothing.

        Args:
            schedule: the modes of all units.
            inputs: the inputs of the forward.
        """
        if self.option == 0 or not torch.is_grad_enabled() or is_exporting():
            return None
        return self._begin(schedule, *inputs)

    @exclude_from_compilation
    def _begin(self, schedule: Sequence[str], *inputs: Tensor) -> Lookahead | None:
        if self.option == 1 or not all(isinstance(x, Tensor) for x in inputs):  # the chain refuses what is no tensor
            return Lookahead()
        device = inputs[0].device
        autocast = device.type != "meta" and torch.is_autocast_enabled(device.type)
        shapes = [tuple(n if isinstance(n, int) else None for n in x.shape) for x in inputs]
        kinds = [(x.dtype, x.device) for x in inputs]
        key = (*schedule, *shapes, *kinds, autocast, torch.get_num_threads())
        return self._choices.setdefault(key, _Choice(device)).begin_forward()


seams.make_lookahead = LookaheadSetting


class _Choice:
    """Whether to look ahead for one shape, schedule and device: undecided until enough backwards have been timed."""

    def __init__(self, device: torch.device):
        self._device = device
        self._times: tuple[list[float], list[float]] = [], []  # serial, ahead
        self._pending: deque[_Timing] = deque()
        self._chosen: bool | None = None

    def begin_forward(self) -> Lookahead | None:
        if self._chosen is None and not is_capturing():
            self._read()
            self._chosen = self._choose()
        if self._chosen is not None or is_capturing():
            return Lookahead() if self._chosen else None
        counts = [len(times) + sum(each.is_ahead == ahead for each in self._pending) for ahead, times in enumerate(self._times)]
        is_ahead = counts[1] < counts[0]
        return Lookahead(_Stopwatch(self._device, is_ahead, self._pending), is_on=is_ahead)

    def _read(self) -> None:
        while self._pending and (seconds := self._pending[0].seconds) is not None:
            self._times[self._pending.popleft().is_ahead].append(seconds)

    def _choose(self) -> bool | None:
        serial, ahead = (times[_WARM_UPS:] for times in self._times)
        if min(len(serial), len(ahead)) < _TRIALS:
            return None
        return median(ahead) < LARGEST_RATIO * median(serial)


class _Stopwatch:
    """Times backwards, from the first recovery to the end.

    Args:
        device: an accelerator is timed by events, and nothing waits for it.
        is_ahead: whether these backwards look ahead.
        timings: where to add the time of each backward that reaches its end.
    """

    def __init__(self, device: torch.device, is_ahead: bool, timings: "deque[_Timing]"):
        self._device = device
        self._is_ahead = is_ahead
        self._timings = timings
        self._start: Any = None

    def start(self) -> None:
        self._start = self._mark()

    def stop(self) -> None:
        if self._start is not None:
            self._timings.append(_Timing(self._is_ahead, self._start, self._mark()))
            self._start = None

    def _mark(self) -> Any:
        if not has_streams(self._device):
            return time.perf_counter()
        return torch.accelerator.current_stream(self._device).record_event(torch.Event(self._device, enable_timing=True))


class _Timing(NamedTuple):
    """The time of one backward.

    Args:
        is_ahead: whether it looked ahead.
        start: seconds of a clock, or an event that the accelerator may not have reached yet.
        end: likewise.
    """

    is_ahead: bool
    start: Any
    end: Any

    @property
    def seconds(self) -> float | None:
        """The time that has passed, None while it is not known."""
        if isinstance(self.end, float):
            return float(self.end - self.start)
        return float(self.start.elapsed_time(self.end)) / 1000 if self.end.query() else None
