"""Write a file completely or not at all."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a temporary file in the same folder, then rename it to `path`.

    If writing fails, the temporary file is removed and a file that was at `path` stays as it was.

    Args:
        path: the file to write.
        write: called with the path of the temporary file; writes all of its content.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        write(partial)
        partial.replace(path)
    except BaseException:
        with suppress(OSError):  # what the caller has to know is why writing failed
            partial.unlink()
        raise
