"""BatchNorm and activation as one layer that keeps its output alone: in-place activated BatchNorm (ABN).

A BatchNorm keeps its input x for backward, and the convolution after the activation keeps the activation's output y: two
tensors of one size. Where the activation can be undone, y is enough. From it, backward rebuilds what BatchNorm needs:

    y = act(z + shortcut),  z = weight * xhat + bias    =>    z = act^-1(y) - shortcut,  xhat = (z - bias) / weight

The shortcut is 0, or what a residual block adds before its activation: the output of another layer, which a convolution keeps.
So x is freed as soon as nobody else holds it; a convolution does not keep its output. "In place" is meant in this sense:
no tensor is overwritten that somebody else could read.

The function is that of BatchNorm and activation, also where a weight is negative or 0. Where a weight is so small that xhat
would drown in the rounding of z, or ELU has flattened z, the normalised input of that channel is kept (`_find_weak_channels`).
This reads numbers on the host, so a GPU waits once per call.

Backward takes one new tensor of the size of x, one more for the gradient of a shortcut, and three temporaries of the size of
some channels (`_PART`). Channels are independent, so all of a part is computed while it is in the cache.

Source: Rota Bulo et al. 2018, "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", section 3. Differs from it:
there the scale is |weight| + eps, which changes the function of trained weights.
"""

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.jit._trace import is_tracing
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase

from revzoo.activation import Activation
from revzoo.errors import InputError
from revzoo.invertible import make_eval_mode_error, refuse_one_value
from revzoo.noise import compute_norm_alpha

_PART = 2**17  # elements: five such tensors nearly stay in a CPU's cache of 2 MiB; of half the size, Python's own time shows
_MOST_PARTS = 16  # on other devices, where every part starts kernels
_TOLERANCE = 1e-4  # of xhat, where the dtype allows it


@contextmanager
def scale_parts(factor: float) -> Iterator[None]:
    """Let every part be larger or smaller inside the block, so that two batches of different sizes have as many of them."""
    global _PART
    before, _PART = _PART, int(_PART * factor)
    try:
        yield
    finally:
        _PART = before


@dataclass
class Normalised:
    """What BatchNorm makes of a batch, as `activate` needs it.

    Args:
        z: the output of BatchNorm plus shortcut, outside of autograd. It becomes the output of the activation.
        mean: of each channel of x.
        inverse_deviation: 1 / sqrt(var + eps) of each channel of x.
        activation: what is computed of z.
        inplace: whether the memory of z may be overwritten.
        layer: the BatchNorm, for whoever reads the graph.
        weak: the channels whose xhat is kept, and this xhat; found by `activate`.
    """

    z: Tensor
    mean: Tensor
    inverse_deviation: Tensor
    activation: Activation
    inplace: bool
    layer: nn.Module
    weak: tuple[Tensor, ...] = field(default=(), init=False)


