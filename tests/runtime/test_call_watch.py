"""What autograd saves in a call is compared with that of its second run: all of it, however little the output shows."""

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import revzoo
from revzoo.errors import RecoveryError
from revzoo.runtime import LayerChain, ReversibleChain

WIDTH = 8
DROPPING = ("invert", "recompute", "selective")


def make_chain(make: Callable[[], nn.Module], depth: int, mode: str, exact: bool = False) -> Callable[[Tensor], Tensor]:
    chain = ReversibleChain([make() for _ in range(depth)], exact=exact)
    chain.schedule = mode
    return lambda x: torch.cat(chain(x, x.sin()))


def make_layers(make: Callable[[], nn.Module], depth: int, mode: str) -> nn.Module:
    chain = LayerChain(*[make() for _ in range(depth)])
    chain.schedule = mode
    return chain


KINDS = {"chain": make_chain, "exact": partial(make_chain, exact=True), "layers": make_layers}


def differentiate(kind: str, make: Callable[[], nn.Module], depth: int, mode: str) -> None:
    torch.manual_seed(0)
    random.seed(1)
    run = KINDS[kind](make, depth, mode)
    x = torch.randn(12, WIDTH, requires_grad=True)
    for _ in range(2):
        run(x).square().sum().backward()


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
    if kind == "layers" and mode == "invert":
        mode = "recompute"  # these layers have no inverse
    with pytest.raises(RecoveryError, match=r"ran differently the second time: .* or set its schedule to 'store'"):
        differentiate(kind, source, depth, mode)


def test_a_difference_in_a_reversible_block_raises():
    model = VisionTransformer(img_size=8, patch_size=4, embed_dim=WIDTH, depth=3, num_heads=2)
    model.blocks[1].mlp = InOneBranch()
    revzoo.reversible_(model)
    with pytest.raises(RecoveryError, match=r"^blocks\.1 ran differently the second time"):
        model(torch.randn(2, 3, 8, 8)).sum().backward()


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
    "negative bit": lambda: Call(lambda x: torch.fft.irfft(torch.fft.rfft(x.float()).conj().imag.sin(), n=8)),
    "infinite": lambda: Call(lambda x: x.masked_fill(x > 0.5, -torch.inf).softmax(-1)),
}


@pytest.mark.parametrize("make", REPEATING.values(), ids=REPEATING)
@pytest.mark.parametrize("mode", DROPPING)
@pytest.mark.parametrize(("autocast", "exact"), [(False, True), (True, False)])
def test_what_repeats_is_no_difference(make, mode, autocast, exact):
    if autocast and make is REPEATING["lstm"] and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("PyTorch has no LSTM in bfloat16 on this CPU")
    chain = ReversibleChain([make() for _ in range(3)], exact=exact)
    chain.schedule = mode
    x1, x2 = torch.randn(2, 12, WIDTH).requires_grad_().unbind()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y1, y2 = chain(x1, x2)
    torch.rand(3)
    (y1 * y2).sum().backward()
    assert all(p.grad is not None for p in chain.parameters())


def test_sums_in_another_order_are_no_difference():
    class Reordering(Layers):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.a(x.tanh() * (1 + 2e-7 * self.calls)).sin()

    differentiate("chain", Reordering, 1, "recompute")
    with pytest.raises(RecoveryError, match="of which rounding explains 7.6"):
        differentiate("chain", ScaledDown, 1, "recompute")
