"""Folders of images, one folder per class: which files are examples.

timm's reader is not used: it follows a link into a loop, waits for a pipe, takes hidden folders for classes, and drops files
without a word.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from revzoo.data.natural_order import natural_key
from revzoo.data.stored_images import StoredImages, list_suffixes
from revzoo.errors import DataError, join_names

_HELD_OUT = 5  # one image in five is for validation where there is no folder of them


@dataclass(frozen=True)
class ClassFolders:
    """What is in a folder of class folders.

    Args:
        path: the folder.
        files: the images of each class, by the name of its folder; classes and images are in natural order (2 before 10).
        skipped: number of files and hidden folders that are no examples, by the reason.
    """

    path: Path
    files: dict[str, list[Path]]
    skipped: Counter[str]

    def describe_skipped(self) -> list[str]:
        """Return a line with the numbers of what is skipped, or none."""
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(self.skipped.items()))
        return [f"skipped in {self.path}: {kinds}"] if kinds else []

    def split(self) -> tuple["ClassFolders", "ClassFolders"]:
        """Return the images for training, and those held out for validation: every fifth of each class.

        Of a class with fewer the last one is held out, unless it is the only one.
        """
        last = {name: len(paths) - 1 if 1 < len(paths) < _HELD_OUT else -1 for name, paths in self.files.items()}
        held_out, train = (
            {
                name: [p for i, p in enumerate(paths) if (i % _HELD_OUT == _HELD_OUT - 1 or i == last[name]) == chosen]
                for name, paths in self.files.items()
            }
            for chosen in (True, False)
        )
        filled = {name: paths for name, paths in held_out.items() if paths}
        return replace(self, files=train), ClassFolders(self.path, filled, Counter())


class FolderImages(StoredImages):
    """Images of class folders.

    Args:
        folders: the class folders.
        labels: the label of each class.
        mode: "L" for grey images, "RGB" for colours.
    """

    def __init__(self, folders: ClassFolders, labels: dict[str, int], mode: str):
        super().__init__([labels[name] for name, files in folders.files.items() for _ in files], mode)
        self.files = [file for files in folders.files.values() for file in files]
        self.path = folders.path

    def locate(self, index: int) -> Path:
        return self.files[index]

    def name(self, index: int) -> str:
        return str(self.files[index])

    def list_contents(self) -> list[bytes]:
        """Return the names of the files within the folder of the classes."""
        return [os.fsencode(file.relative_to(self.path)) for file in self.files]  # also of a name that is not UTF-8


def find_classes(folder: Path) -> ClassFolders:
    """Return the classes of a folder and their images.

    A class has the images of its folder and of all folders in it. Links are followed, but no folder is read twice for a class.

    Raises:
        DataError: a folder cannot be read, a link leads nowhere, there is no class, an image is in no class, or a class has no
            image.
    """
    suffixes, skipped = set(list_suffixes()), Counter[str]()
    files: dict[str, list[Path]] = {}
    for entry in _list(folder, skipped):
        if _is_folder(entry):
            _require_utf8(entry)
            inside = _walk(Path(entry.path), {_identify(folder)}, skipped)
            files[entry.name] = [Path(each.path) for each in inside if _is_image(each, suffixes, skipped)]
        elif entry.is_symlink() and not os.path.exists(entry.path):  # without it the labels of other classes would shift
            raise DataError(f"{entry.path} is a link to {os.readlink(entry.path)}, which does not exist. Mend or remove it.")
        elif _is_image(entry, suffixes, skipped):
            raise DataError(f"There are images directly in {folder}, outside of any class folder. Move or remove them.")
    if not files:
        raise DataError(f"{folder} has no classes: looked for one folder of images per class.")
    if not any(files.values()):
        raise DataError(
            f"The class folders in {folder} hold no images: looked for {', '.join(sorted(suffixes))}. Put some there."
        )
    if empty := sorted(name for name, paths in files.items() if not paths):
        raise DataError(f"Class folders in {folder} without images in them: {join_names(empty)}. Fill or remove them.")
    return ClassFolders(folder, files, skipped)


def _require_utf8(folder: "os.DirEntry[str]") -> None:
    """Raise DataError unless the name of a class can be written to files and printed."""
    try:
        folder.name.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"The name of the class folder {folder.path!a} is not UTF-8. Rename it.") from error


def list_images(folder: Path) -> list[Path]:
    """Return the images of a folder and of those in it, in natural order; which files are images, `find_classes` says."""
    suffixes, skipped = set(list_suffixes()), Counter[str]()
    return [Path(entry.path) for entry in _walk(folder, set(), skipped) if _is_image(entry, suffixes, skipped)]


def _list(folder: Path, skipped: Counter[str]) -> list["os.DirEntry[str]"]:
    """Return what is in a folder and not hidden, in natural order."""
    try:
        with os.scandir(folder) as scanned:
            entries = sorted(scanned, key=lambda entry: natural_key(entry.name))
    except OSError as error:
        raise DataError(
            f"The folder {folder} cannot be read ({error.strerror}). Change its permissions, or name another."
        ) from error
    if hidden := sum(entry.name.startswith(".") for entry in entries):
        skipped["hidden"] += hidden
    return [entry for entry in entries if not entry.name.startswith(".")]


def _walk(folder: Path, visited: set[tuple[int, int]], skipped: Counter[str]) -> Iterator["os.DirEntry[str]"]:
    """Yield what is not a folder, in a folder and those in it, each of which is visited once."""
    if (identity := _identify(folder)) in visited:
        return
    visited.add(identity)
    for entry in _list(folder, skipped):
        if _is_folder(entry):
            yield from _walk(Path(entry.path), visited, skipped)
        else:
            yield entry


def _identify(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _is_image(entry: "os.DirEntry[str]", suffixes: set[str], skipped: Counter[str]) -> bool:
    """Return whether a file is an example; count it as skipped if not. A link to nowhere is one, which reading it names."""
    suffix = Path(entry.name).suffix.lower()
    if suffix not in suffixes:
        skipped[suffix or "without suffix"] += 1
        return False
    if os.path.exists(entry.path) and not entry.is_file():  # a pipe would be waited for
        skipped["not a regular file"] += 1
        return False
    return True
