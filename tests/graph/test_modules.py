"""Captured modules of many kinds: outputs, gradients, buffers and random streams are bit for bit those of the plain ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def _capture_anew() -> None:
    torch._dynamo.reset()


def image(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*(shape or (2, 4, 6, 6)), dtype=dtype).requires_grad_()


def conv(width: int = 4, to: int = 4) -> nn.Conv2d:
    return nn.Conv2d(width, to, 3, padding=1, bias=False)


class Residual(nn.Module):
    """Blocks of ResNet: activations in place, additions in place."""

    def __init__(self, momentum: float | None = 0.1):
        super().__init__()
        self.convs = nn.ModuleList(conv() for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4, momentum=momentum) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 2):
            y = F.relu_(self.norms[i](self.convs[i](x)))
            y = self.norms[i + 1](self.convs[i + 1](y))
            y += x
            x = F.relu(y, inplace=True)
        return x


class DropPath(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            mask = x.new_empty(x.shape[0], 1, 1).bernoulli_(0.7).div_(0.7)
            x = x + mask * F.dropout(F.gelu(layer(x)), 0.3)
        return x


class Attention(nn.Module):
    def __init__(self, fused: bool):
        super().__init__()
        self.fused = fused
        self.norm = nn.LayerNorm(8)
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(B, N, 3, 2, D // 2).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        else:
            scores = (q * 0.5) @ k.transpose(-2, -1)
            y = F.dropout(scores.softmax(-1), 0.2) @ v
        return x + self.proj(y.transpose(1, 2).reshape(B, N, D))


class Pools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = conv(), conv()

    def forward(self, x: Tensor) -> Tensor:
        y, where = F.max_pool2d(self.conv(x).relu(), 2, return_indices=True)
        y = F.max_unpool2d(y.sigmoid(), where, 2)
        return F.adaptive_avg_pool2d(self.last(y), 2)


class Skips(nn.Module):
    """A U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv(), conv(), conv()])
        self.up = nn.ModuleList([conv(8), conv(8)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down[:2]:
            x = layer(x).relu_()
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.down[2](x).relu()
        for layer in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = layer(torch.cat([x, skips.pop()], 1)).relu_()
        return x


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(4 + 2 * i) for i in range(3))
        self.convs = nn.ModuleList(conv(4 + 2 * i, 2) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for norm, layer in zip(self.norms, self.convs, strict=True):
            features.append(layer(F.relu_(norm(torch.cat(features, 1)))))
        return torch.cat(features, 1)


class Shared(nn.Module):
    """Tied weights, a module called twice, and a BatchNorm called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(2):
            x = self.norm(self.layer(x).tanh().transpose(1, 2)).transpose(1, 2)
        return F.linear(x, self.embed.weight)


class Several(nn.Module):
    """Functions with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        a, b = self.layer(x).sigmoid().chunk(2, -1)
        c, d = (a * b.tanh()).split([2, 4], -1)
        values, indices = d.exp().max(-1)
        first, *_ = c.sin().unbind(1)
        top = d.topk(2, -1)
        var, mean = torch.var_mean(d, -1)
        return values, indices, first.cos(), None, top.values * 2, var * mean


class Views(nn.Module):
    """Views, slices and in-place changes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh() * 2
        y[:, 0] = y[:, 1] * 2
        y[..., 2:4].mul_(3)
        z = y.sigmoid() * 2
        z.view(-1)[::2] += 1
        w = z.transpose(0, 1)[1:].unsqueeze(0).expand(2, -1, -1, -1)
        w = w.exp() * 2
        w.masked_fill_(w > 2, 0.5)
        return w.flatten().cos().roll(1)


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 5)), nn.Bilinear(5, 5, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bnd,de->bne", x.cumsum(1), self.a).sin()
        z = self.b(y, y.flip(1)) * self.scale
        order = z[..., 0].argsort(1)
        z = z.gather(1, order[..., None].expand_as(z)).exp()
        return torch.where(z > 1, z.log(), z * z).index_select(1, torch.tensor([0, 0, 1])).cumprod(-1)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sigmoid()
        with torch.autocast("cpu", torch.bfloat16):
            x = self.second(x).tanh()
            with torch.autocast("cpu", enabled=False):
                x = self.third(x.float()).sigmoid()
            x = self.second(x).sin()
        return self.third(x.float()).cos()


class NoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sigmoid()
        with torch.no_grad():
            scale = self.second(x).tanh().abs().amax(-1, keepdim=True)
            with torch.enable_grad():
                y = self.second(x).sigmoid()
        return y.sin() / (scale + 1) * x.detach().cos()


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


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Rounded.apply(self.first(x).sigmoid(), 8.0).sin()).tanh()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return F.dropout(self.second(y.sin()).tanh(), 0.3).cos()

        x = checkpoint(inner, self.first(x).sigmoid(), use_reentrant=False)
        return checkpoint(inner, x.sin(), use_reentrant=False).exp()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.rfft(self.layer(x).tanh()) * self.filter
        z = y.exp() * y.conj()
        z = (z * z.conj().mT.mT) + torch.view_as_complex(torch.view_as_real(z * 2).sin())
        return torch.fft.irfft(z).sin() + (z.imag * z.real).mean() + (z.conj().imag * z.abs()).mean()


class Bits(nn.Module):
    """Views of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh()
        parity = (y.detach().view(torch.int32) & 1).float()
        z = (y * parity).exp()
        return torch.where(z.detach().view(torch.int32) % 3 == 0, z.sin(), z * z)


class Rescaled(nn.Module):
    """Reads running statistics before and after they move."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(4), conv()

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        assert norm.running_mean is not None
        assert norm.running_var is not None
        x = self.conv(x).sigmoid()
        before = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias).sin()
        x = torch.batch_norm(x, norm.weight, None, norm.running_mean, norm.running_var, True, 0.1, 1e-5, False).relu_()
        return before * norm(x).tanh() * norm.running_mean.clone()[:, None, None]


class Moved(nn.Module):
    """Autocast begins between a result and its change in place; other calls stand in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.autocast("cpu", torch.bfloat16):
            z = self.second(x)
            y += x
        return (y.sin() * z).tanh()


class Recurrent(nn.Module):
    """LSTM cells written out."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.gru = nn.LSTMCell(6, 6), nn.GRUCell(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros_like(x[:, 0])
        g = h
        for i in range(x.shape[1]):
            h, c = self.cell(x[:, i], (h, c))
            g = self.gru(h.sin(), g)
        return torch.stack([h, c, g])


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.instance, self.group = nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.GroupNorm(2, 4)
        self.plain, self.conv = nn.InstanceNorm2d(4), conv()
        self.rms = nn.RMSNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.group(self.instance(self.conv(x)).relu_())
        return self.rms(F.local_response_norm(self.plain(x.sin()), 2))


class Observed(nn.Module):
    """Buffers that forward changes itself, and reads."""

    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).sigmoid()
        x = x - self.mean.detach().clone() * x.sin()
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        self.count += 1
        return (x * (self.mean * self.count).clone()).tanh().sin()


class Frozen(nn.Sequential):
    """Frozen layers between trained ones, and a cast."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.SiLU(), nn.Linear(6, 6), nn.Softplus())
        self[0].requires_grad_(False)
        self[4].requires_grad_(False)


class Reduced(nn.Module):
    """Half precision between float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh().bfloat16()).sigmoid().float().sin()


class Lists(nn.Module):
    """Dictionaries, lists and None in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, batch: dict[str, Any], scale: float = 2.0) -> dict[str, Any]:
        x = self.layer(batch["x"]).sigmoid() * scale
        y = torch.stack([t.sin() for t in batch["more"]]).sum(0)
        return {"out": [x * y, (y, None)], "count": 3, "x": batch["x"]}


class Random(nn.Module):
    """Noise of several kinds, some of which autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).sigmoid()
        x = F.rrelu(x - 0.5, training=True).sin() * torch.rand_like(x)
        x = F.alpha_dropout(x, 0.2, True) + torch.randn(6) * x.cos()
        x = F.dropout1d(x, 0.3, True).exp()
        keep = torch.randperm(3)[:2]
        return F.gumbel_softmax(x[:, keep], tau=0.5) * x[:, keep].normal_()


def tokens() -> Tensor:
    return torch.arange(6).reshape(2, 3)


SEQUENCE = (2, 3, 6)
CASES: dict[str, Callable[[], tuple[nn.Module, list[Any]]]] = {
    "residual": lambda: (Residual(), [image()]),
    "channels last": lambda: (
        Residual().to(memory_format=torch.channels_last),
        [image().detach().to(memory_format=torch.channels_last).requires_grad_()],
    ),
    "float64": lambda: (Residual().double(), [image(dtype=torch.float64)]),
    "bfloat16": lambda: (Residual().bfloat16(), [image(dtype=torch.bfloat16)]),
    "evaluation": lambda: (Residual().eval(), [image()]),
    "no gradient of the input": lambda: (Residual(), [image().detach()]),
    "drop path": lambda: (DropPath(), [image(*SEQUENCE)]),
    "attention": lambda: (Attention(False), [image(2, 5, 8)]),
    "fused attention": lambda: (Attention(True), [image(2, 5, 8)]),
    "transformer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), [image(2, 5, 8)]),
    "pools": lambda: (Pools(), [image()]),
    "skips": lambda: (Skips(), [image(2, 4, 8, 8)]),
    "dense": lambda: (Dense(), [image()]),
    "shared": lambda: (Shared(), [tokens()]),
    "several results": lambda: (Several(), [image(*SEQUENCE)]),
    "views": lambda: (Views(), [image(*SEQUENCE)]),
    "sums": lambda: (Sums(), [image(*SEQUENCE)]),
    "autocast inside": lambda: (Autocast(), [image(*SEQUENCE)]),
    "no_grad inside": lambda: (NoGrad(), [image(*SEQUENCE)]),
    "custom function": lambda: (Custom(), [image(*SEQUENCE)]),
    "checkpoint inside": lambda: (Checkpointed(), [image(*SEQUENCE)]),
    "complex": lambda: (Complex(), [image(*SEQUENCE)]),
    "rescaled": lambda: (Rescaled(), [image()]),
    "spectral norm": lambda: (nn.Sequential(spectral_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 6)), [image(*SEQUENCE)]),
    "moved": lambda: (Moved(), [image(*SEQUENCE)]),
    "bits": lambda: (Bits(), [image(*SEQUENCE)]),
    "recurrent": lambda: (Recurrent(), [image(*SEQUENCE)]),
    "norms": lambda: (Norms(), [image()]),
    "observed": lambda: (Observed(), [image(*SEQUENCE)]),
    "frozen": lambda: (Frozen(), [image(*SEQUENCE)]),
    "reduced": lambda: (Reduced(), [image(*SEQUENCE)]),
    "noise": lambda: (Random(), [image(*SEQUENCE)]),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # what PyTorch 2.11's compiler does
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_bit_identical(name: str, check: Callable[..., None]):
    module, inputs = CASES[name]()
    check(module, inputs)


def test_dictionaries_and_lists(check: Callable[..., None]):
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Lists()

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return self.inner({"x": x, "more": [y, y * 2]}, scale=3.0)

    check(Around(), [image(*SEQUENCE), image(*SEQUENCE)])


def test_sparse_gradients_of_an_embedding(check: Callable[..., None]):
    check(nn.Sequential(nn.Embedding(10, 6, sparse=True), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()), [tokens()])


def test_autocast_outside(check: Callable[..., None]):
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Residual()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    module = Outside()
    with torch.autocast("cpu", torch.bfloat16):
        check(module, [image()])
