"""Tables of texts on this machine: CSV, TSV, JSON lines, parquet, and data sets of Hugging Face.

Nothing is downloaded, and no cache remains.
"""

import csv
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import StringIO
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from revzoo.data.corpus import Texts, read_utf8, require_utf8
from revzoo.data.options import SPLITS, TABLES
from revzoo.errors import DataError, did_you_mean, explain_missing, join_names, quote
from revzoo.file import parse_json, require_shallow
from revzoo.spec.names import find_beside

STANDARD_INPUT = Path("-")
_SEPARATED = (
    "Separate columns by commas in a .csv file, by tabs in a .tsv file; put texts that contain these in quotation marks."
)


def read_texts(root: Path, column: str, label: str | None) -> tuple[Texts, Texts]:
    """Return the texts for training and those for validation.

    Args:
        root: a folder with train.csv (or .tsv, .jsonl, .json, .parquet) and val.csv (or another of the names in `SPLITS`); or
            one file, where every tenth row of each label is for validation; or a folder of `save_to_disk`, of one split or
            two.
        column: name of the column that holds the texts.
        label: name of the column that holds the labels; None: read no labels.

    Raises:
        DataError: something is missing, empty or unreadable.
    """
    if is_saved_dataset(root):
        splits = read_splits(root, is_one_enough=True)
        train, *others = (check_columns(source, rows[:], column, label) for rows, source in splits)
    else:
        train, *others = (read_table(file, column, label) for file in list_tables(root))
    return (train, others[0]) if others else train.split()


def is_saved_dataset(root: Path) -> bool:
    """Return whether `save_to_disk` of Hugging Face's `datasets` wrote a folder."""
    return any((root / name).is_file() for name in ("dataset_dict.json", "state.json"))


def read_splits(root: Path, is_one_enough: bool = False) -> list[tuple[Any, str]]:
    """Return the rows for training and for validation, or of the only split, and what each split is called in messages."""
    with explain_missing("datasets", "Data sets of Hugging Face"):
        import datasets
        import fsspec
    try:
        for file in filter(Path.is_file, root.rglob("*json*")):
            with fsspec.open(str(file), compression="infer") as stream:
                require_shallow(stream.read(), f"{file}: ")  # Arrow has no limit of its own
        with quiet(datasets):
            # A relative name might be that of a data set on the hub.
            loaded = (datasets.load_from_disk if is_saved_dataset(root) else datasets.load_dataset)(str(root.absolute()))
    except Exception as error:  # each format has its own exceptions
        raise DataError(f"{root} cannot be read as a data set of Hugging Face ({shorten(error)}).") from error
    splits = loaded if isinstance(loaded, dict) else {"without a split": loaded}
    names = {split: next((name for name in SPLITS[split] if name in splits), None) for split in SPLITS}
    if is_one_enough and len(splits) == 1:
        names = {"train": next(iter(splits))}
    for split, name in names.items():
        if name is None:
            raise DataError(
                f"{root} has no {split} split: looked for {' or '.join(SPLITS[split])}. Received: {join_names(list(splits))}. "
                "Make two of one with train_test_split of datasets, and save them with save_to_disk."
            )
        if not len(splits[name]):
            raise DataError(f"{root} ({name}) has no rows.")
    return [(splits[name], f"{root} ({name})") for name in names.values()]


def list_tables(root: Path) -> list[Path]:
    """Return the table for training and that for validation, or one file for both; errors as in `read_texts`."""
    return [_find_split(root, split) for split in SPLITS] if root.is_dir() else [root]


def read_table(file: Path, column: str, label: str | None) -> Texts:
    """Return the texts of one table; arguments and errors as in `read_texts`."""
    table = read_columns(file)
    if not any(table.values()):
        raise DataError(f"{file} has no rows. Add some below the names of the columns.")
    return check_columns(str(file), table, column, label)


def read_lines(file: Path, column: str) -> list[str]:
    """Return the texts in the column of a table, or the lines of any other file; - is the standard input.

    Arguments and errors are as in `read_texts`.
    """
    if file.suffix.lower() in TABLES:
        return read_table(file, column, None).texts
    content = require_utf8(sys.stdin.buffer.read(), "The standard input") if file == STANDARD_INPUT else read_utf8(file)
    text = content.decode(errors="ignore").removeprefix("\ufeff")
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
    require_column(source, table, column, "data.text.column (--column for predict and tokenizer)")
    if label is not None:
        require_column(source, table, label, "data.text.label")
    for name, values, kinds in ((column, table[column], str), (label, table[label] if label else [], str | int)):
        for row, value in enumerate(values, 1):
            if not isinstance(value, kinds) or not str(value).strip():
                what = "text" if name == column else "label"
                raise DataError(
                    f"{source}, row {row}: the column {name!r} holds no {what}, but {value!r}. Correct or remove the row."
                )
    labels = None if label is None else [str(value) for value in table[label]]
    return Texts(source, list(range(1, len(table[column]) + 1)), table[column], labels)


