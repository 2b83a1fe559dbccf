"""Running a function again under the conditions of its first run.

Besides its inputs, a call of f depends on the autocast state, the random stream, and its buffers and parameters. `Replay`
records them at the first run and restores them around every later one. The user's random stream, autocast state and BatchNorm
statistics are the same before and after.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from ctypes import string_at
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from revzoo.errors import RecoveryError
from revzoo.runtime.nested import tensors_in

# Autograd has one thread per device. Recoveries in different threads must not set a shared random stream at the same time.
_random_lock = RLock()


class Replay:
    """The conditions under which `f` is called, besides its inputs.

    Args:
        f: the function about to be called; if it is a module, its buffers, parameters and training flags are recorded.
        device: device of its input; the random streams of this device and of the CPU are recorded.
        name: name of the step, for messages.
        side: second argument of f; a tensor in it that is changed in place before backward is refused.
    """

    def __init__(self, f: Callable[..., Any], device: torch.device, name: str, side: Any = None):
        self._f = f
        self._name = name
        self._autocast = [_autocast_state(kind) for kind in dict.fromkeys(("cpu", device.type)) if kind != "meta"]
        modules = list(f.modules()) if isinstance(f, nn.Module) else []
        self._training = [(m, m.training) for m in modules]
        self._norms = [m for m in modules if isinstance(m, _NormBase) and m.training and m.track_running_stats]
        moving = {id(buffer) for norm in self._norms for buffer in norm.buffers(recurse=False)}
        self._state = {key: t for key, t in self._current_state() if id(t) not in moving}
        watched = [*self._state.items(), *(("side input", t) for t in tensors_in(side))]
        self._versions = [(key, t, t._version) for key, t in watched if not t.is_inference()]
        self._random = [(generator, generator.get_state()) for generator in _generators(device)]

    def end_first_run(self) -> None:
        """Discard the random streams that f did not draw from.

        Raises:
            RecoveryError: f changed a buffer or parameter of its own, so a second run would not repeat the first.
        """
        self._random = [(g, state) for g, state in self._random if not _same(state, g.get_state())]
        if changed := self._find_changed():
            raise RecoveryError(
                f"{self._name} changes its {changed!r} in forward, so a second run would not repeat the first. "
                f"Set the schedule of {self._name} to 'store'. (BatchNorm's running statistics need no change.)"
            )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the recorded conditions inside the context, and the present ones after it.

        Raises:
            RecoveryError: a parameter, buffer or side input was changed in place or replaced since the first run.
        """
        if changed := self._find_changed():
            raise RecoveryError(
                f"{changed!r} of {self._name} was changed in place between forward and backward, for example by "
                "optimizer.step(). Run backward first, or set the schedule to 'store' and let autograd say where."
            )
        if replaced := self._find_replaced():
            raise RecoveryError(
                f"{replaced!r} of {self._name} was another tensor in forward, as under torch.func.functional_call or after "
                "load_state_dict(assign=True). Run backward first, or set the schedule to 'store'."
            )
        with ExitStack() as stack:
            for autocast in self._autocast:
                stack.enter_context(torch.autocast(**autocast))
            if self._random:
                stack.enter_context(_random_lock)
            for generator, state in self._random:
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            for module, training in self._training:
                if module.training != training:  # not .train(): submodules have flags of their own
                    stack.callback(setattr, module, "training", module.training)
                    module.training = training
            for norm in self._norms:
                stack.callback(norm._buffers.update, dict(norm._buffers))
                norm._buffers.update({key: b if b is None else b.clone() for key, b in norm._buffers.items()})
            yield

    def _current_state(self) -> Iterator[tuple[str, Tensor]]:
        if isinstance(self._f, nn.Module):
            yield from self._f.named_parameters()
            yield from self._f.named_buffers()

    def _find_changed(self) -> str | None:
        return next((key for key, t, version in self._versions if t._version != version), None)

    def _find_replaced(self) -> str | None:
        """Return the first entry that is another tensor now. FSDP exchanges shards and whole tensors of the same parameter."""
        pairs = ((key, self._state[key], t) for key, t in self._current_state() if key in self._state)
        return next((key for key, then, now in pairs if then is not now and not is_sharded(then, now)), None)


def _autocast_state(kind: str) -> dict[str, Any]:
    return {
        "device_type": kind,
        "dtype": torch.get_autocast_dtype(kind),
        "enabled": torch.is_autocast_enabled(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def _generators(device: torch.device) -> list[torch.Generator]:
    """Return the default generators that an f on `device` can draw from."""
    generators = [torch.default_generator]
    if device.type not in ("cpu", "meta") and (module := torch.get_device_module(device)).is_available():
        generators.append(module.default_generators[device.index or 0])
    return generators


def _same(left: Tensor, right: Tensor) -> bool:
    """Compare without a dispatched operation, which a FakeTensorMode around the call would refuse."""
    return string_at(left.data_ptr(), left.nbytes) == string_at(right.data_ptr(), right.nbytes)


def is_sharded(*tensors: Tensor) -> bool:
    """Return whether one of the tensors is a DTensor."""
    # Importing DTensor takes half a second, and there is none before somebody else has imported it.
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and any(isinstance(t, distributed.DTensor) for t in tensors)
