"""Mode `selective`: which outputs are kept, to the byte and the FLOP, and gradients bit-identical to the stored run's."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.analysis.flops import FlopCounter
from revzoo.runtime import LiveBytes, ReversibleChain, set_tripwire
from revzoo.runtime.node import run_node

B, N, D, M = 2, 20, 16, 2  # examples, tokens, width, heads
UNIT = 4 * B * N * D
C, S = 8, 6  # channels, height and width
IMAGE = 4 * B * C * S * S


@pytest.fixture(autouse=True)
def _without_tripwire() -> Iterator[None]:
    """It would have all computed again where what is kept is wrong."""
    with set_tripwire(False):
        yield


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).reshape(*x.shape[:2], 3, M, D // M).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


def mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))


def unit(dropout: float = 0.0) -> nn.Module:
    half = (nn.BatchNorm2d(C), nn.ReLU(), nn.Conv2d(C, C, 3, padding=1, bias=False))
    return nn.Sequential(*half, nn.Dropout(dropout), nn.BatchNorm2d(C), nn.ReLU(), nn.Conv2d(C, C, 3, padding=1, bias=False))


def transformer(depth: int) -> list[nn.Module]:
    return [step for _ in range(depth) for step in (Attention(), mlp())]


def convolution(depth: int) -> list[nn.Module]:
    return [unit() for _ in range(2 * depth)]


def linear(depth: int) -> list[nn.Module]:
    return [nn.Linear(D, D) for _ in range(2 * depth)]


SHAPES = {transformer: (B, N, D), convolution: (B, C, S, S), linear: (B, N, D)}


def waiting(make, mode: str, depth: int) -> int:
    """Return the bytes between forward and backward."""
    chain = ReversibleChain(make(depth))
    chain.schedule = mode
    streams = [x.requires_grad_() for x in torch.randn(2, *SHAPES[make]).unbind()]
    with LiveBytes() as live:
        known = live.watch([*chain.parameters(), *chain.buffers(), *streams])
        y1, y2 = chain(*streams)
        loss = y1.sum() + y2.sum()
        del y1, y2
        alive = live.alive(without=known)
    loss.backward()
    return alive


def added(make, mode: str) -> int:
    """Return the bytes that one more pair of steps keeps."""
    return waiting(make, mode, 4) - waiting(make, mode, 3)


# w of each of two steps, qkv 3, the attention's output 1, fc1 4; and a log-sum-exp for every token and head. Of two
# convolutions the first one is kept, of one product none.
ADDED = {
    transformer: {"selective": 10 * UNIT + 4 * B * N * M, "recompute": 2 * UNIT},
    convolution: {"selective": 2 * 2 * IMAGE, "recompute": 2 * IMAGE},
    linear: {"selective": 2 * UNIT, "recompute": 2 * UNIT, "store": 2 * UNIT},
}


@pytest.mark.parametrize("make", ADDED)
def test_bytes_that_one_more_pair_of_steps_keeps(make):
    assert {mode: added(make, mode) for mode in ADDED[make]} == ADDED[make]


def test_streams_do_not_depend_on_pytorchs_table_of_flops(monkeypatch):
    """As on 2.14, which lacks attention on the CPU; selective would recompute it, and keep 9 streams."""
    monkeypatch.setattr("torch.utils.flop_counter.flop_registry", {})
    assert added(transformer, "selective") == ADDED[transformer]["selective"]


def test_selective_repeats_no_product():
    attention, layers = 4 * B * N * N * D, 2 * B * N * 12 * D * D  # in each of two blocks
    expected = 2 * (attention + layers), 2 * (attention * 5 // 2 + 2 * layers)
    assert flops(transformer, "store") == flops(transformer, "selective") == expected


def flops(make, schedule: object) -> tuple[int, int]:
    chain = ReversibleChain(make(2))
    chain.schedule = schedule
    streams = [x.requires_grad_() for x in torch.randn(2, *SHAPES[make]).unbind()]
    with FlopCounter() as counter:
        y1, y2 = chain(*streams)
        (y1.sum() + y2.sum()).backward()
    return counter.forward, counter.backward


@pytest.mark.parametrize("make", SHAPES)
def test_flops_are_those_of_the_stored_run(make):
    forward, backward = flops(make, "store")
    assert flops(make, "selective") == (forward, backward)
    assert flops(make, ["selective", "store", "store", "selective"]) == (forward, backward)
    assert (flops(make, "recompute")[1] > backward) == (make is not linear)


def test_kept_outputs_are_freed_as_backward_proceeds():
    chain = ReversibleChain(transformer(4))
    chain.schedule = "selective"
    streams = [x.requires_grad_() for x in torch.randn(2, B, N, D).unbind()]
    alive: list[int] = []
    with LiveBytes() as live:
        known = live.watch([*chain.parameters(), *streams])
        y1, y2 = chain(*streams)
        for step in chain.steps[::-2]:
            bias = step[3].bias
            bias.register_post_accumulate_grad_hook(lambda _: alive.append(live.alive(without=known)))
        loss = y1.sum() + y2.sum()
        del y1, y2
        loss.backward()
        del loss
        known |= live.watch([p.grad for p in chain.parameters()] + [x.grad for x in streams])
        assert live.alive(without=known) == 0
    weights = sum(p.nbytes for step in chain.steps[:2] for p in step.parameters())
    assert len(alive) == 4
    # From one block to the next its ten streams go and the gradients of its weights come.
    assert {before - after for before, after in pairwise(alive[1:])} == {10 * UNIT + 4 * B * N * M - weights}


def steps_of_every_sort() -> list[list[nn.Module]]:
    class Scaled(nn.Module):
        """Change the output of a linear layer in place."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, w: Tensor) -> Tensor:
            return self.linear(w).mul_(0.5).add_(1).tanh()

    class Split(nn.Module):
        """Use views of a layer's output, a batched product, and an einsum."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, 3 * D)

        def forward(self, w: Tensor) -> Tensor:
            q, k, v = self.linear(w).chunk(3, dim=-1)
            return torch.einsum("bij,bjd->bid", (q @ k.transpose(1, 2)).softmax(-1), v)

    class Branches(nn.Module):
        """Use one layer's output twice, beside two others."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(D, D) for _ in range(3))

        def forward(self, w: Tensor) -> Tensor:
            first = self.a(w)
            return self.c(first.sigmoid() * self.b(w).relu()) + first

    return [
        [nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Dropout(0.3), nn.Linear(D, D)) for _ in range(3)],
        [nn.Sequential(nn.Linear(D, D), nn.Linear(D, D).requires_grad_(False), nn.ReLU(inplace=True)) for _ in range(3)],
        [Scaled() for _ in range(3)],
        [Split() for _ in range(3)],
        [Branches() for _ in range(3)],
        [
            nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5, inplace=True), nn.Linear(D, D), nn.SiLU(inplace=True))
            for _ in range(3)
        ],
        [nn.LayerNorm(D), nn.GELU(), nn.Linear(D, D, bias=False), nn.Identity()],
    ]


