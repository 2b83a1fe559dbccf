"""The `data` section of a recipe: which data set, and how its examples become tensors."""

import os
import re
from dataclasses import dataclass
from typing import Annotated, Literal, get_type_hints

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
from revzoo.errors import DataError
from revzoo.spec.names import find_beside
from revzoo.spec.parsing import check_value, to_plain

TABLES = {".csv": "csv", ".tsv": "csv", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # how rows of texts are kept
TEXT_FILES = (*TABLES, ".txt")  # endings of files of texts
HEIF = (".heic", ".heif")  # files of images that Pillow reads with pillow-heif only
IMAGES = (".apng", ".bmp", ".gif", *HEIF, ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")  # files of images
TEXTS = ("causal_lm", "text_classification", "masked_lm")  # values of `data.name` that are texts
UNROTATED = ("box", "hamming", "lanczos")  # interpolations that resize images, and that rotations do not have
BUNDLED = ("digits", *TEXTS)  # those that need no root
# Names of splits, in the order in which they are looked for. timm has all but `dev`, and where it finds none it takes the whole
# folder for both splits.
SPLITS = {"train": ("train", "training"), "validation": ("val", "valid", "validation", "dev", "eval", "evaluation", "test")}


@dataclass(frozen=True)
class AugmentOptions:
    """How images are augmented and normalised: arguments of timm's `create_transform`, `padding` and `cutout`.

    Args:
        padding: pad the image by this many pixels on each side and crop it at random; None: timm's random resized crop.
        scale: least and largest share of the image's area that a random resized crop takes; None: timm's, 0.08 to 1.
        ratio: least and largest width of such a crop over its height; None: timm's, 3/4 to 4/3.
        hflip: probability that left and right are exchanged.
        vflip: probability that top and bottom are exchanged.
        color_jitter: by how much brightness, contrast and saturation change at most, as a share; None, or with most policies of
            `auto_augment`: not at all.
        auto_augment: timm's name of a policy, such as rand-m9-mstd0.5-inc1, original or augmix-m3-w3; None: none.
        interpolation: how images are resized; "random": bilinear or bicubic in training, and bicubic in evaluation; "box",
            "hamming" and "lanczos" only without `auto_augment`. None: as those of the starting weights, else bicubic.
        cutout: side of a square that is erased at a random place, after normalisation [pixels]; None: nothing is.
        re_prob: probability that a rectangle of random size is erased (random erasing).
        re_mode: what it is filled with: 0, a random colour, or random pixels.
        re_count: largest number of such rectangles in an image.
        crop_pct: in evaluation, side of the model's images over the size that images are resized to before their middle is cut
            out; None: that of the starting weights, else 1 for CIFAR and MNIST and 0.875 for others.
        crop_mode: what evaluation does with images of another shape: "center" cuts out the middle, "squash" changes the shape,
            "border" fits them in and fills the rest. None: that of the starting weights, else center.
        mean: subtracted from each channel; None: that of the starting weights, else of the data set where known, else
            ImageNet's.
        std: each channel is divided by it; None: as for `mean`.
    """

    padding: PositiveInt | None = None
    scale: tuple[UnitInterval, UnitInterval] | None = None
    ratio: tuple[PositiveFloat, PositiveFloat] | None = None
    hflip: Probability = 0.5
    vflip: Probability = 0.0
    color_jitter: NonNegativeFloat | None = 0.4
    auto_augment: str | None = None
    interpolation: Literal["random", "nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"] | None = None
    cutout: PositiveInt | None = None
    re_prob: Probability = 0.0
    re_mode: Literal["const", "rand", "pixel"] = "pixel"
    re_count: PositiveInt = 1
    crop_pct: UnitInterval | None = None
    crop_mode: Literal["center", "squash", "border"] | None = None
    mean: tuple[FiniteFloat, ...] | None = None
    std: tuple[PositiveFloat, ...] | None = None


def check_augment(name: str, value: object) -> str | None:
    """Return None if a value may be that of an option of `AugmentOptions`, else a description of what may."""
    return check_value(to_plain(value), get_type_hints(AugmentOptions, include_extras=True)[name])


@dataclass(frozen=True)
class TextOptions:
    """How texts are read and tokenized.

    Args:
        tokenizer: tokenizer file, as `revzoo tokenizer` writes it, or "bytes": ids are bytes. None: bytes, for `causal_lm`
            and without `data.root`.
        column: name of the column that holds the texts, in a table.
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


BATCH_RANGE = "auto, or auto:LOW-HIGH such as auto:16-256"


def read_batch_range(text: str) -> tuple[int, int | None] | None:
    """Return the lowest and the highest batch size of "auto:16-256", or 1 and None for "auto"; None for any other text."""
    match = re.fullmatch(r"auto(?::([1-9]\d{0,8})-([1-9]\d{0,8}))?", text)
    if match is None or match[1] is None:
        return match and (1, None)
    return (int(match[1]), int(match[2])) if int(match[1]) <= int(match[2]) else None


BatchRange = Annotated[str, Bound(BATCH_RANGE, read_batch_range)]
OwnData = Annotated[
    str, Bound("a function of your own, package.module:function", lambda name: re.fullmatch(r"[\w.]+:\w+", name))
]


def is_own(name: str) -> bool:
    """Return whether `data.name` is a function of the user's own."""
    return ":" in name


@dataclass(frozen=True)
class DataOptions:
    """Which data set is trained on, and how it is loaded.

    Args:
        name: the data set, or the kind of files in `root`, or package.module:function, which returns your own.
        batch_size: examples per batch and process; auto: with `memory.budget` the fastest within it, else the largest whose
            step fits nine tenths of what is free, with ten updates in an epoch; auto:LOW-HIGH: likewise, within a range.
        root: folder or file of the data; None: digits come with scikit-learn, and texts are Python's own documentation.
        limit: take this many examples, drawn by `train.seed`, of those for training, and at most as many of those for testing;
            None: all. `revzoo eval` takes all test examples anyway.
        unreadable: what happens where an image cannot be read: "skip", another one takes its place in training, and evaluation
            leaves it out; "stop", the run stops.
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
            "causal_lm",
            "text_classification",
            "masked_lm",
        ]
        | OwnData
    )
    batch_size: PositiveInt | BatchRange
    root: str | None = None
    limit: PositiveInt | None = None
    unreadable: Literal["skip", "stop"] = "skip"
    num_workers: NonNegativeInt = 0
    shift: NonNegativeInt = 0
    augment: AugmentOptions = AugmentOptions()
    image: ImageOptions = ImageOptions()
    text: TextOptions = TextOptions()


def require_root(options: DataOptions) -> None:
    """Refuse a `data.root` that is not there, or that is a file where the data are a folder; no library is imported for it.

    Raises:
        DataError: one of these.
    """
    root = options.root or ""
    if is_own(options.name) or options.name == "digits" or (options.name in TEXTS and not root):
        return
    if options.name not in TEXTS and os.path.isfile(root):
        raise DataError(
            f"{root} is a file, and data.name={options.name} needs a folder. For a table of texts use revzoo train texts."
        )
    if not os.path.exists(root):
        what, data = ("file or folder", "texts") if options.name in TEXTS else ("folder", "data")
        raise DataError(f"There is no {what} {root[:300]}.{find_beside(root)} Set data.root to where the {data} are.")
