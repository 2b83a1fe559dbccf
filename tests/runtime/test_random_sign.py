"""A momentum whose sign is drawn for each example and step: gradients of storing, and an ordinary network in evaluation."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from revzoo.errors import InputError, PartArgumentError
from revzoo.runtime import LiveBytes, ReversibleChain
from revzoo.runtime.coupling import momentum

D = 6
MOMENTA = [
    {"kept_bits": 1, "gain": 1.0},
    {"kept_bits": 1, "gain": 1.0, "residual": False},
    {"kept_bits": 3, "gain": 0.3, "residual": False, "fraction_bits": 10},
    {"kept_bits": 0, "gain": 0.5},
]


class SeesZeros(nn.Module):
    """Returns -0.0 at many places, and tells a state's 0.0 from -0.0."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        return self.layer(x) * (torch.rand_like(x) < 0.5) * -1e-3 + torch.atan2(x, torch.full_like(x, -1.0)).detach()


def make_chain(steps, dtype=torch.float32, **options):
    torch.manual_seed(0)
    fs = [SeesZeros() if i % 2 else nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Dropout(0.2)) for i in range(steps)]
    return ReversibleChain(fs, coupling=momentum(**options)).to(dtype)


def make_streams(dtype=torch.float32):
    streams = torch.linspace(-1, 1, 10 * D, dtype=dtype).view(2, 5, D)
    streams[:, 1], streams[:, 2, 0] = -0.0, 0.0
    return [x.clone().requires_grad_() for x in streams]


def run(chain, schedule, call=lambda chain, *streams: chain(*streams), autocast=False):
    """Return streams and gradients of a step, and the generator's state after it."""
    chain.schedule = schedule
    torch.manual_seed(1)
    streams = make_streams(next(chain.parameters()).dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y1, y2 = call(chain, *streams)
    gradients = torch.autograd.grad((y1.sin() * y2).sum(), [*streams, *chain.parameters()], materialize_grads=True)
    return [y1, y2, *gradients, torch.random.get_rng_state()]


def assert_same_bits(actual, expected):
    assert all(torch.equal(a, b) and torch.equal(a.signbit(), b.signbit()) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("options", MOMENTA)
@pytest.mark.parametrize(("steps", "dtype"), [(1, torch.float32), (7, torch.float64), (15, torch.float32)])
def test_gradients_are_those_of_storing_to_the_bit(steps, dtype, options):
    chain = make_chain(steps, dtype, sign="random", **options)
    stored = run(chain, "store")
    for schedule in ("invert", "recompute", "selective", (["invert", "store", "invert", "recompute"] * steps)[:steps]):
        assert_same_bits(run(chain, schedule), stored)
    assert_same_bits(run(chain, "invert", lambda *args: checkpoint(*args, use_reentrant=False)), stored)
    assert not torch.equal(stored[1], run(make_chain(steps, dtype, **options), "store")[1]) or steps == 1
    if dtype is torch.float32:
        assert_same_bits(run(chain, "invert", autocast=True), run(chain, "store", autocast=True))


def test_examples_have_signs_of_their_own_and_steps_too():
    """With f = 0, w[k+1] = s (w[k-1] - w[k]) / 2."""
    chain = ReversibleChain(
        [nn.Threshold(99.0, 0.0)] * 2, coupling=momentum(kept_bits=1, gain=1.0, residual=False, sign="random")
    )
    x1, x2 = torch.full((2, 64, 3), 0.25).mul(torch.tensor([2.0, 1.0]).view(2, 1, 1)).unbind()
    y1, y2 = chain(x1, x2)
    first, second = y1 * 8, y2 / (x2 - y1) * 2
    for sign in (first, second):
        assert torch.equal(sign.abs(), torch.ones(64, 3))
        assert torch.equal(sign, sign[:, :1].expand(64, 3))
        assert 16 < (sign[:, 0] > 0).sum() < 48
    assert 16 < (first == second)[:, 0].sum() < 48


@pytest.mark.parametrize("options", MOMENTA)
@pytest.mark.parametrize("schedule", ["store", "invert"])
def test_in_evaluation_it_is_the_ordinary_network_to_the_bit(schedule, options):
    chain = make_chain(7, sign="random", **options).eval()
    ordinary = make_chain(7, m=0.0, **{key: options[key] for key in ("gain", "residual") if key in options}).eval()
    assert_same_bits(run(chain, schedule), run(ordinary, "store"))


def add_calls(chain, *streams):
    return [a + b for a, b in zip(chain(*streams), chain(*streams), strict=True)]


@pytest.mark.parametrize("call", [add_calls, lambda chain, *streams: chain(*chain(*streams))])
def test_two_forwards_before_one_backward_keep_their_own_signs(call):
    chain = make_chain(5, sign="random", **MOMENTA[0])
    assert_same_bits(run(chain, "invert", call), run(chain, "store", call))


def test_a_step_keeps_its_bits_and_a_byte_for_each_example():
    kept = []
    for steps in (4, 12):
        fs = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(steps)]
        chain = ReversibleChain(fs, momentum(kept_bits=1, sign="random"))
        live = LiveBytes()
        known = live.watch(chain.parameters())
        with live:
            y = chain(*torch.randn(2, 8, 64).requires_grad_().unbind())
            kept.append(live.alive(without=known))
        del y
    assert kept[1] - kept[0] == 8 * (8 * 64 // 8 + 8)


def test_what_random_signs_refuse():
    with pytest.raises(PartArgumentError, match="sign: found 'random'; allowed: fixed, or kept_bits instead of m"):
        momentum(m=0.5, sign="random")
    chain = make_chain(2, sign="random", **MOMENTA[0])
    streams = [x.detach() for x in make_streams()]
    with pytest.raises(InputError, match="The inverse needs the bits that forward kept"):
        chain.inverse(*streams)
    with pytest.raises(InputError, match="Random signs have b = 0 in evaluation"):
        chain.eval().inverse(*streams)
    nested = [torch.nested.nested_tensor(list(x), layout=torch.jagged) for x in streams]
    with pytest.raises(
        InputError, match="a dense tensor. Received: states of NestedTensor with ragged examples. Use sign='fixed'"
    ):
        ReversibleChain([nn.Tanh()], momentum(kept_bits=1, sign="random"))(*nested)
