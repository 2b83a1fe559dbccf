"""Settings of PyTorch that decide what a call computes: autocast, precision, and which kernels may be chosen.

Backward may run under other settings than forward: outside autocast, outside `torch.nn.attention.sdpa_kernel`, or after a flag
such as `torch.backends.cudnn.benchmark` was changed. A second run needs those of the first.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.backends import cuda, cudnn, mkldnn

# What reads a setting, and what sets it. Read for every second run, so cheap getters are preferred.
_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    *(
        (partial(getattr, owner, name), partial(setattr, owner, name))
        for owner, name in (
            (cudnn, "enabled"),
            (cudnn, "benchmark"),
            (cudnn, "deterministic"),
            *((owner, "fp32_precision") for owner in (cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)),
        )
    ),
]

_TF32 = 2.0**-10


class Settings:
    """The settings as they are now.

    Args:
        device: device whose autocast state is recorded, beside that of the CPU.
    """

    def __init__(self, device: torch.device):
        self._kinds = [kind for kind in dict.fromkeys(("cpu", device.type)) if kind != "meta"]
        self._autocast = [_read_autocast(kind) for kind in self._kinds]
        self._values = _read()

    @property
    def spacing(self) -> float:
        """Relative spacing of the coarsest numbers that are computed with, whatever the operands are."""
        autocast = [torch.finfo(autocast["dtype"]).eps for autocast in self._autocast if autocast["enabled"]]
        # On a GPU, float32 convolutions use TF32 by default.
        return max(autocast, default=_TF32 if self._kinds[-1] == "cuda" else 0.0)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have these settings inside the context, and the present ones after it."""
        with ExitStack() as stack:
            for kind, autocast in zip(self._kinds, self._autocast, strict=True):
                if autocast != _read_autocast(kind):
                    stack.enter_context(torch.autocast(**autocast))
            if (present := _read()) != self._values:
                stack.callback(_write, present, self._values)
                _write(self._values, present)
            yield


def _read_autocast(kind: str) -> dict[str, Any]:
    return {
        "device_type": kind,
        "dtype": torch.get_autocast_dtype(kind),
        "enabled": torch.is_autocast_enabled(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def _read() -> list[Any]:
    return [get() for get, _ in _SETTINGS]


def _write(wanted: list[Any], present: list[Any]) -> None:
    for (_, set_), value, other in zip(_SETTINGS, wanted, present, strict=True):
        if value != other:
            set_(value)
