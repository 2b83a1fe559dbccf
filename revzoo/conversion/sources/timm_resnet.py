"""timm's ResNet: each block that keeps width and size becomes an f, and every tensor keeps its values.

The first block of a layer changes width or size and becomes a transition. The other blocks become reversible steps. With the
momentum and dual_residual couplings f is the whole block, including its residual and ReLU; with the additive coupling it is
ReLU(unit(x)), as in Re2TAL.
"""

from collections.abc import Sequence
from typing import Any

from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn

from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.mapping import TensorMapping
from revzoo.conversion.sources.base import Tensors
from revzoo.conversion.sources.tensors import add_batch_counts
from revzoo.conversion.sources.timm_base import TimmSource, read_rate

_LAYERS = ("layer1", "layer2", "layer3", "layer4")
_LAYOUTS: dict[type[nn.Module], str] = {BasicBlock: "basic", Bottleneck: "bottleneck"}
_POOLS = {"avg": "mean", "max": "max"}
_SIZE = (3, 224, 224)  # of images, if the original has no pretrained_cfg


class TimmResNet(TimmSource):
    """Convert `timm.models.resnet.ResNet` that begins with one 7x7 convolution: ResNet v1.5, ResNeXt, Wide ResNet.

    A ResNet takes images of any size; the spec has the size of the original's `pretrained_cfg`, or 224. Refused by name: deep
    stems, attention in blocks (SE), anti-aliasing, dilation, averaging shortcuts, other norms and activations, and layers
    without a block that keeps width and size.

    Source: timm `resnet.py`; torchvision's names are the same.
    """

    name = "timm ResNet"
    network_class, block_classes, family = ResNet, tuple(_LAYOUTS), "rev_resnet"
    has_branches, drops_transitions = False, True

    def canonicalise(self, network: Any, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors, and 0 for the counts of batches that files from before PyTorch 0.4.1 lack."""
        return add_batch_counts(tensors)

    def map_tensors(self, network: Any) -> Sequence[TensorMapping]:
        """Return the mapping of every tensor."""
        rules = {r"(conv1|bn1)\b": r"stem.\1", r"fc\b": "head.linear"}
        for i, name in enumerate(_LAYERS):
            first = 0 if getattr(network, name)[0].downsample is None else 1
            for j in range(len(getattr(network, name))):
                place = f"blocks.{j - first}.f" if j >= first else "transition"
                rules[rf"{name}\.{j}\b"] = f"stages.{i}.{place}"
        return self._rename_keys(network.state_dict(), rules)

    def check(self, resnet: ResNet) -> None:
        """Raise ConversionError for stems, norms, activations and pooling that a spec does not have."""
        self._require_classifier(resnet.fc)
        conv, pool = resnet.conv1, resnet.maxpool
        self._refuse({"a deep stem (stem_type)": not isinstance(conv, nn.Conv2d)})
        pools = isinstance(pool, nn.MaxPool2d) and (pool.kernel_size, pool.stride, pool.padding) == (3, 2, 1)
        self._refuse(
            {
                "a stem that is not a 7x7 convolution of stride 2": not _is_conv(conv, 7, 2),
                "a pooling in the stem that is not 3x3 with stride 2 (replace_stem_pool, aa_layer)": not pools,
                f"pooling {resnet.global_pool.pool_type!r} (global_pool)": resnet.global_pool.pool_type not in _POOLS,
            }
        )
        norms = [norm for norm in resnet.modules() if isinstance(norm, nn.BatchNorm2d)]
        norms += [norm for block in self.list_blocks(resnet) for norm in (block.bn1, block.bn2)]
        kinds = {type(norm).__name__ for norm in [resnet.bn1, *norms] if type(norm) is not nn.BatchNorm2d}
        self._refuse({f"norms of class {', '.join(sorted(kinds))}": kinds})
        self._refuse({"BatchNorm with an eps other than 1e-5": any(norm.eps != 1e-5 for norm in norms)})
        self._refuse({"BatchNorm without momentum": any(norm.momentum is None for norm in norms)})
        kinds = {
            type(act).__name__ for block in self.list_blocks(resnet) for act in (block.act1, block.act2) if not _is_relu(act)
        }
        self._refuse({f"the activation {', '.join(sorted(kinds))} (not ReLU)": kinds or not _is_relu(resnet.act1)})

    def list_blocks(self, resnet: Any) -> list[Any]:
        """Return every block."""
        return [block for layer in _LAYERS for block in getattr(resnet, layer)]

    def list_rates(self, resnet: Any) -> list[float]:
        """Return the rate of drop path of every block."""
        return [read_rate(block.drop_path) for block in self.list_blocks(resnet)]

    def find_input(self, resnet: Any) -> tuple[nn.Conv2d, Sequence[int]]:
        """Return the first convolution, and height and width of images."""
        return resnet.conv1, (getattr(resnet, "pretrained_cfg", None) or {}).get("input_size", _SIZE)[1:]

    def describe_stem(self, resnet: Any) -> dict[str, Any]:
        """Return the spec of the first convolution and the pooling."""
        return {"type": "resnet", "momentum": resnet.bn1.momentum}

    def describe_stages(self, resnet: Any, choice: CouplingChoice) -> list[dict[str, Any]]:
        """Return the spec of every layer, whose first block is a transition if it changes width or size."""
        return [self._describe_stage(name, getattr(resnet, name), choice) for name in _LAYERS]

    def describe_head(self, resnet: Any) -> dict[str, Any]:
        """Return the spec of the pooling and the classifier."""
        pool, outputs = _POOLS[resnet.global_pool.pool_type], resnet.num_classes
        return {"type": "pooled_linear", "pool": pool, "dropout": resnet.drop_rate, "outputs": outputs}

    def _describe_stage(self, name: str, layer: Any, choice: CouplingChoice) -> dict[str, Any]:
        first, parts = layer[0], [self._describe_unit(block) for block in layer]
        depth = len(layer) - (first.downsample is not None)
        self._refuse({f"a {name} whose only block changes the width or the size, so that none is reversible": not depth})
        unit = self._require_same(f"blocks of {name}", parts[-depth:])
        stage = {
            "depth": depth,
            "width": layer[-1].get_submodule(f"conv{2 if unit['layout'] == 'basic' else 3}").out_channels,
            "f": {"type": "residual_unit", "residual": not choice.is_additive, **unit},
        }
        if first.downsample is None:
            return stage
        return {**stage, "transition": {"type": "residual_block", "fuse": choice.fuse, "stride": first.stride, **parts[0]}}

    def _describe_unit(self, block: Any) -> dict[str, Any]:
        layout, down = _LAYOUTS[type(block)], block.downsample
        plain = down is None or (len(down) == 2 and _is_conv(down[0], 1, block.stride))
        widths = block.conv1.out_channels, block.conv2.out_channels
        self._refuse(
            {
                "attention in its blocks (attn_layer, such as SE)": block.se is not None,
                "anti-aliasing (aa_layer)": not isinstance(block.aa, nn.Identity),
                "drop_block_rate": not isinstance(block.drop_block, nn.Identity),
                "dilation (output_stride)": block.conv2.dilation != (1, 1) or block.conv1.dilation != (1, 1),
                "shortcuts that average or have larger kernels (avg_down, down_kernel_size)": not plain,
                "a narrower first convolution (block_reduce_first)": layout == "bottleneck" and widths[0] != widths[1],
            }
        )
        return {"layout": layout, "middle": widths[0], "groups": block.conv2.groups, "momentum": block.bn1.momentum}


def _is_conv(conv: nn.Module, kernel: int, stride: int) -> bool:
    expected = ((kernel, kernel), (stride, stride), (kernel // 2, kernel // 2), (1, 1))
    return isinstance(conv, nn.Conv2d) and (conv.kernel_size, conv.stride, conv.padding, conv.dilation) == expected


def _is_relu(act: nn.Module) -> bool:
    return type(act) is nn.ReLU
