"""Tars in the layout of WebDataset: the files of an example share a name up to its first dot, as 000123.jpg and 000123.cls.

The headers of all tars are read once; then an image is read from its place in its tar, in any order. So the order of an epoch
is that of any other data, every example is seen once, and a run goes on in the middle of an epoch. timm's reader streams
tars instead: it shuffles within a buffer, and how often an example is seen depends on the numbers of processes and workers.

Source: the format that WebDataset describes (https://github.com/webdataset/webdataset), and the names and _info.json of timm.
"""

import json
import re
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from revzoo.data.labels import describe_missing, name_classes, number_labels, read_label
from revzoo.data.natural_order import natural_key
from revzoo.data.options import SPLITS, ImageOptions
from revzoo.data.stored_images import ImageSplits, StoredImages, list_suffixes
from revzoo.errors import DataError, join_names

_INFO = ("_info.json", "info.json")
_READERS = 16  # tars that are indexed at the same time: what takes time is waiting for the disk


@dataclass(frozen=True)
class TarIndex:
    """The examples of a tar, in its order.

    Args:
        path: the tar.
        keys: the name of each example.
        places: for each image the byte where it begins, and the number of its bytes.
        labels: the label of each example.
    """

    path: Path
    keys: list[str]
    places: list[tuple[int, int]]
    labels: list[str]


class TarImages(StoredImages):
    """Images in tars.

    Args:
        tars: the tars; their images are numbered through.
        labels: the class of each image.
        mode: "L" for grey images, "RGB" for colours.
    """

    def __init__(self, tars: list[TarIndex], labels: list[int], mode: str):
        super().__init__(labels, mode)
        self.paths = [tar.path for tar in tars]
        # Arrays, because workers that read lists of Python objects copy them bit by bit.
        self.tars = np.repeat(np.arange(len(tars)), [len(tar.keys) for tar in tars])
        self.keys = np.array([key.encode(errors="backslashreplace") for tar in tars for key in tar.keys])
        self.places = np.array([place for tar in tars for place in tar.places])

    def locate(self, index: int) -> BinaryIO:
        start, size = self.places[index].tolist()
        with self.paths[self.tars[index]].open("rb") as file:
            file.seek(start)
            return BytesIO(file.read(size))

    def name(self, index: int) -> str:
        return _name_example(self.paths[self.tars[index]], self.keys[index].decode())

    def list_contents(self) -> Iterator[bytes]:
        """Yield name, size and label of each image; in which tar it stands makes no difference."""
        for key, (_, size), label in zip(self.keys, self.places, self.labels, strict=True):
            yield b"%s %d %d" % (key, size, label)


def open_tars(root: Path, options: ImageOptions, mode: str) -> ImageSplits:
    """Return the images of the tars in a folder, for training and for validation.

    Args:
        root: the folder. A split is what `_info.json` lists, or the tars that have its name in theirs or are in a folder of its
            name.
        options: the name of the label, for examples without a .cls file.
        mode: "L" for grey images, "RGB" for colours.

    Raises:
        DataError: a split or a tar is missing, a tar is broken, or an example has no image or no class.
    """
    info = _read_info(root)
    indices = [_index_split(root, split, info, options.label) for split in SPLITS]
    train_paths, test_paths = ({tar.path for tar in tars} for tars in indices)
    if both := sorted(path.name for path in train_paths & test_paths):
        raise DataError(
            f"A tar is for training or for validation. Received in {root}: {join_names(both)}, for both. Rename what the name "
            "says otherwise, or list the tars of each split in _info.json."
        )
    names = name_classes([label for tar in indices[0] for label in tar.labels], f"{root} (train)")
    train, test = (_gather_images(tars, names, mode) for tars in indices)
    notes = describe_missing(train.labels, names, f"{root} (train)")
    notes += describe_missing(test.labels, names, f"{root} (validation)")
    return ImageSplits(train, test, names, notes)


