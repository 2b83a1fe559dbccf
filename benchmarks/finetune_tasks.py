"""Small ordinary networks and their two tasks each, on data that scikit-learn and Python contain.

              first task                             second task
    images    classify the ten digits                classify them when turned by 90 degrees
    text      predict the masked bytes of a text     tell English (the language reference) from program source

Images are shifted by up to a pixel in each direction: at random in training, in all four combinations of 0 and 1 in testing.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from timm.models.resnet import BasicBlock, ResNet
from timm.models.swin_transformer import SwinTransformer, WindowAttention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from revzoo.data.base import IGNORED
from revzoo.data.corpus import read_standard_text

_HELD_OUT = 3  # of each class, every third image is for testing
_CHUNK, _CHUNKS = 1024, 8  # bytes of a chunk; every eighth chunk of a text is for testing
_PROGRAMS = ("inspect", "argparse", "typing")  # modules of the standard library, together half as long as the reference
_MASK, _MASKED = 1, 0.15  # a byte that no text contains; share of bytes that it replaces


class Task(Protocol):
    """Examples and their labels."""

    def batch(self, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return a random batch for training."""

    def test(self) -> tuple[Tensor, Tensor]:
        """Return all examples for testing; none of them is used in training."""


@dataclass
class Images:
    """Digits of scikit-learn, 8x8 pixels, labelled with the digit.

    Shapes: images (B, 1, side, side), labels (B,).
    Args:
        side: of the enlarged images [pixels].
        size: of a batch.
        turned: whether the images are turned by 90 degrees.
    """

    side: int
    size: int
    turned: bool

    def __post_init__(self) -> None:
        images, digits, test = _load_digits()
        padded = F.pad(images, [1] * 4, value=float(images.min()))
        self._train, self._test = (padded[~test], digits[~test]), (padded[test], digits[test])

    def batch(self, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        padded, digits = self._train
        chosen = torch.randint(len(padded), (self.size,), generator=rng)
        corners = torch.randint(3, (2, self.size), generator=rng)
        rows, columns = corners[:, :, None] + torch.arange(8)
        images = padded[chosen[:, None, None], 0, rows[:, :, None], columns[:, None, :]][:, None]
        return self._prepare(images), digits[chosen]

    def test(self) -> tuple[Tensor, Tensor]:
        padded, digits = self._test
        moved = [padded[:, :, i : i + 8, j : j + 8] for i in (0, 1) for j in (0, 1)]
        return self._prepare(torch.cat(moved)), digits.repeat(len(moved))

    def _prepare(self, images: Tensor) -> Tensor:
        if self.turned:
            images = images.rot90(1, (2, 3))
        return images if self.side == 8 else F.interpolate(images, size=self.side, mode="bilinear", align_corners=False)


@dataclass
class Windows:
    """Windows of texts, with bytes as ids.

    With masks, the texts are the language reference, and the labels are the masked bytes. Without, there are two kinds of text,
    and the label is the kind.

    Shapes: ids (B, N), labels (B, N) or (B,).
    Args:
        length: N, the number of bytes in a window.
        size: of a batch.
        masked: whether to predict masked bytes instead of the kind of text.
    """

    length: int
    size: int
    masked: bool

    def __post_init__(self) -> None:
        self._kinds = (
            [_split_chunks(read_standard_text())]
            if self.masked
            else [_split_chunks(read_standard_text()), _split_chunks(_read_programs())]
        )

    def batch(self, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        kinds = torch.arange(self.size) % len(self._kinds)
        chunks = [self._kinds[int(kind)][0] for kind in kinds]
        chosen = [int(torch.randint(len(each), (), generator=rng)) for each in chunks]
        begins = torch.randint(_CHUNK - self.length + 1, (self.size,), generator=rng).tolist()
        windows = [each[i][begin : begin + self.length] for each, i, begin in zip(chunks, chosen, begins, strict=True)]
        return self._prepare(windows, kinds, rng)

    def test(self) -> tuple[Tensor, Tensor]:
        chunks = [(chunk, kind) for kind, (_, held_out) in enumerate(self._kinds) for chunk in held_out]
        begins = range(0, _CHUNK - self.length + 1, self.length)
        windows = [chunk[begin : begin + self.length] for chunk, _ in chunks for begin in begins]
        kinds = torch.tensor([kind for _, kind in chunks]).repeat_interleave(len(begins))
        return self._prepare(windows, kinds, torch.Generator().manual_seed(0))

    def _prepare(self, windows: list[bytes], kinds: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([list(window) for window in windows])
        if not self.masked:
            return ids, kinds
        hidden = torch.rand(ids.shape, generator=rng) < _MASKED
        return ids.masked_fill(hidden, _MASK), ids.masked_fill(~hidden, IGNORED)


@cache
def _load_digits() -> tuple[Tensor, Tensor, Tensor]:
    """Return the images with mean 0 and standard deviation 1, their classes, and which are for testing."""
    pixels, classes = load_digits(return_X_y=True)
    images, digits = torch.from_numpy(pixels).float().view(-1, 1, 8, 8), torch.from_numpy(classes).long()
    index = F.one_hot(digits).cumsum(0).gather(1, digits[:, None])[:, 0]
    test = index % _HELD_OUT == 0
    return (images - images[~test].mean()) / images[~test].std(), digits, test


@cache
def _read_programs() -> str:
    return "\n".join(inspect.getsource(import_module(name)) for name in _PROGRAMS)


def _split_chunks(text: str) -> tuple[list[bytes], list[bytes]]:
    """Return the chunks of a text for training and for testing, with white space reduced to single blanks."""
    content = " ".join(text.split()).encode()
    chunks = [content[begin : begin + _CHUNK] for begin in range(0, len(content) - _CHUNK + 1, _CHUNK)]
    return [c for i, c in enumerate(chunks) if (i + 1) % _CHUNKS], [c for i, c in enumerate(chunks) if not (i + 1) % _CHUNKS]


@dataclass(frozen=True)
class Arch:
    """A network to train, convert and fine-tune.

    Args:
        first: makes the task for pretraining.
        second: makes the task for fine-tuning.
        pretrained: makes the network for the first task.
        fresh: makes the network for the second task; except in the head, its tensors have the same names and shapes.
        updates: numbers of updates in pretraining and in fine-tuning.
        lr: largest learning rate of pretraining.
        tuning_lr: largest learning rate of fine-tuning.
        evaluations: number of evaluations during fine-tuning, evenly spaced.
        every: n of "every n-th test example is used".
    """

    first: Callable[[], Task]
    second: Callable[[], Task]
    pretrained: Callable[[], nn.Module]
    fresh: Callable[[], nn.Module]
    updates: tuple[int, int]
    lr: float = 3e-3
    tuning_lr: float = 3e-3
    evaluations: int = 6
    every: int = 1


def list_archs(quick: bool) -> dict[str, Arch]:
    """Return the networks by name."""
    networks = {"ViT": _vit(quick), "Swin": _swin(quick), "ResNet": _resnet(quick), "BERT": _bert(quick)}
    return {name: replace(arch, updates=(2, 4), evaluations=2, every=40) if quick else arch for name, arch in networks.items()}


def _vision(make: Callable[[int], nn.Module], side: int, quick: bool, updates: tuple[int, int], **options: Any) -> Arch:
    size = 8 if quick else 64
    return Arch(
        lambda: Images(side, size, turned=False),
        lambda: Images(side, size, turned=True),
        lambda: make(10),
        lambda: make(10),
        updates,
        **options,
    )


def _vit(quick: bool) -> Arch:
    sizes: dict[str, Any] = {"embed_dim": 16, "depth": 2} if quick else {"embed_dim": 32, "depth": 6}
    common: dict[str, Any] = {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_heads": 4, "mlp_ratio": 2.0} | sizes

    def make(classes: int) -> Any:
        network = _initialise(VisionTransformer(num_classes=classes, **common))
        nn.init.normal_(network.pos_embed, std=0.5)
        return network

    return _vision(make, 8, quick, (500, 300))


def _swin(quick: bool) -> Arch:
    sizes: dict[str, Any] = {"embed_dim": 8, "depths": (2, 2)} if quick else {"embed_dim": 32, "depths": (2, 4)}
    common: dict[str, Any] = {
        "img_size": 8,
        "patch_size": 2,
        "window_size": 2,
        "in_chans": 1,
        "num_heads": (2, 4),
        "mlp_ratio": 2.0,
    } | sizes
    common["drop_path_rate"] = 0.0
    return _vision(lambda classes: _initialise(SwinTransformer(num_classes=classes, **common)), 8, quick, (500, 300))


def _resnet(quick: bool) -> Arch:
    layers, channels = ([3, 2, 2, 2], (8, 8, 8, 8)) if quick else ([5, 4, 3, 3], (32, 48, 64, 64))
    common: dict[str, Any] = {"block": BasicBlock, "layers": layers, "channels": channels, "in_chans": 1}

    def make(classes: int) -> Any:
        network: Any = ResNet(num_classes=classes, **common)
        network.pretrained_cfg = {"input_size": (1, 16, 16)}  # without it the images have 224x224 pixels
        return network

    return _vision(make, 16, quick, (150, 200))


def _bert(quick: bool) -> Arch:
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    width, depth, length, size = (16, 2, 16, 8) if quick else (48, 4, 64, 32)
    config: Any = BertConfig(  # type: ignore[call-arg]
        vocab_size=256,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        intermediate_size=2 * width,
        max_position_embeddings=length,
        initializer_range=0.1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    return Arch(
        lambda: Windows(length, size, masked=True),
        lambda: Windows(length, size, masked=False),
        lambda: BertForMaskedLM(config),
        lambda: BertForSequenceClassification(config),
        (500, 300),
        lr=2e-3,
        tuning_lr=2e-3,
    )


def _initialise(network: Any) -> Any:
    """Initialise weights by the layers' widths; the usual deviation of 0.02 is for wide networks, and trains slowly here."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
        elif isinstance(module, WindowAttention):
            nn.init.normal_(module.relative_position_bias_table, std=0.5)
    return network
