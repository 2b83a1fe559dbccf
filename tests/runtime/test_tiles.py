"""Steps cut into tiles: gradients of the stored run, the memory of one tile, and what cannot be cut."""

import copy
import pickle
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from revzoo.analysis.flops import FlopCounter
from revzoo.analysis.numerics import measure_numerics
from revzoo.analysis.verify import verify
from revzoo.errors import InputError, ScheduleError
from revzoo.runtime import Coupling, LiveBytes, ReversibleChain, set_tripwire, tiled
from revzoo.runtime.coupling import momentum
from revzoo.runtime.tiles import find_tiles

B, N, D = 3, 5, 6
COUPLINGS = {
    "additive": "additive",
    "leapfrog": "leapfrog",
    "midpoint": "midpoint",
    "kept bits": momentum(kept_bits=8, gain=1.0),
    "random sign": momentum(kept_bits=1, gain=1.0, sign="random"),
}


@pytest.fixture(autouse=True)
def _compare_every_backward():
    with set_tripwire("always"):
        yield


def mlp(dropout=0.0, width=D):
    drop = nn.Identity() if dropout is None else nn.Dropout(dropout)
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), drop, nn.Linear(4 * width, width))


def make_chain(depth=3, tiles=2, dim=1, make=mlp, coupling="additive", dtype=torch.float64, **options):
    torch.manual_seed(0)
    return ReversibleChain([tiled(make(), tiles, dim) for _ in range(depth)], coupling, **options).to(dtype)


def make_streams(*shape, dtype=torch.float64):
    return [x.requires_grad_() for x in torch.randn(2, *(shape or (B, N, D)), dtype=dtype).unbind()]


def run(chain, streams, schedule, call=lambda chain, *streams, **side: chain(*streams, **side), **side):
    """Return outputs and gradients."""
    chain.schedule = schedule
    torch.manual_seed(1)
    y1, y2 = call(chain, *streams, **side)
    wanted = [x for x in (*streams, *chain.parameters()) if x.requires_grad]
    loss = (y1.sin() * torch.linspace(0, 1, y1.numel(), dtype=y1.dtype).view_as(y1)).sum() + (y2 * y2).sum()
    return [y1, y2, *torch.autograd.grad(loss, wanted, materialize_grads=True)]


