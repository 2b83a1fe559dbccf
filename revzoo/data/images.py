"""Images from folders, CIFAR-10/100 and ImageNet, through timm's data sets and transforms.

timm's loader is not used: on a GPU it draws random erasing from the global generator of the training process, one batch ahead
of training, so that a resumed run would differ. The transforms are those that timm's loader would use.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_dataset, create_transform
from timm.data.dataset import ImageDataset
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import transforms

from revzoo.data.options import AugmentOptions, DataOptions
from revzoo.data.random import seeded
from revzoo.errors import DataError, join_names
from revzoo.spec.schema import ImageInput

# timm looks for the same names, but where none exists it takes the root folder itself, for both splits.
_SPLITS = {"train": ("train", "training"), "validation": ("val", "valid", "validation", "eval", "evaluation", "test")}
_CIFAR = {
    "cifar10": ("cifar-10-batches-py", (0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)),
    "cifar100": ("cifar-100-python", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


class BrokenImageError(DataError):
    """An image that cannot be decoded.

    A loader process passes the error on with its traceback inside the message; only the message proper is kept.
    """

    def __init__(self, message: str):
        super().__init__(message.rpartition("BrokenImageError: ")[2].strip())


class Folders(ImageDataset):
    """timm's folders of images, but a broken image is an error; timm would replace it by the next one."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            file, label = self.reader[index]
            with file:
                image = Image.open(file).convert(self.input_img_mode)
        except Exception as error:  # decoders raise all kinds of exceptions for damaged bytes
            path = self.filename(index, absolute=True)
            raise BrokenImageError(f"The image {path} cannot be read ({error}). Replace or remove it.") from error
        return self.transform(image), label


class Images(Dataset[tuple[Tensor, int]]):
    """A timm data set whose augmentation is a function of the seed, the epoch and the image."""

    label_noun = "images"

    def __init__(self, source: Any, num_classes: int, seed: int):
        self.source, self.num_classes, self.seed = source, num_classes, seed
        self.class_names = list(source.reader.class_to_idx) if isinstance(source, Folders) else None
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.source)

    def start_epoch(self, epoch: int) -> None:
        """Choose the epoch, which determines the augmentation."""
        self.epoch = epoch

    def list_contents(self) -> list[bytes]:
        """Return the names of the files within the folder of the split; of a data set without files, what it is."""
        if isinstance(self.source, Folders):
            return [str(name).encode() for name in self.source.filenames()]
        return [repr(self.source.classes).encode()]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with seeded(self.seed, self.epoch, index):
            image, label = self.source[index]
        return image, int(label)


def load_images(options: DataOptions, input: ImageInput, seed: int) -> tuple[Images, Images]:
    """Return the training and the validation images (CIFAR's test images).

    Raises:
        DataError: the folder, a split or its classes are missing, there is no image, or images do not fit the model.
    """
    root = Path(options.root or "")
    if not root.is_dir():
        raise DataError(f"There is no folder {root}. Set data.root to where the data are.")
    defaults: tuple[tuple[float, ...], tuple[float, ...]] = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    if options.name in _CIFAR:
        defaults = _CIFAR[options.name][1:]
        train, test, num_classes = _open_cifar(options.name, root, input)
    else:
        train, test, num_classes = _open_folders(options.name, root, "L" if input.channels == 1 else "RGB")
    if input.channels == 1:
        defaults = (sum(defaults[0]) / 3,), (sum(defaults[1]) / 3,)
    mean, std = options.augment.mean or defaults[0], options.augment.std or defaults[1]
    if not len(mean) == len(std) == input.channels:
        raise DataError(
            f"One mean and std per channel is needed, and the model takes {input.channels}. Received: data.augment.mean="
            f"{list(mean)}, std={list(std)}; images have 3 channels, or 1 if the model takes 1."
        )
    height, width = input.size
    if (options.augment.padding or 0) >= min(height, width):
        raise DataError(
            f"Padding has to be smaller than an image. Received: data.augment.padding={options.augment.padding} for images of "
            f"{height}x{width} pixels."
        )
    if (options.augment.cutout or 0) >= min(height, width):
        raise DataError(
            f"Cutout has to leave some of an image. Received: data.augment.cutout={options.augment.cutout} for images of "
            f"{height}x{width} pixels."
        )
    train.transform = _make_train_transform(options.augment, (height, width), mean, std)
    crop_pct = options.augment.crop_pct or (1.0 if options.name in _CIFAR else 0.875)
    plain: dict[str, Any] = {"interpolation": "bicubic", "crop_pct": crop_pct, "mean": mean, "std": std}
    test.transform = create_transform((height, width), **plain)
    return Images(train, num_classes, seed), Images(test, num_classes, seed)


