"""What a call watches: fingerprints of the tensors that autograd saves in its first run, compared with those of a second.

    on a CPU     all of them: a difference may be scaled down later, or lie before a product that is kept
    elsewhere    the last two, where most differences show; none where the state that follows is compared

On a CPU, a second run on the same input differs by the order in which several threads have added up sums.

Nothing is kept alive for this: a tensor is read when two others have been saved after it. By then the operation that it was
saved for has run, which may have filled it (the noise of RReLU).
"""

import math
from collections import deque
from collections.abc import Mapping

from torch import Tensor, nn

from revzoo.device import can_read_now
from revzoo.runtime.conditions import Conditions
from revzoo.runtime.fingerprint import INDICES, Fingerprint, take_fingerprint
from revzoo.runtime.inventory import find_spacing
from revzoo.runtime.tripwire import Watch

_LARGEST_DIFFERENCE = 1e-2  # relative, of two runs whose inputs or kernels differ by rounding
_REORDERED = 64  # the same on a CPU with the same input, where only the order of sums differs, in spacings of the numbers


class CallWatch:
    """The fingerprints of one call.

    Args:
        x: the call's input.
        conditions: the conditions of the call.
        reads_whole: whether to read the last two tensors. Not needed where the state that follows from f's output is compared.
    """

    def __init__(self, x: Tensor, conditions: Conditions, *, reads_whole: bool) -> None:
        self._conditions = conditions
        self._reads_whole = reads_whole
        self._is_on_cpu = can_read_now(x)
        self._latest: deque[tuple[int, Tensor, int]] = deque()  # slot, tensor, version; two, since the last is often a weight
        self._taken: list[tuple[int, Fingerprint]] = []  # by slot

    def note(self, slot: int, tensor: Tensor) -> None:
        """Note a tensor that autograd saves in the first run."""
        if not self._is_telling(tensor):
            return
        latest = self._latest
        if len(latest) == 2:
            earlier, saved, version = latest.popleft()
            if saved is not latest[0][1] and saved._version == version:
                self._take(earlier, saved)
        latest.append((slot, tensor, tensor._version))

    def end_first_run(self) -> None:
        """Take the fingerprints of the last two, and let go of all tensors."""
        while self._latest:
            slot, tensor, _ = self._latest.popleft()
            self._take(slot, tensor, self._reads_whole)

    def abandon(self) -> None:
        """Let go of all tensors: the first run has failed."""
        self._latest.clear()

    def compare(
        self, refilled: Mapping[int, tuple[Tensor, int]], watch: Watch, explained: float | Tensor, *, same_input: bool
    ) -> None:
        """Compare the tensors that a second run has refilled.

        Args:
            refilled: the tensors by slot, with their versions.
            watch: of the segment.
            explained: the relative error that is predicted for its input.
            same_input: whether this run has begun with the bits of the first.
        Raises:
            RecoveryError: one differs by more than is explained.
        """
        for slot, taken in self._taken:
            tensor, version = refilled.get(slot, (None, 0))  # another thread may have taken it
            if tensor is not None and tensor._version == version:
                tolerance = self._limit(tensor, same_input)
                watch.compare(self._conditions.name, taken, tensor, tolerance, explained, of_state=False)

    def _is_telling(self, tensor: Tensor) -> bool:
        """Return whether a tensor can show a difference: no weight, no moving statistic."""
        base = tensor._base if tensor._is_view() else tensor
        if base.__class__ is not Tensor and isinstance(base, nn.Parameter):  # the first test takes a fifth of the time
            return False
        return not self._conditions.holds_moving(tensor)

    def _take(self, slot: int, tensor: Tensor, also_elsewhere: bool = False) -> None:
        if (self._is_on_cpu or also_elsewhere) and (taken := take_fingerprint(tensor)) is not None:
            self._taken.append((slot, taken))

    def _limit(self, tensor: Tensor, same_input: bool) -> float:
        """Return the largest relative difference that is explained."""
        spacing = self._conditions.spacing
        largest = max(_LARGEST_DIFFERENCE, 16 * spacing)
        if tensor.dtype in INDICES:  # rounding may change the order of two numbers
            return largest if same_input else math.inf
        if same_input and self._is_on_cpu:
            return min(largest, _REORDERED * max(spacing, find_spacing(tensor.dtype)) or largest)
        return largest
