"""Images of Hugging Face's `datasets` on this machine: what `save_to_disk` wrote, or a folder that `load_dataset` reads.

Rows are read from memory-mapped files in any order, and images are decoded by the loader. timm's reader is not used: it does
not read what `save_to_disk` wrote, and neither finds the classes of labels that are words nor names the row of a broken image.
"""

from collections.abc import Iterator
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from revzoo.data.image_labels import describe_missing, name_classes, number_labels, read_label
from revzoo.data.options import ImageOptions
from revzoo.data.stored_images import ImageSplits, StoredImages
from revzoo.data.text_tables import read_splits, require_column, shorten
from revzoo.errors import DataError

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
            for name, content in zip(images.field("path").to_pylist(), images.field("bytes"), strict=True):
                size = content.as_buffer().size if content.is_valid else 0  # nothing is copied
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
    images, notes, names = [], list[str](), None
    for rows, source in read_splits(root):
        require_column(source, rows.column_names, options.column, "data.image.column")
        labels, known = _read_labels(rows, source, options.label)
        if known is None:  # else names stay as they are: "007"
            labels = [read_label(label) for label in labels]
        if None in labels:
            raise DataError(
                f"Row {labels.index(None) + 1} of {source} has no label: {options.label!r} is neither a word nor a number from "
                "0. Correct or remove it, or name another column with data.image.label=..."
            )
        names = names or known or name_classes(labels, source)  # those of the training images
        numbers = number_labels(labels, names, source)
        undecoded = _disable_decoding(rows, options.column, source)
        images.append(DatasetImages(undecoded, options.column, numbers, mode, source, root))
        notes += describe_missing(numbers, names, source)
    return ImageSplits(images[0], images[1], names or [], notes)


def _disable_decoding(rows: Any, column: str, source: str) -> Any:
    """Return a data set with the bytes or the file names of its images."""
    import datasets

    try:
        return rows.cast_column(column, datasets.Image(decode=False))
    except Exception as error:  # Arrow raises its own for each kind of column
        raise DataError(f"The column {column!r} of {source} does not hold images ({shorten(error)}).") from error


def _read_labels(rows: Any, source: str, column: str) -> tuple[list[Any], list[str] | None]:
    """Return the label of each row, and the names of the classes if they are a ClassLabel's.

    Then a label is the name of its class, or None where it is missing or, as some write instead, below 0.
    """
    require_column(source, rows.column_names, column, "data.image.label")
    labels = rows.select_columns([column])[:][column]
    names = getattr(rows.features[column], "names", None)
    if names is None:
        return labels, None
    return [None if number is None or number < 0 else names[number] for number in labels], list(names)