class InPlaceABN2d(_NormBase):
    """BatchNorm and activation, y = act(weight (x - mean) / sqrt(var + eps) + bias), keeping y alone for backward.

    Use it where y is kept anyway, that is before a convolution. Parameters, buffers and state-dict keys are those of
    `nn.BatchNorm2d`, and so is the function, in training and in eval mode. It is not a `torch.nn.BatchNorm2d`, so that nothing
    takes it for one: `convert_sync_batchnorm` would drop the activation. What a compiled model keeps is up to the compiler.

    Shapes: x: (B, C, H, W); returns the same.
    Args:
        channels: C.
        activation: leaky_relu, elu or identity. ReLU cannot be undone.
        slope: of leaky_relu's negative side, or the alpha of elu, > 0.
        eps: added to the variance.
        momentum: weight of the batch in the running statistics; None averages over all batches.
        affine: whether there are weight and bias.
        track_running_stats: whether there are running statistics. Without them eval mode takes the batch's.
    Raises:
        InputError: an activation that cannot be undone, one value per channel; in backward, create_graph=True.
    Source: Rota Bulo et al. 2018, "In-Place Activated BatchNorm", figure 2d.
    """

    def __init__(
        self,
        channels: int,
        activation: Literal["leaky_relu", "elu", "identity"] = "leaky_relu",
        slope: float = 0.01,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ):
        super().__init__(channels, eps, momentum, affine, track_running_stats)
        self.activation = Activation(activation, slope)

    def forward(self, x: Tensor) -> Tensor:
        if can_keep_output(self, x):
            return self._activate(x)[0]
        statistics, momentum = _begin_batch(self)
        z = F.batch_norm(x, *statistics, self.weight, self.bias, uses_batch(self), momentum, self.eps)
        return self.activation(z)

    def forward_keeping(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return y, mean and 1 / sqrt(var + eps) of each channel, and the channels whose normalised input is kept, with it."""
        if not uses_batch(self):
            raise make_eval_mode_error()
        y, normalised = self._activate(x)
        return y, normalised.mean, normalised.inverse_deviation, *normalised.weak

    @torch.no_grad()
    def inverse(self, y: Tensor, mean: Tensor, inverse_deviation: Tensor, *weak: Tensor) -> Tensor:
        """Return x from y and what `forward_keeping` returns behind it."""
        x = self.activation.undo(y)
        factor = inverse_deviation.reciprocal()
        shift = mean
        if self.weight is not None:
            factor = factor / self.weight
            shift = mean - self.bias * factor
        x = torch.addcmul(_spread(shift, x), x, _spread(factor, x), out=x)
        if weak:
            channels, xhat = weak
            kept = torch.addcmul(_spread(mean[channels], x), xhat, _spread(inverse_deviation[channels].reciprocal(), x))
            x.index_copy_(1, channels, kept.to(x.dtype))
        return x

    def alpha(self, y: Tensor, mean: Tensor, inverse_deviation: Tensor, *weak: Tensor) -> Tensor:
        """Return the product of BatchNorm's alpha and that of the activation."""
        scale, bias = torch.ones_like(mean), torch.zeros_like(mean)
        if self.weight is not None:
            scale, bias = self.weight.detach(), self.bias.detach()
        alpha = compute_norm_alpha(mean, inverse_deviation, scale, bias, noiseless=weak[0] if weak else None)
        return alpha * self.activation.alpha(y)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation.name}, slope={self.activation.slope:g}"

    def _activate(self, x: Tensor) -> tuple[Tensor, Normalised]:
        with torch.no_grad():
            z, mean, inverse_deviation = normalise(self, x)
        normalised = Normalised(z, mean, inverse_deviation, self.activation, inplace=True, layer=self)
        return activate(normalised, x, self.weight, self.bias), normalised

    def _check_input_dim(self, input: Tensor) -> None:
        pass


def uses_batch(layer: _NormBase) -> bool:
    """Return whether a BatchNorm uses the statistics of the batch."""
    return layer.training or layer.running_mean is None or layer.running_var is None


