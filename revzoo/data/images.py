"""Images of folders, tars, data sets of Hugging Face, CIFAR-10/100 and MNIST, through timm's transforms.

timm's loader is not used: on a GPU it draws random erasing from the global generator of the training process, one batch ahead
of training, so that a resumed run would differ. The transforms are those that timm's loader would use.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_dataset, create_transform
from torch import Tensor
from torchvision import transforms

from revzoo.data.base import IGNORED, BrokenExampleError, Examples
from revzoo.data.dataset_images import open_dataset
from revzoo.data.image_folders import open_folders
from revzoo.data.image_tars import open_tars
from revzoo.data.options import SPLITS, AugmentOptions, DataOptions
from revzoo.data.random import seeded
from revzoo.data.stored_images import ImageSplits, StoredImages, make_printable
from revzoo.errors import DataError
from revzoo.spec.schema import ImageInput

_MOST_IN_A_ROW = 50  # images that cannot be read: more of them mean that something else is broken, such as a disk
_INTERPOLATION = "bicubic"  # where nothing says which
_CIFAR_SITE = "Unpack the archive of the Python version from https://www.cs.toronto.edu/~kriz/cifar.html there"
_MNIST_CALL = "Let torchvision download it there (torchvision.datasets.{}(root, download=True))"


class _Published(NamedTuple):
    """A data set that torchvision reads.

    Args:
        folder: where its files are, within its root.
        how: how to get it.
        mean, std: of its pixels, by channel.
    """

    folder: str
    how: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def is_grey(self) -> bool:
        return len(self.mean) == 1


_PUBLISHED = {
    "cifar10": _Published("cifar-10-batches-py", _CIFAR_SITE, (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)),
    "cifar100": _Published("cifar-100-python", _CIFAR_SITE, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "mnist": _Published("MNIST/raw", _MNIST_CALL.format("MNIST"), (0.1307,), (0.3081,)),
    "fashion_mnist": _Published("FashionMNIST/raw", _MNIST_CALL.format("FashionMNIST"), (0.2860,), (0.3530,)),
}


class Images(Examples):
    """Images whose augmentation is a function of the seed, the epoch and the image.

    Args:
        source: images and labels by number; its `transform` makes tensors of the images.
        class_names: the names of the classes.
        seed: determines the augmentation.
        notes: remarks for the reader.
        data_config: how an image becomes a tensor, in the words of timm's `create_transform`; for validation.
        is_held_out: as for `Examples`.
        is_test: an image that cannot be read is left out: its label is IGNORED. Otherwise the next one that can be read takes
            its place, with the random choices that belong to the place.
        stops: an image that cannot be read is an error.
    """

    label_noun = "images"

    def __init__(
        self,
        source: Any,
        class_names: list[str],
        seed: int,
        notes: Sequence[str] = (),
        data_config: Mapping[str, Any] = MappingProxyType({}),
        is_held_out: bool = False,
        *,
        is_test: bool = False,
        stops: bool = False,
    ):
        self.source, self.class_names, self.seed, self.notes = source, class_names, seed, notes
        self.labels = source.labels if isinstance(source, StoredImages) else source.targets  # as torchvision calls them
        self.data_config, self.is_held_out, self.is_test = data_config, is_held_out, is_test
        self._most_in_a_row = 1 if stops else min(_MOST_IN_A_ROW, len(source))
        self._unreadable = torch.zeros(len(source), dtype=torch.bool).share_memory_()  # loader processes write it

    def __len__(self) -> int:
        return len(self.source)

    def list_contents(self) -> Iterable[bytes]:
        """Return what the source says of its images; of CIFAR, which it is."""
        if isinstance(self.source, StoredImages):
            return self.source.list_contents()
        return [repr(self.source.classes).encode()]

    def list_unreadable(self) -> list[str]:
        """Return the names of the images that were asked for and could not be read; what is not UTF-8 in them is escaped."""
        return [make_printable(self.source.name(i)) for i in self._unreadable.nonzero().flatten().tolist()]

    def name_example(self, index: int) -> str:
        """Return the file of an image, or where it is in its tar or data set."""
        if not isinstance(self.source, StoredImages):
            return super().name_example(index)
        return make_printable(self.source.name(index).removeprefix("in "))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        last = index + self._most_in_a_row - 1
        for place in range(index, last + 1):
            try:
                with seeded(self.seed, self.epoch, index):
                    image, label = self.source[place % len(self) if place > index else index]  # which may raise IndexError
                return image, IGNORED if self.is_test and place > index else int(label)
            except BrokenExampleError:
                if place == last:
                    raise
                self._unreadable[index] = True
        raise AssertionError


def load_images(options: DataOptions, input: ImageInput, seed: int) -> tuple[Images, Images]:
    """Return the training and the validation images (the test images of CIFAR and MNIST).

    Raises:
        DataError: a split or its classes are missing, there is no image, or images do not fit the model.
    """
    root, published = Path(options.root or ""), _PUBLISHED.get(options.name)
    if published is None:
        splits = _open_splits(options, root, "L" if input.channels == 1 else "RGB")
    else:
        splits = _open_published(options.name, root, input)
    mean, std = _choose_statistics(options.augment, input, published)
    if (options.augment.cutout or 0) >= min(input.size):  # timm would erase nothing
        height, width = input.size
        raise DataError(
            f"Cutout has to leave some of an image. Received: data.augment.cutout={options.augment.cutout} for images of "
            f"{height}x{width} pixels."
        )
    config = _choose_preprocessing(options.augment, mean, std, 0.875 if published is None else 1.0)
    height, width = input.size
    train = _make_train_transform(options.augment, (height, width), mean, std)
    test = create_transform((height, width), **config)
    if published is not None and published.is_grey and input.channels == 3:
        train, test = (transforms.Compose([transforms.Grayscale(3), each]) for each in (train, test))
    splits.train.transform, splits.test.transform = train, test
    names = splits.class_names
    stops = options.unreadable == "stop"
    held_out = splits.is_held_out
    validation = Images(splits.test, names, seed, data_config=config, is_held_out=held_out, is_test=True, stops=stops)
    return Images(splits.train, names, seed, splits.notes, stops=stops), validation


def _choose_statistics(
    augment: AugmentOptions, input: ImageInput, published: _Published | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation by channel: the recipe's, else those of the data set where known, else ImageNet's."""
    known = (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD) if published is None else (published.mean, published.std)
    if published is not None and published.is_grey:
        known = known[0] * input.channels, known[1] * input.channels
    elif input.channels == 1:
        known = (sum(known[0]) / 3,), (sum(known[1]) / 3,)
    mean, std = augment.mean or known[0], augment.std or known[1]
    if not len(mean) == len(std) == input.channels:
        raise DataError(
            f"One mean and std per channel is needed, and the model takes {input.channels}. Received: data.augment.mean="
            f"{list(mean)}, std={list(std)}; images have 3 channels, or 1 if the model takes 1."
        )
    return mean, std


