"""Images that are stored as files, or as the content of files: how one of them is decoded, and their labels."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps
from torch.utils.data import Dataset

from revzoo.data.base import BrokenExampleError
from revzoo.data.options import IMAGES

with suppress(ImportError):  # where it is installed; here, because loader processes import this file
    from pillow_heif import register_heif_opener

    register_heif_opener()


class StoredImages(Dataset[tuple[Any, int]]):
    """Images with their labels, decoded when they are asked for; a broken image is an error.

    Subclasses say where an image is and what it is called.

    Args:
        labels: the class of each image.
        mode: "L" for grey images, "RGB" for colours.
    """

    def __init__(self, labels: Sequence[int], mode: str):
        self.labels, self.mode = np.asarray(labels), mode
        self.transform: Any = None

    def locate(self, index: int) -> Path | BinaryIO:
        """Return the file of an image, or its content."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Return what an image is called in messages."""
        raise NotImplementedError

    def list_contents(self) -> Iterable[bytes]:
        """Return what tells these images from others, in their order."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with explain_broken(lambda: self.name(index)):
            image = read_image(self.locate(index), self.mode)
        return image if self.transform is None else self.transform(image), int(self.labels[index])


@dataclass(frozen=True)
class ImageSplits:
    """The images of a data set.

    Args:
        train: images for training: StoredImages, or a data set of torchvision.
        test: images for validation, likewise.
        class_names: the names of the classes.
        notes: remarks for the reader.
        is_held_out: whether the images for validation were split off those for training, by position.
    """

    train: Any
    test: Any
    class_names: list[str]
    notes: list[str]
    is_held_out: bool = False


@contextmanager
def explain_broken(name: Callable[[], str]) -> Iterator[None]:
    """Say which image it is that cannot be read inside the block.

    Raises:
        BrokenExampleError: whatever its decoder raised.
    """
    try:
        yield
    except Exception as error:  # decoders raise all kinds of exceptions for damaged bytes
        raise BrokenExampleError(f"The image {name()} cannot be read ({error}). Replace or remove it.") from error


def make_printable(name: str) -> str:
    """Return a file's name as it is, or with an escape for each byte that is not UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")


@cache
def list_formats() -> dict[str, str]:
    """Return Pillow's names for the formats of the image files that the installed one reads, by suffix, sorted."""
    formats = Image.registered_extensions()
    return {suffix: formats[suffix] for suffix in IMAGES if formats.get(suffix) in Image.OPEN}


def open_image(file: Path | BinaryIO) -> Image.Image:
    """Open a file as one of the formats that `IMAGES` names: Pillow knows others, and hands PostScript to a program."""
    return Image.open(file, formats=sorted(set(list_formats().values())))


def read_image(file: Path | BinaryIO, mode: str) -> Any:
    """Return an image, upright and with 8 bits per channel, in Pillow's mode "L" or "RGB".

    Pixels of 16 bits are scaled; Pillow would set all above 255 to white. Of several frames the first is read.

    Raises:
        ValueError: the image holds numbers whose range is not known.
        Exception: whatever Pillow raises for damaged bytes.
    """
    with open_image(file) as image:
        return convert_image(image, mode)


def convert_image(image: Image.Image, mode: str) -> Image.Image:
    """Return an open image as `read_image` returns that of a file; ValueError if the range of its numbers is not known."""
    return _to_8_bits(_turn_upright(image), str(image.format)).convert(mode)


def _turn_upright(image: Image.Image) -> Image.Image:
    image.load()
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged metadata of a sound image name no orientation
        return image


def _to_8_bits(image: Image.Image, format: str) -> Image.Image:
    if image.mode.startswith("I;16") or (image.mode == "I" and format == "PNG"):  # Pillow before 10.3 gives these PNGs mode I
        values = np.asarray(image).astype(np.int64)
        return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers of unknown range: save it with 8 or 16 bits")
    return image.convert("RGBA") if image.mode == "P" and "transparency" in image.info else image
