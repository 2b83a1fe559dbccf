"""Running a function again under the conditions of its first run.

Besides its inputs, a call of f depends on settings (`settings.py`), the random streams (`random_state.py`), and its buffers and
parameters. `Replay` records them at the first run and restores them around every later one. The user's settings, random streams
and BatchNorm statistics are the same before and after.
"""

import os
import sys
from collections.abc import Callable
from threading import RLock
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from revzoo.errors import RecoveryError
from revzoo.runtime.nested import tensors_in
from revzoo.runtime.random_state import RandomState
from revzoo.runtime.settings import Settings

T = TypeVar("T")
_Tensors = dict[str, Tensor | None]

# Threads share random streams and buffers. While a step runs in one thread, no other runs a step on the same device.
_turns: dict[torch.device, RLock] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turns.clear)  # the thread that holds one does not exist in the child
_LONGEST_WAIT_SECONDS = 600.0


class Replay:
    """The conditions under which `f` is called, besides its inputs.

    Args:
        f: the function about to be called; if it is a module, its buffers, parameters and training flags are recorded.
        device: device of its input. The random streams of this device, of those of f's parameters and of the CPU are recorded.
        name: name of the step, for messages.
        settings: the settings under which f is called.
        side: second argument of f; a tensor in it that is changed in place before backward is refused.
    """

    def __init__(self, f: Callable[..., Any], device: torch.device, name: str, settings: Settings, side: Any = None):
        self._name = name
        self.device = device
        self.settings = settings
        self._modules = _walk(f) if isinstance(f, nn.Module) else []
        self._training = [m.training for m in self._modules]
        self._norms: list[_NormBase] = []
        # What autograd saves of a statistic has moved by the second run. It is recognised by its number of elements.
        self.moving_sizes: set[int] = set()
        # Lists of equal length, since tuples for each tensor would keep the garbage collector busy:
        self._holders: list[_Tensors] = []  # of each module by name: the dictionary that holds its tensors
        self._held: list[_Tensors] = []  # and a copy
        self.fixed: list[Tensor] = []  # parameters, buffers and side inputs, which must not be modified
        self._versions: list[int] = []
        self._devices = {device}
        for m in self._modules:
            if m._parameters:
                self._record(cast(_Tensors, m._parameters))
            if isinstance(m, _NormBase) and m.training and m.track_running_stats:
                self._norms.append(m)
                self.moving_sizes |= {b.numel() for b in m._buffers.values() if b is not None}
            elif m._buffers:
                self._record(m._buffers)
        if side is not None:
            self.fixed += tensors_in(side)
        try:
            self._versions = [t._version for t in self.fixed]
        except RuntimeError:
            self.fixed = [t for t in self.fixed if not t.is_inference()]
            self._versions = [t._version for t in self.fixed]
        self._random: RandomState
        self.drew_the_same = True  # whether the latest second run drew as many random numbers as the first

    def run_first(self, run: Callable[[], T]) -> T:
        """Return run(), which calls f for the first time.

        Raises:
            RecoveryError: f changed a buffer or parameter of its own, so a second run would not repeat the first.
        """
        turn = _take_turn(self.device, self._name)
        try:
            self._random = RandomState(self._devices)
            out = run()
            self._random.end_first_run()
        finally:
            turn.release()
        if changed := self._find_changed():
            raise RecoveryError(
                f"{self._name} changes its {changed!r} in forward, so a second run would not repeat the first. "
                f"Set the schedule of {self._name} to 'store'. (BatchNorm's running statistics need no change; lazy modules "
                "need one call under torch.no_grad() first.)"
            )
        return out

    def run_again(self, run: Callable[[], T], check_draws: bool = True) -> T:
        """Return run(), which calls f under the recorded conditions. The present ones are restored after it.

        Args:
            run: calls f.
            check_draws: whether `drew_the_same` is to be known.

        Raises:
            RecoveryError: a parameter, buffer or side input was changed in place or replaced since the first run.
        """
        if changed := self._find_changed():
            raise RecoveryError(
                f"{changed!r} of {self._name} was changed in place between forward and backward, for example by "
                "optimizer.step(). Run backward first, or set the schedule to 'store' and let autograd say where. With an "
                "optimizer inside backward (register_post_accumulate_grad_hook), no step may end by adding a parameter: its "
                "gradient is complete before the step runs again."
            )
        if replaced := self._find_replaced():
            raise RecoveryError(
                f"{replaced!r} of {self._name} was another tensor in forward, as under torch.func.functional_call or after "
                "load_state_dict(assign=True). Run backward first, or set the schedule to 'store'."
            )
        turn = _take_turn(self.device, self._name)
        try:
            return self._run_in_turn(run, check_draws)
        finally:
            turn.release()

    def _run_in_turn(self, run: Callable[[], T], check_draws: bool) -> T:
        flags = [(m, then) for m, then in zip(self._modules, self._training, strict=True) if m.training != then]
        statistics = [(norm._buffers, dict(norm._buffers)) for norm in self._norms]
        random_states = self._random.rewind()
        self.drew_the_same = True
        try:
            for module, then in flags:  # not .train(): submodules have flags of their own
                module.training = then
            for buffers, present in statistics:
                buffers.update({key: b if b is None else b.clone() for key, b in present.items()})
            with self.settings.restore():
                out = run()
            self.drew_the_same = not check_draws or self._random.has_drawn_all
            return out
        finally:
            for module, then in flags:
                module.training = not then
            for buffers, present in statistics:
                buffers.update(present)
            self._random.restore(random_states)

    @property
    def spacing(self) -> float:
        """Relative spacing of the coarsest numbers among f's parameters, buffers and side inputs; 0 without any."""
        dtypes = {t.dtype for t in self.fixed}
        return max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0)

    @property
    def has_drawn_all(self) -> bool:
        """Whether the second run has drawn as many random numbers as the first, so it will draw no more."""
        return self._random.has_drawn_all

    def _record(self, tensors: _Tensors) -> None:
        self._holders.append(tensors)
        self._held.append(tensors.copy())
        for t in tensors.values():
            if t is not None:
                self._devices.add(t.device)
                self.fixed.append(t)

    def _find_changed(self) -> str | None:
        for t, version in zip(self.fixed, self._versions, strict=True):
            if t._version != version:
                return self._name_of(t)
        return None

    def _find_replaced(self) -> str | None:
        """Return the first entry that is another tensor now. FSDP exchanges shards and whole tensors of the same parameter."""
        for tensors, then in zip(self._holders, self._held, strict=True):
            for key, t in then.items():
                now = tensors.get(key)
                if now is not t and now is not None and t is not None and not is_sharded(t, now):
                    return self._name_of(t)
        return None

    def _name_of(self, tensor: Tensor) -> str:
        """Return the name of a tensor at the time of the first run, relative to f."""
        copies = {id(tensors): then for tensors, then in zip(self._holders, self._held, strict=True)}
        for name, module in self._modules[0].named_modules() if self._modules else ():
            for tensors in (module._parameters, module._buffers):
                for key, t in copies.get(id(tensors), {}).items():
                    if t is tensor:
                        return f"{name}.{key}".removeprefix(".")
        return "side input"


