"""The pre-activation ResNets of the RevNet paper (revnet-public), which neither timm nor torchvision has."""

from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.layers.convolution import UnitLayout, build_batch_norm, build_preactivated_unit, build_shortcut
from revzoo.parts.stems.convolution import ConvStem


class ResNetLayout(NamedTuple):
    """The hyperparameters of one ResNet.

    Args:
        depths: number of residual blocks in each stage.
        widths: channels of the stem, then of each stage.
        layout: layout of the convolutions in a block.
        shrinks: whether the stem downsamples images by 4, as for ImageNet.
    """

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    layout: UnitLayout
    shrinks: bool = False


# Source: revnet-public resnet/configs/cifar_configs.py and imagenet_configs.py; widths of bottlenecks are 4 times those there.
RESNETS = {
    "resnet_32": ResNetLayout((5, 5, 5), (16, 16, 32, 64), "basic"),
    "resnet_110": ResNetLayout((18, 18, 18), (16, 16, 32, 64), "basic"),
    "resnet_164": ResNetLayout((18, 18, 18), (16, 64, 128, 256), "bottleneck"),
    "resnet_50": ResNetLayout((3, 4, 6, 3), (64, 256, 512, 1024, 2048), "bottleneck", True),
    "resnet_101": ResNetLayout((3, 4, 23, 3), (64, 256, 512, 1024, 2048), "bottleneck", True),
}


class ResNet(nn.Module):
    """Build a ResNet from the stem, branches and shortcuts of revzoo's RevNet, with one stream instead of two.

    Shapes: (B, C, H, W) -> (B, outputs).
    Args:
        layout: depths, widths and layout of the blocks.
        channels: C.
        size: H and W, divisible by 4, or by 32 if the stem shrinks.
        outputs: number of classes.
    Source: He et al. 2016, "Identity Mappings in Deep Residual Networks", as in revnet-public `resnet_model.py`.
    """

    def __init__(self, layout: ResNetLayout, channels: int, size: tuple[int, ...], outputs: int):
        super().__init__()
        width, *widths = layout.widths
        context = BuildContext(Shape(channels, size, "image"), channels)
        large = layout.shrinks
        self.stem = ConvStem(context, width=width, kernel=7 if large else 3, stride=2 if large else 1, pool=large)
        self.blocks = nn.ModuleList()
        for stage, (depth, out_width) in enumerate(zip(layout.depths, widths, strict=True)):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                self.blocks.append(_Block(width, out_width, stride, layout.layout, preactivate=len(self.blocks) > 0))
                width = out_width
        self.norm = build_batch_norm(width, momentum=0.01)
        self.linear = nn.Linear(width, outputs)
        self._checkpoints = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only the input of every block for backward, as timm's networks do; running statistics move twice in a step."""
        self._checkpoints = enable

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._checkpoints else block(x)
        return self.linear(self.norm(x).mean((2, 3)))


class _Block(nn.Module):
    def __init__(self, width: int, out_width: int, stride: int, layout: UnitLayout, preactivate: bool):
        super().__init__()
        self.f = build_preactivated_unit(width, out_width, layout=layout, stride=stride, preactivate=preactivate)
        self.shortcut = build_shortcut(width, out_width, stride, layout)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.f(x)
