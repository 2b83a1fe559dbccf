"""What an optimizer takes: its state, and the most that an update allocates besides.

A copy of the optimizer makes a few steps under `FakeTensorMode`, with parameters that have no values, and the bytes of what it
allocates are counted. So whatever it does counts: `foreach` makes a copy of all weights or two, a loop over the parameters one
of the largest, a fused update none. An optimizer that asks for values makes its steps with real tensors, one parameter of each
shape at a time.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.optim.optimizer import _foreach_supported_types

from revzoo.analysis.dry_run import require_module
from revzoo.analysis.fake_tensors import find_fake_mode, make_fake
from revzoo.errors import InputError
from revzoo.runtime.live_bytes import LiveBytes, LiveBytesOfReplacedCalls

_STEPS, _MORE_STEPS = 2, 8  # the sixth step of RAdam is the first to take as much as the later ones

_Group = dict[str, Any]


@dataclass(frozen=True)
class OptimizerBytes:
    """What an optimizer takes.

    Args:
        state: its state, as after a step.
        update: the most that a step has allocated at once besides state and gradients.
    """

    state: int = 0
    update: int = 0


NO_OPTIMIZER = OptimizerBytes()


def count_optimizer(model: nn.Module, optimizer: Optimizer | None) -> OptimizerBytes:
    """Return what an optimizer takes; before its first step, with the state that this step will create.

    Raises:
        InputError: not an optimizer, parameters that are not the model's, or a step that cannot be tried out.
    """
    if optimizer is None:
        require_module(model)
        return NO_OPTIMIZER
    optimizer = _require_optimizer(model, optimizer)
    groups = optimizer.param_groups
    with torch.random.fork_rng(devices=[]):
        try:
            taken = _make_steps(optimizer, groups, _count_steps(optimizer))
        except Exception:  # whatever an optimizer raises that needs values
            count_one = _count_apart(optimizer)
            each = [count_one(group, p) for group in groups for p in group["params"] if p.requires_grad]
            taken = OptimizerBytes(sum(one.state for one in each), max((one.update for one in each), default=0))
    return OptimizerBytes(_total_bytes(optimizer.state.values()), taken.update) if optimizer.state else taken


def count_updates_apart(model: nn.Module, optimizer: Optimizer) -> list[int]:
    """Return what an update takes, of each parameter of the model by itself; of frozen ones 0. Raises as `count_optimizer`."""
    optimizer = _require_optimizer(model, optimizer)
    count_one, updates = _count_apart(optimizer), dict[int, int]()
    with torch.random.fork_rng(devices=[]):
        for group in optimizer.param_groups:
            updates |= {id(p): count_one(group, p).update for p in group["params"] if p.requires_grad}
    return [updates.get(id(p), 0) for p in model.parameters()]


def _require_optimizer(model: nn.Module, optimizer: Any) -> Optimizer:
    require_module(model)
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"The optimizer must be a torch.optim.Optimizer. Received: {type(optimizer).__name__}.")
    if not {id(p) for group in optimizer.param_groups for p in group["params"]} <= set(map(id, model.parameters())):
        raise InputError("The optimizer has parameters that are not the model's. Make it from model.parameters().")
    return optimizer


def _count_apart(optimizer: Optimizer) -> Callable[[_Group, Tensor], OptimizerBytes]:
    """Return a function that counts one parameter of a group by itself, and those of the same shape once."""
    known: dict[Any, OptimizerBytes] = {}

    def count_one(group: _Group, p: Tensor) -> OptimizerBytes:
        key = id(group), p.shape, p.stride(), p.dtype, p.device
        if key not in known:
            alone = [{**group, "params": [p]}]
            try:
                known[key] = _make_steps(optimizer, alone, _MORE_STEPS)
            except Exception:
                known[key] = _make_real_steps(optimizer, alone)
        return known[key]

    return count_one


def _count_steps(optimizer: Optimizer) -> int:
    """Return after how many steps the first parameters show the most that a step ever takes."""
    few = [{**group, "params": group["params"][:1]} for group in optimizer.param_groups]
    return _STEPS if _make_steps(optimizer, few, _STEPS) == _make_steps(optimizer, few, _MORE_STEPS) else _MORE_STEPS


def _make_steps(optimizer: Optimizer, groups: Sequence[_Group], steps: int) -> OptimizerBytes:
    """Make steps with parameters without values."""
    real = [p for group in groups for p in group["params"]]
    mode = find_fake_mode(real, always=True)
    assert mode is not None
    fakes = {id(p): nn.Parameter(make_fake(p, mode, torch.device("cpu")), p.requires_grad) for p in real}
    with mode, _fake_tensors_as_parameters():
        return _count_trial(optimizer, groups, fakes, steps)


def _make_real_steps(optimizer: Optimizer, groups: Sequence[_Group]) -> OptimizerBytes:
    """Make steps with real parameters like those of the groups; they are zero.

    Raises:
        InputError: the optimizer raised an error.
    """
    parameters = {}
    for group in groups:
        for p in group["params"]:
            device = torch.device("cpu") if p.is_meta or isinstance(p, FakeTensor) else p.device
            parameters[id(p)] = nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=device), p.requires_grad)
    try:
        return _count_trial(optimizer, groups, parameters, _MORE_STEPS)
    except Exception as error:
        raise InputError(
            f"The state of {type(optimizer).__name__} cannot be predicted ({type(error).__name__}: {error}). Measure "
            "without the optimizer, or after its first step."
        ) from error


def _count_trial(
    optimizer: Optimizer, groups: Sequence[_Group], parameters: dict[int, nn.Parameter], steps: int
) -> OptimizerBytes:
    """Let a copy of the optimizer make steps with other parameters, given by the ids of those in the groups."""
    trial = copy_optimizer(optimizer, [{**group, "params": [parameters[id(p)] for p in group["params"]]} for group in groups])
    live, most = LiveBytesOfReplacedCalls(), 0  # of optimizers that compile their functions
    live.watch(parameters.values())
    for _ in range(steps):
        for p in parameters.values():
            p.grad = torch.ones_like(p) if p.requires_grad else None
        live.watch([p.grad for p in parameters.values() if p.grad is not None])
        start = live.now()
        with live:
            trial.step()
        most = max(most, live.peak(since=start) - live.alive())
    return OptimizerBytes(_total_bytes(trial.state.values()), most)


def copy_optimizer(optimizer: Optimizer, groups: list[_Group]) -> Optimizer:
    """Return an optimizer with the same settings, no state, and these groups."""
    # What deepcopy is not to copy: state, and the parameters.
    memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict)}
    memo |= {id(group["params"]): [] for group in optimizer.param_groups}
    copied: Optimizer = copy.deepcopy(optimizer, memo)
    copied.param_groups = groups
    return copied


@contextmanager
def _fake_tensors_as_parameters() -> Iterator[None]:
    """Let optimizers choose `foreach` for FakeTensors as they do for parameters, by the device."""
    _foreach_supported_types.append(FakeTensor)
    try:
        yield
    finally:
        _foreach_supported_types.pop()


def _total_bytes(tensors: Any) -> int:
    live = LiveBytes()
    return live.size(live.watch(tensors))
