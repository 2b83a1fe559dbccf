"""Which channels of an in-place ABN keep their normalised input xhat, because their output does not tell it well enough.

Rounding of y, which is of the size of the bias, is divided by the weight. So xhat is rebuilt well enough only from a
certain weight on. The ratio of a channel is its weight over this least weight, and a channel with a ratio below 1 is weak.

A CPU knows at once which channels those are. To ask an accelerator would be to wait for it in every layer, so there the host
chooses how many of the weakest channels keep xhat by what an earlier step has shown: all that were near to being weak.
A weight that has jumped to nearly 0 in one step is past that; its xhat is then rebuilt less well in that step, and a warning
says so. Only the first step waits.
"""

import warnings
from collections import deque
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from revzoo.device import HostCopy, can_read_now, is_capturing

_TOLERANCE = 1e-4  # of xhat, where the dtype allows it; elsewhere one ulp for half a standard deviation, which sums average out
_NEAR = 2.0  # a channel of a smaller ratio may be weak in the next step: one update hardly ever halves a weight


def find_weak_channels(layer: nn.Module, z: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return the channels that keep xhat, in ascending order; None if there are none.

    Args:
        layer: the BatchNorm.
        z: its output.
        weight, bias: of BatchNorm.
    """
    if z.is_meta or isinstance(z, FakeTensor) or weight is None or bias is None:  # without numbers, or weights of 1
        return None
    ratios = weight.abs() / (find_least_weight(z.dtype) * (1 + bias.abs()))
    if can_read_now(z):
        channels = (ratios < 1).nonzero().flatten()
        return channels if channels.numel() else None
    history = _histories.get(layer) or _histories.setdefault(layer, _History())
    count = history.choose_count(ratios)
    return ratios.topk(count, largest=False).indices.sort().values if count else None


def find_least_weight(dtype: torch.dtype) -> float:
    """Return the least weight that a channel whose output is of size 1 may have without being weak."""
    return max(2 * torch.finfo(dtype).eps, _TOLERANCE)


class _History:
    """What the steps of one layer have shown on an accelerator.

    A second run has to keep what the first one kept. So where there are second runs, the count changes only after one.
    """

    def __init__(self) -> None:
        self._count: int | None = None
        self._observed: deque[tuple[HostCopy, int]] = deque()  # ratios on their way to the host, and how many kept xhat
        self._begins_outside = False  # of backward; not where torch.utils.checkpoint is reentrant and records in backward only
        self._has_second_runs, self._has_run_again = False, False  # at all, and since the count was chosen
        self._task = -1

    def choose_count(self, ratios: Tensor) -> int:
        """Return how many channels keep xhat in this call."""
        if is_capturing():
            return len(ratios) if self._count is None else self._count
        task = torch._C._current_graph_task_id()
        if task != -1 and self._begins_outside and self._count is not None:
            self._has_second_runs = self._has_run_again = True
            return self._count
        arriving = HostCopy(ratios)
        if self._count is None:
            self._count = _count_below(_NEAR, arriving)
        elif task != self._task if task != -1 else self._has_run_again or not self._has_second_runs:
            while self._observed and self._observed[0][0].has_arrived:
                self._count = self._review(*self._observed.popleft())
            self._has_run_again = False
        self._begins_outside, self._task = self._begins_outside or task == -1, task
        self._observed.append((arriving, self._count))
        return self._count

    def _review(self, arrived: HostCopy, kept: int) -> int:
        if (weak := _count_below(1.0, arrived)) > kept:
            warnings.warn(
                f"In one step {weak - kept} channels of an in-place ABN had weights that had jumped to nearly 0; the gradients "
                "of these weights were then too small. Does the training diverge?",
                stacklevel=2,
            )
        return _count_below(_NEAR, arrived)


_histories: WeakKeyDictionary[nn.Module, _History] = WeakKeyDictionary()


def _count_below(limit: float, ratios: HostCopy) -> int:
    return sum(not ratio >= limit for ratio in ratios.read()[0])  # NaN is below, too
