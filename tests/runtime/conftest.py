"""Small chains that every runtime test builds on."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from revzoo.runtime import ReversibleChain, lookahead, transforms

Grads = list[Tensor]


@pytest.fixture(autouse=True)
def _forget_warnings() -> Iterator[None]:
    warn_once = lookahead._warn_once  # a test may replace it
    yield
    warn_once.cache_clear()
    transforms._warn_once.cache_clear()


def mlp(width: int = 6, hidden: int = 12) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


@pytest.fixture
def chain_of() -> Callable[..., ReversibleChain]:
    """Return a maker of chains of MLP steps."""

    def make(depth: int, coupling: object = "additive", exact: bool = False, dtype: torch.dtype = torch.float64):
        return ReversibleChain([mlp() for _ in range(depth)], coupling, exact).to(dtype)

    return make


@pytest.fixture
def streams() -> tuple[Tensor, Tensor]:
    """Return two different streams in float64 that require gradients."""
    x1, x2 = torch.randn(2, 3, 6, dtype=torch.float64)
    return x1.requires_grad_(), x2.requires_grad_()


@pytest.fixture
def gradients() -> Callable[..., Grads]:
    """Return a function that gives the gradients of a loss over both outputs, inputs first."""

    def run(chain: ReversibleChain, inputs: Sequence[Tensor], schedule: object = None, **kwargs: object) -> Grads:
        if schedule is not None:
            chain.schedule = schedule
        y1, y2 = chain(*inputs, **kwargs)
        loss = (y1.sin() * torch.linspace(0, 1, y1.numel(), dtype=y1.dtype).view_as(y1)).sum() + (y2 * y2).sum()
        wanted = [x for x in (*inputs, *chain.parameters()) if x.requires_grad]
        return list(torch.autograd.grad(loss, wanted))

    return run


@pytest.fixture
def error() -> Callable[[Grads, Grads], float]:
    """Return a function that gives the worst relative error over all tensors."""

    def worst(grads: Grads, expected: Grads) -> float:
        assert len(grads) == len(expected) > 0
        # A step whose every example was dropped has zero gradients. Not Python's max, which may pass over a NaN.
        errors = [(a - b).norm() / b.norm().clamp_min(torch.finfo(b.dtype).tiny) for a, b in zip(grads, expected, strict=True)]
        return torch.stack(errors).max().item()

    return worst
