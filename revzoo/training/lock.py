"""One process at a time works in the folder of a run: two would mix their epochs and states.

The lock is a record lock (`fcntl.lockf`) on a file. The operating system releases it when its process ends, however it ends, so
a killed run leaves no lock behind. The file names host and process of its holder. If that is another host, which may hold a
lock that this host does not see (network drives without locks), only the user knows whether the process still runs. On Windows,
which has no record locks of this kind, and on drives without them, what the file says has to do.
"""

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

from revzoo.errors import InputError, quote

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class LockedError(InputError):
    """Another process works in the folder of the run."""


@contextmanager
def hold_lock(file: Path, folder: Path, *, release: bool = False) -> Iterator[None]:
    """Hold the lock of a run's folder inside the block.

    Args:
        file: the lock; it and its folder are made if they do not exist, and it stays, empty.
        folder: folder of the run, for messages.
        release: take the lock of a process of another host. The lock of a process that runs on this one is never taken.

    Raises:
        LockedError: another process holds the lock, or one on another host did and may still run.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+", encoding="utf-8") as stream:
        _acquire(stream, folder, release)
        try:
            _rewrite(stream, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
            yield
        finally:
            _rewrite(stream, "")


def _acquire(stream: IO[str], folder: Path, release: bool) -> None:
    has_locks = fcntl is not None
    try:
        if has_locks:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise _explain(folder, *_read_holder(stream)) from None
        has_locks = False
    host, pid = _read_holder(stream)
    if not host:
        return
    if host != socket.gethostname():
        if not release:
            raise LockedError(
                f"{folder} was in use by process {pid} on {host}, and this machine ({socket.gethostname()}) cannot see whether "
                f"that still runs. If it does not: revzoo train --resume {quote(folder)} --release-lock"
            )
    elif not has_locks and pid != os.getpid() and psutil.pid_exists(pid):
        raise _explain(folder, host, pid)


def _explain(folder: Path, host: str, pid: int) -> LockedError:
    holder = f"process {pid} on {host}" if host else "another process"
    return LockedError(f"{folder} is in use by {holder}. Wait until it ends or stop it; then resume the run.")


def _read_holder(stream: IO[str]) -> tuple[str, int]:
    """Return host and process that the file names; ("", 0) if it names none."""
    stream.seek(0)
    try:
        holder = json.loads(stream.read())
        return str(holder["host"]), int(holder["pid"])
    except (ValueError, TypeError, KeyError):
        return "", 0


def _rewrite(stream: IO[str], text: str) -> None:
    stream.seek(0)
    stream.truncate()
    stream.write(text)
    stream.flush()