def index_tar(path: Path, label: str) -> TarIndex:
    """Return the examples of a tar; arguments and errors as in `open_tars`."""
    suffixes = {suffix[1:] for suffix in list_suffixes()}
    index = TarIndex(path, [], [], [])
    try:
        with tarfile.open(path, "r:") as tar:
            for key, files in _group_members(tar, path).items():
                images = [member for suffix, member in files.items() if suffix in suffixes]
                if len(images) != 1:
                    raise DataError(
                        f"An example has one image, and {_name_example(path, key)} has {len(images)}. Received: "
                        f"{join_names([member.name for member in files.values()])}. Correct or remove it."
                    )
                index.keys.append(key)
                index.places.append((images[0].offset_data, images[0].size))
                index.labels.append(_read_label(tar, files, label, _name_example(path, key)))
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{path} is not a whole, uncompressed tar ({error}). Copy or make it again.") from error
    return index


def _gather_images(tars: list[TarIndex], names: list[str], mode: str) -> TarImages:
    labels = [label for tar in tars for label in tar.labels]
    examples = (_name_example(tar.path, key) for tar in tars for key in tar.keys)
    return TarImages(tars, number_labels(labels, names, examples), mode)


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
    _require_end(tar)
    return groups


def _require_end(tar: tarfile.TarFile) -> None:
    """Check that zeros end the tar where its last file ends: Python takes a damaged header for the end, too."""
    file: Any = tar.fileobj
    file.seek(tar.offset)
    if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
        raise tarfile.ReadError(f"it is cut off or damaged at byte {tar.offset}")


def _read_label(tar: tarfile.TarFile, files: dict[str, tarfile.TarInfo], name: str, example: str) -> str:
    """Return the label of an example: the content of its .cls file, or a value in its .json file."""
    member = files.get("cls") or files.get("json")
    if member is None:
        raise DataError(f"The image {example} has no label: neither a .cls nor a .json file. Add one, or remove the image.")
    content: Any = tar.extractfile(member)
    try:
        text = content.read().decode()
        label = read_label(text if "cls" in files else json.loads(text)[name])
    except (ValueError, LookupError, TypeError):
        label = None
    if label is None:
        place = member.name if "cls" in files else f"{name!r} in {member.name}"
        raise DataError(
            f"The image {example} has no label: {place} is neither a word nor a number from 0. Correct it, remove the image, "
            "or name the label with data.image.label=..."
        )
    return label


def _read_info(root: Path) -> dict[str, Any]:
    """Return what _info.json says of each split; nothing where there is no such file."""
    file = next((root / name for name in _INFO if (root / name).is_file()), None)
    if file is None:
        return {}
    try:
        splits = json.loads(file.read_text(encoding="utf-8"))["splits"]
        return {name: dict(zip(split["filenames"], split["shard_lengths"], strict=True)) for name, split in splits.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{file} does not list the splits with their filenames and shard_lengths ({type(error).__name__}: {error}). "
            "Correct or remove it."
        ) from error


def _index_split(root: Path, split: str, info: dict[str, Any], label: str) -> list[TarIndex]:
    """Index the tars of a split, and check that they hold as many examples as the folder's _info.json says."""
    listed: dict[str, int] = next((info[name] for name in SPLITS[split] if name in info), {})
    paths = [root / name for name in listed] or _find_tars(root, split)
    if missing := [path.name for path in paths if not path.is_file()]:
        raise DataError(f"{root} lacks tars that its _info.json lists: {join_names(missing)}. Copy them there.")
    with ThreadPoolExecutor(_READERS) as pool:
        tars = list(pool.map(lambda path: index_tar(path, label), paths))
    if not any(tar.keys for tar in tars):
        raise DataError(f"The {split} tars in {root} hold no examples: {join_names([path.name for path in paths])}.")
    for tar, number in zip(tars, listed.values(), strict=False):
        if len(tar.keys) != number:
            raise DataError(
                f"_info.json says that {tar.path} has {number} examples. Received: {len(tar.keys)}. Copy or make it again."
            )
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


def _name_example(path: Path, key: str) -> str:
    return f"{key} of {path}"
