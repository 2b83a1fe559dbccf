"""Running a function a second time as if it were the first.

What a call of f depends on besides its inputs: the autocast state, the random stream, and its buffers and parameters.
`Replay` notes them during the first run and puts them back around every later one, leaving the user's random stream,
autocast state and BatchNorm statistics as if nothing had been run.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from ctypes import string_at
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from revzoo.errors import RecoveryError


class Replay:
    """The surroundings of one call of `f`.

    Args:
        f: the function about to be called; buffers and parameters are looked after if it is a module.
        device: of its input; random streams of this device and of the CPU are looked after.
        name: of the step, for messages.
    """

    def __init__(self, f: Callable[..., Any], device: torch.device, name: str):
        self._name = name
        self._device = device
        self._autocast = [_autocast_state(kind) for kind in dict.fromkeys(("cpu", device.type)) if kind != "meta"]
        self._norms: list[nn.Module] = []
        self._watched: list[tuple[str, Tensor, int]] = []
        if isinstance(f, nn.Module):
            self._norms = [m for m in f.modules() if isinstance(m, _NormBase) and m.training and m.track_running_stats]
            moving = {id(buffer) for norm in self._norms for buffer in norm.buffers(recurse=False)}
            state = [*f.named_parameters(), *f.named_buffers()]
            self._watched = [(key, t, t._version) for key, t in state if id(t) not in moving]
        self._random: list[Tensor] | None = _random_state(device)

    def first_run_ended(self) -> None:
        """Forget the random stream when f drew nothing; refuse an f whose second run would see other buffers."""
        if self._random is not None and _same(self._random, _random_state(self._device)):
            self._random = None
        if changed := self._changed():
            raise RecoveryError(
                f"{self._name} changes its {changed!r} in forward, so a second run would not repeat the first. "
                f"Set the schedule of {self._name} to 'store'. (BatchNorm statistics are understood and need no change.)"
            )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Surround a further run of f.

        Raises:
            RecoveryError: a parameter or buffer was changed in place since the first run.
        """
        if changed := self._changed():
            raise RecoveryError(
                f"{changed!r} of {self._name} was changed in place between forward and backward, for example by "
                "optimizer.step(). Run backward first, or set the schedule to 'store' and let autograd say where."
            )
        with ExitStack() as stack:
            for state in self._autocast:
                stack.enter_context(torch.autocast(**state))
            if self._random is not None:
                stack.callback(_set_random_state, self._device, _random_state(self._device))
                _set_random_state(self._device, self._random)
            for norm in self._norms:
                stack.callback(norm._buffers.update, dict(norm._buffers))
                norm._buffers.update({key: b if b is None else b.clone() for key, b in norm._buffers.items()})
            yield

    def _changed(self) -> str | None:
        return next((key for key, t, version in self._watched if t._version != version), None)


def _autocast_state(kind: str) -> dict[str, Any]:
    return {
        "device_type": kind,
        "dtype": torch.get_autocast_dtype(kind),
        "enabled": torch.is_autocast_enabled(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def _generators(device: torch.device) -> list[torch.Generator]:
    """Return the default generators that an f on `device` can draw from."""
    found = [torch.default_generator]
    if device.type not in ("cpu", "meta") and (module := torch.get_device_module(device)).is_available():
        found.append(module.default_generators[device.index or 0])
    return found


def _random_state(device: torch.device) -> list[Tensor]:
    return [generator.get_state() for generator in _generators(device)]


def _set_random_state(device: torch.device, state: list[Tensor]) -> None:
    for generator, part in zip(_generators(device), state, strict=True):
        generator.set_state(part)


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Compare without a dispatched operation, which a FakeTensorMode around the call would refuse."""
    return all(string_at(a.data_ptr(), a.nbytes) == string_at(b.data_ptr(), b.nbytes) for a, b in zip(left, right, strict=True))
