"""Running a function again under the conditions of its first run.

Besides its inputs, a call of f depends on settings (`settings.py`), the random streams (`random_state.py`), and its buffers and
parameters. `Replay` records them at the first run and restores them around every later one. The user's settings, random streams
and BatchNorm statistics are the same before and after.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter, is_
from threading import RLock
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from revzoo.errors import RecoveryError
from revzoo.host_copy import find_graph
from revzoo.runtime.compiling import are_compiled
from revzoo.runtime.nested import tensors_in
from revzoo.runtime.random_state import RandomState
from revzoo.runtime.settings import Settings
from revzoo.sharded import is_sharded

T = TypeVar("T")
_Tensors = dict[str, Tensor | None]

# Threads share random streams and buffers. While a step runs in one thread, no other runs a step on the same device.
_turns: dict[torch.device, RLock] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turns.clear)  # the thread that holds one does not exist in the child
_LONGEST_WAIT_SECONDS = 600.0

# Norms that move their running statistics in training, and use none of them: by what defines their `forward`.
_ONLY_MOVING = ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm", "timm.layers.norm_act", "revzoo.")

_get_version: Callable[[Tensor], int] = attrgetter("_version")
_get_device: Callable[[Tensor], torch.device] = attrgetter("device")
_get_dtype: Callable[[Tensor], torch.dtype] = attrgetter("dtype")
_is_training: Callable[[nn.Module], bool] = attrgetter("training")


class Replay:
    """The conditions under which `f` is called, besides its inputs.

    Args:
        f: the function about to be called; if it is a module, its buffers, parameters and training flags are recorded, but not
            those of its `silent_modules`, which do not run.
        device: device of its input. The random streams of this device, of those of f's parameters and of the CPU are recorded.
        name: name of the step, for messages.
        settings: the settings under which f is called.
        side: second argument of f; a tensor in it that is changed in place before backward is refused.
    """

    def __init__(self, f: Callable[..., Any], device: torch.device, name: str, settings: Settings, side: Any = None):
        self._name = name
        self.device = device
        self.settings = settings
        self._modules = _walk(f, getattr(f, "silent_modules", ())) if isinstance(f, nn.Module) else []
        self._training = list(map(_is_training, self._modules))
        self._norms: list[_NormBase] = []
        # What autograd saves of a statistic has moved by the second run. It is recognised by its number of elements, of which
        # InstanceNorm has so many for each example.
        self._moving_sizes: set[int] = set()
        self._earlier: dict[_NormBase, _Tensors] = {}  # statistics before the first run, where the output may depend on them
        self._holders: list[_Tensors] = []  # of each module: the dictionaries that hold its tensors
        for m in self._modules:
            if m._parameters:
                self._holders.append(cast(_Tensors, m._parameters))
            if not m._buffers:
                continue
            if isinstance(m, _NormBase) and m.training and m.track_running_stats:
                self._norms.append(m)
                if str(getattr(m.forward, "__module__", "")).startswith(_ONLY_MOVING):
                    self._moving_sizes |= {len(b) for b in m._buffers.values() if b is not None and b.dim() == 1}
                else:
                    self._earlier[m] = _clone(m._buffers)
            else:
                self._holders.append(m._buffers)
        self._held = list(map(dict, self._holders))  # and a copy of each
        # Parameters, buffers and side inputs, which must not be modified:
        self.fixed = [t for tensors in self._held for t in tensors.values() if t is not None]
        self._devices = {device, *map(_get_device, self.fixed)}
        if side is not None:
            self.fixed += tensors_in(side)
        try:
            self._versions = self._read_versions()
        except RuntimeError:
            self.fixed = [t for t in self.fixed if not t.is_inference()]
            self._versions = self._read_versions()
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
            self._graph = find_graph() if self._random.has_drawn else None
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
        self.require_unchanged()
        if self._random.has_drawn and find_graph() is not self._graph:
            raise RecoveryError(
                f"{self._name} draws random numbers, and its forward and backward are not captured in one CUDA graph, so the "
                "second run would draw others. Capture both in one graph (torch.cuda.make_graphed_callables makes two), or set "
                "its schedule to 'store'."
            )
        turn = _take_turn(self.device, self._name)
        try:
            return self._run_in_turn(run, check_draws)
        finally:
            turn.release()

    def require_unchanged(self) -> None:
        """Raise RecoveryError if a parameter, buffer or side input was changed in place or replaced since the first run."""
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

    def _run_in_turn(self, run: Callable[[], T], check_draws: bool) -> T:
        present_training = list(map(_is_training, self._modules))
        statistics = [(norm, dict(norm._buffers)) for norm in self._norms] if self._norms else ()
        random_states = self._random.rewind()
        try:
            self._set_training(present_training, self._training)
            for norm, present in statistics:
                norm._buffers.update(_clone(self._earlier.get(norm, present)))
            out = self.settings.run(run)
            self.drew_the_same = not check_draws or self._random.has_drawn_all
            return out
        finally:
            self._set_training(self._training, present_training)
            for norm, present in statistics:
                norm._buffers.update(present)
            self._random.restore(random_states)

    def _set_training(self, present: list[bool], wanted: list[bool]) -> None:
        if present != wanted:
            for module, now, then in zip(self._modules, present, wanted, strict=True):
                if now != then:
                    module.training = then  # not .train(): submodules have flags of their own

    @property
    def spacing(self) -> float:
        """Relative spacing of the coarsest numbers among f's parameters, buffers and side inputs; 0 without any."""
        return max(map(_find_spacing, set(map(_get_dtype, self.fixed))), default=0.0)

    def holds_moving(self, tensor: Tensor) -> bool:
        """Return whether a tensor that autograd saves may be a statistic that has moved by the second run."""
        return tensor.dim() == 1 and any(len(tensor) % size == 0 for size in self._moving_sizes)

    @property
    def is_compiled(self) -> bool:
        """Whether f, or a module in it, was compiled by itself."""
        return are_compiled(self._modules)

    @property
    def needs_no_rewinding(self) -> bool:
        """Whether a second run has no use for random streams: the first drew nothing, and they are where they were."""
        return self._random.needs_no_rewinding

    @property
    def has_drawn_all(self) -> bool:
        """Whether the second run has drawn as many random numbers as the first, so it will draw no more."""
        return self._random.has_drawn_all

    def _read_versions(self) -> list[int]:
        return list(map(_get_version, self.fixed))

    def _find_changed(self) -> str | None:
        now = self._read_versions()
        if now == self._versions:
            return None
        return self._name_of(next(t for t, a, b in zip(self.fixed, now, self._versions, strict=True) if a != b))

    def _find_replaced(self) -> str | None:
        """Return the first entry that is another tensor now. FSDP exchanges shards and whole tensors of the same parameter."""
        for tensors, then in zip(self._holders, self._held, strict=True):
            if all(map(is_, tensors.values(), then.values())):
                continue
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


def _clone(buffers: Mapping[str, Tensor | None]) -> _Tensors:
    return {key: b if b is None else b.clone() for key, b in buffers.items()}


def _walk(module: nn.Module, silent: Sequence[nn.Module]) -> list[nn.Module]:
    """Return a module and all modules in it but the silent ones, without the cost of `modules()`."""
    modules = {id(m): m for m in (*silent, module)}
    waiting = [module]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in modules:
                modules[id(child)] = child
                waiting.append(child)
    return list(modules.values())[len(silent) :]


@cache
def _find_spacing(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _take_turn(device: torch.device, name: str) -> RLock:
    """Wait until no other thread runs a step on the device; return what to release.

    Where processes communicate, threads do not wait: a collective of one could be waiting for the other.

    Raises:
        RecoveryError: another thread keeps running a step.
    """
    turn = _turns.get(device) or _turns.setdefault(device, RLock())
    if turn.acquire(False):
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
