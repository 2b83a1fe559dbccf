"""Where texts come from: text files, tables on this machine, or the documentation that comes with Python.

Nothing is downloaded and nothing is left in a cache. Whatever cannot be read is named, with its row.
"""

import codecs
import csv
import json
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from revzoo.errors import DataError, RevzooError, did_you_mean, listing

_FORMATS = {".csv": "csv", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_SPLITS = {"training": ("train", "training"), "test": ("test", "validation", "valid", "val", "dev")}
_HELD_OUT = 10  # one text of so many is for testing where the data have no split of their own
# Topics of Python's documentation that are about different things, for a classification without files.
_SUBJECTS = {
    "statements": ("assignment", "async", "compound", "import", "raise"),
    "debugger": ("debugger",),
    "types": ("string-methods", "typesmapping", "typesseq"),
    "customization": ("attribute-access", "comparisons", "customization", "specialnames"),
}


@dataclass(frozen=True)
class Texts:
    """Texts, and for classification the label of each.

    Args:
        source: where they come from, for messages.
        rows: the number of each in the source, from 1.
    """

    source: str
    rows: list[int]
    texts: list[str]
    labels: list[str] | None = None

    def split(self) -> tuple["Texts", "Texts"]:
        """Return the texts for training, and every tenth of each label, for testing."""
        seen = Counter[str]()
        train, test = list[int](), list[int]()
        for i, label in enumerate(self.labels or [""] * len(self.texts)):
            seen[label] += 1
            (train if seen[label] % _HELD_OUT else test).append(i)
        return self._only(train), self._only(test)

    def _only(self, chosen: list[int]) -> "Texts":
        labels = None if self.labels is None else [self.labels[i] for i in chosen]
        return Texts(self.source, [self.rows[i] for i in chosen], [self.texts[i] for i in chosen], labels)


def standard_text() -> str:
    """Return the language reference that Python brings for its `help`: some 400 kB, not quite the same in every version."""
    return "\n\n".join(paragraph for _, paragraph in _paragraphs())


def standard_texts(labelled: bool) -> tuple[Texts, Texts]:
    """Return its paragraphs, for training and test; with labels, those of four subjects, each labelled with its own."""
    subjects = {topic: subject for subject, topics in _SUBJECTS.items() for topic in topics}
    found = [(topic, " ".join(paragraph.split())) for topic, paragraph in _paragraphs() if topic in subjects or not labelled]
    texts = [text for _, text in found]
    labels = [subjects[topic] for topic, _ in found] if labelled else None
    return Texts("Python's documentation", list(range(1, len(texts) + 1)), texts, labels).split()


def _paragraphs() -> list[tuple[str, str]]:
    """Return topics and paragraphs, each paragraph once: what is repeated elsewhere could not be held out for testing."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "This Python comes without its documentation (pydoc_data). Set data.root to texts of your own."
        ) from error
    found: dict[str, tuple[str, str]] = {}
    for topic in sorted(topics):
        for paragraph in topics[topic].strip().split("\n\n"):
            found.setdefault(" ".join(paragraph.split()), (topic, paragraph))
    found.pop("", None)
    return list(found.values())


def read_files(root: Path) -> bytes:
    """Return a text file as it is, or all .txt files of a folder and its folders, in the order of their names.

    Raises:
        DataError: there is none, or one is empty or not UTF-8.
    """
    files = sorted(root.rglob("*.txt")) if root.is_dir() else [root]
    if not files:
        raise DataError(f"{root} has no .txt files. Set data.root to a text file or a folder of them.")
    return b"\n".join(read_utf8(file) for file in files)


def read_utf8(file: Path) -> bytes:
    """Return the bytes of a text file; it may end within a character, as a benchmark cut from a longer text does.

    Raises:
        DataError: there is no such file, or it is empty or not UTF-8.
    """
    if not file.is_file():
        raise DataError(f"There is no file {file}. Set data.root to where the texts are.")
    content = file.read_bytes()
    if not content.strip():
        raise DataError(f"{file} is empty. Remove it, or set data.root to other texts.")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content)
    except UnicodeDecodeError as error:
        row = content[: error.start].count(b"\n") + 1
        wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        raise DataError(
            f"{file} is not UTF-8: row {row}, byte {error.start} of the file is {content[error.start : error.start + 1]!r}. "
            f"Convert it, for example with iconv -f {'utf-16' if wide else 'latin1'} -t utf-8."
        ) from error
    return content


def read_texts(root: Path, column: str, label: str | None) -> tuple[Texts, Texts]:
    """Read tables of texts, for training and test.

    Args:
        root: a folder with train.csv (or .jsonl, .json, .parquet) and test.csv (or validation, valid, val, dev), or one file,
            of which every tenth row (of each label) is for testing.
        column: where the texts are.
        label: where the labels are; None is no labels.

    Raises:
        DataError: something is missing, empty or not readable; the file and the row are named.
    """
    if not root.is_dir():
        return read_table(root, column, label).split()
    train, test = (_split_file(root, split) for split in _SPLITS)
    return read_table(train, column, label), read_table(test, column, label)


def read_table(file: Path, column: str, label: str | None) -> Texts:
    """Read one table; raises as `read_texts` does."""
    table = _load(file)
    if not any(table.values()):
        raise DataError(f"{file} has no rows.")
    for name, option in ((column, "column"), (label, "label")):
        if name is not None and name not in table:
            raise DataError(
                f"{file} has no column {name!r}.{did_you_mean(name, table)} Received: {listing(list(table))}. Name one with "
                f"data.text.{option}=..."
            )
    texts = table[column]
    for row, text in enumerate(texts, 1):
        if not isinstance(text, str) or not text.strip():
            found = "is empty" if text is None or isinstance(text, str) else f"is {text!r}, which is no text"
            raise DataError(f"{file}, row {row}: the column {column!r} {found}. Correct or remove the row.")
    if label is None:
        return Texts(str(file), list(range(1, len(texts) + 1)), texts)
    for row, value in enumerate(table[label], 1):
        blank = value is None or (isinstance(value, str) and not value.strip())
        if blank or not isinstance(value, str | int):
            found = "has no label" if blank else f"is {value!r}, which is neither a text nor an integer"
            raise DataError(f"{file}, row {row}: the column {label!r} {found}. Correct or remove the row.")
    return Texts(str(file), list(range(1, len(texts) + 1)), texts, [str(value) for value in table[label]])


def _split_file(root: Path, split: str) -> Path:
    names = [name + suffix for name in _SPLITS[split] for suffix in _FORMATS]
    for name in names:
        if (root / name).is_file():
            return root / name
    raise DataError(
        f"No {split} texts in {root}: looked for {' or '.join(_SPLITS[split])} with the ending {' or '.join(_FORMATS)}. "
        f"Received: {listing(sorted(path.name for path in root.iterdir()))}."
    )


def _load(file: Path) -> dict[str, list[Any]]:
    """Return the columns of a table."""
    if not file.exists():
        raise DataError(f"There is no file or folder {file}. Set data.root to where the texts are.")
    if file.suffix not in _FORMATS:
        raise DataError(f"{file} is no table: {' or '.join(_FORMATS)} is. Texts without columns are for data.name=characters.")
    content = "" if file.suffix == ".parquet" else read_utf8(file).decode(errors="replace")
    return _read_csv(file, content) if file.suffix == ".csv" else _read_dataset(file, content)


def _read_csv(file: Path, content: str) -> dict[str, list[Any]]:
    """Return the columns of a CSV, all of texts: a label 007 is not 7, and NA is a text like any other."""
    reader = csv.reader(StringIO(content.removeprefix("\ufeff"), newline=""), strict=True)
    try:
        with _long_fields():
            header, *rows = [row for row in reader if row]  # without blank lines
    except csv.Error as error:
        raise DataError(f"{file} cannot be read: line {reader.line_num}: {error}. Correct it.") from error
    for name in header:
        if not name.strip():
            raise DataError(f"{file} has a column without a name. Received: {','.join(header)}. Name or remove it.")
        if header.count(name) > 1:
            raise DataError(f"{file} has more than one column {name!r}. Received: {','.join(header)}. Rename or remove one.")
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise DataError(
                f"{file}, row {number}: there are {len(row)} fields, and the header names {len(header)}. A text with a comma "
                "stands in quotation marks. Correct the row."
            )
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lift csv's limit of 131,072 characters for a field."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _read_dataset(file: Path, content: str) -> dict[str, list[Any]]:
    """Return the columns of a table, read by Hugging Face's datasets; a cache it writes is gone afterwards."""
    with text_extra():
        import datasets
    try:
        with TemporaryDirectory() as cache, _quiet(datasets):
            tables = datasets.load_dataset(_FORMATS[file.suffix], data_files=[str(file)], cache_dir=cache, keep_in_memory=True)
            columns: dict[str, list[Any]] = tables["train"][:] if "train" in tables else {}
            return columns
    except Exception as error:  # the reader answers damaged files with whatever it stumbles over
        if "corresponds to no data" in str(error):
            raise DataError(f"{file} has no rows.") from error
        reason = _bad_line(content) if file.suffix == ".jsonl" else ""
        reason = reason or textwrap.shorten(str(error.__cause__ or error), 200)
        raise DataError(f"{file} cannot be read: {reason}. Correct it.") from error


def _bad_line(content: str) -> str:
    for row, line in enumerate(content.splitlines(), 1):
        try:
            json.loads(line)
        except ValueError as error:
            return f"row {row} is no JSON ({error})"
    return ""


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Keep progress bars and logged repetitions of what is raised away from the console."""
    shown, level = datasets.utils.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not shown:
            datasets.enable_progress_bars()


@contextmanager
def text_extra() -> Iterator[None]:
    """Say how to install what is imported inside."""
    try:
        yield
    except ImportError as error:
        raise RevzooError(
            f"Tables and tokenizers of texts need the package {error.name}. Install it: pip install {error.name}"
        ) from error
