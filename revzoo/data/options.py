"""The `data` section of a recipe: which data set, and how its examples become tensors."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from revzoo.bounds import (
    Bound,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    UnitInterval,
)

BYTES = "bytes"  # the tokenizer that needs no file
TABLES = (".csv", ".jsonl", ".json", ".parquet")  # endings of files with texts in rows
TEXTS = ("characters", "text_classification", "masked_lm")  # values of `data.name` that are texts
# Names of splits, in the order in which they are looked for. timm has the same, but where it finds none it takes the whole
# folder for both splits.
SPLITS = {"train": ("train", "training"), "validation": ("val", "valid", "validation", "eval", "evaluation", "test")}


@dataclass(frozen=True)
class AugmentOptions:
    """How images are augmented and normalised: arguments of timm's `create_transform`, `padding` and `cutout`.

    Args:
        padding: pad the image by this many pixels on each side and crop it at random; None: timm's random resized crop.
        cutout: side of a square that is erased at a random place, after normalisation [pixels]; None: nothing is.
        mean: subtracted from each channel; None: that of the data set where known, else ImageNet's.
        std: each channel is divided by it; None: as for `mean`.
    """

    padding: PositiveInt | None = None
    scale: tuple[UnitInterval, UnitInterval] | None = None
    ratio: tuple[PositiveFloat, PositiveFloat] | None = None
    hflip: Probability = 0.5
    vflip: Probability = 0.0
    color_jitter: NonNegativeFloat | None = 0.4
    auto_augment: str | None = None
    interpolation: Literal["random", "nearest", "bilinear", "bicubic"] = "bicubic"
    cutout: PositiveInt | None = None
    re_prob: Probability = 0.0
    re_mode: Literal["const", "rand", "pixel"] = "pixel"
    re_count: PositiveInt = 1
    crop_pct: UnitInterval | None = None
    mean: tuple[FiniteFloat, ...] | None = None
    std: tuple[PositiveFloat, ...] | None = None


@dataclass(frozen=True)
class TextOptions:
    """How tables of texts are read and tokenized.

    Args:
        tokenizer: tokenizer file, as `revzoo tokenizer` writes it, or "bytes": ids are bytes. None: bytes, without `data.root`.
        column: name of the column that holds the texts.
        label: name of the column that holds the classes, for `text_classification`.
    """

    tokenizer: str | None = None
    column: str = "text"
    label: str = "label"


@dataclass(frozen=True)
class ImageOptions:
    """Which columns of a data set are the images and their classes.

    Args:
        column: name of the column that holds the images, for `hfds`.
        label: name of the column that holds the classes, for `hfds`; for `wds` their name in the .json file of an example, if
            there is no .cls file.
    """

    column: str = "image"
    label: str = "label"


OwnData = Annotated[
    str, Bound("a function of your own, package.module:function", lambda name: re.fullmatch(r"[\w.]+:\w+", name))
]


@dataclass(frozen=True)
class DataOptions:
    """Which data set is trained on, and how it is loaded.

    Args:
        name: the data set, or the kind of files in `root`, or package.module:function, which returns your own.
        batch_size: examples per batch and process.
        root: folder or file of the data; None: digits come with scikit-learn, and texts are Python's own documentation.
        num_workers: loader processes per training process; 0 loads in the training process itself.
        shift: largest shift of a digit in training [pixels].
        augment: augmentation of images.
        image: columns of images and classes.
        text: columns and tokenizer of texts.
    """

    name: (
        Literal[
            "digits",
            "folder",
            "cifar10",
            "cifar100",
            "mnist",
            "fashion_mnist",
            "imagenet",
            "wds",
            "hfds",
            "characters",
            "text_classification",
            "masked_lm",
        ]
        | OwnData
    )
    batch_size: PositiveInt
    root: str | None = None
    num_workers: NonNegativeInt = 0
    shift: NonNegativeInt = 0
    augment: AugmentOptions = AugmentOptions()
    image: ImageOptions = ImageOptions()
    text: TextOptions = TextOptions()