def assert_equal(actual, expected, dtype=torch.float64):
    tolerance = 1e-10 if dtype is torch.float64 else 0.0
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b) or (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_gradients_are_those_of_storing(coupling, depth):
    """And those of storing whole steps; states on a grid to the bit."""
    options, streams = {"coupling": COUPLINGS[coupling]}, make_streams()
    whole = run(make_chain(depth, 1, **options), streams, "store")
    for tiles, dim, dropout in [(2, 1, 0.0), (3, -2, 0.3), (9, 1, 0.3), (2, 0, 0.3), (3, 0, 0.0)][depth % 2 :: 2]:
        chain = make_chain(depth, tiles, dim, lambda rate=dropout: mlp(rate), **options)
        stored = run(chain, streams, "store")
        if not dropout and not chain.couplings[0].is_exact:
            assert_equal(stored, whole)
        for schedule in ("invert", "recompute", "selective", ["invert", "store", "invert", "recompute", "invert"][:depth]):
            found = run(chain, streams, schedule)
            assert_equal(found, stored, torch.float32 if chain.couplings[0].is_exact else torch.float64)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("autocast", [False, True])
def test_exact_arithmetic_is_bit_identical(dim, autocast):
    chain, streams = make_chain(5, 2, dim, dtype=torch.float32, exact=True), make_streams(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        stored = run(chain, streams, "store")
        for schedule in ("invert", "recompute", ["invert", "invert", "store", "selective", "invert"]):
            assert_equal(run(chain, streams, schedule), stored, torch.float32)


def test_channels_last_images_are_cut_along_examples_and_keep_their_strides():
    convolution = lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())  # noqa: E731
    chain = make_chain(3, 2, 0, convolution, dtype=torch.float32, exact=True)
    streams = make_streams(5, 4, 6, 7, dtype=torch.float32)
    streams = [x.detach().to(memory_format=torch.channels_last).requires_grad_() for x in streams]
    stored, found = run(chain, streams, "store"), run(chain, streams, "invert")
    assert_equal(found, stored, torch.float32)
    assert found[0].stride() == streams[0].stride()


class Masked(nn.Module):
    """Attention with a mask and a scale for each example."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, w, side):
        q, k, v = self.qkv(w)[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, side["mask"])[:, 0] * side["scales"][0]


def test_side_inputs_are_cut_along_examples():
    chain, scale = make_chain(3, 2, 0, Masked), torch.randn(B, 1, 1, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(B, 1, N, N) < 0.5
    side = {"mask": mask | torch.eye(N, dtype=torch.bool), "scales": (scale, torch.ones(()))}

    def differentiate(schedule, tiles):
        chain.tiles, chain.schedule = tiles, schedule
        y1, y2 = chain(*streams, side=side)
        return torch.autograd.grad((y1 * y2).sum(), [*streams, scale, *chain.parameters()])

    streams = make_streams()
    assert_equal(differentiate("invert", 2), differentiate("store", 1))


@pytest.mark.parametrize("shape", [(1, 1, D), (1, 7, D), (7, 1, D), (0, N, D), (B, 0, D)])
@pytest.mark.parametrize("dim", [0, 1])
def test_there_are_no_more_tiles_than_places(shape, dim):
    chain, streams, lengths = make_chain(2, 4, dim), make_streams(*shape), []
    run(chain, streams, "store")
    chain.steps[0].register_forward_hook(lambda step, args, out: lengths.append(out.shape[dim]))
    run(chain, streams, "store")  # with the hook, it is tried again
    lengths.clear()
    assert_equal(run(chain, streams, "store"), run(make_chain(2, 1), streams, "store"))
    assert lengths == {0: [0], 1: [1], 3: [1, 1, 1], 7: [2, 2, 2, 1]}.get(shape[dim], [2, 2, 1])
    assert_equal(run(chain, streams, "invert"), run(chain, streams, "store"))


@pytest.mark.parametrize("make", [nn.Identity, lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True))])
def test_nothing_that_a_user_holds_changes(make):
    for depth in range(1, 6):
        chain, streams = make_chain(depth, make=make), make_streams()
        outputs = chain(*streams)
        held = [*streams, *outputs]
        before = [x.detach().clone() for x in held]
        sum(y.sin().sum() for y in outputs).backward()
        assert all(map(torch.equal, held, before))


def test_a_graph_is_differentiated_again_from_any_step():
    chain, streams = make_chain(4), make_streams()
    wanted = [*streams, *chain.parameters()]
    y1, y2 = chain(*streams)
    loss = (y1.sin() * y2).sum()
    del y1, y2
    late = torch.autograd.grad(loss, list(chain.steps[2].parameters()), retain_graph=True)
    first, second = (torch.autograd.grad(loss, wanted, retain_graph=again) for again in (True, False))
    assert_equal(second, first)
    assert_equal(late, first[2 + 2 * len(late) : 2 + 3 * len(late)])


@pytest.mark.parametrize("schedule", ["store", "recompute", "invert"])
def test_second_derivatives_are_those_of_whole_steps(schedule):
    streams, found = make_streams(), []
    for tiles in (1, 2):
        chain = make_chain(2, tiles)
        chain.schedule = schedule
        y1, y2 = chain(*streams)
        (dx,) = torch.autograd.grad((y1.sin() * y2).sum(), streams[0], create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), chain.parameters(), materialize_grads=True))
    assert_equal(*found)


def test_hooks_of_parameters_fire_once():
    chain, fired = make_chain(3, 3), Counter()
    for name, p in chain.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name]))
    for _ in range(2):
        y1, y2 = chain(*make_streams())
        (y1 * y2).sum().backward()
    assert fired == {name: 2 for name, _ in chain.named_parameters()}


def test_frozen_parameters_and_streams_without_gradients():
    for frozen in ([], [0], [1], [0, 1, 2]):
        chain = make_chain(3)
        for i in frozen:
            chain.steps[i].requires_grad_(False)
        x1, x2 = make_streams()
        for streams in ([x1, x2], [x1.detach(), x2], [x1, x2.detach()], [x1.detach(), x2.detach()]):
            if len(frozen) < 3 or any(x.requires_grad for x in streams):
                assert_equal(run(chain, streams, "invert"), run(chain, streams, "store"))


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_checkpoint_dropout_is_the_same_in_both_runs(reentrant):
    """A reentrant checkpoint runs the chain first without gradients."""
    streams, make = make_streams(), lambda: mlp(0.3)
    results = []
    for call in (lambda chain, *x: chain(*x), lambda chain, *x: checkpoint(chain, *x, use_reentrant=reentrant)):
        chain = make_chain(3, make=make)
        torch.manual_seed(1)
        y1, y2 = call(chain, *streams)
        (y1.sin() * y2).sum().backward()
        results.append([*(x.grad for x in streams), *(p.grad for p in chain.parameters())])
        for x in streams:
            x.grad = None
    assert_equal(results[1], results[0])


@pytest.mark.filterwarnings("ignore:lookahead steps aside")
def test_lookahead_recovers_the_tile_before():
    for dropout in (0.0, 0.3):
        chain, streams = make_chain(4, 3, make=lambda rate=dropout: mlp(rate), lookahead=1), make_streams()
        stored = run(chain, streams, "store")
        assert_equal(run(chain, streams, "invert"), stored)
        with LiveBytes():  # at once, in the thread of backward
            assert_equal(run(chain, streams, "invert"), stored)


def test_marks_are_copied_and_leave_no_keys():
    chain, streams = make_chain(2, 3), make_streams()
    assert list(chain.state_dict()) == list(make_chain(2, 1).state_dict())
    for other in (copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))):
        assert other.tiles == [3, 3]
        assert_equal(run(other, streams, "invert"), run(chain, streams, "store"))
        other.tiles = [1, 3]
        assert (other.tiles, chain.tiles) == ([1, 3], [3, 3])
        other.tiles = 2
        assert [find_tiles(step).dim for step in other.steps] == [find_tiles(step).dim for step in chain.steps]
    with pytest.raises(InputError, match=r"tiles is an integer from 1\. Received: 0"):
        chain.tiles = [4, 0]
    with pytest.raises(InputError, match=r"tiles is an integer from 1\. Received: 'auto'"):
        chain.tiles = "auto"
    assert chain.tiles == [3, 3]


def test_in_evaluation_without_gradients_steps_run_whole():
    chain, shapes = make_chain(2, 3).eval(), []
    chain.steps[1].register_forward_hook(lambda step, args, out: shapes.append(out.shape))
    with torch.no_grad():
        outputs = chain(*make_streams())
    chain.inverse(*outputs)
    assert shapes == [(B, N, D)] * 2


WIDTH, TOKENS = 8, (8, 64)
UNIT = 4 * 8 * 64 * WIDTH


def measure(depth, tiles):
    """Return the bytes at the peak and after forward, and the FLOPs, of MLPs cut along tokens."""
    torch.manual_seed(0)
    mlps = [tiled(mlp(None, WIDTH), tiles) for _ in range(depth)]
    chain = ReversibleChain([nn.Linear(WIDTH, WIDTH), *mlps])
    x1, x2, v1, v2 = (torch.randn(*TOKENS, WIDTH, requires_grad=i < 2) for i in range(4))
    chain(x1, x2)  # it is tested
    with LiveBytes() as live, FlopCounter() as flops:
        known = live.watch([*chain.parameters(), x1, x2, v1, v2])
        y1, y2 = chain(x1, x2)
        loss = (y1 * v1).sum() + (y2 * v2).sum()
        del y1, y2
        after_forward = live.alive(without=known)
        loss.backward()
        known |= live.watch([p.grad for p in chain.parameters()])
    return live.peak(without=known), after_forward, flops.forward + flops.backward


def test_the_peak_is_that_of_a_tile_at_every_depth_and_at_the_same_flops():
    weights = 4 * sum(p.numel() for p in mlp(None, WIDTH).parameters())
    flops = {depth: measure(depth, 1)[2] for depth in (2, 4)}
    for tiles in (1, 2, 4):
        # States 2, gradients 2, and in the MLP 13 and the mean and deviation of each token. A tile's gradient is copied, since
        # it has gaps in memory, and gradients of parameters are summed: those of the tiles so far, and one of this tile.
        inside = (13 + 2 / WIDTH) * UNIT
        sums = 0 if tiles == 1 else UNIT / tiles + weights + 4 * WIDTH * 4 * WIDTH
        for depth in flops:
            assert measure(depth, tiles) == (4 * UNIT + inside / tiles + sums + 8, 2 * UNIT + 4, flops[depth])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, w):
        q, k, v = self.qkv(w)[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v)[:, 0]


class Positions(nn.Module):
    """Adds learned positions of tokens, to as many as there are."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(N, D))

    def forward(self, w):
        return w + self.positions[: w.shape[1]]


class Experts(nn.Module):
    """Gives each expert room for a share of the tokens that it gets."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(D, 2), nn.Linear(D, 2 * D)

    def forward(self, w):
        tokens = w.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        one_hot = F.one_hot(chosen, 2)
        has_room = ((one_hot.cumsum(0) - 1) * one_hot).sum(-1) < len(tokens) // 4
        out = self.experts(tokens).unflatten(-1, (2, D))[torch.arange(len(tokens)), chosen]
        return (out * (weights * has_room)[:, None]).view_as(w)


class LeavesLoss(nn.Linear):
    def forward(self, w):
        out = super().forward(w)
        self.loss = out.square().mean()
        return out


class CountsCalls(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, w):
        self.calls += 1
        return super().forward(w)


class DropPath(nn.Identity):
    drop_prob = 0.5


class ZeroAttention(Attention):
    """As gates, adapters and output projections begin."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(D, D)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, w):
        return w.tanh() + self.out(super().forward(w))


class Far(nn.Conv1d):
    """Reaches 128 places to both sides, as WaveNet does."""

    def __init__(self):
        super().__init__(D, D, 3, padding=128, dilation=128)

    def forward(self, w):
        return super().forward(w.transpose(1, 2)).transpose(1, 2)


class FromFiveOn(nn.Linear):
    def forward(self, w):
        return super().forward(w) - (w.mean(0) if len(w) > 4 else 0)


class Rolled(nn.Linear):
    def forward(self, w):
        return super().forward(w.roll(128, 1))


IMAGES = (2, 4, 16, 4)


@pytest.mark.parametrize(
    ("make", "shape", "tiles", "dim", "culprit"),
    [
        (lambda: nn.Sequential(nn.BatchNorm2d(4)), IMAGES, 2, 0, "0, a BatchNorm2d, mixes them in its statistics"),
        (lambda: nn.InstanceNorm2d(4, track_running_stats=True), IMAGES, 2, 0, "f, a InstanceNorm2d, mixes them"),
        (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)), IMAGES, 2, 2, "others, as 0, a Conv2d, is the first"),
        (lambda: nn.Conv2d(4, 4, 3, padding=4, dilation=4), IMAGES, 8, 2, "others, as f, a Conv2d, is the first"),
        (lambda: nn.GroupNorm(2, 4), IMAGES, 2, 2, "others, as f, a GroupNorm, is the first"),
        (Attention, (B, N, D), 2, 1, "others, as its own code is the first"),
        (Positions, (B, N, D), 2, 1, "others, as f, a Positions, is the first"),
        (ZeroAttention, (B, N, D), 2, 1, "others, as out, a Linear, is the first"),
        (Far, (B, 320, D), 8, 1, "others, as f, a Far, is the first"),
        (lambda: Rolled(D, D), (B, 320, D), 8, 1, "others, as f, a Rolled, is the first"),
        (lambda: FromFiveOn(D, D), (9, N, D), 9, 0, "others, as f, a FromFiveOn, is the first"),
        (Experts, (8, 8, D), 2, 0, "others, as its own code is the first"),
        (lambda: LeavesLoss(D, D), (B, N, D), 2, 1, "f leaves 'loss' on f, a LeavesLoss,"),
        (lambda: CountsCalls(D, D), (B, N, D), 2, 1, "f changes its 'calls' in every run"),
        (lambda: nn.Sequential(nn.Linear(D, D), DropPath()), (B, N, D), 2, 1, "1, a DropPath, drops whole examples"),
        (lambda: nn.Linear(D, D), (B, N, D), 2, 2, "others, as f, a Linear, is the first"),
    ],
)
@pytest.mark.parametrize("schedule", ["store", "invert"])
def test_what_mixes_the_places_is_refused_by_name(make, shape, tiles, dim, culprit, schedule):
    chain = make_chain(2, tiles, dim, make)
    with pytest.raises(InputError, match=rf"steps\.0 cannot be cut into tiles along dimension {dim} .* {culprit}"):
        run(chain, make_streams(*shape), schedule)
    assert all(module.training for module in chain.modules())
    chain.tiles = 1
    run(chain, make_streams(*shape), "store")


