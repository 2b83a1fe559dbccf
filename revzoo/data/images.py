"""Images of folders, tars, data sets of Hugging Face, CIFAR-10/100 and MNIST, through timm's transforms.

timm's loader is not used: on a GPU it draws random erasing from the global generator of the training process, one batch ahead
of training, so that a resumed run would differ. The transforms are those that timm's loader would use.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_dataset, create_transform
from torch import Tensor
from torchvision import transforms

from revzoo.data.base import Examples
from revzoo.data.folders import ClassFolders, FolderImages, find_classes
from revzoo.data.hugging_face import open_dataset
from revzoo.data.options import SPLITS, AugmentOptions, DataOptions
from revzoo.data.random import seeded
from revzoo.data.stored_images import ImageSplits, StoredImages
from revzoo.data.tars import open_tars
from revzoo.errors import DataError, join_names, quote
from revzoo.spec.schema import ImageInput

_INTERPOLATION = "bicubic"  # where nothing says which
_MUCH = 4  # a side of an image that is so many times longer or shorter than the model's is worth a remark
_CIFAR_SITE = "Unpack the archive of the Python version from https://www.cs.toronto.edu/~kriz/cifar.html there"
_MNIST_CALL = "Let torchvision download it there (torchvision.datasets.{}(root, download=True))"


class _Published(NamedTuple):
    """A data set that torchvision reads.

    Args:
        folder: where its files are, within its root.
        how: how to get it.
        mean, std: of its pixels, by channel.
        side: of an image [pixels].
    """

    folder: str
    how: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    side: int

    @property
    def is_grey(self) -> bool:
        return len(self.mean) == 1


_PUBLISHED = {
    "cifar10": _Published("cifar-10-batches-py", _CIFAR_SITE, (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616), 32),
    "cifar100": _Published("cifar-100-python", _CIFAR_SITE, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), 32),
    "mnist": _Published("MNIST/raw", _MNIST_CALL.format("MNIST"), (0.1307,), (0.3081,), 28),
    "fashion_mnist": _Published("FashionMNIST/raw", _MNIST_CALL.format("FashionMNIST"), (0.2860,), (0.3530,), 28),
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
    ):
        self.source, self.class_names, self.seed, self.notes = source, class_names, seed, notes
        self.labels = source.labels if isinstance(source, StoredImages) else source.targets  # as torchvision calls them
        self.data_config, self.is_held_out = data_config, is_held_out
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.source)

    def start_epoch(self, epoch: int) -> None:
        """Choose the epoch, which determines the augmentation."""
        self.epoch = epoch

    def list_contents(self) -> Iterable[bytes]:
        """Return what the source says of its images; of CIFAR, which it is."""
        if isinstance(self.source, StoredImages):
            return self.source.list_contents()
        return [repr(self.source.classes).encode()]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with seeded(self.seed, self.epoch, index):
            image, label = self.source[index]
        return image, int(label)


def load_images(options: DataOptions, input: ImageInput, seed: int) -> tuple[Images, Images]:
    """Return the training and the validation images (the test images of CIFAR and MNIST).

    Raises:
        DataError: a split or its classes are missing, there is no image, or images do not fit the model.
    """
    root, published = Path(options.root or ""), _PUBLISHED.get(options.name)
    if published is None:
        splits = _open_splits(options, root, "L" if input.channels == 1 else "RGB")
        shapes = splits.train.read_shapes()
    else:
        splits = _open_published(options.name, root, input)
        shapes = [(published.side, published.side, not published.is_grey)]
    mean, std = _choose_statistics(options.augment, input, published)
    _require_sizes_within_images(options.augment, input)
    config = _choose_preprocessing(options.augment, mean, std, 0.875 if published is None else 1.0)
    height, width = input.size
    train = _make_train_transform(options.augment, (height, width), mean, std)
    test = create_transform((height, width), **config)
    if published is not None and published.is_grey and input.channels == 3:
        train, test = (transforms.Compose([transforms.Grayscale(3), each]) for each in (train, test))
    splits.train.transform, splits.test.transform = train, test
    notes = [*splits.notes, *_describe_misfit(shapes, input)]
    names = splits.class_names
    validation = Images(splits.test, names, seed, data_config=config, is_held_out=splits.is_held_out)
    return Images(splits.train, names, seed, notes), validation


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


def _require_sizes_within_images(augment: AugmentOptions, input: ImageInput) -> None:
    """Raise DataError unless what is padded and what is cut out are smaller than an image."""
    for option, size, rule in (
        ("padding", augment.padding, "Padding has to be smaller than an image"),
        ("cutout", augment.cutout, "Cutout has to leave some of an image"),
    ):
        height, width = input.size
        if size is not None and size >= min(height, width):
            raise DataError(f"{rule}. Received: data.augment.{option}={size} for images of {height}x{width} pixels.")


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


def _describe_misfit(shapes: Sequence[tuple[int, int, bool]], input: ImageInput) -> list[str]:
    """Return a line if a model takes images of another kind than those of the data, so that much of them would be lost.

    Args:
        shapes: height, width and whether there are colours, of some of the images.
        input: what the model takes.
    """
    if not shapes:
        return []
    sides, taken = [min(height, width) for height, width, _ in shapes], min(input.size)
    side, in_colour = sorted(sides)[len(sides) // 2], any(coloured for *_, coloured in shapes)
    lost, overrides = [], []
    if in_colour and input.channels == 1:
        lost, overrides = ["colours"], ["input.channels=3"]
    if side >= _MUCH * taken and taken < 224:
        best = min(side // 32 * 32 or side, 224)
        lost, overrides = [*lost, "details"], [*overrides, f"input.size=[{best},{best}]"]
    kind = f"images of about {side} pixels a side{' in colour' if in_colour else ''}"
    takes = f"the model takes {input.size[0]}x{input.size[1]} pixels{' in grey' if input.channels == 1 else ''}"
    if lost:
        return [
            f"{kind}, and {takes}: {' and '.join(lost)} are lost. Use a model for larger images in colour (revzoo list), or "
            f"model.overrides=[{','.join(overrides)}]"
        ]
    if taken >= _MUCH * side:
        return [f"{kind}, and {takes}: they are enlarged. A model for smaller images (revzoo list) takes less time and memory"]
    return []


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
    train, validation = _find_folders(options.name, root)
    labels = {name: label for label, name in enumerate(train.files)}
    images, others = (FolderImages(folders, labels, mode) for folders in (train, validation))
    is_held_out = train.path == validation.path
    return ImageSplits(images, others, list(labels), _describe_folders(train, validation), is_held_out)


def _find_folders(name: str, root: Path) -> tuple[ClassFolders, ClassFolders]:
    """Return the class folders for training and for validation, which may be part of the first."""
    folders = [_find_split(root, split) for split in SPLITS]
    if folders == [None, None] and name == "folder" and any(path.is_dir() for path in root.iterdir()):
        folders[0] = root  # the class folders themselves
    if folders[0] is None or (folders[1] is None and name == "imagenet"):
        raise _explain_missing(root, "train" if folders[0] is None else "validation")
    train = find_classes(folders[0])
    if len(train.files) < 2:
        raise DataError(
            f"{train.path} has one class: {join_names(list(train.files))}. Classification needs two or more: add a folder with "
            "images of another."
        )
    if name == "imagenet" and len(train.files) != 1000:
        raise DataError(
            f"{train.path} should hold ImageNet's 1000 class folders. Received: {len(train.files)}. "
            "For other images use data.name=folder."
        )
    if folders[1] is None:
        if not any(len(paths) > 1 for paths in train.files.values()):
            raise DataError(
                f"The classes in {train.path} have one image each, so none can be held out for validation. Add some."
            )
        return train.split()
    validation = find_classes(folders[1])
    if unknown := sorted(set(validation.files) - set(train.files)):
        raise DataError(
            f"{validation.path} has classes that {train.path} does not have: {join_names(unknown)}. Remove them, or add "
            "images of them for training."
        )
    return train, validation


def _describe_folders(train: ClassFolders, validation: ClassFolders) -> list[str]:
    missing = [name for name in train.files if name not in validation.files]
    place = "validation" if train.path == validation.path else validation.path
    without = [f"{place} has no images of {join_names(missing)}"] if missing else []
    notes = [*train.describe_skipped(), *validation.describe_skipped(), *without, *_describe_lookalikes(train)]
    if train.path != validation.path:
        return notes
    held_out = sum(map(len, validation.files.values()))
    return [f"{train.path} has no images for validation: every fifth of each class is held out, {held_out:,} in all", *notes]


def _describe_lookalikes(folders: ClassFolders) -> list[str]:
    """Return a line if the classes look like splits: folders alone are in each of them, of the same names."""
    if any(files and files[0].parent == folders.path / name for name, files in folders.files.items()):
        return []  # before every file of a large data set is looked at
    inside = {
        frozenset(file.relative_to(folders.path / name).parts[0] for file in files) for name, files in folders.files.items()
    }
    [names, *others] = inside
    if others or len(names) < 2 or not all((folders.path / name / each).is_dir() for name in folders.files for each in names):
        return []
    classes, within = join_names(list(folders.files), most=4), join_names(sorted(names), most=4)
    return [
        f"the classes are {classes}, and each holds the folders {within}. If they are splits, call them train and val; if not, "
        "all is well"
    ]


def _find_split(root: Path, split: str) -> Path | None:
    """Return the folder of a split, whose name may have capitals: Train."""
    folders = {path.name.lower(): path for path in sorted(root.iterdir()) if path.is_dir()}  # train goes before Train
    return next((folders[name] for name in SPLITS[split] if name in folders), None)


def _explain_missing(root: Path, split: str) -> DataError:
    directly = ", or for these folders themselves" if split == "train" else ""
    inside = sorted(path for path in root.iterdir() if not path.name.startswith("."))
    if inside and not any(path.is_dir() for path in inside):
        return DataError(
            f"{root} holds files and no folders. Put the images of each class into a folder of its own, such as "
            f"{root}/cat/{inside[0].name}, or name the folder above ({quote(f'data.root={root.parent}')})."
        )
    return DataError(
        f"No {split} images in {root}: looked for a folder called {' or '.join(SPLITS[split])} with one folder of images per "
        f"class{directly}. Received: {join_names(sorted(path.name for path in root.iterdir()))}."
    )