def can_keep_output(layer: _NormBase, x: Tensor) -> bool:
    """Return whether there will be a backward that can rebuild the input of a BatchNorm.

    Not under compilers, tracers, transforms of torch.func and forward-mode derivatives.
    """
    if not (torch.is_grad_enabled() and uses_batch(layer)) or not x.numel():
        return False
    if not (x.requires_grad or (layer.weight is not None and (layer.weight.requires_grad or layer.bias.requires_grad))):
        return False
    if torch.compiler.is_compiling() or is_tracing() or forward_ad._current_level >= 0:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def normalise(layer: _NormBase, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a BatchNorm's output, and mean and 1 / sqrt(var + eps) of each channel of the batch; move its statistics.

    Raises:
        InputError: one value per channel.
    """
    refuse_one_value(x)
    statistics, momentum = _begin_batch(layer)
    z, mean, inverse_deviation = torch.native_batch_norm(x, layer.weight, layer.bias, *statistics, True, momentum, layer.eps)
    return z, mean, inverse_deviation


def activate(
    normalised: Normalised, x: Tensor, weight: Tensor | None, bias: Tensor | None, shortcut: Tensor | None = None
) -> Tensor:
    """Return act(z) with the gradient of act(BatchNorm(x) + shortcut), keeping the result and the shortcut.

    Args:
        normalised: z and the statistics of x. `normalised.weak` is set.
        x: input of BatchNorm, which is not kept.
        weight: of BatchNorm.
        bias: of BatchNorm.
        shortcut: what z has beside BatchNorm's output, or None.
    """
    y: Tensor = InPlaceABNFunction.apply(x, shortcut, weight, bias, normalised)
    return y


class InPlaceABNFunction(torch.autograd.Function):
    """The node of `activate` in the graph, from which can be read: layer, activation, adds_shortcut, weak_channels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shortcut: Tensor | None, weight: Tensor | None, bias: Tensor | None, normalised: Normalised
    ) -> Tensor:
        activation, z = normalised.activation, normalised.z
        channels = _find_weak_channels(normalised, weight, bias, shortcut)
        if channels is not None:
            xhat = x.index_select(1, channels)
            xhat = (xhat - _spread(normalised.mean[channels], x)) * _spread(normalised.inverse_deviation[channels], x)
            normalised.weak = (channels, xhat.to(x.dtype).contiguous(memory_format=_read_format(z)))
        ctx.activation, ctx.layer = activation, normalised.layer
        ctx.adds_shortcut, ctx.weak_channels = shortcut is not None, 0 if channels is None else len(channels)
        y = activation(z, normalised.inplace)
        normalised.z = y
        weak = normalised.weak or (None, None)
        ctx.save_for_backward(y, shortcut, weight, bias, normalised.inverse_deviation, *weak)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise InputError(
                "An in-place ABN has no second derivative: its input is gone. Received: create_graph=True. Use nn.BatchNorm2d "
                "and the activation as two layers."
            )
        (gradient,) = gradients
        activation = ctx.activation
        y, shortcut, weight, bias, inverse_deviation, channels, xhat = ctx.saved_tensors
        needs_x, needs_shortcut, *needs_parameters, _ = ctx.needs_input_grad
        if not (needs_x or any(needs_parameters)):
            return None, activation.differentiate(gradient, y), None, None, None
        own_dtype = None if weight is None else weight.dtype
        dtype = torch.promote_types(inverse_deviation.dtype, torch.float32)
        inverse_deviation = inverse_deviation.to(dtype)
        weight = torch.ones_like(inverse_deviation) if weight is None else weight.to(dtype)
        shift = torch.zeros_like(inverse_deviation) if bias is None else bias.to(dtype)
        factor = weight.reciprocal()
        if channels is not None:
            shift, factor = shift.index_fill(0, channels, 0.0), factor.index_fill(0, channels, 1.0)
        scale = weight * inverse_deviation
        backward = _Backward(activation, gradient, y, shortcut, channels, xhat, shift, factor, scale, needs_x, needs_shortcut)
        dx, dz, dweight, dbias = backward.run()
        if own_dtype is None:
            return dx, dz, None, None, None
        return dx, dz, dweight.to(own_dtype), dbias.to(own_dtype), None


_Gradients = tuple[Tensor | None, Tensor | None, Tensor, Tensor]


