"""Look-ahead on a GPU: races provoked by delaying either stream, the bits of serial backward, no wait of the host, memory."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import revzoo
from revzoo.registry import couplings
from revzoo.runtime import LiveBytes, ReversibleChain, lookahead

DEVICE = "cuda"
CYCLES = 20_000_000  # some 10 ms
SCHEDULES = {
    "invert": ["invert"],
    "recompute": ["recompute"],
    "selective": ["selective"],
    "mixed": ["invert", "recompute", "selective", "invert", "store", "invert", "invert"],
}


class Delayed(torch.autograd.Function):
    """The identity, whose backward holds up the stream that it runs on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cycles: int) -> Tensor:
        ctx.cycles = cycles
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        torch.cuda._sleep(ctx.cycles)
        return grads[0].clone(), None


class Step(nn.Module):
    """A step whose recovery, or whose gradient, takes longer than everything else."""

    def __init__(self, recovery_cycles: int = 0, gradient_cycles: int = 0):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.statistics = nn.BatchNorm1d(64)
        self.recovery_cycles, self.gradient_cycles, self.calls = recovery_cycles, gradient_cycles, 0

    def forward(self, w: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2 == 0:
            torch.cuda._sleep(self.recovery_cycles)
        hidden = torch.dropout(torch.nn.functional.gelu(self.first(self.norm(w))), 0.2, train=True)
        return Delayed.apply(self.statistics(self.second(hidden)), self.gradient_cycles)


def backward(chain: nn.Module, *inputs: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    chain.zero_grad()
    out = chain(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    sum(y.sin().sum() for y in outs).backward()
    grads = [x.grad for x in (*inputs, *chain.parameters()) if x.grad is not None]
    return [*grads, *(b.clone() for b in chain.buffers()), torch.rand(2, device=DEVICE)]


def assert_same(chain: nn.Module, *inputs: Tensor, repeats: int = 3) -> None:
    state = copy.deepcopy(chain.state_dict())
    chain.lookahead = 0
    expected = backward(chain, *inputs)
    chain.lookahead = 1
    for _ in range(repeats):
        chain.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(backward(chain, *inputs), expected, strict=True))


@pytest.mark.parametrize("slow", ["recovery", "gradient", "both in turn", "nothing"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kept_bits", [None, 3])
@pytest.mark.parametrize("count", [2, 7])
def test_delays_of_either_stream_change_no_bit(slow, schedule, kept_bits, count):
    def cycles(i: int, kind: str) -> int:
        return CYCLES if slow == kind or (slow == "both in turn" and (i % 2 == 0) == (kind == "recovery")) else 0

    steps = [Step(cycles(i, "recovery"), cycles(i, "gradient")) for i in range(count)]
    coupling = "additive" if kept_bits is None else couplings["momentum"](kept_bits=kept_bits)
    chain = ReversibleChain(steps, coupling).to(DEVICE)
    chain.schedule = (SCHEDULES[schedule] * count)[:count]
    assert_same(chain, *torch.randn(2, 32, 64, device=DEVICE))


@pytest.mark.parametrize("name", ["rev_swin_digits", "revnet_digits"])
def test_models_of_the_zoo(name):
    model = revzoo.create(name, device=DEVICE)
    model.schedule = ["recompute" if entry.kind == "node" else "invert" for entry in model.layout() if entry.is_unit]
    assert_same(model, model.example_input(4))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_host_waits_for_nothing(schedule, forbid_waiting):
    chain = ReversibleChain([Step() for _ in range(7)]).to(DEVICE)
    chain.schedule = (SCHEDULES[schedule] * 7)[:7]
    chain.lookahead = 1
    x = torch.randn(2, 32, 64, device=DEVICE)
    backward(chain, *x)
    y = chain(*x)
    loss = (y[0] * y[1]).sum()
    with forbid_waiting():
        loss.backward()


@pytest.mark.values
def test_the_recovery_runs_beside_the_gradient():
    """With both held up by the same time, serial backward takes twice as long."""

    def seconds(depth: int) -> float:
        chain.lookahead = depth
        for _ in range(2):
            y = chain(*x)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            (y[0] * y[1]).sum().backward()
            end.record()
            torch.cuda.synchronize()
        return start.elapsed_time(end)

    chain = ReversibleChain([Step(CYCLES, CYCLES) for _ in range(8)]).to(DEVICE)
    x = torch.randn(2, 32, 64, device=DEVICE)
    assert seconds(1) < 0.7 * seconds(0)


def test_it_steps_aside_where_backward_runs_under_autocast():
    chain = ReversibleChain([Step() for _ in range(4)], lookahead=1).to(DEVICE)
    lookahead._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="lookahead steps aside.*autocast"), torch.autocast("cuda", torch.bfloat16):
        backward(chain, *torch.randn(2, 32, 64, device=DEVICE))
    lookahead._warn_once.cache_clear()


def test_bytes_are_counted_in_one_stream():
    chain = ReversibleChain([Step() for _ in range(4)]).to(DEVICE)
    chain.lookahead = 1
    with LiveBytes():
        counted = backward(chain, *torch.randn(2, 32, 64, device=DEVICE))
    assert all(x.isfinite().all() for x in counted)
