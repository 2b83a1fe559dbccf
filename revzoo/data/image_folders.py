"""Folders of images, one folder per class: which files are examples.

timm's reader is not used: it names a class by the innermost folder, follows a link into a loop, waits for a pipe, takes hidden
folders for classes, and drops files without a word.
"""

import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from revzoo.data.image_labels import describe_missing, natural_key
from revzoo.data.options import HEIF, SPLITS
from revzoo.data.stored_images import ImageSplits, StoredImages, list_formats
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
        return [f"skipped in {self.path}: {kinds}{_explain_heif(self.skipped)}"] if kinds else []

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
    notes = train.describe_skipped()
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
    skipped, files = Counter[str](), dict[str, list[Path]]()
    for path in sorted(folder.iterdir(), key=lambda path: natural_key(path.name)):
        if _is_hidden(path.name):
            skipped["hidden"] += 1
        elif path.is_dir():
            if path.name != path.name.encode(errors="ignore").decode():  # it is written to files, and printed
                raise DataError(f"The name of the class folder {str(path)!a} is not UTF-8. Rename it.")
            files[path.name] = list_images(path, skipped, without=folder)
        elif path.is_symlink() and not path.exists():  # without it the labels of other classes would shift
            raise DataError(f"{path} is a link to {os.readlink(path)}, which does not exist. Correct or remove it.")
        elif _is_image(path, skipped):
            raise DataError(f"There are images directly in {folder}, outside of any class folder. Move or remove them.")
    if not files:
        raise DataError(f"{folder} has no classes: looked for one folder of images per class.")
    if empty := [name for name, paths in files.items() if not paths]:
        raise DataError(
            f"Class folders in {folder} without images in them: {join_names(empty)}. Fill or remove them. Images end with "
            f"{', '.join(list_formats())}{_explain_heif(skipped)}."
        )
    return ClassFolders(folder, files, skipped)


def list_images(folder: Path, skipped: Counter[str] | None = None, without: Path | None = None) -> list[Path]:
    """Return the images of a folder and of those in it, in natural order; which files are images, `find_classes` says.

    Args:
        folder: the folder.
        skipped: gets the numbers of other files.
        without: a folder that links in it may lead to, and that is not read.
    """
    skipped = Counter[str]() if skipped is None else skipped
    images, seen = list[Path](), {os.path.realpath(each) for each in (folder, without) if each is not None}

    def fail(error: OSError) -> None:
        raise error  # os.walk would leave the folder out

    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        if hidden := sum(map(_is_hidden, (*folders, *names))):
            skipped["hidden"] += hidden
        shown = sorted((name for name in folders if not _is_hidden(name)), reverse=True)
        targets = {os.path.realpath(os.path.join(place, name)): name for name in shown}  # of several links the first stays
        folders[:] = sorted(name for target, name in targets.items() if target not in seen)
        seen |= targets.keys()
        images += [path for name in names if not _is_hidden(name) and _is_image(path := Path(place, name), skipped)]
    return sorted(images, key=lambda path: [natural_key(part) for part in path.relative_to(folder).parts])


def _explain_heif(skipped: Counter[str]) -> str:
    return "; .heic is read after python -m pip install pillow-heif" if skipped.keys() & set(HEIF) else ""


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _is_image(path: Path, skipped: Counter[str]) -> bool:
    """Return whether a file is an example; count it as skipped if not. A link to nowhere is one, which reading it names."""
    suffix = path.suffix.lower()
    if suffix not in list_formats():
        skipped[suffix or "without suffix"] += 1
        return False
    if path.is_file() or not path.exists():
        return True
    skipped["not a regular file"] += 1  # a pipe would be waited for
    return False


def _find_split(root: Path, split: str) -> Path | None:
    """Return the folder of a split, whose name may have capitals: Train."""
    folders = {path.name.lower(): path for path in sorted(root.iterdir()) if path.is_dir()}  # train goes before Train
    return next((folders[name] for name in SPLITS[split] if name in folders), None)


def _explain_missing(root: Path, split: str) -> DataError:
    directly = ", or for these folders themselves" if split == "train" else ""
    return DataError(
        f"No {split} images in {root}: looked for a folder called {' or '.join(SPLITS[split])} with one folder of images per "
        f"class{directly}. Received: {join_names(sorted(path.name for path in root.iterdir()))}. Put the images of each class "
        f"into a folder of its own, such as {root / 'cat' / '0.png'}."
    )
