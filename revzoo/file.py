"""Write a file completely or not at all, so that it is there after a power loss too; read JSON of strangers."""

import errno
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

# Of folders: some network drives cannot sync them, and Windows cannot open them.
_NOT_SYNCED = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)
_DEEPEST = 100
_NO_BRACKETS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[^]["{}]+', re.DOTALL)


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a temporary file in the same folder, then rename it to `path`.

    If writing fails, the temporary file is removed and a file that was at `path` stays as it was. The file has the permissions
    of any new file of the user: some libraries write files that only their owner can read.

    Args:
        path: the file to write.
        write: called with the path of the temporary file, which is empty; writes all of its content.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.open("wb").close()
        mode = partial.stat().st_mode
        write(partial)
        partial.chmod(mode)
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno and error.filename is None:  # unlike that of an open, that of a write
            error.filename = str(path)
        with suppress(OSError):  # what the caller has to know is why writing failed
            partial.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, as `write_atomically` does."""
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def parse_json(text: str | bytes) -> Any:
    """Return what a text in JSON says.

    Raises:
        ValueError: it is not JSON, or nested more than 100 deep.
    """
    require_shallow(content := text.encode() if isinstance(text, str) else text)
    return json.loads(content)


def require_shallow(content: bytes, name: str = "") -> None:
    """Check that lists and mappings in JSON are not nested so deep that a reader of it runs out of stack.

    Args:
        content: the JSON.
        name: of it, with a colon and a blank; the message begins with it.

    Raises:
        ValueError: they are nested more than 100 deep.
    """
    depths = accumulate(1 if bracket in b"[{" else -1 for bracket in _NO_BRACKETS.sub(b"", content))
    if max(depths, default=0) > _DEEPEST:
        raise ValueError(f"{name}lists and mappings are nested more than {_DEEPEST} deep")


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk; without it a power loss leaves empty files."""
    is_folder = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)  # Windows syncs only what is open for writing
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not (is_folder and error.errno in _NOT_SYNCED):
            raise
