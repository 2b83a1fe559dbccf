"""Whether a step fits the memory that is free, counted before anything runs, and what to type where it does not."""

import math
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch

from revzoo.errors import BudgetError, InputError
from revzoo.format import format_bytes
from revzoo.planning.budget import free_bytes, parse_budget

_NEARLY = 0.95  # of what may be taken: a step that takes as much is no longer made larger


def require_fit(
    count: Callable[[int], int],
    size: int,
    device: torch.device | str,
    word: str,
    *,
    taken: int | None = None,
    present_bytes: int = 0,
    sharing: int = 1,
    multiple: int = 1,
    others: Callable[[int], Iterable[str]] = lambda limit: (),
) -> None:
    """Raise BudgetError where a step takes more than is free; the error says what fits, all of it counted.

    Args:
        count: returns the bytes that the step takes with a number of examples.
        size: the number of examples that is asked for.
        device: where the step runs.
        word: what to type before a number of examples, such as "data.batch_size=".
        taken: `count(size)`, where it is known.
        present_bytes: that are counted, and on the device already.
        sharing: how many processes the device's memory is for.
        multiple: of which a number of examples has to be.
        others: given the bytes that a step may take, returns what else fits, to be typed.
    """
    with suppress(InputError):  # the memory of other devices is not known, and networks that ask for values cannot be counted
        free = free_bytes(device, sharing) + present_bytes
        taken = count(size) if taken is None else taken
        if taken > free:
            limit = parse_budget("auto", device, present_bytes, sharing=sharing)
            words = f"{format_bytes(free)} are free"
            raise BudgetError(explain_shortage(count, size, word, limit, words, others(limit), taken, multiple))


def explain_shortage(
    count: Callable[[int], int], size: int, word: str, limit: int, free: str, others: Iterable[str], taken: int, multiple: int
) -> str:
    """Return a message that says what a step takes, what is free, and what would fit within `limit`."""
    largest = find_largest(lambda number: count(number * multiple), (size - 1) // multiple, limit) * multiple
    fitting = [*others, *([f"{word}{largest}"] if largest else [])]
    advice = (
        f"What fits: {', or '.join(fitting)}." if fitting else "Not even one example fits: take a smaller network or input."
    )
    return f"A step of {size} examples takes {format_bytes(taken)}, and {free}. {advice}"


def find_largest(count: Callable[[int], int], high: int, limit: int, low: int = 1) -> int:
    """Return a number of examples from `low` to `high`, about the largest, whose step takes no more than `limit` bytes, or 0.

    What a step takes is the largest of sums that grow in proportion to the examples, so it bends upwards only: on a straight
    line between a number that fits and one that does not, where the line meets the limit, is a number that fits.

    Cost: a count of two to eight numbers.
    """
    low_bytes = count(low)
    if high < low or low_bytes > limit:
        return 0
    if (high_bytes := count(high)) <= limit:
        return high
    for number in range(6):
        if low_bytes > _NEARLY * limit or high - low < 2:
            break
        middle = low + (limit - low_bytes) * (high - low) // (high_bytes - low_bytes)
        if number % 2 or middle == low:  # bends make steps on straight lines short
            middle = math.isqrt(low * high)
        taken = count(middle)
        if taken <= limit:
            low, low_bytes = middle, taken
        else:
            high, high_bytes = middle, taken
    return low
