"""Settings of PyTorch that decide what a call computes: autocast, precision, and which kernels may be chosen.

Backward may run under other settings than forward: outside autocast, outside `torch.nn.attention.sdpa_kernel`, or after a flag
such as `torch.backends.cudnn.benchmark` was changed. A second run needs those of the first.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, reduce
from typing import Any

import torch
from torch import backends

_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # what reads it, and what sets it


def _attribute(path: str) -> _Setting:
    *owners, name = path.split(".")
    owner = reduce(getattr, owners, backends)
    return partial(getattr, owner, name), partial(setattr, owner, name)


_EVERYWHERE: list[_Setting] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp),
    (backends.cuda.math_sdp_enabled, backends.cuda.enable_math_sdp),
]
_CPU: list[_Setting] = [
    *_EVERYWHERE,
    (torch.get_num_threads, torch.set_num_threads),
    *map(_attribute, ("mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision")),
]
_ELSEWHERE: list[_Setting] = [
    *_EVERYWHERE,
    (backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp),
    (backends.cuda.cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp),
    *map(_attribute, ("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic")),
    *map(_attribute, ("cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision")),
]
_TF32 = 2.0**-10
_NO_DEVICE = torch.device("cpu")
_Autocast = tuple[bool, torch.dtype, bool]  # enabled, dtype, whether casts of weights are cached


class Settings:
    """The settings as they are now.

    Args:
        device: device of the computation. Its autocast state is recorded, and that of the CPU.
    """

    def __init__(self, device: torch.device):
        self._settings = _CPU if device.type == "cpu" else _ELSEWHERE
        self._kinds = [kind for kind in dict.fromkeys(("cpu", device.type)) if kind != "meta"]
        self._autocast = [_read_autocast(kind) for kind in self._kinds]
        self._device = _read_default_device()
        self._values = self._read()

    @property
    def spacing(self) -> float:
        """Relative spacing of the coarsest numbers that are computed with, whatever the operands are."""
        autocast = [torch.finfo(dtype).eps for enabled, dtype, _ in self._autocast if enabled]
        # On a GPU, float32 convolutions use TF32 by default.
        return max(autocast, default=_TF32 if self._kinds[-1] == "cuda" else 0.0)

    @property
    def are_in_force(self) -> bool:
        """Whether the settings that all threads share are these now."""
        return self._read() == self._values

    def restore(self) -> AbstractContextManager[object]:
        """Return a context in which these settings are in force; after it the present ones are."""
        autocast = [_read_autocast(kind) for kind in self._kinds]
        present = self._read()
        if present == self._values and autocast == self._autocast and _read_default_device() == self._device:
            return nullcontext()
        return self._restore(present, autocast)

    @contextmanager
    def _restore(self, present: list[Any], present_autocast: list[_Autocast]) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, wanted, now in zip(self._kinds, self._autocast, present_autocast, strict=True):
                if wanted != now:
                    enabled, dtype, cache_enabled = wanted
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled))
            if self._device != _read_default_device():
                stack.enter_context(self._device)
            stack.callback(self._write, present, self._values)
            self._write(self._values, present)
            yield

    def _read(self) -> list[Any]:
        return [get() for get, _ in self._settings]

    def _write(self, wanted: list[Any], present: list[Any]) -> None:
        for (_, set_), value, other in zip(self._settings, wanted, present, strict=True):
            if value != other:
                set_(value)


def _read_default_device() -> torch.device:
    # It is a mode for functions; without any, it is the CPU.
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _NO_DEVICE


def _read_autocast(kind: str) -> _Autocast:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
