"""A check of numbers that an accelerator computes, without waiting for what it has still to do.

Reading a number from an accelerator waits for everything it was told to do before. So the numbers are copied to the host when
backward begins, and checked when it has been queued: at that moment forward has ended, or nearly so, and the accelerator still
has the backward to do.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from revzoo.host_copy import HostCopy


def check_after_backward(numbers: Tensor, check: Callable[[list[float]], None]) -> None:
    """Copy numbers to the host, and check them at the end of the backward that is running, or now if there is none.

    Args:
        numbers: a flat tensor.
        check: called with the numbers, and raises if they are bad. Backward then raises the same error, before the optimizer's
            step.
    """
    copy = HostCopy(numbers)

    def run() -> None:
        check(*copy.read())

    if torch._C._current_graph_task_id() == -1:
        run()
    else:
        cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(run)
