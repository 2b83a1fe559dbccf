"""Bijections: parameter-free maps between steps, which are inverted exactly and store nothing."""

from torch import Tensor, nn
from torch.nn import functional as F

from revzoo.errors import InputError


class Bijection(nn.Module):
    """A parameter-free map of one stream with an exact inverse.

    A chain applies it to both streams and inverts it in backward. `forward` must consist of operations that save no tensor for
    backward (views, permutations, copies). `forward` and `inverse` should return contiguous tensors: a rebuilt state needs the
    strides of the first run, and is copied where `inverse` returns others.

    If it makes the first half of the output's channels from the first half of the input's, it may say so with
    `is_channelwise = True`. Among layers (`revzoo/invertible.py`) it is then run on one half after the other.
    """

    def inverse(self, y: Tensor) -> Tensor:
        """Return x such that `self(x)` is y, bit for bit."""
        raise TypeError(f"{type(self).__name__} does not define inverse(y).")


class _Folding(Bijection):
    """The base of bijections that take `block` x `block` squares of pixels apart."""

    def __init__(self, block: int = 2):
        super().__init__()
        self.block = block

    def _cut(self, x: Tensor) -> Tensor:
        """Return a view of images (B, C, H, W) as squares, (B, C, H / block, dy, W / block, dx)."""
        H, W = x.shape[-2:]
        if H % self.block or W % self.block:
            raise InputError(
                f"Pooling takes whole squares of {self.block} x {self.block} pixels. Received: {H} x {W} pixels. Pad or crop "
                "the image, or pool less often."
            )
        return x.unflatten(3, (-1, self.block)).unflatten(2, (-1, self.block))


def _join(squares: Tensor) -> Tensor:
    """Return images of such squares; of 1x1 pixels, the flattened tensor is a channels-last view."""
    return squares.flatten(4, 5).flatten(2, 3).contiguous()


class SpaceToDepth(_Folding):
    """Fold each `block` x `block` square of pixels into the channels.

    Shapes: (B, C, H, W) -> (B, block^2 C, H / block, W / block), H and W divisible by block.
    Source: i-RevNet (Jacobsen et al. 2018), psi; output channel is (dy * block + dx) * C + c, which is not the order
        of `torch.nn.PixelUnshuffle`.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self._cut(x).permute(0, 3, 5, 1, 2, 4).flatten(1, 3).contiguous()

    def inverse(self, y: Tensor) -> Tensor:
        return _join(y.unflatten(1, (self.block, self.block, -1)).permute(0, 3, 4, 1, 5, 2))


class PixelUnshuffle(_Folding):
    """Fold each `block` x `block` square of pixels into channels next to the one they come from.

    Half of the output comes from half of the input, which `SpaceToDepth` mixes: among layers it needs half as much memory.

    Shapes: (B, C, H, W) -> (B, block^2 C, H / block, W / block), H and W divisible by block.
    Source: channel pooling of Hascoet et al. 2023, section 4.2.4; output channel is c * block^2 + dy * block + dx, as that of
        `torch.nn.PixelUnshuffle`.
    """

    is_channelwise = True

    def forward(self, x: Tensor) -> Tensor:
        return self._cut(x).permute(0, 1, 3, 5, 2, 4).flatten(1, 3).contiguous()

    def inverse(self, y: Tensor) -> Tensor:
        return F.pixel_shuffle(y, self.block).contiguous()


class SpaceToBatch(_Folding):
    """Stack the pixels of each `block` x `block` square along the batch, which keeps the number of channels.

    Shapes: (B, C, H, W) -> (block^2 B, C, H / block, W / block), H and W divisible by block. Example b gives the outputs
        (dy * block + dx) * B + b, so `y.unflatten(0, (block**2, -1))` is (block^2, B, C, H / block, W / block).
    Source: batch pooling of Hascoet et al. 2023, section 4.2.4; the order is that of `SpaceToDepth`.
    """

    is_channelwise = True

    def forward(self, x: Tensor) -> Tensor:
        return self._cut(x).permute(3, 5, 0, 1, 2, 4).flatten(0, 2).contiguous()

    def inverse(self, y: Tensor) -> Tensor:
        return _join(y.unflatten(0, (self.block, self.block, -1)).permute(2, 3, 4, 0, 5, 1))
