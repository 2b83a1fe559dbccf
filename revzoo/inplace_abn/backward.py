"""The arithmetic of the backward of an in-place ABN, part by part."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from revzoo.device import can_read_now

_PART = 2**17  # elements: five such tensors nearly stay in a CPU's cache of 2 MiB; of half the size, Python's own time shows
_MOST_PARTS = 16  # on other devices, where every part starts kernels
_IMAGES = ("gradient", "y", "xhat")
_Gradients = tuple[Tensor | None, Tensor, Tensor]


@dataclass
class Backward:
    """Computes the gradient of act(BatchNorm(x)) from y, part by part.

    From z = act^-1(y) follows xhat = (z - shift) factor. With means over everything but channels,

        dx = scale (dz - mean(dz) - xhat mean(dz xhat)),   the gradient of weight: sum(dz xhat),   of bias: sum(dz)

    This is the backward of a BatchNorm with input z, mean `shift` and deviation 1 / `factor`.

    Args:
        slope: of act, on its negative side.
        gradient: of y.
        y: the output.
        channels: those whose xhat is kept, in ascending order; it takes the place of z. None: all, if there is an `xhat`.
        xhat: of these channels.
        shift: the bias of each channel; 0 where xhat is kept.
        factor: 1 / weight of each channel; 1 where xhat is kept.
        scale: weight / deviation of each channel.
        needs_x: whether dx is asked for.
    """

    slope: float
    gradient: Tensor
    y: Tensor
    channels: Tensor | None
    xhat: Tensor | None
    shift: Tensor
    factor: Tensor
    scale: Tensor
    needs_x: bool

    def run(self) -> _Gradients:
        """Return dx, and the gradients of weight and bias."""
        y = self.y
        size = _PART if y.is_cpu or y.is_meta else max(_PART, y.numel() // _MOST_PARTS)
        if y.numel() <= size and y.dtype == self.shift.dtype:
            return self._run_whole()
        dx = torch.empty_like(y) if self.needs_x else None
        if read_format(y) is torch.contiguous_format:
            dweight, dbias = self._run_channels(max(size * y.size(1) // y.numel(), 1), dx)
        else:
            lined = replace(self, **{name: _line_up(getattr(self, name)) for name in _IMAGES})
            dweight, dbias = lined._run_places(max(size // y.size(1), 1), _line_up(dx))
        return dx, dweight, dbias

    def _run_whole(self) -> _Gradients:
        dz, z = self._rebuild()
        weight = self.scale / self.factor
        return _differentiate_norm(dz, z, weight, self.shift, self.factor, self.needs_x)

    def _run_channels(self, size: int, dx: Tensor | None) -> tuple[Tensor, Tensor]:
        """Take `size` channels after the other: none needs another one, so all is computed while a part is in the cache."""
        weak, later = self._locate_weak(size)
        sums = []
        for start in range(0, self.y.size(1), size):
            part = slice(start, start + size)
            few = slice(bisect_left(weak, start), bisect_left(weak, start + size))
            dx_part, *each = self._take_channels(part, few)._run_whole()
            sums.append(each)
            if dx is not None and dx_part is not None:
                dx[:, part] = dx_part
            del dx_part  # before the next ones come
        dweight, dbias = (torch.cat(each) for each in zip(*sums, strict=True))
        for channels, few in later:
            dx_part, *each = self._take_kept(channels, few)._run_whole()
            dweight[channels], dbias[channels] = each
            if dx is not None and dx_part is not None:
                dx[:, channels] = dx_part
        return dweight, dbias

    def _locate_weak(self, size: int) -> tuple[Sequence[int], Iterable[tuple[Tensor, slice]]]:
        """Return the channels that keep xhat, if the host knows them; else parts of them, which come once more later."""
        if self.channels is None:
            return (), ()
        if len(self.channels) == self.y.size(1):
            return range(self.y.size(1)), ()
        if can_read_now(self.channels):
            return self.channels.tolist(), ()
        parts = [slice(start, start + size) for start in range(0, len(self.channels), size)]
        return (), ((self.channels[part], part) for part in parts)

    def _run_places(self, size: int, dx: Tensor | None) -> tuple[Tensor, Tensor]:
        """Take `size` places of the images after the other, where channels lie side by side: first for sums, then for dx."""
        dweight, dbias = torch.zeros_like(self.shift), torch.zeros_like(self.shift)
        parts = [slice(start, start + size) for start in range(0, self.y.size(2), size)]
        for part in parts:
            dz_part, z = self._take_places(part)._rebuild()
            _, *sums = _differentiate_norm(dz_part, z, None, self.shift, self.factor, needs_x=False)
            dweight += sums[0]
            dbias += sums[1]
            if dx is not None:
                dx[:, :, part] = dz_part
            del dz_part, z  # before the next ones come
        if dx is not None:
            n = self.y.numel() // self.y.size(1)
            slope = -self.scale * self.factor * dweight / n
            shift = -self.scale * dbias / n - slope * self.shift
            scale, slope, shift = (spread(each, self.y) for each in (self.scale, slope, shift))
            for part in parts:
                z = self._take_places(part)._rebuild_z()
                dx[:, :, part] = torch.addcmul(shift, z, slope, out=z).addcmul_(dx[:, :, part], scale)
                del z
        return dweight, dbias

    def _take_channels(self, part: slice, few: slice) -> "Backward":
        """Return the part of this work for some channels; those at `few` of `channels` are among them."""
        channels, xhat = None, None
        if self.channels is not None and self.xhat is not None and few.start < few.stop:
            channels, xhat = self.channels[few] - part.start, self.xhat[:, few]
        known = self.shift[part], self.factor[part], self.scale[part], self.needs_x
        return Backward(self.slope, self.gradient[:, part], self.y[:, part], channels, xhat, *known)

    def _take_kept(self, channels: Tensor, few: slice) -> "Backward":
        """Return the part for channels that keep xhat, at `few` of all that do: the rest of z is not needed."""
        assert self.xhat is not None
        known = self.shift[channels], self.factor[channels], self.scale[channels], self.needs_x
        kept = self.xhat[:, few]
        return Backward(self.slope, self.gradient[:, channels], self.y[:, channels], None, kept, *known)

    def _take_places(self, part: slice) -> "Backward":
        return replace(self, **{name: x[:, :, part] for name in _IMAGES if (x := getattr(self, name)) is not None})

    def _rebuild(self) -> tuple[Tensor, Tensor]:
        """Return dz, and z in new memory."""
        z = self._rebuild_z()
        dz = torch.ops.aten.leaky_relu_backward(self.gradient.to(z.dtype), self.y.to(z.dtype), self.slope, True)
        return dz.contiguous(memory_format=read_format(z)), z

    def _rebuild_z(self) -> Tensor:
        if self.channels is None and self.xhat is not None:  # of all channels
            return self.xhat.to(self.shift.dtype)
        z = F.leaky_relu(self.y.to(self.shift.dtype), 1 / self.slope)
        if self.channels is not None and self.xhat is not None:
            z.index_copy_(1, self.channels, self.xhat.to(z.dtype))
        return z


def _differentiate_norm(
    dz: Tensor, z: Tensor, weight: Tensor | None, mean: Tensor, factor: Tensor, needs_x: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of the input, if it is needed, of weight and of bias of the BatchNorm weight (z - mean) factor."""
    mask = [needs_x, True, True]
    gradients = torch.ops.aten.native_batch_norm_backward(dz, z, weight, None, None, mean, factor, True, 0.0, mask)
    return cast(tuple[Tensor | None, Tensor, Tensor], gradients)


def read_format(y: Tensor) -> torch.memory_format:
    """Return the order of the elements of y; a tensor that has both is contiguous."""
    is_last = y.dim() == 4 and not y.is_contiguous() and y.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


def _line_up(images: Tensor | None) -> Any:
    """Return images in channels_last as one image of one column: (B, C, H, W) -> (1, C, B H W, 1), without a copy."""
    if images is None:
        return None
    places = images.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    return places.reshape(1, -1, 1, images.size(1)).permute(0, 3, 1, 2)


def spread(values: Tensor, x: Tensor) -> Tensor:
    """Return values of channels in the shape that multiplies x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