@dataclass
class _Backward:
    """Computes the gradient of act(BatchNorm(x) + shortcut) from y, part by part.

    From z = act^-1(y) - shortcut follows xhat = (z - shift) factor. With means over everything but channels,

        dx = scale (dz - mean(dz) - xhat mean(dz xhat)),   the gradient of weight: sum(dz xhat),   of bias: sum(dz)

    This is the backward of a BatchNorm with input z, mean `shift` and deviation 1 / `factor`.

    Args:
        activation: act.
        gradient: of y.
        y: the output.
        shortcut: what z has beside BatchNorm's output, or None.
        channels: those whose xhat is kept, in ascending order; it takes the place of z.
        xhat: of these channels.
        shift: the bias of each channel; 0 where xhat is kept.
        factor: 1 / weight of each channel; 1 where xhat is kept.
        scale: weight / deviation of each channel.
        needs_x: whether dx is asked for.
        needs_shortcut: whether dz is asked for.
    """

    activation: Activation
    gradient: Tensor
    y: Tensor
    shortcut: Tensor | None
    channels: Tensor | None
    xhat: Tensor | None
    shift: Tensor
    factor: Tensor
    scale: Tensor
    needs_x: bool
    needs_shortcut: bool

    def run(self) -> _Gradients:
        """Return dx, dz, and the gradients of weight and bias."""
        y = self.y
        size = _PART if y.is_cpu or y.is_meta else max(_PART, y.numel() // _MOST_PARTS)
        if y.numel() <= size and y.dtype == self.shift.dtype:
            dx, dz, dweight, dbias = self._run_whole()
            return dx, dz if self.needs_shortcut else None, dweight, dbias
        is_new = self.needs_shortcut and self.activation.name != "identity"
        dz = torch.empty_like(y) if is_new else None
        dx = torch.empty_like(y) if self.needs_x else None
        if _read_format(y) is torch.contiguous_format:
            dweight, dbias = self._run_channels(max(size * y.size(1) // y.numel(), 1), dz, dx)
        else:
            names = ("gradient", "y", "shortcut", "xhat")
            lined = replace(self, **{name: _line_up(getattr(self, name)) for name in names})
            dweight, dbias = lined._run_places(max(size // y.size(1), 1), _line_up(dz), _line_up(dx))
        return dx, dz if is_new or not self.needs_shortcut else self.gradient, dweight, dbias

    def _run_whole(self) -> _Gradients:
        dz, z = self._rebuild()
        weight = self.scale / self.factor
        dx, dweight, dbias = _differentiate_norm(dz, z, weight, self.shift, self.factor, self.needs_x)
        return dx, dz, dweight, dbias

    def _run_channels(self, size: int, dz: Tensor | None, dx: Tensor | None) -> tuple[Tensor, Tensor]:
        """Take `size` channels after the other: none needs another one, so all is computed while a part is in the cache."""
        weak = [] if self.channels is None else self.channels.tolist()
        sums = []
        for start in range(0, self.y.size(1), size):
            part = slice(start, start + size)
            few = slice(bisect_left(weak, start), bisect_left(weak, start + size))
            dx_part, dz_part, *each = self._take_channels(part, few)._run_whole()
            sums.append(each)
            if dz is not None and dz_part is not None:
                dz[:, part] = dz_part
            if dx is not None and dx_part is not None:
                dx[:, part] = dx_part
            del dx_part, dz_part  # before the next ones come
        dweight, dbias = (torch.cat(each) for each in zip(*sums, strict=True))
        return dweight, dbias

    def _run_places(self, size: int, dz: Tensor | None, dx: Tensor | None) -> tuple[Tensor, Tensor]:
        """Take `size` places of the images after the other, where channels lie side by side: first for sums, then for dx."""
        dweight, dbias = torch.zeros_like(self.shift), torch.zeros_like(self.shift)
        buffer = dx if dz is None else dz
        parts = [slice(start, start + size) for start in range(0, self.y.size(2), size)]
        for part in parts:
            dz_part, z = self._take_places(part)._rebuild()
            _, *sums = _differentiate_norm(dz_part, z, None, self.shift, self.factor, needs_x=False)
            dweight += sums[0]
            dbias += sums[1]
            if buffer is not None:
                buffer[:, :, part] = dz_part
            del dz_part, z  # before the next ones come
        if dx is not None and buffer is not None:
            n = self.y.numel() // self.y.size(1)
            slope = -self.scale * self.factor * dweight / n
            shift = -self.scale * dbias / n - slope * self.shift
            scale, slope, shift = (_spread(each, self.y) for each in (self.scale, slope, shift))
            for part in parts:
                z = self._take_places(part)._rebuild_z()
                dx[:, :, part] = torch.addcmul(shift, z, slope, out=z).addcmul_(buffer[:, :, part], scale)
                del z
        return dweight, dbias

    def _take_channels(self, part: slice, few: slice) -> "_Backward":
        """Return the work that some channels are; those at `few` of `channels` are among them."""
        channels = None if self.channels is None or few.start == few.stop else self.channels[few] - part.start
        shortcut = None if self.shortcut is None else self.shortcut[:, part]
        xhat = None if self.xhat is None else self.xhat[:, few]
        known = self.shift[part], self.factor[part], self.scale[part], self.needs_x, self.needs_shortcut
        return _Backward(self.activation, self.gradient[:, part], self.y[:, part], shortcut, channels, xhat, *known)

    def _take_places(self, part: slice) -> "_Backward":
        shortcut = None if self.shortcut is None else self.shortcut[:, :, part]
        xhat = None if self.xhat is None else self.xhat[:, :, part]
        known = self.shift, self.factor, self.scale, self.needs_x, self.needs_shortcut
        gradient, y = self.gradient[:, :, part], self.y[:, :, part]
        return _Backward(self.activation, gradient, y, shortcut, self.channels, xhat, *known)

    def _rebuild(self) -> tuple[Tensor, Tensor]:
        """Return dz, and z in new memory."""
        z = self._rebuild_z()
        dz = self.activation.differentiate(self.gradient.to(z.dtype), self.y.to(z.dtype))
        return dz.contiguous(memory_format=_read_format(z)), z

    def _rebuild_z(self) -> Tensor:
        z = self.activation.undo(self.y.to(self.shift.dtype))
        if self.shortcut is not None:
            z -= self.shortcut
        if self.channels is not None and self.xhat is not None:
            z.index_copy_(1, self.channels, self.xhat.to(z.dtype))
        return z


def _find_weak_channels(
    normalised: Normalised, weight: Tensor | None, bias: Tensor | None, shortcut: Tensor | None
) -> Tensor | None:
    """Return the channels whose xhat cannot be rebuilt well enough; None if there are none.

    Rounding of y, which is of the size of bias and shortcut, is divided by the weight. An error of xhat of `_TOLERANCE` is
    allowed, or where the dtype is too coarse for that, one ulp for half a standard deviation, which the sums still average out.
    """
    z = normalised.z
    if z.is_meta or isinstance(z, FakeTensor):
        return None  # no numbers
    is_weak = normalised.activation.find_lost(z)
    if weight is not None and bias is not None:
        size = 1 + bias.abs()
        if shortcut is not None:
            example = shortcut[0].flatten(1)  # one tells the size
            dtype = torch.promote_types(example.dtype, torch.float32)
            size += torch.linalg.vector_norm(example, dim=1, dtype=dtype) / sqrt(example.size(1))
        is_small = weight.abs() < max(2 * torch.finfo(z.dtype).eps, _TOLERANCE) * size
        is_weak = is_small if is_weak is None else is_weak | is_small
    if is_weak is None:
        return None
    channels = is_weak.nonzero().flatten()
    return channels if channels.numel() else None


def _begin_batch(layer: _NormBase) -> tuple[tuple[Tensor | None, Tensor | None], float]:
    """Count a batch as `nn.BatchNorm2d` does; return the running statistics that are read or moved, and their momentum."""
    momentum = 0.0 if layer.momentum is None else layer.momentum
    if layer.training and layer.track_running_stats and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked)
    if layer.training and not layer.track_running_stats:
        return (None, None), momentum
    return (layer.running_mean, layer.running_var), momentum


def _differentiate_norm(
    dz: Tensor, z: Tensor, weight: Tensor | None, mean: Tensor, factor: Tensor, needs_x: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of the input, if it is needed, of weight and of bias of the BatchNorm weight (z - mean) factor."""
    mask = [needs_x, True, True]
    gradients = torch.ops.aten.native_batch_norm_backward(dz, z, weight, None, None, mean, factor, True, 0.0, mask)
    return cast(tuple[Tensor | None, Tensor, Tensor], gradients)


def _read_format(y: Tensor) -> torch.memory_format:
    is_last = y.dim() == 4 and not y.is_contiguous() and y.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


def _line_up(images: Tensor | None) -> Any:
    """Return images in channels_last as one image of one column: (B, C, H, W) -> (1, C, B H W, 1), without a copy."""
    if images is None:
        return None
    places = images.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    return places.reshape(1, -1, 1, images.size(1)).permute(0, 3, 1, 2)


def _spread(values: Tensor, x: Tensor) -> Tensor:
    """Return values of channels in the shape that multiplies x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