def require_column(source: str, columns: Iterable[str], name: str, option: str) -> None:
    """Raise DataError unless a table has a column; `option` names another."""
    names = list(columns)
    if name not in names:
        setting, _, others = option.partition(" ")
        raise DataError(
            f"{source} has no column {name!r}.{did_you_mean(name, names)} Received: {join_names(names)}. The first row of a "
            f"table names its columns. Name one of them, such as {setting}={quote(names[0])} {others}".rstrip()
        )


def _find_split(root: Path, split: str) -> Path:
    names = [name + suffix for name in SPLITS[split] for suffix in TABLES]
    for name in names:
        if (root / name).is_file():
            return root / name
    raise DataError(
        f"No {split} texts in {root}: looked for {' or '.join(SPLITS[split])} with the ending {' or '.join(TABLES)}. "
        f"Received: {join_names(sorted(path.name for path in root.iterdir()))}."
    )


def read_columns(file: Path) -> dict[str, list[Any]]:
    """Return the columns of a table by their names; errors as in `read_texts`."""
    if not file.exists():
        raise DataError(f"There is no file or folder {file}.{find_beside(str(file))} Set data.root to where the texts are.")
    suffix = file.suffix.lower()
    if suffix not in TABLES:
        raise DataError(
            f"{file} is not a table: the name of one ends with {' or '.join(TABLES)}. Save it as CSV; texts without columns "
            "are for data.name=causal_lm."
        )
    if TABLES[suffix] == "csv":
        return _read_csv(file, "\t" if suffix == ".tsv" else ",")
    if TABLES[suffix] == "json":
        return _read_json(file)
    with explain_missing("datasets", "Tables in parquet"):
        import datasets
    try:
        with TemporaryDirectory() as cache, quiet(datasets):
            tables = datasets.load_dataset("parquet", data_files=[str(file)], cache_dir=cache, keep_in_memory=True)
            return tables["train"][:]
    except Exception as error:  # a damaged file makes the reader raise all kinds of exceptions
        raise DataError(f"{file} cannot be read: {shorten(error)}. Correct it.") from error


def _read_csv(file: Path, delimiter: str) -> dict[str, list[Any]]:
    """Return the columns of a CSV or TSV file as strings: a label 007 is not 7, and NA is a text like any other."""
    content = read_utf8(file).decode(errors="replace").removeprefix("\ufeff")
    csv.field_size_limit(2**31 - 1)  # characters; it is 131,072 by default
    reader = csv.reader(StringIO(content, newline=""), delimiter=delimiter, strict=True)
    try:
        header, *rows = [row for row in reader if row] or [[]]  # without blank lines
    except csv.Error as error:
        raise DataError(f"{file} cannot be read: line {reader.line_num}: {error}. {_SEPARATED}") from error
    if len(header) == 1 and set(header[0]) & set(";\t,") - {delimiter}:
        raise DataError(f"{file} has one column, {header[0]!r}. {_SEPARATED}")
    if len(set(header)) < len(header):
        raise DataError(f"Two columns of {file} have the same name. Received: {join_names(header)}. Rename or remove one.")
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise DataError(
                f"{file}, row {number}: there are {len(row)} fields, and the header names {len(header)}. {_SEPARATED}"
            )
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}


def _read_json(file: Path) -> dict[str, list[Any]]:
    """Return the columns of JSON lines, or of a list of rows; a label that looks like a date stays a text."""
    content = read_utf8(file).decode(errors="replace").removeprefix("\ufeff")
    rows = list[Any]()
    try:
        if content.lstrip().startswith("["):
            rows = parse_json(content)
        else:
            rows.extend(parse_json(line) for line in content.split("\n") if line.strip())
    except ValueError as error:
        raise DataError(f"{file} cannot be read: row {len(rows) + 1}: {error}. Correct it: a row is a line in JSON.") from error
    if number := next((number for number, row in enumerate(rows, 1) if not isinstance(row, dict)), 0):
        raise DataError(f'{file}, row {number}: expected {{"COLUMN": VALUE}}. Received: {str(rows[number - 1])[:80]}.')
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain.from_iterable(rows))}


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


def shorten(error: Exception) -> str:
    """Return an error of a reader, or what caused it, in 200 characters."""
    return textwrap.shorten(str(error.__cause__ or error), 200)
