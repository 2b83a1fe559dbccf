"""Gradients equal plain autograd's: every mode, coupling and depth; and to the bit in exact arithmetic."""

from itertools import islice, product

import pytest
import torch
from torch import nn

from revzoo.errors import RecoveryError
from revzoo.registry import couplings
from revzoo.runtime import Coupling, ReversibleChain, SpaceToDepth
from revzoo.runtime.coupling import dual_residual, momentum

MODES = ("store", "selective", "recompute", "invert")


def plain(chain, x1, x2):
    """The recurrence written down once more, without the runtime."""
    for step, k in zip(chain.steps, chain.couplings, strict=True):
        x1, x2 = x2, k.a * x2 + k.b * x1 + k.c * step(x2)
    return x1, x2


def test_every_coupling_is_covered():
    assert list(couplings) == ["additive", "dual_residual", "leapfrog", "midpoint", "momentum", "none"]


# Every schedule of up to three steps, some of four and five: strides are odd, so that each step takes each mode.
STRIDES = {1: 1, 2: 1, 3: 1, 4: 11, 5: 61}


@pytest.mark.parametrize("coupling", [name for name in couplings if name != "none"])  # which has no inverse
@pytest.mark.parametrize(("depth", "stride"), [*STRIDES.items()])
def test_mixes_of_modes_equal_plain_autograd(coupling, depth, stride, chain_of, streams, gradients, error):
    chain = chain_of(depth, coupling)
    y1, y2 = plain(chain, *streams)
    torch.testing.assert_close(chain(*streams), (y1, y2), rtol=1e-12, atol=1e-12)
    loss = (y1.sin() * torch.linspace(0, 1, y1.numel(), dtype=y1.dtype).view_as(y1)).sum() + (y2 * y2).sum()
    expected = list(torch.autograd.grad(loss, [*streams, *chain.parameters()]))
    schedules = list(islice(product(MODES, repeat=depth), 0, None, stride))
    assert all(set(modes) == set(MODES) for modes in zip(*schedules, strict=True))
    for schedule in schedules:
        assert error(gradients(chain, streams, schedule), expected) < 1e-10, schedule


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("m", [0.0, 0.1, 0.9])
def test_momentum_is_momentumnets(m, residual, chain_of, streams):
    """`momentumnet/momentum_net.py`, with its velocity and its `is_residual`; streams are the states before and after."""
    chain = chain_of(4, momentum(m=m, residual=residual))
    x1, x2 = streams
    v, x = x2 - x1, x2
    for step in chain.steps:
        f = step(x) if residual else step(x) - x
        v = m * v + f * (1 - m)
        x = x + v
    chain.schedule = "store"
    torch.testing.assert_close(chain(*streams), (x - v, x), rtol=1e-12, atol=1e-12)


def test_momentum_with_a_residual_of_its_own_and_gain_1_adds_the_velocity_alone():
    """w+ = f(w) + m (w - w-), which is what conversion makes of networks whose layers contain their residual."""
    for m in (0.1, 0.7, 0.9):
        assert (momentum(m=m, gain=1.0, residual=False).a, momentum(m=m, gain=1.0).a) == (m, 1.0 + m)
    assert momentum(kept_bits=3, gain=1.0, residual=False) == Coupling(0.125, -0.125, 1.0, 3)


def test_couplings_may_differ_from_step_to_step(chain_of, streams, gradients, error):
    chain = chain_of(3, [Coupling(0, 1, 1), Coupling(0.5, -2, 0.25), Coupling(1, 0.5, 1)])
    expected = gradients(chain, streams, "store")
    assert error(gradients(chain, streams, "invert"), expected) < 1e-10


@pytest.mark.parametrize("coupling", ["additive", "leapfrog"])
def test_exact_gradients_are_bit_identical_at_depth_100(coupling, chain_of, gradients):
    chain = chain_of(100, coupling, exact=True, dtype=torch.float32)
    x1, x2 = torch.randn(2, 3, 6).unbind()
    if coupling == "leapfrog":  # a second-order network keeps its speed: from rest and pushed little, it stays on the grid
        x2 = x1.clone()
        for step in chain.steps:
            nn.init.normal_(step[3].weight, std=0.003)
            nn.init.zeros_(step[3].bias)
    streams = [x.requires_grad_() for x in (x1, x2)]
    expected = gradients(chain, streams, "store")
    for schedule in ("invert", ["invert", "store", "selective", "recompute", "invert"] * 20):
        grads = gradients(chain, streams, schedule)
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True)), schedule


@pytest.mark.parametrize("coupling", ["additive", "leapfrog"])
def test_exact_holds_every_state_below_256_and_refuses_others(coupling, chain_of, gradients):
    chain = chain_of(3, coupling, exact=True, dtype=torch.float32)
    streams = [torch.full((1, 6), 250.0 - 2**-16).requires_grad_() for _ in range(2)]  # all 24 bits are in use
    expected = gradients(chain, streams, "store")
    assert all(torch.equal(a, b) for a, b in zip(gradients(chain, streams, "invert"), expected, strict=True))
    with pytest.raises(RecoveryError, match=r"states below 256 in magnitude. Received: 2\d\d"):
        chain(*(x + 8 for x in streams))


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("bits", [0, 3, 8, 9, 15])
def test_kept_bits_make_gradients_bit_identical(bits, residual, chain_of, gradients):
    chain = chain_of(24, momentum(kept_bits=bits, gain=0.01 if residual else 1.0, residual=residual), dtype=torch.float32)
    x = torch.randn(3, 6)
    streams = [x.requires_grad_(), (x + 0.01 * torch.randn(3, 6)).detach().requires_grad_()]
    expected = gradients(chain, streams, "store")
    for schedule in ("selective", "recompute", "invert", ["invert", "store", "selective", "recompute", "invert", "invert"] * 4):
        grads = gradients(chain, streams, schedule)
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True)), schedule