def run(chain: ReversibleChain, streams: list[Tensor], schedule: object, **kwargs) -> list[Tensor]:
    chain.schedule = schedule
    torch.manual_seed(3)
    y1, y2 = chain(*streams, **kwargs)
    return list(torch.autograd.grad((y1.sin() * y2).sum(), [x for x in (*streams, *chain.parameters()) if x.requires_grad]))


@pytest.mark.parametrize("sort", range(7))
def test_gradients_are_bit_identical_to_the_stored_ones(sort):
    chain = ReversibleChain(steps_of_every_sort()[sort])
    streams = [x.requires_grad_() for x in torch.randn(2, B, N, D).unbind()]
    for grad, expected in zip(run(chain, streams, "selective"), run(chain, streams, "store"), strict=True):
        assert torch.equal(grad, expected)


def test_an_output_changed_in_place_is_computed_again():
    chain = ReversibleChain([nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True), nn.Linear(D, D))])
    streams = [x.requires_grad_() for x in torch.randn(2, B, N, D).unbind()]
    counts = {}
    for mode in ("store", "selective"):
        chain.schedule = mode
        with FlopCounter() as counter:
            y1, y2 = chain(*streams)
            (y1 * y2).sum().backward()
        counts[mode] = counter.forward + counter.backward
    assert counts["selective"] - counts["store"] == 2 * B * N * D * D  # the first of the two