def _choose_preprocessing(
    augment: AugmentOptions, mean: tuple[float, ...], std: tuple[float, ...], crop_pct: float
) -> dict[str, Any]:
    """Return how images are prepared for evaluation, as arguments of timm's `create_transform`.

    Args:
        augment: of the recipe.
        mean, std: by channel.
        crop_pct: where the recipe names none.
    """
    return {
        "interpolation": _INTERPOLATION if augment.interpolation in (None, "random") else augment.interpolation,
        "crop_pct": augment.crop_pct or crop_pct,
        "crop_mode": augment.crop_mode or "center",
        "mean": mean,
        "std": std,
    }


def _make_train_transform(
    augment: AugmentOptions, size: tuple[int, int], mean: tuple[float, ...], std: tuple[float, ...]
) -> transforms.Compose:
    """Return timm's training transform; with `padding`, its random resized crop is replaced by a crop of the padded image."""
    others = ("padding", "crop_pct", "crop_mode", "cutout")
    arguments = {f.name: getattr(augment, f.name) for f in fields(augment) if f.name not in others}
    arguments |= {"mean": mean, "std": std, "interpolation": augment.interpolation or _INTERPOLATION}
    shape, policy, final = create_transform(size, is_training=True, separate=True, **arguments)
    if augment.padding is not None:
        crop = transforms.RandomCrop(size, padding=augment.padding)
        shape = transforms.Compose([crop, *shape.transforms[1:]])
    if augment.cutout is not None:
        share = augment.cutout**2 / (size[0] * size[1])
        final = transforms.Compose([final, transforms.RandomErasing(p=1.0, scale=(share, share), ratio=(1.0, 1.0))])
    return transforms.Compose([shape, policy, final])


def _open_published(name: str, root: Path, input: ImageInput) -> ImageSplits:
    """Return the images of a data set that torchvision reads."""
    published = _PUBLISHED[name]
    if input.channels not in (3, len(published.mean)):
        raise DataError(f"{name} has images of {len(published.mean)} channels. Received: a model for {input.channels}.")
    try:
        train, test = (create_dataset(f"torch/{name}", root=str(root), split=split, download=False) for split in SPLITS)
    except Exception as error:  # files that end too early make torchvision raise anything
        raise DataError(
            f"No complete {name} in {root}: looked for the folder {published.folder} and its files. {published.how}, or set "
            "data.root to where it is."
        ) from error
    return ImageSplits(train, test, list(train.classes), [])


def _open_splits(options: DataOptions, root: Path, mode: str) -> ImageSplits:
    """Return the images of a data set that is stored as files."""
    if options.name == "wds":
        return open_tars(root, options.image, mode)
    if options.name == "hfds":
        return open_dataset(root, options.image, mode)
    return open_folders(root, mode, require_imagenet=options.name == "imagenet")
