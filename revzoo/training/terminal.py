"""One terminal for several processes: a single line says why they end, and all but the first write to files of the run.

Where one process ends, those that wait for it fail, too. The first to end speaks; it is mostly the cause. The store of torchrun
tells who that is, since it outlives the processes.
"""

import os
import re
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, cast

from revzoo.errors import RevzooError, explain_os_error

_LOST = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|Timed out waiting|wait timeout")


@contextmanager
def share_terminal() -> Iterator[None]:
    """If one of several processes fails, one of them says why in a line, and all end with the status of the command line."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    terminal = os.dup(2)  # which standard error is not, once it goes to a file
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        _end(terminal, error)


def send_output_to(folder: Path) -> None:
    """Let all that this process writes from now on go to a file in a folder, unless it is the first."""
    if read_rank() == 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with (folder / f"process-{read_rank()}.txt").open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def has_lost_others(error: BaseException | None) -> bool:
    """Return whether an error says that another process has ended or does not answer."""
    return isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))


def _describe(error: Exception | KeyboardInterrupt) -> tuple[str, int]:
    """Return in a line why the process ends, and its exit status; an error of the program is printed whole."""
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "stopped", 128 + getattr(error, "signum", 2)
    if isinstance(error, RevzooError):
        return str(error), error.exit_status
    if has_lost_others(error):
        if read_rank() > 0:
            traceback.print_exception(error)
        reason = textwrap.shorten(str(error), 100)
        return f"process {read_rank()} waited in vain for another one, which has ended or hangs ({reason})", 1
    if isinstance(error, OSError):
        return explain_os_error(error), 2
    traceback.print_exception(error)
    return f"process {read_rank()} ended with {type(error).__name__}: {str(error).partition(os.linesep)[0]}", 1


def _end(terminal: int, error: Exception | KeyboardInterrupt) -> NoReturn:
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM):  # torchrun sends it to those that are left, which have to speak
            signal.signal(signum, signal.SIG_IGN)
    if isinstance(error, KeyboardInterrupt) and has_lost_others(error.__context__):  # the process was about to end
        error = cast(RuntimeError, error.__context__)
    line, status = _describe(error)
    if _is_first():
        os.write(terminal, f"revzoo: {line}\n".encode())
    elif not os.path.sameopenfile(2, terminal):
        print(line, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # an orderly end would wait for the others


def _is_first() -> bool:
    """Return whether no other process has ended since the last start; without a store to ask, whether this is the first."""
    from torch import distributed  # torch takes long to import

    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = distributed.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))  # type: ignore[attr-defined]
        return bool(store.add(f"revzoo/ended/{start}", 1) == 1)
    except (KeyError, ValueError, RuntimeError):
        return read_rank() == 0


def read_rank() -> int:
    """Return the number of this process among those that were started together, from 0."""
    return int(os.environ.get("RANK", "0"))
