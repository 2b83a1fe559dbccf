"""Data sets of Hugging Face's `datasets` on this machine: what `save_to_disk` wrote, or a folder that `load_dataset` reads.

Rows are read from memory-mapped files in any order, and images are decoded by the loader. timm's reader is not used: it does
not read what `save_to_disk` wrote, and neither finds the classes of labels that are words nor names the row of a broken image.
"""

import textwrap
from collections.abc import Iterator
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from revzoo.data.corpus import Texts
from revzoo.data.labels import describe_missing, name_classes, number_labels, read_label
from revzoo.data.options import SPLITS, ImageOptions, TextOptions
from revzoo.data.stored_images import ImageSplits, StoredImages
from revzoo.data.table import check_columns, quiet
from revzoo.errors import DataError, did_you_mean, explain_missing, join_names

_BATCH = 1000  # rows that are listed together


class DatasetImages(StoredImages):
    """Images in a column of a data set.

    Args:
        rows: the data set, whose images are not decoded.
        column: name of the column that holds the images.
        labels: the class of each image.
        mode: "L" for grey images, "RGB" for colours.
        source: the data set in messages.
        root: the folder of the data set.
    """

    def __init__(self, rows: Any, column: str, labels: list[int], mode: str, source: str, root: Path):
        super().__init__(labels, mode)
        self.rows, self.column, self.source, self.root = rows.select_columns([column]), column, source, root.absolute()

    def locate(self, index: int) -> Path | BinaryIO:
        image = self.rows[index][self.column]
        if image is None:
            raise ValueError("the row has none")
        return Path(image["path"]) if image["bytes"] is None else BytesIO(image["bytes"])

    def name(self, index: int) -> str:
        return f"in row {index + 1} of {self.source}"

    def list_contents(self) -> Iterator[bytes]:
        """Yield the name within the folder, number of bytes and label of each image; the bytes themselves are not read."""
        labels = iter(self.labels)
        batches = self.rows.with_format("arrow").iter(_BATCH)
        for images in chain.from_iterable(batch[self.column].chunks for batch in batches):
            for name, size in zip(images.field("path").to_pylist(), _measure(images.field("bytes")), strict=True):
                yield f"{str(name or '').removeprefix(f'{self.root}/')} {size} {next(labels)}".encode()


def open_dataset(root: Path, options: ImageOptions, mode: str) -> ImageSplits:
    """Return the images of a data set, for training and for validation.

    Args:
        root: the folder.
        options: names of the columns.
        mode: "L" for grey images, "RGB" for colours.

    Raises:
        DataError: the folder is no data set, a split or a column is missing, or a row has no class.
    """
    splits = _read_splits(root)
    for rows, source in splits:
        _require_columns(rows, source, {"image.column": options.column, "image.label": options.label})
    known = _read_class_names(splits[0][0], options.label)
    labels = [_read_labels(rows, options.label, source) for rows, source in splits]
    names = known or name_classes(labels[0], splits[0][1])
    images, notes = [], list[str]()
    for (rows, source), own in zip(splits, labels, strict=True):
        numbers = number_labels(own, names, (f"in row {row} of {source}" for row in range(1, len(own) + 1)))
        undecoded = _disable_decoding(rows, options.column, source)
        images.append(DatasetImages(undecoded, options.column, numbers, mode, source, root))
        notes += describe_missing(numbers, names, source)
    train, test = images
    return ImageSplits(train, test, names, notes)


def read_dataset(root: Path, options: TextOptions) -> tuple[Texts, Texts, list[str] | None]:
    """Return the texts of a data set for training and for testing, and the names of the classes if it has them.

    Args:
        root: the folder.
        options: names of the columns.

    Raises:
        DataError: the folder is no data set, a split or a column is missing, or a row has no text or no class.
    """
    splits, texts = _read_splits(root), []
    for rows, source in splits:
        _require_columns(rows, source, {"text.column": options.column, "text.label": options.label})
        columns = rows.select_columns([options.column, options.label])[:]
        columns[options.label] = [_name_class(rows, options.label, value) for value in columns[options.label]]
        texts.append(check_columns(source, columns, options.column, options.label))
    return texts[0], texts[1], _read_class_names(splits[0][0], options.label)