def test_a_second_backward_computes_what_the_first_has_used_up(error):
    chain = ReversibleChain(transformer(2)).double()
    chain.schedule = "selective"
    streams = [x.requires_grad_() for x in torch.randn(2, B, N, D).double().unbind()]
    wanted = [*streams, *chain.parameters()]
    y1, y2 = chain(*streams)
    loss = (y1.sin() * y2).sum()
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    work = []
    for _ in range(2):
        with FlopCounter() as counter:
            again = torch.autograd.grad(loss, wanted, retain_graph=True)
        assert all(map(torch.equal, again, first))
        work.append(counter.forward + counter.backward)
    with FlopCounter() as counter:
        torch.autograd.grad(run_loss(chain, streams, "recompute"), wanted)
    assert work == [work[0]] * 2
    assert work[0] == counter.backward  # as a step that keeps its input alone
    assert error(first, torch.autograd.grad(run_loss(chain, streams, "store"), wanted)) < 1e-12


def run_loss(chain: ReversibleChain, streams: list[Tensor], schedule: object) -> Tensor:
    chain.schedule = schedule
    y1, y2 = chain(*streams)
    return (y1.sin() * y2).sum()


def test_outputs_without_gradients_are_not_kept():
    """As inside an autograd.Function, whose saved tensors say nothing about the operations in it."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x @ x.transpose(1, 2) @ x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                return torch.autograd.grad(y @ y.transpose(1, 2) @ y, y, grad)[0]

    class Step(nn.Linear):
        def forward(self, w: Tensor) -> Tensor:
            return super().forward(Square.apply(w * 0.1).tanh())

    chain = ReversibleChain([Step(D, D) for _ in range(3)])
    streams = [x.requires_grad_() for x in torch.randn(2, B, N, D).unbind()]
    assert all(map(torch.equal, run(chain, streams, "selective"), run(chain, streams, "store")))


def stem() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, C, 3, padding=1), nn.BatchNorm2d(C), nn.ReLU(), nn.Conv2d(C, C, 1))


@pytest.mark.parametrize("changes", [False, True])
def test_a_node_that_ends_in_a_convolution(changes):
    """What follows may change its output in place: no saved tensor depends on it, so it is not kept."""
    node, x = stem(), torch.randn(B, 3, S, S, requires_grad=True)

    def gradients(mode: str) -> list[Tensor]:
        out = run_node(node, "stem", mode, x)
        out = out.mul_(2) if changes else out * 2
        return list(torch.autograd.grad(out.sin().sum(), [x, *node.parameters()]))

    assert all(map(torch.equal, gradients("selective"), gradients("store")))


def test_a_kept_output_changed_in_place_after_forward_is_computed_again():
    class Fork(nn.Module):
        """Return the output of a layer, and something whose gradient needs it."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.linear(x)
            return h, h.sin()

    node, x = Fork(), torch.randn(B, D, requires_grad=True)
    expected = torch.autograd.grad(node(x)[1].sum(), x)
    h, y = run_node(node, "head", "selective", x)
    with torch.no_grad():
        h.mul_(2)
    with FlopCounter() as counter:
        assert all(map(torch.equal, torch.autograd.grad(y.sum(), x), expected))
    assert counter.forward + counter.backward == 2 * (2 * B * D * D)  # the layer again, and the gradient of its input


def test_a_node_keeps_its_input_and_its_expensive_outputs():
    node, x = stem(), torch.randn(B, 3, S, S, requires_grad=True)
    kept = {}
    for mode in ("store", "selective", "recompute"):
        with LiveBytes() as live:
            known = live.watch([*node.parameters(), *node.buffers(), x])
            out = run_node(node, "stem", mode, x)
            kept[mode] = live.alive(without=known)
        del out
    statistics = 2 * 4 * C
    assert kept == {"store": 3 * IMAGE + statistics, "selective": 2 * IMAGE, "recompute": IMAGE}


def test_a_product_that_is_written_unseen_is_computed_again():
    """NumPy's writes raise no version, and no dispatch mode sees them."""

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            h.detach().numpy()[...] *= 1.5
            return self.outer(h.sin())

    torch.manual_seed(0)
    chain = ReversibleChain([Writing() for _ in range(4)])
    gradients = []
    for mode in ("store", "selective", "selective", "selective", "selective"):
        chain.schedule = mode
        chain(*torch.ones(2, B, N, D).requires_grad_().unbind())[1].square().sum().backward()
        gradients.append([p.grad for p in chain.parameters()])
        chain.zero_grad()
    assert all(torch.equal(*pair) for each in gradients[1:] for pair in zip(gradients[0], each, strict=True))