@pytest.mark.parametrize("depth", [12, 96])
def test_a_faithful_start_is_rebuilt_bit_for_bit_at_any_depth(depth, chain_of, gradients):
    chain = chain_of(depth, dual_residual(alpha=0.0, kept_bits=8), dtype=torch.float32)
    streams = [torch.randn(3, 6).requires_grad_() for _ in range(2)]
    expected = gradients(chain, streams, "store")
    assert all(torch.equal(a, b) for a, b in zip(gradients(chain, streams, "invert"), expected, strict=True))


def test_gradients_of_kept_bits_are_those_of_the_recurrence(chain_of, error, gradients):
    """The grid is fine in float64: straight through its rounding, gradients are those without it."""
    chain = chain_of(5, momentum(m=0.25, gain=1.0))
    streams = [torch.randn(3, 6, dtype=torch.float64).requires_grad_() for _ in range(2)]
    expected = gradients(chain, streams, "store")
    chain.couplings = (momentum(kept_bits=2, gain=1.0),) * 5
    assert error(gradients(chain, streams, "invert"), expected) < 1e-7


@pytest.mark.parametrize(
    ("coupling", "dtype", "most"), [("dual_residual", torch.float32, 5), ("dual_residual", torch.float64, 14)]
)
def test_inverting_so_far_that_only_rounding_is_left_is_refused(coupling, dtype, most, chain_of, error, gradients):
    chain = chain_of(most + 2, coupling, dtype=dtype)
    streams = [x.requires_grad_() for x in torch.randn(2, 3, 6, dtype=dtype).unbind()]
    computed: list[str] = []
    handle = chain.steps[0].register_forward_pre_hook(lambda *_: computed.append("steps.0"))
    with pytest.raises(RecoveryError, match=rf"Inverting steps\.{most} and the steps before it multiplies rounding errors by"):
        chain(*streams)
    assert not computed
    handle.remove()
    expected = gradients(chain, streams, "store")
    assert error(gradients(chain, streams, ["invert", "recompute"] + ["invert"] * most), expected) < 0.05


def test_without_exact_float32_is_not_bit_identical(chain_of, gradients):
    chain = chain_of(100, dtype=torch.float32)
    streams = [x.requires_grad_() for x in torch.randn(2, 3, 6).unbind()]
    expected = gradients(chain, streams, "store")
    assert not all(torch.equal(a, b) for a, b in zip(gradients(chain, streams, "invert"), expected, strict=True))


def test_exact_inverse_returns_the_rounded_input(chain_of):
    chain = chain_of(8, exact=True, dtype=torch.float32)
    x1, x2 = torch.randn(2, 3, 6)
    inputs = chain.inverse(*(y.detach() for y in chain(x1, x2)))
    for w, x in zip(inputs, (x1, x2), strict=True):
        assert torch.equal(w, torch.round(x * 2**16) / 2**16)


def test_streams_may_differ_in_width(gradients, error):
    chain = ReversibleChain([nn.Linear(5, 3), nn.Linear(3, 5), nn.Linear(5, 3)]).double()
    inputs = torch.randn(4, 3).double().requires_grad_(), torch.randn(4, 5).double().requires_grad_()
    expected = gradients(chain, inputs, "store")
    assert error(gradients(chain, inputs, "invert"), expected) < 1e-12


@pytest.mark.parametrize("schedule", list(product(MODES, repeat=3))[::5])
def test_bijections_stand_between_steps(schedule, gradients, error):
    def unit(width):
        return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.Tanh())

    chain = ReversibleChain([SpaceToDepth(), unit(8), SpaceToDepth(), unit(32), unit(32), SpaceToDepth()]).double()
    inputs = [x.requires_grad_() for x in torch.randn(2, 2, 2, 8, 8).double().unbind()]
    expected = gradients(chain, inputs, "store")
    assert error(gradients(chain, inputs, schedule), expected) < 1e-12


class Masked(nn.Module):
    """A step with a side input: what it sees is scaled by a mask and shifted by a learned bias from outside."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, w, side):
        return self.linear(w * side["mask"]).tanh() * side["bias"]


@pytest.mark.parametrize("mode", ["invert", "recompute", "selective"])
def test_side_inputs_reach_every_step_and_get_gradients(mode, streams, error):
    chain = ReversibleChain([Masked() for _ in range(4)]).double()
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    side = {"mask": torch.tensor([1.0, 0, 1, 1, 0, 1]).double(), "bias": bias * 2}

    def run(schedule):
        chain.schedule = schedule
        y1, y2 = chain(*streams, side=side)
        return list(torch.autograd.grad((y1 * y2).sum(), [*streams, bias, *chain.parameters()], retain_graph=True))

    assert error(run(mode), run("store")) < 1e-12


def test_the_same_step_may_stand_in_every_place(streams, gradients, error):
    step = nn.Linear(6, 6)
    chain = ReversibleChain([step] * 4).double()
    expected = gradients(chain, streams, "store")
    assert error(gradients(chain, streams, "invert"), expected) < 1e-12
