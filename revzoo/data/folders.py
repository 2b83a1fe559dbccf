"""Folders of images, one folder per class: which files are examples.

timm's reader is not used: it names a class by the innermost folder, follows a link into a loop, waits for a pipe, takes hidden
folders for classes, and drops files without a word.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from revzoo.data.labels import describe_missing, natural_key
from revzoo.data.options import SPLITS
from revzoo.data.stored_images import ImageSplits, StoredImages, list_suffixes
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
        train, held_out = dict[str, list[Path]](), dict[str, list[Path]]()
        for name, paths in self.files.items():
            chosen = set(range(_HELD_OUT - 1, len(paths), _HELD_OUT) or range(1, len(paths))[-1:])
            train[name] = [path for i, path in enumerate(paths) if i not in chosen]
            held_out |= {name: [paths[i] for i in sorted(chosen)]} if chosen else {}
        return replace(self, files=train), ClassFolders(self.path, held_out, Counter())


class FolderImages(StoredImages):
    """Images of class folders.

    Args:
        folders: the class folders.
        names: the names of the classes.
        mode: "L" for grey images, "RGB" for colours.
    """

    def __init__(self, folders: ClassFolders, names: list[str], mode: str):
        numbers = {name: number for number, name in enumerate(names)}
        super().__init__([numbers[name] for name, files in folders.files.items() for _ in files], mode)
        self.files = [file for files in folders.files.values() for file in files]
        self.path = folders.path

    def locate(self, index: int) -> Path:
        return self.files[index]

    def name(self, index: int) -> str:
        return str(self.files[index])

    def list_contents(self) -> list[bytes]:
        """Return the names of the files within the folder of the classes."""
        return [os.fsencode(file.relative_to(self.path)) for file in self.files]  # also of a name that is not UTF-8


def open_folders(root: Path, mode: str, *, require_imagenet: bool) -> ImageSplits:
    """Return the images of the class folders for training and for validation, which may be part of the first.

    Args:
        root: a folder with a folder of class folders for each split, or the class folders themselves.
        mode: "L" for grey images, "RGB" for colours.
        require_imagenet: refuse what has not ImageNet's 1000 classes and images for validation.

    Raises:
        DataError: a split or its classes are missing, or a class has no image.
    """
    folders = [_find_split(root, split) for split in SPLITS]
    if folders == [None, None] and not require_imagenet and any(path.is_dir() for path in root.iterdir()):
        folders[0] = root  # the class folders themselves
    if folders[0] is None or (folders[1] is None and require_imagenet):
        raise _explain_missing(root, "train" if folders[0] is None else "validation")
    train = find_classes(folders[0])
    names = list(train.files)
    if len(names) < 2:
        raise DataError(f"{train.path} has one class: {names[0]}. Add a folder with images of another.")
    if require_imagenet and len(names) != 1000:
        raise DataError(
            f"{train.path} should hold ImageNet's 1000 class folders. Received: {len(names)}. For other images use "
            "data.name=folder."
        )
    notes = [*train.describe_skipped(), *_describe_lookalikes(train)]
    if folders[1] is None:
        train, validation = train.split()
        if not validation.files:
            raise DataError(f"The classes in {train.path} have one image each: none can be held out for validation. Add some.")
        held_out = sum(map(len, validation.files.values()))
        held_out_of = f"{train.path} has no images for validation: every fifth of each class is held out, {held_out:,} in all"
        notes, source = [held_out_of, *notes], "validation"
    else:
        validation = find_classes(folders[1])
        notes, source = [*notes, *validation.describe_skipped()], str(validation.path)
    if unknown := [name for name in validation.files if name not in train.files]:
        raise DataError(
            f"{validation.path} has classes that {train.path} does not have: {join_names(unknown)}. Remove them, or add images "
            "of them for training."
        )
    images, others = (FolderImages(each, names, mode) for each in (train, validation))
    notes += describe_missing(others.labels, names, source)
    return ImageSplits(images, others, names, notes, is_held_out=folders[1] is None)


def find_classes(folder: Path) -> ClassFolders:
    """Return the classes of a folder and their images.

    A class has the images of its folder and of all folders in it. Links are followed, but no folder is read twice for a class.

    Raises:
        DataError: a link leads nowhere, there is no class, an image is in no class, or a class has no image.
        OSError: a folder cannot be read.
    """
    suffixes, skipped = set(list_suffixes()), Counter[str]()
    files: dict[str, list[Path]] = {}
    for entry in _list(folder, skipped):
        if _is_folder(entry):
            if entry.name != entry.name.encode(errors="ignore").decode():  # it is written to files, and printed
                raise DataError(f"The name of the class folder {entry.path!a} is not UTF-8. Rename it.")
            files[entry.name] = list(_walk(Path(entry.path), {_identify(folder)}, suffixes, skipped))
        elif entry.is_symlink() and not os.path.exists(entry.path):  # without it the labels of other classes would shift
            raise DataError(f"{entry.path} is a link to {os.readlink(entry.path)}, which does not exist. Mend or remove it.")
        elif _is_image(entry, suffixes, skipped):
            raise DataError(f"There are images directly in {folder}, outside of any class folder. Move or remove them.")
    if not files:
        raise DataError(f"{folder} has no classes: looked for one folder of images per class.")
    if empty := [name for name, paths in files.items() if not paths]:
        raise DataError(
            f"Class folders in {folder} without images in them: {join_names(empty)}. Fill or remove them. Images end with "
            f"{', '.join(sorted(suffixes))}."
        )
    return ClassFolders(folder, files, skipped)


def list_images(folder: Path) -> list[Path]:
    """Return the images of a folder and of those in it, in natural order; which files are images, `find_classes` says."""
    return list(_walk(folder, set(), set(list_suffixes()), Counter()))


def _list(folder: Path, skipped: Counter[str]) -> list["os.DirEntry[str]"]:
    """Return what is in a folder and not hidden, in natural order."""
    with os.scandir(folder) as scanned:
        entries = sorted(scanned, key=lambda entry: natural_key(entry.name))
    if hidden := sum(entry.name.startswith(".") for entry in entries):
        skipped["hidden"] += hidden
    return [entry for entry in entries if not entry.name.startswith(".")]


def _walk(folder: Path, visited: set[tuple[int, int]], suffixes: set[str], skipped: Counter[str]) -> Iterator[Path]:
    """Yield the images of a folder and of those in it, each of which is visited once."""
    if (identity := _identify(folder)) in visited:
        return
    visited.add(identity)
    for entry in _list(folder, skipped):
        if _is_folder(entry):
            yield from _walk(Path(entry.path), visited, suffixes, skipped)
        elif _is_image(entry, suffixes, skipped):
            yield Path(entry.path)


def _identify(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()  # a link to itself is none, and no error


def _is_image(entry: "os.DirEntry[str]", suffixes: set[str], skipped: Counter[str]) -> bool:
    """Return whether a file is an example; count it as skipped if not. A link to nowhere is one, which reading it names."""
    suffix = Path(entry.name).suffix.lower()
    is_special = os.path.exists(entry.path) and not entry.is_file()  # a pipe would be waited for
    if suffix in suffixes and not is_special:
        return True
    skipped["not a regular file" if suffix in suffixes else suffix or "without suffix"] += 1
    return False


def _find_split(root: Path, split: str) -> Path | None:
    """Return the folder of a split, whose name may have capitals: Train."""
    folders = {path.name.lower(): path for path in sorted(root.iterdir()) if path.is_dir()}  # train goes before Train
    return next((folders[name] for name in SPLITS[split] if name in folders), None)


def _describe_lookalikes(folders: ClassFolders) -> list[str]:
    """Return a line if the classes look like splits: each of them holds folders alone, of the same names."""
    if any(files[0].parent == folders.path / name for name, files in folders.files.items()):
        return []  # before every file of a large data set is looked at
    inside = [{file.relative_to(folders.path / name).parts[0] for file in files} for name, files in folders.files.items()]
    if len(inside[0]) < 2 or any(names != inside[0] for names in inside):
        return []
    return [
        f"the classes are {join_names(list(folders.files), most=4)}, and each holds the folders "
        f"{join_names(sorted(inside[0]), most=4)}. If they are splits, call them train and val; if not, all is well"
    ]


def _explain_missing(root: Path, split: str) -> DataError:
    directly = ", or for these folders themselves" if split == "train" else ""
    return DataError(
        f"No {split} images in {root}: looked for a folder called {' or '.join(SPLITS[split])} with one folder of images per "
        f"class{directly}. Received: {join_names(sorted(path.name for path in root.iterdir()))}."
    )
