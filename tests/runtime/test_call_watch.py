"""What autograd saves in a call is compared with that of its second run: all of it, however little the output shows."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import revzoo
from revzoo.analysis.chains import find_block_chains
from revzoo.errors import RecoveryError
from revzoo.runtime import LayerChain, ReversibleChain
from revzoo.runtime.live_bytes import LiveBytes

WIDTH = 8
DROPPING = ("invert", "recompute", "selective")
Run = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Then every bit counts."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, f: nn.Module):
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


class Blocks(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], used: int):
        super().__init__()
        self.blocks = nn.ModuleList([Block(make()) for _ in range(max(2, used))])
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.used]:
            x = block(x)
        return x


def make_chain(make: Callable[[], nn.Module], depth: int, mode: str, **options: Any) -> tuple[nn.Module, Run]:
    chain = ReversibleChain([make() for _ in range(depth)], **options)
    chain.schedule = mode
    return chain, lambda x: torch.cat(chain(x, x.sin()))


def make_exact(make: Callable[[], nn.Module], depth: int, mode: str) -> tuple[nn.Module, Run]:
    return make_chain(make, depth, mode, exact=True)


def make_layers(make: Callable[[], nn.Module], depth: int, mode: str) -> tuple[nn.Module, Run]:
    chain = LayerChain(*[make() for _ in range(depth)])
    chain.schedule = mode
    return chain, chain


def make_blocks(make: Callable[[], nn.Module], depth: int, mode: str) -> tuple[nn.Module, Run]:
    model = Blocks(make, depth)
    revzoo.reversible_(model, "blocks")
    for chain in find_block_chains(model).values():
        chain.schedule = mode
    return model, model


KINDS = [make_chain, make_exact, make_layers, make_blocks]


def differentiate(
    kind: Callable[..., tuple[nn.Module, Run]], make: Callable[[], nn.Module], depth: int, mode: str
) -> list[Any]:
    """Return gradients and buffers after two steps."""
    torch.manual_seed(0)
    random.seed(1)
    model, run = kind(make, depth, mode)
    x = torch.randn(12, WIDTH, requires_grad=True)
    for _ in range(2):
        run(x).square().sum().backward()
    return [None if p.grad is None else p.grad.tolist() for p in (*model.parameters(), x)] + [
        b.tolist() for b in model.buffers()
    ]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.full((WIDTH,), 1e-6))
        self.calls = 0


class EarlyInFrontOfProducts(Layers):
    """A selective call keeps the output of the first product, behind which nothing differs."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(torch.sin(x * random.uniform(0.5, 2))).tanh())


class InOneBranch(Layers):
    """What the other branch saves last does not differ."""

    def forward(self, x: Tensor) -> Tensor:
        p, q = self.a(x * random.uniform(0.5, 2)).tanh(), self.c(x).tanh()
        return self.b(torch.sin(q)) + 1e-3 * p


class ScaledDown(Layers):
    """As by the layer scale that networks start with."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.a(x * random.uniform(0.5, 2)).tanh() + 0.1 * self.b(x).tanh()


@pytest.mark.parametrize("source", [EarlyInFrontOfProducts, InOneBranch, ScaledDown])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("mode", DROPPING)
def test_a_difference_that_the_last_tensors_hardly_show_raises(source, kind, depth, mode):
    if kind is make_layers and mode == "invert":
        mode = "recompute"  # these layers have no inverse
    with pytest.raises(RecoveryError, match=r"ran differently the second time: .* or set its schedule to 'store'"):
        differentiate(kind, source, depth, mode)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("mode", DROPPING)
def test_a_small_difference_raises_where_bits_repeat(kind, depth, mode):
    class Counting(Layers):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.a(x * (1 + 1e-5 * self.calls)).tanh().sin()

    if mode == "invert" and kind in (make_chain, make_layers):
        mode = "recompute"  # floating-point inversion rounds by more
    with pytest.raises(RecoveryError, match="in some bits"):
        differentiate(kind, Counting, depth, mode)


class Renorm(nn.BatchNorm1d):
    """Batch renormalisation: in training the output depends on the running statistics, which then move."""

    def __init__(self) -> None:
        super().__init__(WIDTH, momentum=0.01)

    def forward(self, input: Tensor) -> Tensor:
        mean, deviation = input.mean(0), input.std(0, unbiased=False) + self.eps
        with torch.no_grad():
            running = (self.running_var + self.eps).sqrt()
            r, d = (deviation / running).clamp(1 / 3, 3), ((mean - self.running_mean) / running).clamp(-5, 5)
        out = ((input - mean) / deviation * r + d) * self.weight + self.bias
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(deviation.square(), self.momentum)
        return out


@pytest.mark.parametrize("kind", [make_exact, make_layers, make_blocks])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("mode", DROPPING)
def test_a_norm_that_reads_its_statistics_is_repeated_to_the_bit(kind, depth, mode):
    def make() -> nn.Module:
        return nn.Sequential(Renorm(), nn.Linear(WIDTH, WIDTH), nn.GELU())

    assert differentiate(kind, make, depth, mode) == differentiate(kind, make, depth, "store")


def test_two_forwards_through_a_norm_that_reads_its_statistics():
    def run(mode: str) -> list[Any]:
        torch.manual_seed(0)
        chain = ReversibleChain([nn.Sequential(Renorm(), nn.Tanh()) for _ in range(3)], exact=True)
        chain.schedule = mode
        x1, x2 = torch.randn(2, 12, WIDTH).unbind()
        a1, a2 = chain(x1, x2)
        b1, b2 = chain(x2, x1)
        gradients = torch.autograd.grad((a1 * b1 + a2 * b2).sum(), list(chain.parameters()))
        return [t.tolist() for t in (*gradients, *chain.buffers())]

    assert [run(mode) for mode in DROPPING] == [run("store")] * 3


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(WIDTH), Renorm()], ids=["plain", "reading"])
def test_only_a_norm_of_ones_own_keeps_its_statistics(norm):
    chain = ReversibleChain([nn.Sequential(norm, nn.Tanh())])
    x1, x2 = torch.randn(2, 12, WIDTH).unbind()
    with LiveBytes() as live:
        known = live.watch([x1, x2, *chain.parameters(), *chain.buffers()])
        y = chain(x1, x2)
        kept = live.alive(without=known)
    del y
    statistics = 0 if type(norm) is nn.BatchNorm1d else 2 * WIDTH * 4 + 8
    assert kept == 12 * WIDTH * 4 + statistics  # the chain's first output is its second input


def _attend(x: Tensor) -> Tensor:
    q = x.view(3, 4, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1, is_causal=True).transpose(1, 2).reshape(12, 8)


class Call(nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]):
        super().__init__()
        self.f, self.linear = f, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.f(self.linear(x)))


class First(nn.Module):
    """Return the first of what a module returns."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x)[0]
        return out


