"""Tars in the layout of WebDataset: the files of an example share a name up to its first dot, as 000123.png and 000123.cls.

The headers of all tars are read once; then an image is read from its place in its tar, in any order. So the order of an epoch
is that of any other data, every example is seen once, and a run goes on in the middle of an epoch. timm's reader streams
tars instead: it shuffles within a buffer, and how often an example is seen depends on the numbers of processes and workers.
`datasets` would copy every image to its cache.

Source: the format that WebDataset describes (https://github.com/webdataset/webdataset), and the names of timm.
"""

import re
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from revzoo.data.image_labels import describe_missing, name_classes, natural_key, number_labels, read_label
from revzoo.data.options import SPLITS, ImageOptions
from revzoo.data.stored_images import ImageSplits, StoredImages, list_formats
from revzoo.errors import DataError, join_names
from revzoo.file import parse_json

_READERS = 16  # tars that are indexed at the same time: what takes time is waiting for the disk


class _Example(NamedTuple):
    """An example of a tar.

    Args:
        key: its name.
        start: the byte of the tar where its image begins.
        size: number of the image's bytes.
        label: its label.
    """

    key: str
    start: int
    size: int
    label: str


class TarImages(StoredImages):
    """Images in tars.

    Args:
        tars: the examples of each tar; they are numbered through.
        labels: the class of each image.
        mode: "L" for grey images, "RGB" for colours.
    """

    def __init__(self, tars: dict[Path, list[_Example]], labels: list[int], mode: str):
        super().__init__(labels, mode)
        self.paths = list(tars)
        examples = [example for each in tars.values() for example in each]
        # Arrays, because workers that read lists of Python objects copy them bit by bit.
        self.tars = np.repeat(np.arange(len(tars)), [len(each) for each in tars.values()])
        self.keys = np.array([example.key.encode(errors="backslashreplace") for example in examples])
        self.places = np.array([(example.start, example.size) for example in examples])

    def locate(self, index: int) -> BinaryIO:
        start, size = self.places[index].tolist()
        with self.paths[self.tars[index]].open("rb") as file:
            file.seek(start)
            return BytesIO(file.read(size))

    def name(self, index: int) -> str:
        return f"{self.keys[index].decode()} of {self.paths[self.tars[index]]}"

    def list_contents(self) -> Iterator[bytes]:
        """Yield name, size and label of each image; its tar makes no difference."""
        for key, (_, size), label in zip(self.keys, self.places, self.labels, strict=True):
            yield b"%s %d %d" % (key, size, label)


def open_tars(root: Path, options: ImageOptions, mode: str) -> ImageSplits:
    """Return the images of the tars in a folder, for training and for validation.

    Args:
        root: the folder. A split is the tars that have its name in theirs, or are in a folder of its name.
        options: the name of the label, for examples without a .cls file.
        mode: "L" for grey images, "RGB" for colours.

    Raises:
        DataError: a split or a tar is missing, a tar is broken, or an example has no image or no class.
    """
    train, validation = (_index_split(root, split, options.label) for split in SPLITS)
    if both := sorted(path.name for path in train.keys() & validation.keys()):
        raise DataError(
            f"A tar is for training or for validation. Received in {root}: {join_names(both)}, for both. Rename one."
        )
    images, notes, names = list[TarImages](), list[str](), list[str]()
    for tars, source in ((train, f"{root} (train)"), (validation, f"{root} (validation)")):
        labels = [example.label for each in tars.values() for example in each]
        names = names or name_classes(labels, source)  # those of the training images
        images.append(TarImages(tars, number_labels(labels, names, source), mode))
        notes += describe_missing(images[-1].labels, names, source)
    return ImageSplits(images[0], images[1], names, notes)


def _index_tar(path: Path, label: str) -> list[_Example]:
    """Return the examples of a tar, in its order."""
    suffixes = {suffix[1:] for suffix in list_formats()}
    examples = []
    try:
        with tarfile.open(path, "r:") as tar:
            for key, files in _group_members(tar, path).items():
                images = [member for suffix, member in files.items() if suffix in suffixes]
                if len(images) != 1:
                    raise DataError(
                        f"An example has one image, and {key} of {path} has {len(images)}. Received: "
                        f"{join_names([member.name for member in files.values()])}. Correct or remove it."
                    )
                own = _read_label(tar, files, label)
                if own is None:
                    raise DataError(
                        f"The image {key} of {path} has no label: neither a .cls file nor a {label!r} in its .json file holds "
                        "a word or a number from 0. Add one, remove the image, or name the label with data.image.label=..."
                    )
                examples.append(_Example(key, images[0].offset_data, images[0].size, own))
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{path} is not a whole, uncompressed tar ({error}). Copy or make it again.") from error
    return examples


def _group_members(tar: tarfile.TarFile, path: Path) -> dict[str, dict[str, tarfile.TarInfo]]:
    """Return the files of each example by their suffix."""
    groups: dict[str, dict[str, tarfile.TarInfo]] = {}
    for member in tar:
        match = re.fullmatch(r"((?:.*/)?[^./]+)\.([^/]*)", member.name)
        if not member.isreg() or match is None or re.match(r"__[^/]*__(/|$)", member.name):
            continue  # as WebDataset does: folders, hidden files, and what describes the tar itself
        key, suffix = match[1], match[2].lower()
        if suffix in groups.setdefault(key, {}):
            raise DataError(f"{path} has two files {member.name}. Rename one, or make the tar again.")
        groups[key][suffix] = member
    file: Any = tar.fileobj
    file.seek(tar.offset)
    if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:  # Python takes a damaged header for the end, too
        raise tarfile.ReadError(f"it is cut off or damaged at byte {tar.offset}")
    return groups


def _read_label(tar: tarfile.TarFile, files: dict[str, tarfile.TarInfo], name: str) -> str | None:
    """Return the label of an example, if there is one: the content of its .cls file, or a value in its .json file."""
    if (member := files.get("cls") or files.get("json")) is None:
        return None
    content: Any = tar.extractfile(member)
    try:
        text = content.read().decode()
        return read_label(text if "cls" in files else parse_json(text)[name])
    except (ValueError, LookupError, TypeError):
        return None


def _index_split(root: Path, split: str, label: str) -> dict[Path, list[_Example]]:
    """Index the tars of a split."""
    paths = _find_tars(root, split)
    with ThreadPoolExecutor(_READERS) as pool:
        tars = dict(zip(paths, pool.map(lambda path: _index_tar(path, label), paths), strict=True))
    if not any(tars.values()):
        raise DataError(f"The {split} tars in {root} hold no examples: {join_names([path.name for path in paths])}.")
    return tars


def _find_tars(root: Path, split: str) -> list[Path]:
    for name in SPLITS[split]:
        named = [path for path in root.glob("[!.]*.tar") if name in re.split(r"[^a-z]+", path.stem.lower())]
        if paths := named or list((root / name).glob("[!.]*.tar")):
            return sorted(paths, key=lambda path: natural_key(path.name))
    raise DataError(
        f"No {split} tars in {root}: looked for names with {' or '.join(SPLITS[split])} in them, such as {name}-0000.tar, and "
        f"for folders of these names. Received: {join_names(sorted(path.name for path in root.iterdir()))}."
    )
