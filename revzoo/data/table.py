"""Tables of texts on this machine: CSV, TSV, JSON lines and parquet. What cannot be read is named, with its row.

Nothing is downloaded, and no cache is left behind.
"""

import csv
import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from revzoo.data.corpus import Texts, read_utf8
from revzoo.data.options import SPLITS, TABLES
from revzoo.errors import DataError, did_you_mean, explain_missing, find_nearest, join_names, quote
from revzoo.spec.names import find_beside

_DELIMITERS = {".csv": (",", "comma"), ".tsv": ("\t", "tab")}  # and what they are called


def read_texts(root: Path, column: str, label: str | None) -> tuple[Texts, Texts]:
    """Return the texts for training and those for validation.

    Args:
        root: a folder with train.csv (or .tsv, .jsonl, .json, .parquet) and val.csv (or another of the names in `SPLITS`); or
            one file, of which every tenth row of each label is for validation.
        column: name of the column that holds the texts.
        label: name of the column that holds the labels; None: read no labels.

    Raises:
        DataError: something is missing, empty or unreadable; file and row are named.
    """
    if not root.is_dir():
        return read_table(root, column, label).split()
    train, validation = (_find_split(root, split) for split in SPLITS)
    return read_table(train, column, label), read_table(validation, column, label)


def read_table(file: Path, column: str, label: str | None) -> Texts:
    """Return the texts of one table; arguments and errors as in `read_texts`."""
    table = _read_columns(file)
    if not any(table.values()):
        raise DataError(f"{file} has no rows. Add some below the names of the columns.")
    return check_columns(str(file), table, column, label)


def read_lines(file: Path, column: str) -> list[str]:
    """Return the texts in the column of a table, or the lines of any other file; arguments and errors as in `read_texts`."""
    if file.suffix.lower() in TABLES:
        return read_table(file, column, None).texts
    text = read_utf8(file).decode(errors="ignore").removeprefix("\ufeff")
    text = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")
    return text.split("\n")  # not splitlines: U+2028 and form feeds are part of a text


def check_columns(source: str, table: dict[str, list[Any]], column: str, label: str | None) -> Texts:
    """Return the texts and labels in columns, each of which has to be one; arguments and errors as in `read_texts`.

    Args:
        source: what the table is called in messages.
        table: the columns by their name.
        column: name of the column that holds the texts.
        label: name of the column that holds the labels; None: read no labels.
    """
    for name, option, contents in ((column, "column", "texts"), (label, "label", "labels")):
        if name is not None and name not in table:
            others = [each for each in table if each not in (column, label)] or list(table)
            other = quote(find_nearest(name, table) or others[0])
            header = " The first row of a table names its columns." if source.lower().endswith(tuple(_DELIMITERS)) else ""
            raise DataError(
                f"{source} has no column {name!r}.{did_you_mean(name, table)} Received: {join_names(list(table))}.{header} "
                f"Name that of the {contents} with data.text.{option}={other}"
                + (f", or --column {other}." if option == "column" else ".")
            )
    texts = table[column]
    for row, text in enumerate(texts, 1):
        if not isinstance(text, str) or not text.strip():
            problem = "is empty" if text is None or isinstance(text, str) else f"is {text!r}, which is not a text"
            raise DataError(f"{source}, row {row}: the column {column!r} {problem}. Correct or remove the row.")
    if label is None:
        return Texts(source, list(range(1, len(texts) + 1)), texts)
    for row, value in enumerate(table[label], 1):
        blank = value is None or (isinstance(value, str) and not value.strip())
        if blank or not isinstance(value, str | int):
            problem = "has no label" if blank else f"is {value!r}, which is neither a text nor an integer"
            raise DataError(f"{source}, row {row}: the column {label!r} {problem}. Correct or remove the row.")
    return Texts(source, list(range(1, len(texts) + 1)), texts, [str(value) for value in table[label]])


