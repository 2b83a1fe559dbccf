"""Settings of PyTorch that decide what a call computes: autocast, precision, and which kernels may be chosen.

Backward may run under other settings than forward: outside autocast, outside `torch.nn.attention.sdpa_kernel`, or after a flag
such as `torch.backends.cudnn.benchmark` was changed. A second run needs those of the first.
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from operator import call
from typing import Any

import torch
from torch import _C, backends

from revzoo.runtime.compiling import around

_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # what reads it, and what sets it


def _precision(*names: str) -> _Setting:
    return partial(_C._get_fp32_precision_getter, *names), partial(_C._set_fp32_precision_setter, *names)


def _flushes_denormals() -> bool:
    # PyTorch has no function that tells whether numbers below the least normal one become 0; Python's numbers do with them.
    return sys.float_info.min / 2 == 0


_NO_DEVICE = torch.device("cpu")


def _read_default_device() -> torch.device:
    # It is a mode for functions; without any, it is the CPU.
    return torch.get_default_device() if _C._len_torch_function_stack() else _NO_DEVICE


# Each is read in every second run, so from where `torch.backends` has it: its modules take ten times as long.
_EVERYWHERE: list[_Setting] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (_C._get_flash_sdp_enabled, backends.cuda.enable_flash_sdp),
    (_C._get_math_sdp_enabled, backends.cuda.enable_math_sdp),
    (around.get, around.set),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
]
# By the type of the device: another one is another row. Without one, those above are all.
_OF_DEVICE: dict[str, list[_Setting]] = {
    "cpu": [
        *_EVERYWHERE,
        (torch.get_num_threads, torch.set_num_threads),
        (_flushes_denormals, torch.set_flush_denormal),
        (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
        _precision("mkldnn", "matmul"),
        _precision("mkldnn", "conv"),
    ],
    "cuda": [
        *_EVERYWHERE,
        (_C._get_mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp),
        (_C._get_cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp),
        (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
        (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
        (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
        _precision("cuda", "matmul"),
        _precision("cuda", "conv"),
        _precision("cuda", "rnn"),
    ],
}
# Relative spacing of the coarsest numbers that a device computes with in float32: on a GPU, convolutions use TF32 by default.
_SPACING = {"cuda": 2.0**-10}
_Entered = tuple[list[Any], torch.device | None]  # the present values, and the default device entered


class Settings:
    """The settings as they are now.

    Args:
        device: device of the computation. Its autocast state is recorded, and that of the CPU.
    """

    def __init__(self, device: torch.device):
        shared = _OF_DEVICE.get(device.type, _EVERYWHERE)
        self._shared = len(shared)
        settings = list(shared)
        for kind in {"cpu", device.type} - {"meta"}:
            settings += _find_autocast(kind)
        self._readers, self._writers = [read for read, _ in settings], [write for _, write in settings]
        self._values = self._read()
        self._device = _read_default_device()
        autocast = [
            torch.finfo(dtype).eps for enabled, dtype in zip(*[iter(self._values[self._shared :])] * 2, strict=True) if enabled
        ]
        # Relative spacing of the coarsest numbers that are computed with, whatever the operands are.
        self.spacing: float = max(autocast, default=_SPACING.get(device.type, 0.0))

    @property
    def are_in_force(self) -> bool:
        """Whether the settings that all threads share are these now."""
        return self._read()[: self._shared] == self._values[: self._shared]

    def enter(self) -> _Entered:
        """Put these settings in force; return what `leave` takes."""
        present, device = self._read(), None
        if present != self._values:
            torch.autocast_increment_nesting()  # as `torch.autocast` does, which looks up the device's properties each time
            self._write(self._values, present)
        if (_C._len_torch_function_stack() or self._device != _NO_DEVICE) and _read_default_device() != self._device:
            device = self._device
            device.__enter__()  # a context, since the present one may be that of a `with` of the user
        return present, device

    def leave(self, entered: _Entered) -> bool:
        """Put the earlier settings in force again; return whether the run has left others than it was given."""
        present, device = entered
        if device is not None:
            device.__exit__(None, None, None)
        now = self._read()
        if present != self._values and torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        if now != present:
            self._write(present, now)
        return now != self._values

    def _read(self) -> list[Any]:
        return list(map(call, self._readers))

    def _write(self, wanted: list[Any], present: list[Any]) -> None:
        for write, value, other in zip(self._writers, wanted, present, strict=True):
            if value != other:
                write(value)


@cache
def _find_autocast(kind: str) -> list[_Setting]:
    return [
        (partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)),
        (partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)),
    ]