def _make_train_transform(
    augment: AugmentOptions, size: tuple[int, int], mean: tuple[float, ...], std: tuple[float, ...]
) -> transforms.Compose:
    """Return timm's training transform; with `padding`, its random resized crop is replaced by a crop of the padded image."""
    arguments = {f.name: getattr(augment, f.name) for f in fields(augment) if f.name not in ("padding", "crop_pct", "cutout")}
    arguments |= {"mean": mean, "std": std}
    shape, policy, final = create_transform(size, is_training=True, separate=True, **arguments)
    if augment.padding is not None:
        crop = transforms.RandomCrop(size, padding=augment.padding)
        shape = transforms.Compose([crop, *shape.transforms[1:]])
    if augment.cutout is not None:
        share = augment.cutout**2 / (size[0] * size[1])
        final = transforms.Compose([final, transforms.RandomErasing(p=1.0, scale=(share, share), ratio=(1.0, 1.0))])
    return transforms.Compose([shape, policy, final])


def _open_cifar(name: str, root: Path, input: ImageInput) -> tuple[Any, Any, int]:
    if input.channels != 3:
        raise DataError(f"{name} has images of 3 channels. Received: a model for {input.channels}.")
    try:
        splits = [create_dataset(f"torch/{name}", root=str(root), split=split, download=False) for split in _SPLITS]
    except RuntimeError as error:
        raise DataError(
            f"No complete {name} in {root}: looked for the folder {_CIFAR[name][0]} with the files of the Python version. "
            "Unpack the archive from https://www.cs.toronto.edu/~kriz/cifar.html there, or set data.root to where it is."
        ) from error
    return splits[0], splits[1], len(splits[0].classes)


def _open_folders(name: str, root: Path, mode: str) -> tuple[Any, Any, int]:
    folders = {split: _find_split(root, split) for split in _SPLITS}
    train = _open_split(folders["train"], mode)
    classes = train.reader.class_to_idx
    if len(classes) < 2:
        raise DataError(f"{folders['train']} has one class: {join_names(list(classes))}. Classification needs two or more.")
    if name == "imagenet" and len(classes) != 1000:
        raise DataError(
            f"{folders['train']} should hold ImageNet's 1000 class folders. Received: {len(classes)}. "
            "For other images use data.name=folder."
        )
    validation = _open_split(folders["validation"], mode)
    own_classes = validation.reader.class_to_idx
    if unknown := sorted(set(own_classes) - set(classes)):
        raise DataError(f"{folders['validation']} has classes that {folders['train']} does not have: {join_names(unknown)}.")
    if own_classes != classes:  # a class without validation images shifted the labels of those after it
        validation = _open_split(folders["validation"], mode, classes)
    return train, validation, len(classes)


def _find_split(root: Path, split: str) -> Path:
    for name in _SPLITS[split]:
        if (root / name).is_dir():
            return root / name
    raise DataError(
        f"No {split} images in {root}: looked for a folder called {' or '.join(_SPLITS[split])} with one folder of images per "
        f"class. Received: {join_names(sorted(path.name for path in root.iterdir()))}."
    )


def _open_split(folder: Path, mode: str, classes: dict[str, int] | None = None) -> Any:
    """Open a folder of class folders; `classes` maps their names to labels, by default in alphabetical order."""
    names = {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
    if not names:
        raise DataError(f"{folder} has no classes: looked for one folder of images per class.")
    try:
        dataset = Folders(str(folder), class_map=classes, input_img_mode=mode)
    except RuntimeError as error:
        raise DataError(f"The class folders in {folder} hold no images: looked for .png, .jpg and .jpeg.") from error
    if "" in dataset.reader.class_to_idx:
        raise DataError(f"There are images directly in {folder}, outside of any class folder. Move or remove them.")
    if empty := sorted(names - set(dataset.reader.class_to_idx)):
        raise DataError(f"Class folders in {folder} without images in them: {join_names(empty)}. Fill or remove them.")
    return dataset