def _find_split(root: Path, split: str) -> Path:
    names = [name + suffix for name in SPLITS[split] for suffix in TABLES]
    for name in names:
        if (root / name).is_file():
            return root / name
    raise DataError(
        f"No {split} texts in {root}: looked for {' or '.join(SPLITS[split])} with the ending {' or '.join(TABLES)}. "
        f"Received: {join_names(sorted(path.name for path in root.iterdir()))}."
    )


def _read_columns(file: Path) -> dict[str, list[Any]]:
    if not file.exists():
        raise DataError(f"There is no file or folder {file}.{find_beside(str(file))} Set data.root to where the texts are.")
    suffix = file.suffix.lower()
    if suffix not in TABLES:
        raise DataError(
            f"{file} is not a table: the name of one ends with {' or '.join(TABLES)}. Save it as CSV; texts without columns "
            "are for data.name=characters."
        )
    content = "" if suffix == ".parquet" else read_utf8(file).decode(errors="replace")
    return _read_csv(file, content) if TABLES[suffix] == "csv" else _read_dataset(file, content)


def _require_delimiter(file: Path, header: str) -> None:
    """Raise DataError if another character than the one that the file's name promises stands between the columns."""
    delimiter, noun = _DELIMITERS[file.suffix.lower()]
    found = next((char for char in ";\t," if char in header), delimiter)
    if delimiter in header or found == delimiter:
        return
    other, remedy = {
        ";": ("semicolon", f"Save it with {noun}s"),
        "\t": ("tab", f"Save it with {noun}s, or call it .tsv"),
        ",": ("comma", f"Save it with {noun}s, or call it .csv"),
    }[found]
    raise DataError(f"{file} has {other}s between its columns; the name says {noun}s. {remedy}.")


def _read_csv(file: Path, content: str) -> dict[str, list[Any]]:
    """Return the columns of a CSV or TSV file as strings: a label 007 is not 7, and NA is a text like any other."""
    delimiter, noun = _DELIMITERS[file.suffix.lower()]
    _require_delimiter(file, content.lstrip("\ufeff\r\n").partition("\n")[0])
    reader = csv.reader(StringIO(content.removeprefix("\ufeff"), newline=""), delimiter=delimiter, strict=True)
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
                f"{file}, row {number}: there are {len(row)} fields, and the header names {len(header)}. Put a text that "
                f"contains a {noun} in quotation marks. Correct the row."
            )
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lift csv's limit of 131,072 characters per field inside the block."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _read_dataset(file: Path, content: str) -> dict[str, list[Any]]:
    """Return the columns of a table read by Hugging Face's datasets, whose cache is deleted afterwards."""
    with explain_missing("datasets", "Tables of texts"):
        import datasets
    try:
        with TemporaryDirectory() as cache, quiet(datasets):
            kind = TABLES[file.suffix.lower()]
            tables = datasets.load_dataset(kind, data_files=[str(file)], cache_dir=cache, keep_in_memory=True)
            columns: dict[str, list[Any]] = tables["train"][:] if "train" in tables else {}
            return columns
    except Exception as error:  # a damaged file makes the reader raise all kinds of exceptions
        if "corresponds to no data" in str(error):
            raise DataError(f"{file} has no rows. Add some.") from error
        reason = _find_bad_line(content) if file.suffix.lower() == ".jsonl" else ""
        reason = reason or textwrap.shorten(str(error.__cause__ or error), 200)
        raise DataError(f"{file} cannot be read: {reason}. Correct it.") from error


def _find_bad_line(content: str) -> str:
    for row, line in enumerate(content.splitlines(), 1):
        try:
            json.loads(line)
        except ValueError as error:
            return f"row {row} is not JSON ({error})"
    return ""


@contextmanager
def quiet(datasets: Any) -> Iterator[None]:
    """Keep progress bars and the logging of exceptions, which are raised anyway, off the console."""
    shown, level = datasets.utils.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not shown:
            datasets.enable_progress_bars()
