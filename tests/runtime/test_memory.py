"""Bytes alive and FLOPs, exactly: the figures that the runtime is for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from revzoo.analysis.flops import FlopCounter
from revzoo.runtime import LiveBytes, ReversibleChain
from revzoo.runtime.chain import run_chain


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        B, N, D = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(B, N, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, D))


def transformer(depth: int) -> list[nn.Module]:
    def mlp():
        return nn.Sequential(nn.LayerNorm(192), nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192))

    return [step for _ in range(depth) for step in (Attention(192, 3), mlp())]


def convolution(depth: int) -> list[nn.Module]:
    def unit():
        half = (nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1, bias=False))
        return nn.Sequential(*half, nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1, bias=False))

    return [unit() for _ in range(2 * depth)]


def measure(steps: list[nn.Module], shape: tuple[int, ...], schedule: object) -> tuple[int, int]:
    """Return the activation bytes (at the peak, after forward) of one forward and backward."""
    chain = ReversibleChain(steps)
    chain.schedule = schedule
    x1, x2, v1, v2 = torch.randn(4, *shape).unbind()
    streams = [x.clone().requires_grad_() for x in (x1, x2)]
    weights = [v1.clone(), v2.clone()]
    with LiveBytes() as live:
        known = live.watch([*chain.parameters(), *chain.buffers(), *streams, *weights])
        y1, y2 = chain(*streams)
        loss = (y1 * weights[0]).sum() + (y2 * weights[1]).sum()  # linear: saves nothing of y
        del y1, y2
        after_forward = live.alive(without=known)
        loss.backward()
        known |= live.watch([p.grad for p in chain.parameters()])
    return live.peak(without=known), after_forward


def flops(steps: list[nn.Module], shape: tuple[int, ...], schedule: object) -> int:
    chain = ReversibleChain(steps)
    chain.schedule = schedule
    x1, x2 = torch.randn(2, *shape, requires_grad=True).unbind()
    with FlopCounter() as counter:
        y1, y2 = chain(x1, x2)
        (y1.sum() + y2.sum()).backward()
    return counter.forward + counter.backward


# The streams of the published comparison, with a smaller batch: (batch, tokens, width) and (batch, channels, H, W).
V, R = (2, 197, 192), (4, 32, 32, 32)
V_UNIT, R_UNIT = 4 * 2 * 197 * 192, 4 * 4 * 32 * 32 * 32


def test_the_transformer_chain_meets_its_bound_at_every_depth():
    figures = {depth: measure(transformer(depth), V, "invert") for depth in (2, 5)}
    assert len(set(figures.values())) == 1
    peak, after_forward = figures[2]
    # Pair of states 2, pair of gradients 2, and what the MLP holds by itself: 13 for its own forward and backward.
    # And the mean and deviation of its LayerNorm, a float each per token, and the loss and its gradient, scalars.
    assert peak == 17 * V_UNIT + 2 * 4 * 2 * 197 + 2 * 4
    assert after_forward == 2 * V_UNIT + 4


def test_the_convolution_chain_meets_its_bound_at_every_depth():
    figures = {depth: measure(convolution(depth), R, "invert") for depth in (2, 5)}
    assert len(set(figures.values())) == 1
    peak, after_forward = figures[2]
    # States 2, gradients 2, the unit by itself 5. And for each of two BatchNorms, mean and deviation of the batch,
    # clones of the running ones (the recovery must not move them) and of the counter; and the loss and its gradient.
    assert peak == 9 * R_UNIT + 2 * (4 * 32 * 4 + 8) + 2 * 4
    assert after_forward == 2 * R_UNIT + 4


def test_what_a_block_adds_in_every_mode():
    def slope(steps, shape, mode):
        return measure(steps(3), shape, mode)[1] - measure(steps(2), shape, mode)[1]

    assert slope(transformer, V, "invert") == slope(convolution, R, "invert") == 0
    assert slope(transformer, V, "recompute") == 2 * V_UNIT
    assert slope(convolution, R, "recompute") == 2 * R_UNIT
    assert slope(convolution, R, "store") == 8 * R_UNIT + 4 * 2 * 32 * 4  # statistics: 4 BatchNorms, 2 each


def test_stored_steps_after_inverted_ones_are_gone_when_those_are_rebuilt():
    peak, _ = measure(convolution(3), R, ["invert"] * 4 + ["store"] * 2)
    stored, _ = measure(convolution(3), R, "store")
    inverted, _ = measure(convolution(3), R, "invert")
    assert inverted < peak < stored


@pytest.mark.parametrize(("mode", "most"), [("invert", 1.3255), ("recompute", 1.2097)])
def test_transformer_flops_are_one_extra_forward_and_no_more(mode, most):
    stored = flops(transformer(6), V, "store")
    assert 1.2 < flops(transformer(6), V, mode) / stored <= most


def test_convolution_flops_are_one_extra_forward_less_the_last_layer_of_the_first_step():
    forward = 2 * 2 * 9 * 32 * 32 * 32 * 32 * 4  # one unit: two convolutions, 2 FLOPs a multiply-add, batch 4
    stored = flops(convolution(3), R, "store")
    assert stored == 3 * 6 * forward
    # The first step needs no state before it, so its recovery ends at the last saved tensor, as `recompute` does.
    assert flops(convolution(3), R, "invert") == stored + 6 * forward - forward // 2
    assert flops(convolution(3), R, "recompute") == stored + 6 * forward // 2


def test_fake_tensors_count_the_same_bytes():
    from torch._subclasses import FakeTensorMode

    real = measure(convolution(2), R, "invert")
    with FakeTensorMode():
        assert measure(convolution(2), R, "invert") == real


def test_a_chain_without_steps_copies_nothing():
    """Halves of the channels have gaps in memory. Only a step that will be given a rebuilt half needs one without."""
    x = torch.randn(4, 16, 8, 8, requires_grad=True) * 1
    halves = x.chunk(2, dim=1)
    with LiveBytes() as live:
        known = live.watch(x)
        y1, y2 = run_chain([], *halves)
        assert live.watch((y1, y2)) == known
        assert live.alive() == x.nbytes
    assert y1 is halves[0]
    assert y2 is halves[1]
