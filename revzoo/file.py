"""Writing files completely or not at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write` with a temporary path in the same folder, then rename the result to `path`.

    If `write` raises, the temporary file is removed and whatever was at `path` stays.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        write(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