REPEATING = {
    "dropout": lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8)),
    "noise that is filled after it was saved": lambda: nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 8)),
    "attention": lambda: Call(_attend),
    "lstm": lambda: First(nn.LSTM(8, 8)),
    "convolution": lambda: Call(lambda x: F.conv1d(x.view(3, 4, 8), torch.ones(4, 4, 3), padding=1).reshape(12, 8).relu()),
    "channels last": lambda: Call(
        lambda x: F.silu(F.avg_pool2d(x.view(3, 2, 4, 4).contiguous(memory_format=torch.channels_last), 3, 1, 1)).reshape(12, 8)
    ),
    "index_add": lambda: Call(lambda x: x * torch.zeros(3, 8).index_add(0, torch.arange(12) % 3, x.float()).mean(0)),
    "embedding": lambda: Call(lambda x: x * F.embedding(x.detach().argmax(-1), torch.eye(8))),
    "max pool": lambda: Call(lambda x: F.max_pool1d(x, 3, 1, 1)),
    "complex": lambda: Call(lambda x: torch.fft.irfft(torch.fft.rfft(x.float()) * 2j, n=8).tanh()),
    "statistics": lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU()),
    "statistics of each example": lambda: Call(nn.InstanceNorm1d(12, affine=True, track_running_stats=True)),
    "parametrization": lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "infinite": lambda: Call(lambda x: x.masked_fill(x > 0.5, -torch.inf).softmax(-1)),
}


# By default any two of the settings in all combinations; slow tests have the rest.
SETTINGS = [
    pytest.param(*settings, marks=pytest.mark.slow if sum(settings) % 2 else ())
    for settings in itertools.product((False, True), repeat=3)
]


@pytest.mark.parametrize("make", REPEATING.values(), ids=REPEATING)
@pytest.mark.parametrize("mode", DROPPING)
@pytest.mark.parametrize(("autocast", "two_threads", "exact"), SETTINGS)
def test_what_repeats_is_no_difference(make, mode, autocast, two_threads, exact):
    if autocast and make is REPEATING["lstm"] and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("PyTorch has no LSTM in bfloat16 on this CPU")
    torch.set_num_threads(2 if two_threads else 1)
    chain = ReversibleChain([make() for _ in range(3)], exact=exact)
    chain.schedule = mode
    x1, x2 = torch.randn(2, 12, WIDTH).requires_grad_().unbind()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y1, y2 = chain(x1, x2)
    torch.rand(3)
    (y1 * y2).sum().backward()
    assert all(p.grad is not None for p in chain.parameters())


def test_sums_in_another_order_are_no_difference_where_several_threads_compute():
    class Reordering(Layers):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.a(x.tanh() * (1 + 2e-7 * self.calls)).sin()

    with pytest.raises(RecoveryError, match="in some bits"):
        differentiate(make_chain, Reordering, 1, "recompute")
    torch.set_num_threads(2)
    differentiate(make_chain, Reordering, 1, "recompute")
    with pytest.raises(RecoveryError, match="of which rounding explains 7.6e-06"):
        differentiate(make_chain, ScaledDown, 1, "recompute")


@pytest.mark.parametrize("mode", ["recompute", "selective", "invert"])
def test_a_tensor_with_the_negative_bit_is_compared(mode):
    class Spectrum(nn.Linear):
        def forward(self, x):
            negated = torch.fft.rfft(super().forward(x)).conj().imag
            return torch.fft.irfft(negated * negated.sin(), n=8)

    torch.manual_seed(0)
    chain = ReversibleChain([Spectrum(8, 8) for _ in range(3)], exact=True)
    x = torch.randn(2, 4, 8).requires_grad_()
    gradients = {}
    for each in ("store", mode):
        chain.schedule = each
        gradients[each] = torch.autograd.grad(sum(y.square().sum() for y in chain(*x)), [x, *chain.parameters()])
    assert all(map(torch.equal, gradients["store"], gradients[mode]))
