"""A memory budget as users write it; reading it needs neither a device nor torch."""

import re
from typing import Literal, NamedTuple

from revzoo.errors import InputError
from revzoo.format import BYTE_UNITS

USABLE_SHARE = 0.9  # of a memory: the rest is for the driver, workspaces of kernels and fragments
ALLOWED = "bytes, a size such as '8GiB', a share such as '60%', or 'auto'"
_UNITS = BYTE_UNITS | {f"{letter}B": 1000**i for i, letter in enumerate("KMGT", 1)}


class Amount(NamedTuple):
    """How much memory a budget is.

    Args:
        number: how many of the unit.
        unit: bytes; shares, from 0 to 1, of a device's memory; or what is free, which has no number.
    """

    number: float
    unit: Literal["bytes", "share", "free"]


def read_amount(budget: object) -> Amount:
    """Return what a budget says: bytes, a size such as "8GiB", a share such as "60%", or "auto".

    Raises:
        InputError: none of these, or less than one byte.
    """
    if isinstance(budget, bool) or not isinstance(budget, str | int | float):
        raise make_budget_error(budget)
    if not isinstance(budget, str):
        return Amount(_require_bytes(budget, budget), "bytes")
    if budget == "auto":
        return Amount(0, "free")
    if share := re.fullmatch(r"(\d+(?:\.\d+)?) ?%", budget):
        if not 0 < float(share[1]) <= 100:
            raise InputError(f"A share of the memory is above 0 % and at most 100 %. Received: {budget!r}.")
        return Amount(float(share[1]) / 100, "share")
    amount = re.fullmatch(r"(\d+(?:\.\d+)?)(?:e(\d\d?))? ?([KMGT]?i?B)?", budget)
    if amount is None or amount[3] not in (None, *_UNITS):
        raise make_budget_error(budget)
    return Amount(_require_bytes(float(amount[1]) * 10 ** int(amount[2] or 0) * _UNITS[amount[3] or "B"], budget), "bytes")


def is_amount(budget: object) -> bool:
    """Return whether something is a budget."""
    try:
        read_amount(budget)
    except InputError:
        return False
    return True


def _require_bytes(size: float, budget: object) -> float:
    if not 1 <= size < 2**62:
        raise make_budget_error(budget)
    return size


def make_budget_error(budget: object) -> InputError:
    """Return the error of what is no budget."""
    return InputError(f"A budget is {ALLOWED}. Received: {budget!r}.")
