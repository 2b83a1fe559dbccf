"""Bringing numbers from a device to the host without waiting for the device."""

from typing import Any

import torch
from torch import Tensor


def can_read_now(device: torch.device) -> bool:
    """Return whether reading a number from the device waits for nothing."""
    return device.type == "cpu"


class HostCopy:
    """Numbers on their way from a device to the host.

    Args:
        numbers: flat tensors of one device; the copy begins now.
    """

    def __init__(self, *numbers: Tensor):
        self._host = [each.to("cpu", non_blocking=True) for each in numbers]
        device = numbers[0].device
        self._arrival = None if can_read_now(device) else _record_event(device)

    @property
    def has_arrived(self) -> bool:
        """Whether `read` would wait for nothing."""
        return self._arrival is None or bool(self._arrival.query())

    def read(self) -> list[list[float]]:
        """Return the numbers of each tensor. Waits for them if they have not arrived."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return [each.tolist() for each in self._host]


def _record_event(device: torch.device) -> Any:
    # An event without a stream would be recorded on that of the current device, which may be another one.
    return torch.accelerator.current_stream(device).record_event()
