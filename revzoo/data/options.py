"""The part of a recipe that says where examples come from and how they become tensors."""

from dataclasses import dataclass
from typing import Literal

from revzoo.bounds import (
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    UnitInterval,
)

TEXTS = ("characters", "text_classification", "masked_lm")  # the names of data that are no images


@dataclass(frozen=True)
class AugmentOptions:
    """How images become tensors: arguments of timm's `create_transform`, and `padding`.

    Args:
        padding: crop the image, padded by so many pixels on each side, instead of timm's random resized crop.
        mean: per channel; None is the data set's own, where known, else ImageNet's. `std` likewise.
    """

    padding: PositiveInt | None = None
    scale: tuple[UnitInterval, UnitInterval] | None = None
    ratio: tuple[PositiveFloat, PositiveFloat] | None = None
    hflip: Probability = 0.5
    vflip: Probability = 0.0
    color_jitter: NonNegativeFloat | None = 0.4
    auto_augment: str | None = None
    interpolation: Literal["random", "nearest", "bilinear", "bicubic"] = "bicubic"
    re_prob: Probability = 0.0
    re_mode: Literal["const", "rand", "pixel"] = "pixel"
    re_count: PositiveInt = 1
    crop_pct: UnitInterval | None = None
    mean: tuple[FiniteFloat, ...] | None = None
    std: tuple[PositiveFloat, ...] | None = None


@dataclass(frozen=True)
class TextOptions:
    """How tables of texts are read.

    Args:
        tokenizer: file of a tokenizer, as `revzoo tokenizer` writes it; None is bytes, for the texts that need no root.
        column: name of the column with the texts.
        label: name of the column with the classes, for text_classification.
    """

    tokenizer: str | None = None
    column: str = "text"
    label: str = "label"


@dataclass(frozen=True)
class DataOptions:
    """Where examples come from.

    Args:
        root: folder or file of the data; digits come with scikit-learn and need none, texts are Python's documentation then.
        batch_size: per process.
        num_workers: processes that load images, per training process; 0 loads in the training process itself.
        shift: digits are moved by up to so many pixels in training.
    """

    name: Literal["digits", "folder", "cifar10", "cifar100", "imagenet", "characters", "text_classification", "masked_lm"]
    batch_size: PositiveInt
    root: str | None = None
    num_workers: NonNegativeInt = 0
    shift: NonNegativeInt = 0
    augment: AugmentOptions = AugmentOptions()
    text: TextOptions = TextOptions()
