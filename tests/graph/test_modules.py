"""Captured modules of many kinds: outputs, gradients, buffers and random streams are bit for bit those of the plain ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IMAGE, SEQUENCE = (2, 4, 6, 6), (2, 3, 6)
CASES: dict[str, Callable[[], tuple[nn.Module, list[Any]]]] = {}
conv = partial(nn.Conv2d, 4, 4, 3, padding=1, bias=False)
linear = partial(nn.Linear, 6, 6)


@pytest.fixture(autouse=True)
def _capture_anew() -> None:
    torch._dynamo.reset()


class Net(nn.Module):
    """Parts, and a function that calls them."""

    def __init__(self, call: Callable[..., Any], parts: dict[str, Any]):
        super().__init__()
        self.call = call
        for name, part in parts.items():
            if type(part) is Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.call(self, *args)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def tokens() -> Tensor:
    return torch.arange(6).reshape(2, 3)


def case(make_input: Callable[[], Any], **makers: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a case of what makes its parts and a function that calls them."""

    def register(call: Callable[..., Any]) -> Callable[..., Any]:
        CASES[call.__name__] = lambda: (Net(call, {name: make() for name, make in makers.items()}), [make_input()])
        return call

    return register


def image_case(**makers: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return case(partial(draw, *IMAGE), **makers)


def sequence_case(**makers: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return case(partial(draw, *SEQUENCE), **makers)


@image_case(convs=lambda: nn.ModuleList(conv() for _ in range(4)), norms=lambda: nn.ModuleList(map(nn.BatchNorm2d, [4] * 4)))
def residual(net: Any, x: Tensor) -> Tensor:
    """Blocks of ResNet: activations in place, additions in place."""
    for i in (0, 2):
        y = F.relu_(net.norms[i](net.convs[i](x)))
        y = net.norms[i + 1](net.convs[i + 1](y))
        y += x
        x = F.relu(y, inplace=True)
    return x


@sequence_case(layers=lambda: nn.ModuleList(linear() for _ in range(3)))
def drop_path(net: Any, x: Tensor) -> Tensor:
    for layer in net.layers:
        mask = x.new_empty(x.shape[0], 1, 1).bernoulli_(0.7).div_(0.7)
        x = x + mask * F.dropout(F.gelu(layer(x)), 0.3)
    return x


@case(tokens, embed=partial(nn.Embedding, 10, 6), layer=linear, norm=partial(nn.BatchNorm1d, 6))
def shared(net: Any, given: Tensor) -> Tensor:
    """Tied weights, a module called twice, and a BatchNorm called twice."""
    x = net.embed(given)
    for _ in range(2):
        x = net.norm(net.layer(x).tanh().transpose(1, 2)).transpose(1, 2)
    return F.linear(x, net.embed.weight)


@sequence_case(layer=partial(nn.Linear, 6, 12))
def several_results(net: Any, x: Tensor) -> tuple[Any, ...]:
    a, b = net.layer(x).sigmoid().chunk(2, -1)
    c, d = (a * b.tanh()).split([2, 4], -1)
    values, indices = d.exp().max(-1)
    first, *_ = c.sin().unbind(1)
    top = d.topk(2, -1)
    var, mean = torch.var_mean(d, -1)
    return values, indices, first.cos(), None, top.values * 2, var * mean


@sequence_case(layer=linear)
def views(net: Any, x: Tensor) -> Tensor:
    """Views, slices and in-place changes of them."""
    y = net.layer(x).tanh() * 2
    y[:, 0] = y[:, 1] * 2
    y[..., 2:4].mul_(3)
    z = y.sigmoid() * 2
    z.view(-1)[::2] += 1
    w = z.transpose(0, 1)[1:].unsqueeze(0).expand(2, -1, -1, -1)
    w = w.exp() * 2
    w.masked_fill_(w > 2, 0.5)
    return w.flatten().cos().roll(1)


@sequence_case(first=linear, second=linear, third=linear)
def autocast_inside(net: Any, x: Tensor) -> Tensor:
    x = net.first(x).sigmoid()
    with torch.autocast("cpu", torch.bfloat16):
        x = net.second(x).tanh()
        with torch.autocast("cpu", enabled=False):
            x = net.third(x.float()).sigmoid()
        x = net.second(x).sin()
    return net.third(x.float()).cos()


@sequence_case(first=linear, second=linear)
def no_grad_inside(net: Any, x: Tensor) -> Tensor:
    x = net.first(x).sigmoid()
    with torch.no_grad():
        scale = net.second(x).tanh().abs().amax(-1, keepdim=True)
        with torch.enable_grad():
            y = net.second(x).sigmoid()
    return y.sin() / (scale + 1) * x.detach().cos()


@sequence_case(layers=lambda: nn.ModuleList(linear() for _ in range(4)))
def scaled_later(net: Any, x: Tensor) -> Tensor:
    """What is scaled in place after its siblings: the gradients of all three are summed in the same order."""
    x = net.layers[0](x).sin()
    query, key, value = (layer(x) for layer in net.layers[1:])
    query /= 3
    return (query * key).sigmoid() * value


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        y = (x * scale).round() / scale
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        x, y = ctx.saved_tensors
        return dy * (1 + (x - y)), None


@sequence_case(first=linear, second=linear)
def custom_function(net: Any, x: Tensor) -> Tensor:
    return net.second(Rounded.apply(net.first(x).sigmoid(), 8.0).sin()).tanh()


@sequence_case(first=linear, second=linear)
def checkpoint_inside(net: Any, x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return F.dropout(net.second(y.sin()).tanh(), 0.3).cos()

    x = checkpoint(inner, net.first(x).sigmoid(), use_reentrant=False)
    return checkpoint(inner, x.sin(), use_reentrant=False).exp()


@sequence_case(layer=linear, filter=lambda: nn.Parameter(torch.randn(4, dtype=torch.complex64)))
def complex_numbers(net: Any, x: Tensor) -> Tensor:
    y = torch.fft.rfft(net.layer(x).tanh()) * net.filter
    z = y.exp() * y.conj()
    z = (z * z.conj().mT.mT) + torch.view_as_complex(torch.view_as_real(z * 2).sin())
    return torch.fft.irfft(z).sin() + (z.imag * z.real).mean() + (z.conj().imag * z.abs()).mean()


@sequence_case(layer=linear)
def bits(net: Any, x: Tensor) -> Tensor:
    """Views of another dtype."""
    y = net.layer(x).tanh()
    parity = (y.detach().view(torch.int32) & 1).float()
    z = (y * parity).exp()
    return torch.where(z.detach().view(torch.int32) % 3 == 0, z.sin(), z * z)


@image_case(norm=partial(nn.BatchNorm2d, 4), conv=conv)
def rescaled(net: Any, x: Tensor) -> Tensor:
    """Reads running statistics before and after they move."""
    norm = net.norm
    x = net.conv(x).sigmoid()
    before = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias).sin()
    x = torch.batch_norm(x, norm.weight, None, norm.running_mean, norm.running_var, True, 0.1, 1e-5, False).relu_()
    return before * norm(x).tanh() * norm.running_mean.clone()[:, None, None]


@sequence_case(first=linear, second=linear)
def moved(net: Any, x: Tensor) -> Tensor:
    """Autocast begins between a result and its change in place; other calls stand in between."""
    y = net.first(x)
    with torch.autocast("cpu", torch.bfloat16):
        z = net.second(x)
        y += x
    return (y.sin() * z).tanh()


@sequence_case(layer=linear, count=lambda: torch.zeros((), dtype=torch.int64), mean=partial(torch.zeros, 6))
def observed(net: Any, x: Tensor) -> Tensor:
    """Buffers that forward changes itself, and reads."""
    x = net.layer(x).sigmoid()
    x = x - net.mean.detach().clone() * x.sin()
    net.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
    net.count += 1
    return (x * (net.mean * net.count).clone()).tanh().sin()


@sequence_case(layer=linear)
def noise(net: Any, x: Tensor) -> Tensor:
    """Noise of several kinds, some of which autograd saves."""
    x = net.layer(x).sigmoid()
    x = F.rrelu(x - 0.5, training=True).sin() * torch.rand_like(x)
    x = F.alpha_dropout(x, 0.2, True) + torch.randn(6) * x.cos()
    x = F.dropout1d(x, 0.3, True).exp()
    keep = torch.randperm(3)[:2]
    return F.gumbel_softmax(x[:, keep], tau=0.5) * x[:, keep].normal_()


def make_frozen() -> nn.Module:
    net = nn.Sequential(linear(), nn.GELU(), linear(), nn.SiLU(), linear(), nn.Softplus())
    net[0].requires_grad_(False)
    net[4].requires_grad_(False)
    return net


def make_residual() -> nn.Module:
    return CASES["residual"]()[0]


CASES |= {
    "channels last": lambda: (
        make_residual().to(memory_format=torch.channels_last),
        [draw(*IMAGE).detach().to(memory_format=torch.channels_last).requires_grad_()],
    ),
    "bfloat16": lambda: (make_residual().bfloat16(), [draw(*IMAGE, dtype=torch.bfloat16)]),
    "evaluation": lambda: (make_residual().eval(), [draw(*IMAGE)]),
    "transformer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), [draw(2, 5, 8)]),
    "frozen": lambda: (make_frozen(), [draw(*SEQUENCE)]),
    "sparse gradients": lambda: (
        nn.Sequential(nn.Embedding(10, 6, sparse=True), linear(), nn.Tanh(), linear(), nn.Tanh()),
        [tokens()],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_bit_identical(name: str, check: Callable[..., None]):
    module, inputs = CASES[name]()
    check(module, inputs)


def test_autocast_outside(check: Callable[..., None]):
    with torch.autocast("cpu", torch.bfloat16):
        check(Net(lambda net, x: net.inner(x), {"inner": make_residual()}), [draw(*IMAGE)])