def _read_splits(root: Path) -> list[tuple[Any, str]]:
    """Return the rows for training and for validation, and what each split is called in messages."""
    with explain_missing("datasets", "Data sets of Hugging Face"):
        import datasets
    saved = any((root / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        with quiet(datasets):
            # A relative name might be that of a data set on the hub.
            loaded = (datasets.load_from_disk if saved else datasets.load_dataset)(str(root.absolute()))
    except Exception as error:  # each format has its own exceptions
        raise DataError(f"{root} cannot be read as a data set of Hugging Face ({_shorten(error)}).") from error
    splits = loaded if isinstance(loaded, dict) else {"without a split": loaded}
    names = {split: next((name for name in SPLITS[split] if name in splits), None) for split in SPLITS}
    for split, name in names.items():
        if name is None:
            raise DataError(
                f"{root} has no {split} split: looked for {' or '.join(SPLITS[split])}. Received: {join_names(list(splits))}. "
                "Make two of one with train_test_split of datasets, and save them with save_to_disk."
            )
        if not len(splits[name]):
            raise DataError(f"{root} ({name}) has no rows.")
    return [(splits[name], f"{root} ({name})") for name in names.values()]


def _disable_decoding(rows: Any, column: str, source: str) -> Any:
    """Return a data set with the bytes or the file names of its images."""
    import datasets

    try:
        return rows.cast_column(column, datasets.Image(decode=False))
    except Exception as error:  # Arrow raises its own for each kind of column
        raise DataError(f"The column {column!r} of {source} does not hold images ({_shorten(error)}).") from error


def _require_columns(rows: Any, source: str, columns: dict[str, str]) -> None:
    for option, name in columns.items():
        if name not in rows.column_names:
            raise DataError(
                f"{source} has no column {name!r}.{did_you_mean(name, rows.column_names)} Received: "
                f"{join_names(rows.column_names)}. Name one with data.{option}=..."
            )


def _read_labels(rows: Any, column: str, source: str) -> list[str]:
    labels = []
    read = read_label if _read_class_names(rows, column) is None else (lambda name: name)  # names stay as they are: "007"
    for row, value in enumerate(rows.select_columns([column])[:][column], 1):
        label = read(_name_class(rows, column, value))
        if label is None:
            raise DataError(
                f"Row {row} of {source} has no label: {column!r} is {value!r}, neither a word nor a number from 0. Correct or "
                "remove it, or name another column with data.image.label=..."
            )
        labels.append(label)
    return labels


def _read_class_names(rows: Any, column: str) -> list[str] | None:
    """Return the names of the classes of a ClassLabel; None for a column of another kind."""
    names = getattr(rows.features[column], "names", None)
    return None if names is None else list(names)


def _name_class(rows: Any, column: str, value: Any) -> Any:
    """Return the name of a class that is stored as a number, None for a number below 0, and any other label unchanged."""
    names = _read_class_names(rows, column)
    if names is None or not isinstance(value, int):
        return value
    return names[value] if value >= 0 else None


def _measure(content: Any) -> list[int]:
    """Return the number of bytes of each element of an Arrow array, from its offsets alone."""
    offsets = content.buffers()[1]
    if offsets is None:
        return [0] * len(content)
    width = np.int64 if str(content.type).startswith("large") else np.int32
    ends = np.frombuffer(offsets, width)[content.offset : content.offset + len(content) + 1]
    return [int(size) for size in np.diff(ends)]


def _shorten(error: Exception) -> str:
    return textwrap.shorten(str(error.__cause__ or error), 200)
