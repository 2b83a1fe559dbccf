"""What was measured of the models that ship, as a file: read without torch."""

import json
from pathlib import Path
from typing import Any

from revzoo.errors import InputError
from revzoo.spec.names import data_root

Row = dict[str, Any]
TABLE = "zoo.json"


def read_shipped_table() -> dict[str, Row]:
    """Return the rows of the table that ships, by model."""
    return read_table(data_root() / "docs" / TABLE)


def read_table(file: Path) -> dict[str, Row]:
    """Return the rows of a zoo.json by model; none if there is no such file.

    Raises:
        InputError: the file was not written by `update`, or is damaged.
    """
    try:
        rows: dict[str, Row] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if all({"digest", "twin"} <= row.keys() for row in rows.values()):
            return rows
    except (AttributeError, ValueError):
        pass
    raise InputError(f"{file} is damaged: it holds no table of models. Delete it, and all models are measured again.")