class Gated(nn.Linear):
    """Mixes examples behind a gate that is closed."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("gate", torch.zeros((), dtype=torch.bool))

    def forward(self, w):
        return torch.where(self.gate, w.sign().mean(0), super().forward(w))


def test_a_closed_gate_hides_nothing():
    with pytest.raises(InputError, match=r"steps\.0 cannot be cut into tiles along dimension 0"):
        run(make_chain(2, 4, 0, lambda: Gated(D, D)), make_streams(4, N, D), "invert")


class Switched(nn.Linear):
    """Mixes tokens if somebody says so."""

    mixes, smooth = False, staticmethod(lambda w: w)

    def forward(self, w):
        return self.smooth(super().forward(w).cumsum(1) if self.mixes else super().forward(w))


class StochasticDepth(nn.Identity):
    p = 0.0


@pytest.mark.parametrize("name", ["mixes", "smooth", "p"])
def test_flags_functions_and_rates_are_looked_at_in_every_forward(name):
    chain, streams = make_chain(2, 4, 1, lambda: nn.Sequential(Switched(D, D), StochasticDepth())), make_streams(4, N, D)
    run(chain, streams, "invert")
    linear, depth = chain.steps[1]
    setattr(depth if name == "p" else linear, name, {"mixes": True, "smooth": lambda w: w.cumsum(1), "p": 0.5}[name])
    with pytest.raises(InputError, match=r"steps\.1 cannot be cut into tiles along dimension 1"):
        run(chain, streams, "invert")


@pytest.mark.parametrize("change", ["module", "class", "forward", "hook", "length"])
def test_what_is_exchanged_or_longer_is_tried_again(change):
    chain = make_chain(
        2, 4, 0, lambda: nn.Sequential(nn.Linear(D, D), FromFiveOn(D, D) if change == "length" else nn.Identity())
    )
    streams = make_streams(4, N, D)
    run(chain, streams, "invert")
    step = chain.steps[1]
    if change == "module":
        step[1] = Experts().double()
    if change == "class":
        step[0].__class__ = FromFiveOn
    if change == "forward":
        step[1].forward = lambda w: w - w.mean(0)
    if change == "hook":
        step[1].register_forward_hook(lambda module, args, out: out - out.mean(0))
    if change in ("class", "length"):
        streams = make_streams(8, N, D)
    with pytest.raises(InputError, match=r"steps\.[01] cannot be cut into tiles along dimension 0"):
        run(chain, streams, "invert")


class Windows(nn.Linear):
    """Mixes four tokens that are side by side."""

    def forward(self, w):
        windows = nn.functional.pad(w, (0, 0, 0, -w.shape[1] % 4)).unflatten(1, (-1, 4))
        return super().forward((windows + windows.mean(2, keepdim=True)).flatten(1, 2)[:, : w.shape[1]])


@pytest.mark.parametrize(("tiles", "length"), [(8, 16), (2, 12)])
def test_other_cuts_than_those_that_were_tried_are_tried(tiles, length):
    chain = make_chain(2, 2, 1, lambda: Windows(D, D))
    run(chain, make_streams(B, 16, D), "invert")
    chain.tiles = tiles
    with pytest.raises(InputError, match=r"steps\.0 cannot be cut into tiles along dimension 1"):
        run(chain, make_streams(B, length, D), "invert")


class Rotated(nn.Linear):
    """Has a side input of tokens and channels."""

    def forward(self, w, side):
        return super().forward(w).tanh() * side["rope"] + side["mask"]


@pytest.mark.parametrize("first", [4, 8])
def test_a_side_input_is_cut_by_its_place_and_not_by_a_shape_that_fits(first):
    """A batch of as many examples as tokens comes second, or is the first: then one of the ways to cut it is right."""
    side = {"rope": torch.linspace(-1, 1, 8 * D).view(8, D).double(), "mask": torch.zeros(())}
    chain = make_chain(2, 8, 0, lambda: Rotated(D, D))
    for examples in (first, 8):
        streams = make_streams(examples, 8, D)
        chain.tiles, chain.schedule = 1, "store"
        whole = run(chain, streams, "store", side=side)
        chain.tiles = 8
        assert_equal(run(chain, streams, "invert", side=side), whole)


def test_a_side_input_of_which_nothing_tells_is_refused_unless_it_is_said():
    side, streams = {"rope": torch.ones(8, D).double(), "mask": torch.ones(8, 1, D).double()}, make_streams(8, 8, D)
    chain = make_chain(2, 8, 0, lambda: Rotated(D, D))
    with pytest.raises(InputError, match=r"\['rope'\] in its side input .* another size, or say it: tiled"):
        run(chain, streams, "invert", side=side)
    for said, mask in (({"rope": False, "mask": True}, side["mask"]), (False, side["mask"][0])):
        own = side | {"mask": mask}
        whole = run(make_chain(2, 1, 0, lambda: Rotated(D, D)), streams, "store", side=own)
        for step in chain.steps:
            tiled(step, 8, 0, side=said)
        assert_equal(run(chain, streams, "invert", side=own), whole)


def test_trying_leaves_everything_as_it_was():
    chain, streams = make_chain(2, 2, make=lambda: nn.Sequential(CountsCalls(D, D), nn.Dropout(0.3))), make_streams()
    before = {key: t.clone() for key, t in chain.state_dict().items()}
    held, state = [dict(module._parameters) for module in chain.modules()], torch.get_rng_state()
    with pytest.raises(InputError, match="f changes its '0.calls' in every run"):
        chain(*streams)
    assert all(torch.equal(t, before[key]) for key, t in chain.state_dict().items())
    assert [dict(module._parameters) for module in chain.modules()] == held
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_seen_in_evaluation_is_looked_at_again_in_training():
    chain, streams = make_chain(2, 2, 0, lambda: nn.BatchNorm2d(4)).eval(), make_streams(*IMAGES)
    assert_equal(run(chain, streams, "invert"), run(chain, streams, "store"))
    with pytest.raises(InputError, match="a BatchNorm2d, mixes them in its statistics"):
        run(chain.train(), streams, "invert")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_says_nothing_about_mixing(value):
    for make, dim in ((mlp, 1), (Attention, 0)):
        chain, streams = make_chain(2, 2, dim, make), make_streams()
        streams[1].data[0, 0, 0] = value
        run(chain, streams, "invert")
    chain = make_chain(2, 2, 1, Attention)
    run(chain, streams, "invert")
    with pytest.raises(InputError, match="cannot be cut"):
        run(chain, make_streams(), "invert")


@dataclass(frozen=True)
class OfExamples(Coupling):
    def bind(self, pair):
        return self


def test_other_refusals():
    for tiles in (0, -1, True, 2.5, None):
        with pytest.raises(InputError, match=rf"tiles is an integer from 1\. Received: {tiles}"):
            tiled(mlp(), tiles)
    with pytest.raises(InputError, match=r"dim is an integer\. Received: 1\.0"):
        tiled(mlp(), 2, 1.0)
    with pytest.raises(InputError, match="A step is a torch.nn.Module"):
        tiled(torch.relu, 2)
    with pytest.raises(ScheduleError, match="one number for each of 3 units"):
        make_chain(3).tiles = [2, 2]
    for dim in (3, -4):
        with pytest.raises(InputError, match=rf"steps\.0 is cut into tiles along dimension {dim}, which its state does not"):
            make_chain(dim=dim)(*make_streams())
    with pytest.raises(InputError, match=r"both states must be dense and of one length .* \(3, 4, 6\) and \(3, 5, 6\)"):
        make_chain(dim=1)(torch.randn(3, 4, 6).double(), torch.randn(3, 5, 6).double())
    with pytest.raises(InputError, match="its coupling, a OfExamples, may not be"):
        make_chain(coupling=OfExamples(0.0, 1.0, 1.0))(*make_streams())


class ChangesInput(nn.Linear):
    def forward(self, w):
        return super().forward(w.mul_(2))


def test_an_f_that_changes_its_input_is_refused_and_the_test_changes_nothing():
    chain, streams = make_chain(make=lambda: ChangesInput(D, D)), [x.detach() for x in make_streams()]
    with pytest.raises(InputError, match=r"steps\.0 changes its input in place"):
        chain(*streams)


def test_verify_and_numerics_see_each_tile():
    chain, streams = make_chain(3, 2), tuple(x.detach() for x in make_streams())
    report = verify(chain, streams)
    assert not report.problems
    assert report.gradient_error < 1e-10
    assert max(report.reconstruction_errors.values()) < 1e-10
    rebuilt = measure_numerics(chain, streams).states
    assert [state.name for state in rebuilt] == ["steps.1"] * 2 + ["steps.2"] * 2
    assert all(state.noise <= 1e-20 * state.signal for state in rebuilt)
