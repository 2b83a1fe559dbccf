"""What devices can do, and bringing numbers from a device to the host without waiting for what it has still to do.

While a CUDA graph is captured nothing runs on the device, so there are no numbers to bring: whatever is checked on the host is
checked in the steps before the capture.
"""

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


def can_read_now(x: Tensor) -> bool:
    """Return whether reading a number of a tensor waits for no device."""
    return x.is_cpu


def has_value(x: Tensor) -> bool:
    """Return whether x holds numbers. Meta and fake tensors do not, nor a tensor that is divided over processes into such."""
    return x.device.type != "meta" and not isinstance(getattr(x, "_local_tensor", x), FakeTensor)


def is_sharded(*tensors: Tensor) -> bool:
    """Return whether one of the tensors is divided over processes (a DTensor)."""
    # Importing DTensor takes half a second, and there is none before somebody else has imported it.
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and any(isinstance(t, distributed.DTensor) for t in tensors)


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64."""
    return device.type != "mps"


def has_streams(device: torch.device) -> bool:
    """Return whether a device computes on streams, which wait for one another by events."""
    return device.type not in ("cpu", "meta", "mps")


def forget_peak(device: torch.device) -> None:
    """Let the peak of a device's allocator begin again, without the blocks that earlier work has left; nothing on a CPU."""
    if has_streams(device):
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


def describe_device(device: torch.device) -> str:
    """Return the type of a device and, of an accelerator, its name."""
    return f"{device.type} {torch.get_device_module(device).get_device_name(device)}" if has_streams(device) else device.type


def is_capturing() -> bool:
    """Return whether what is queued now becomes part of a CUDA graph. Then events may not be queried, nor waited for."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def find_graph() -> object | None:
    """Return the CUDA graph that is being captured, None if there is none or PyTorch does not tell (before 2.14)."""
    find = getattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph", None)
    return find() if find is not None and is_capturing() else None


class HostCopy:
    """Numbers on their way from a device to the host.

    Args:
        numbers: flat tensors of one device; the copy begins now.
    """

    def __init__(self, *numbers: Tensor):
        self._host = [each.to("cpu", non_blocking=True) for each in numbers]
        self._arrival = None if can_read_now(numbers[0]) else _record_event(numbers[0].device)

    @property
    def has_arrived(self) -> bool:
        """Whether `read` would wait for nothing."""
        return self._arrival is None or bool(self._arrival.query())

    def read(self) -> list[list[float]]:
        """Return the numbers of each tensor. Waits for them if they have not arrived."""
        if self._arrival is not None and not self.has_arrived:
            self._arrival.synchronize()
        return [each.tolist() for each in self._host]


def _record_event(device: torch.device) -> Any:
    # An event without a stream would be recorded on that of the current device, which may be another one.
    return torch.accelerator.current_stream(device).record_event()


def check_after_backward(numbers: Tensor, check: Callable[[list[float]], None]) -> None:
    """Copy numbers to the host, and check them at the end of the backward that is running, or now if there is none.

    The copy is begun when backward begins, and read when all of it has been queued: at that moment forward has ended, or nearly
    so, and the device still has the backward to do.

    Args:
        numbers: a flat tensor.
        check: called with the numbers, and raises if they are bad. Backward then raises the same error, before the optimizer's
            step.
    """
    copy = HostCopy(numbers)
    call_after_backward(lambda: check(*copy.read()))


def call_after_backward(function: Callable[[], object]) -> None:
    """Call a function at the end of the backward that is running, or now if there is none. Backward raises what it raises."""
    if torch._C._current_graph_task_id() == -1:
        function()
    else:
        cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(function)
