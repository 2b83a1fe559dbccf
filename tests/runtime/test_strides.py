"""Strides of rebuilt states: kernels choose the order of their sums by them, so every mode must run f on the same ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import revzoo
from revzoo.bijection import Bijection, SpaceToDepth
from revzoo.runtime import LiveBytes, ReversibleChain
from revzoo.runtime.coupling import dual_residual, momentum

MODES = ["recompute", "selective", "invert", ["recompute", "invert", "store", "invert"]]
EXACT = {
    "additive": ("additive", True),
    "leapfrog": ("leapfrog", True),
    "momentum": (momentum(kept_bits=3, gain=1.0), False),
    "dual_residual": (dual_residual(kept_bits=2), False),
}

FLOATING = {"additive": "additive", "leapfrog": "leapfrog", "momentum": "momentum", "dual_residual": dual_residual(beta=0.5)}


def conv(width: int = 16) -> nn.Module:
    half = (nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False))
    return nn.Sequential(*half, nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False))


class Transposed(nn.Module):
    """Mix along the tokens, as in an MLP-Mixer: the output is a transposed view."""

    def __init__(self, length: int = 24):
        super().__init__()
        self.linear = nn.Linear(length, length)

    def forward(self, w: Tensor) -> Tensor:
        return self.linear(w.transpose(1, 2)).tanh().transpose(1, 2)


class ConvNeXtBranch(nn.Module):
    """The branch of a ConvNeXt block: depthwise convolution, then a perceptron over the channels as the last dimension."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, w: Tensor) -> Tensor:
        return self.mlp(self.depthwise(w).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Alternating(nn.Module):
    """A convolution whose output is channels-last or not, whatever its input is."""

    def __init__(self, memory_format: torch.memory_format):
        super().__init__()
        self.conv, self.memory_format = nn.Conv2d(16, 16, 3, padding=1), memory_format

    def forward(self, w: Tensor) -> Tensor:
        return self.conv(w).tanh().contiguous(memory_format=self.memory_format)


FUNCTIONS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "transposed": (lambda k: Transposed(), (4, 24, 24)),
    "convnext": (lambda k: ConvNeXtBranch(), (2, 16, 7, 7)),
    "conv": (lambda k: conv(), (2, 16, 7, 7)),
    "one_pixel": (lambda k: conv(), (4, 16, 1, 1)),
    "alternating": (lambda k: Alternating((torch.channels_last, torch.contiguous_format)[k // 2 % 2]), (2, 16, 7, 7)),
}
FORMATS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "batch_last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "gaps": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "mixed": None,
}


def streams_in(name: str, shape: tuple[int, ...]) -> list[Tensor]:
    """Return the two streams; `mixed` has one contiguous and one channels-last."""
    formats = [FORMATS["contiguous"], FORMATS["channels_last"]] if name == "mixed" else [FORMATS[name]] * 2
    return [convert(torch.randn(shape) / 4).requires_grad_() for convert in formats]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("coupling", "memory_format"),
    [("additive", "contiguous"), ("leapfrog", "channels_last"), ("dual_residual", "batch_last"), ("momentum", "gaps")],
)
def test_exact_modes_are_bit_identical_whatever_the_strides(function, coupling, memory_format, gradients):
    make, shape = FUNCTIONS[function]
    chain = ReversibleChain([make(k) for k in range(4)], *EXACT[coupling])
    if len(shape) == 4 and memory_format != "contiguous":
        chain = chain.to(memory_format=torch.channels_last)
    inputs = streams_in(memory_format, shape)
    stored = gradients(chain, inputs, "store")
    for mode in MODES:
        for grad, expected in zip(gradients(chain, inputs, mode), stored, strict=True):
            assert torch.equal(grad, expected), mode


@pytest.mark.parametrize("name", FLOATING)
@pytest.mark.parametrize("exact", [False, True])
def test_every_step_runs_twice_on_the_same_strides(name, exact):
    coupling, exact_chain = EXACT[name] if exact else (FLOATING[name], False)
    seen: list[list[tuple[int, ...]]] = [[] for _ in range(6)]
    chain = ReversibleChain([FUNCTIONS["alternating"][0](k) for k in range(6)], coupling, exact_chain)
    for step, strides in zip(chain.steps, seen, strict=True):
        step.register_forward_pre_hook(lambda _, args, strides=strides: strides.append(args[0].stride()))
    y1, y2 = chain(*streams_in("mixed", (2, 16, 6, 6)))
    y1.sum().backward(retain_graph=True)
    y2.sum().backward()  # goes forward along the chain first, from the states that the first backward rebuilt
    assert all(len(set(strides)) == 1 and len(strides) >= 2 for strides in seen)
    assert len({strides[0] for strides in seen}) == (2 if exact or name != "dual_residual" else 1)


def test_a_stream_with_gaps_in_memory_is_seen_as_it_will_be_rebuilt():
    seen = []
    chain = ReversibleChain([nn.Linear(4, 4) for _ in range(3)])
    for step in chain.steps:
        step.register_forward_pre_hook(lambda _, args: seen.append(args[0].stride()))
    sum(chain(torch.rand(2, 3, 4), torch.rand(2, 3, 8)[..., ::2])).sum().backward()
    assert seen == [(12, 4, 1)] * 6


def test_a_second_backward_is_bit_identical(gradients):
    chain = ReversibleChain([FUNCTIONS["alternating"][0](k) for k in range(6)], "leapfrog", exact=True)
    inputs = streams_in("mixed", (2, 16, 6, 6))
    stored = gradients(chain, inputs, "store")
    chain.schedule = "invert"
    y1, y2 = chain(*inputs)
    loss = (y1.sin() * torch.linspace(0, 1, y1.numel()).view_as(y1)).sum() + (y2 * y2).sum()
    wanted = [*inputs, *chain.parameters()]
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    second = torch.autograd.grad(loss, wanted)
    assert all(torch.equal(a, b) and torch.equal(c, b) for a, b, c in zip(first, stored, second, strict=True))


class ToColumns(Bijection):
    """Permute the memory, not the values."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(2, 3).contiguous().transpose(2, 3)

    def inverse(self, y: Tensor) -> Tensor:
        return y.contiguous()


@pytest.mark.parametrize("bijection", [SpaceToDepth, ToColumns])
def test_states_before_a_bijection_get_their_strides_back(bijection, gradients):
    wide = 64 if bijection is SpaceToDepth else 16
    before, after = ([conv(width) for _ in range(2)] for width in (16, wide))
    chain = ReversibleChain([*before, bijection(), *after], exact=True).to(memory_format=torch.channels_last)
    inputs = streams_in("channels_last", (2, 16, 8, 8))
    stored = gradients(chain, inputs, "store")
    assert all(torch.equal(a, b) for a, b in zip(gradients(chain, inputs, "invert"), stored, strict=True))


def test_irevnet_digits_is_bit_identical_in_channels_last():
    model = revzoo.create("irevnet_digits", exact=True).to(memory_format=torch.channels_last)
    images, grads = torch.randn(4, 1, 8, 8).to(memory_format=torch.channels_last), []
    for model.schedule in ("store", "selective", "invert"):
        grads.append(torch.autograd.grad(F.cross_entropy(model(images), torch.arange(4)), list(model.parameters())))
    assert all(map(torch.equal, grads[1], grads[0]))
    assert all(map(torch.equal, grads[2], grads[0]))


class Scaled(nn.Module):
    """Multiply by a weight, whose strides the output takes."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, w: Tensor) -> Tensor:
        return torch.mul(self.weight, w)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("coupling", ["additive", "leapfrog", momentum(kept_bits=3, gain=1.0)])
def test_restoring_strides_takes_no_memory(coupling, exact):
    """A state is written with its strides, not copied: f's that return them and f's that return others peak alike."""

    def peak(weight: Tensor) -> int:
        chain = ReversibleChain([Scaled(weight) for _ in range(4)], coupling, exact)
        inputs = [torch.randn(32, 32).requires_grad_() for _ in range(2)]
        with LiveBytes() as live:
            known = live.watch([*chain.parameters(), *inputs])
            y1, y2 = chain(*inputs)
            assert chain.steps[0](inputs[0]).stride() == weight.stride()
            known |= live.watch([y1, y2])
            known |= live.watch(torch.autograd.grad(y1.sum() + y2.sum(), [*chain.parameters(), *inputs]))
        return live.peak(without=known)

    assert peak(torch.ones(32, 32).t()) == peak(torch.ones(32, 32)) > 0
