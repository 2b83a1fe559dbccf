"""Settings of PyTorch that decide what a call computes: autocast, precision, and which kernels may be chosen.

Backward may run under other settings than forward: outside autocast, outside `torch.nn.attention.sdpa_kernel`, or after a flag
such as `torch.backends.cudnn.benchmark` was changed. A second run needs those of the first.
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import _C, backends

_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # what reads it, and what sets it


def _precision(*names: str) -> _Setting:
    return partial(_C._get_fp32_precision_getter, *names), partial(_C._set_fp32_precision_setter, *names)


_LEAST_NORMAL = sys.float_info.min


def _flushes_denormal() -> bool:
    return _LEAST_NORMAL / 2 == 0  # PyTorch has no function that tells; Python's numbers are subject to it too


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
]
_CPU: list[_Setting] = [
    *_EVERYWHERE,
    (torch.get_num_threads, torch.set_num_threads),
    (_flushes_denormal, torch.set_flush_denormal),
    _precision("mkldnn", "matmul"),
    _precision("mkldnn", "conv"),
]
_ELSEWHERE: list[_Setting] = [
    *_EVERYWHERE,
    (_C._get_mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp),
    (_C._get_cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    _precision("cuda", "matmul"),
    _precision("cuda", "conv"),
    _precision("cuda", "rnn"),
]
_TF32 = 2.0**-10
_Entered = tuple[list[Any], torch.device | None]
_Autocast = tuple[bool, torch.dtype, bool]  # enabled, dtype, whether casts of weights are cached


class Settings:
    """The settings as they are now.

    Args:
        device: device of the computation. Its autocast state is recorded, and that of the CPU.
    """

    def __init__(self, device: torch.device):
        shared = _CPU if device.type == "cpu" else _ELSEWHERE
        self._shared = len(shared)
        self._settings = [*shared, *map(_find_autocast, {"cpu", device.type} - {"meta"})]
        self._values = self._read()
        self._device = _read_default_device()
        autocast = [torch.finfo(dtype).eps for enabled, dtype, _ in self._values[self._shared :] if enabled]
        # Relative spacing of the coarsest numbers that are computed with, whatever the operands are. On a GPU, float32
        # convolutions use TF32 by default.
        self.spacing: float = max(autocast, default=_TF32 if device.type == "cuda" else 0.0)

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
        if _read_default_device() != self._device:
            device = self._device
            device.__enter__()  # a context, since the present one may be that of a `with` of the user
        return present, device

    def leave(self, entered: _Entered) -> None:
        """Put the earlier settings in force again, whatever has been set meanwhile."""
        present, device = entered
        if device is not None:
            device.__exit__(None, None, None)
        if present != self._values and torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        now = self._read()
        if now != present:
            self._write(present, now)

    def _read(self) -> list[Any]:
        return [read() for read, _ in self._settings]

    def _write(self, wanted: list[Any], present: list[Any]) -> None:
        for (_, write), value, other in zip(self._settings, wanted, present, strict=True):
            if value != other:
                write(value)


def _read_autocast(kind: str) -> _Autocast:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def _write_autocast(kind: str, wanted: _Autocast) -> None:
    enabled, dtype, is_cache_enabled = wanted
    torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(is_cache_enabled)


@cache
def _find_autocast(kind: str) -> _Setting:
    return partial(_read_autocast, kind), partial(_write_autocast, kind)
