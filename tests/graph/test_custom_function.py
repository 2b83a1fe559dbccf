"""Custom autograd functions in a captured graph: what they save is saved as they say, recovered, and freed by backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import revzoo
from revzoo.errors import BudgetError


class Scaled(torch.autograd.Function):
    """Saves its input and an attribute, returns two results, one without a gradient; has no gradient for the scale."""

    @staticmethod
    def forward(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return x.sin() * scale, x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, ctx.scale = inputs
        ctx.positive = output[1]
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return dy * x.cos() * ctx.scale * (1 + ctx.positive), None


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.sigmoid())
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        x, gate = ctx.saved_tensors
        return dy * gate * (1 + x * (1 - gate))


class Layers(nn.Module):
    def __init__(self, run: Callable[[Tensor], Tensor], num: int = 3):
        super().__init__()
        self.run, self.layers = run, nn.ModuleList(nn.Linear(16, 16) for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.run(layer(x)) + x
        return x.tanh()


def swish(x: Tensor) -> Tensor:
    y: Tensor = Swish.apply(x)
    return y


def scale(x: Tensor) -> Tensor:
    y, positive = Scaled.apply(x, 1.5)
    return y * positive


@pytest.mark.parametrize("run", [scale, swish], ids=["two results", "one tensor of its own"])
def test_a_step_is_bit_identical(run: Callable[[Tensor], Tensor], check: Callable[..., None]):
    torch._dynamo.reset()
    torch.manual_seed(0)
    check(Layers(run), [torch.randn(4, 16, requires_grad=True)], drops=False)


def test_a_plan_spares_what_was_saved():
    net, x = Layers(swish, 6), torch.randn(512, 16)
    with pytest.raises(BudgetError) as refused:
        revzoo.plan(net, x, 1)
    least = int(str(refused.value).split("(")[1].split(" bytes")[0])
    plan = revzoo.plan(net, x, least)
    assert plan.peak_bytes < 0.6 * plan.no_recompute_peak_bytes
    plan.apply(net)
    assert revzoo.measure_memory(net, x).peak_bytes == plan.peak_bytes == least
