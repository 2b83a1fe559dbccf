"""Steps that tell what look-ahead does to them."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from revzoo.runtime import ReversibleChain

MODES = {
    "invert": ["invert"],
    "recompute": ["recompute"],
    "selective": ["selective"],
    "mixed": ["invert", "recompute", "selective", "invert", "store", "invert", "invert"],
}


class Mark(torch.autograd.Function):
    """The identity; its backward first asks for what it saved, and then calls a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        assert ctx.saved_tensors
        ctx.call()
        return grads[0], None


class Told(nn.Module):
    """A step that tells when it is recovered and differentiated."""

    def __init__(self, number: int, on_recovery: Callable[[int], None], on_gradient: Callable[[int], None], p: float = 0.0):
        super().__init__()
        dropout = [nn.Dropout(p)] if p else []
        self.body = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(), *dropout, nn.Linear(12, 6))
        self.number = number
        self.on_recovery, self.on_gradient = on_recovery, on_gradient
        self.calls = 0

    def forward(self, w: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2 == 0:
            self.on_recovery(self.number)
        return Mark.apply(self.body(w), partial(self.on_gradient, self.number))


def told(count: int, on_recovery: Callable[[int], None], on_gradient: Callable[[int], None], modes: list[str] | None = None):
    chain = ReversibleChain([Told(i + 1, on_recovery, on_gradient) for i in range(count)])
    chain.schedule = modes or ["invert"] * count
    chain.lookahead = 1
    return chain


def backward(chain: nn.Module, *inputs: Tensor, seed: int = 3) -> list[Tensor]:
    """Return gradients of inputs and parameters, buffers, and a random number drawn after it all."""
    torch.manual_seed(seed)
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    chain.zero_grad()
    out = chain(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    sum((y.sin() * torch.linspace(0, 1, y.numel()).view_as(y)).sum() for y in outs).backward()
    grads = [x.grad for x in (*inputs, *chain.parameters()) if x.grad is not None]
    return [*grads, *(b.clone() for b in chain.buffers()), torch.rand(1)]


def assert_same_with_and_without(chain: nn.Module, *inputs: Tensor, repeats: int = 2) -> None:
    chain.lookahead = 0
    state = copy.deepcopy(chain.state_dict())
    expected = backward(chain, *inputs)
    assert len(expected) > 1
    chain.lookahead = 1
    for _ in range(repeats):
        chain.load_state_dict(state)
        actual = backward(chain, *inputs)
        assert len(actual) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


class Unseen(TorchDispatchMode):
    """A mode that changes nothing; recovery then runs in the thread of backward, so the order of events is one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Linear(nn.Module):
    """A step that saves its input, its hidden state and nothing else."""

    def __init__(self, hidden: int):
        super().__init__()
        self.first, self.second = nn.Linear(6, hidden, bias=False), nn.Linear(hidden, 6, bias=False)

    def forward(self, w: Tensor) -> Tensor:
        return self.second(self.first(w).sigmoid())
