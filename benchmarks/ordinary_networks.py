"""Ordinary networks, none of them reversible, whose plans are measured beside their rivals."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import revzoo


@dataclass(frozen=True)
class Network:
    """One network.

    Args:
        make: returns it, in training.
        batch: what it is called with.
        blocks: pattern of the names of its blocks, each of which `torch.utils.checkpoint` is put around.
        to_reach: points that a plan should reach: fraction of the stored peak, FLOPs over stored.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    blocks: str
    to_reach: tuple[tuple[float, float], ...] = ()


class UNet(nn.Module):
    """A U-Net of four levels with skips."""

    def __init__(self, width: int = 32, levels: int = 4):
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(_make_pair(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(_make_pair(a + b, a) for a, b in reversed(list(pairwise(widths))))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level in self.down[:-1]:
            x = level(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.down[-1](x)
        for level in self.up:
            x = level(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return self.head(x)


class PlainRevNet(nn.Module):
    """RevNet-104 as a plain module: the same functions, called without the chain."""

    def __init__(self) -> None:
        super().__init__()
        model = revzoo.create("revnet_104")
        self.stem, self.split, self.stages, self.fuse, self.head = model.stem, model.split, model.stages, model.fuse, model.head

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = self.split(self.stem(x))
        for stage in self.stages:
            x1, x2 = stage.transition(x1, x2)
            for block in stage.blocks:
                x1 = x1 + block.f(x2)
                x2 = x2 + block.g(x1)
        return self.head(self.fuse(x1, x2))


def _make_pair(width: int, out: int) -> nn.Module:
    convs = (nn.Conv2d(width, out, 3, padding=1, bias=False), nn.Conv2d(out, out, 3, padding=1, bias=False))
    return nn.Sequential(convs[0], nn.BatchNorm2d(out), nn.ReLU(True), convs[1], nn.BatchNorm2d(out), nn.ReLU(True))


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    import timm

    return lambda: timm.create_model(name, **options)


def _make_bert(layers: int = 12) -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(num_hidden_layers=layers), add_pooling_layer=False)


def _make_llama(layers: int = 24) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8, "vocab_size": 8192}
    return LlamaModel(LlamaConfig(num_hidden_layers=layers, use_cache=False, **sizes))


def list_networks(quick: bool) -> dict[str, Network]:
    """Return the networks by name."""
    if quick:
        return {
            "resnet18": Network(_timm("resnet18"), lambda: torch.zeros(2, 3, 64, 64), r"layer\d\.\d"),
            "bert": Network(lambda: _make_bert(1), lambda: torch.zeros(2, 16, dtype=torch.long), r"encoder\.layer\.\d+"),
        }

    def images() -> Tensor:
        return torch.zeros(64, 3, 224, 224)

    def tokens() -> Tensor:
        return torch.zeros(16, 512, dtype=torch.long)

    blocks, layers = r"blocks\.\d+", r"(encoder\.)?layers?\.\d+"
    return {
        "resnet50": Network(
            _timm("resnet50"), images, r"layer\d\.\d+", ((0.5, 1.0127), (0.4, 1.0307), (0.3, 1.0837), (0.238, 1.179))
        ),
        "vit_small": Network(
            _timm("vit_small_patch16_224"),
            images,
            blocks,
            ((0.6, 1.0), (0.5, 1.0459), (0.4, 1.0917), (0.3, 1.1376), (0.13, 1.243)),
        ),
        "densenet121": Network(
            _timm("densenet121"),
            images,
            r"features\.denseblock\d+\.denselayer\d+",
            ((0.3, 1.0), (0.2, 1.0214), (0.1427, 1.0605)),
        ),
        "convnext_tiny": Network(_timm("convnext_tiny"), images, r"stages\.\d+\.blocks\.\d+", ((0.4, 1.0169), (0.3, 1.043))),
        "bert_base": Network(_make_bert, tokens, layers, ((0.4, 1.0833), (0.3, 1.1366), (0.2, 1.1991))),
        "unet": Network(UNet, lambda: torch.zeros(8, 3, 256, 256), r"(down|up)\.\d+", ((0.6, 1.0016), (0.4, 1.0999))),
        "llama": Network(_make_llama, tokens, layers, ((0.4, 1.0683), (0.3, 1.1256), (0.2, 1.183))),
        "vgg16": Network(_timm("vgg16"), images, "features", ((0.7, 1.0019), (0.6, 1.0218))),
        "vit_small_24_blocks": Network(
            _timm("vit_small_patch16_224", depth=24),
            images,
            blocks,
            ((0.6, 1.0292), (0.5, 1.071), (0.4, 1.1106), (0.3, 1.1524), (0.2, 1.1945), (0.15, 1.2345), (0.125, 1.3538)),
        ),
        "revnet_104": Network(
            PlainRevNet,
            images,
            r"stages\.\d+\.blocks\.\d+\.[fg]",
            ((0.5457, 1.0), (0.5297, 1.0), (0.4843, 1.0065), (0.4786, 1.0071), (0.36, 1.0726)),
        ),
        "resnet152": Network(_timm("resnet152"), images, r"layer\d\.\d+", ((0.3, 1.0546), (0.15, 1.1814))),
    }
