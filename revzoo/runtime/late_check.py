"""A check of numbers that an accelerator computes, without waiting for it.

Reading a number from an accelerator waits for everything it was told to do before. So the numbers are copied to the host while
forward goes on, and checked when backward has been queued as well: at that moment forward has ended, or nearly so, and the
accelerator still has the backward to do.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from revzoo.runtime.host_copy import HostCopy


class LateCheck:
    """Copy numbers to the host, and check them at the end of the next backward.

    Args:
        numbers: a tensor; the copy begins now.
        check: called with the numbers, and raises if they are bad. Backward then raises the same error, in front of the
            optimizer's step.
    """

    def __init__(self, numbers: Tensor, check: Callable[[list[float]], None]):
        self._check = check
        self._copy: HostCopy | None = HostCopy(numbers)  # until it has been checked
        self._task = -1  # the backward at whose end the check is due

    def run_after_backward(self) -> None:
        """Check at the end of the backward that is running, or now if there is none. Later calls do nothing."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            self._run()
        elif task != self._task:
            self._task = task
            cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(self._run)

    def _run(self) -> None:
        if self._copy is not None:
            self._check(*self._copy.read())
            self._copy = None