def _walk(module: nn.Module) -> list[nn.Module]:
    """Return a module and all modules in it, without the cost of `modules()`."""
    modules = {id(module): module}
    waiting = [module]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in modules:
                modules[id(child)] = child
                waiting.append(child)
    return list(modules.values())


def _take_turn(device: torch.device, name: str) -> RLock:
    """Wait until no other thread runs a step on the device; return what to release.

    Where processes communicate, threads do not wait: a collective of one could be waiting for the other.

    Raises:
        RecoveryError: another thread keeps running a step.
    """
    turn = _turns.get(device) or _turns.setdefault(device, RLock())
    if turn.acquire(blocking=False):
        return turn
    if processes_communicate():
        turn = RLock()
    if not turn.acquire(timeout=_LONGEST_WAIT_SECONDS):
        raise RecoveryError(
            f"{name} has waited {_LONGEST_WAIT_SECONDS:g} seconds for a step that another thread runs on {device}. Run their "
            "forwards and backwards in one thread, or in two processes."
        )
    return turn


def runs_step() -> bool:
    """Return whether this thread is running a step."""
    return any(cast(Any, turn)._is_owned() for turn in list(_turns.values()))


def processes_communicate() -> bool:
    """Return whether this process is one of several that torch.distributed connects."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def is_sharded(*tensors: Tensor) -> bool:
    """Return whether one of the tensors is a DTensor."""
    # Importing DTensor takes half a second, and there is none before somebody else has imported it.
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and any(isinstance(t, distributed.DTensor) for t in tensors)
