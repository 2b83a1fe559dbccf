"""The clock that prices are measured with, how often to measure, and what the samples say.

On a GPU, times are those between events in the stream. On a CPU the clock is that of the calling thread: it stands still while
other processes have the core. With several intra-op threads the calling one takes part in every operation, and waits for the
others; the clock of the process would add up all of them, as if an operation that is spread over the cores took longer than the
same one on a single core.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

_STEADY = 0.03  # a spread that needs no further rounds
MOST_ROUNDS = 16
_LIMIT_SECONDS = 120  # no further round begins after this time
# Of normal samples: their standard deviation over half of the range of the middle half, times the standard error of a median.
_ERROR_OF_MEDIAN = 1.4826 * 1.2533


class Clock(NamedTuple):
    """A clock.

    Args:
        mark: returns a mark of the present time.
        measure: returns the seconds between two marks.
    """

    mark: Callable[[], Any]
    measure: Callable[[Any, Any], float]


class Median(NamedTuple):
    """The median of some samples.

    Args:
        seconds: the median.
        spread: by how much it differs if it is measured again, as a fraction of it: the standard error.
    """

    seconds: float
    spread: float


def make_clock(device: torch.device, *, elapsed: bool = False) -> Clock:
    """Return the clock for a device.

    Args:
        device: what is timed runs there.
        elapsed: on a CPU, measure the time that passes: where a second thread works at the same time.
    """
    if device.type != "cuda":

        def read() -> float:
            if device.type not in ("cpu", "meta"):
                torch.accelerator.synchronize(device)
            return time.perf_counter()

        is_own = device.type == "cpu" and not elapsed
        return Clock(time.thread_time if is_own else read, lambda start, end: float(end - start))

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def measure(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    return Clock(mark, measure)


def repeat(least: int, read_spread: Callable[[], float]) -> Iterator[int]:
    """Yield the numbers of the rounds of a measurement: a few, and more of them while what they show is spread.

    Args:
        least: rounds that are made in any case, if there is time.
        read_spread: returns the spread of what has been measured so far.
    """
    begin = time.perf_counter()
    for round_ in range(MOST_ROUNDS):
        is_over = time.perf_counter() - begin > _LIMIT_SECONDS
        if round_ and (is_over or (round_ >= least and read_spread() <= _STEADY)):
            return
        yield round_


def find_median(samples: Sequence[float]) -> Median:
    """Return the median of some samples and its spread."""
    median = statistics.median(samples)
    deviation = statistics.median(abs(sample - median) for sample in samples)
    return Median(median, _ERROR_OF_MEDIAN * deviation / (median * len(samples) ** 0.5) if median > 0 else 0.0)


def combine_spreads(medians: Sequence[Median]) -> float:
    """Return the spread of several medians together: the mean of their spreads, weighted by seconds."""
    seconds = sum(median.seconds for median in medians)
    return sum(median.seconds * median.spread for median in medians) / seconds if seconds > 0 else 0.0


def smooth_rising(medians: Sequence[tuple[float, int]]) -> list[float]:
    """Return the rising numbers that are nearest to some medians, by least squares: neighbours that fall are averaged.

    Args:
        medians: each with the number of its samples.
    Source: pool adjacent violators; Ayer et al., "An empirical distribution function for sampling with incomplete information",
        1955.
    """
    pools: list[tuple[float, int, int]] = []  # mean, samples, medians
    for median, samples in medians:
        pool = median, samples, 1
        while pools and pools[-1][0] > pool[0]:
            mean, others, count = pools.pop()
            weight = others + pool[1]
            pool = (mean * others + pool[0] * pool[1]) / weight, weight, count + pool[2]
        pools.append(pool)
    return [mean for mean, _, count in pools for _ in range(count)]
