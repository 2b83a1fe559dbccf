"""Ctrl-C and SIGTERM as a request to stop, which training answers after the current update, when everything can be saved."""

import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from accelerate import Accelerator

from revzoo.errors import quote

T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal and can be resumed.

    Args:
        folder: folder of the run.
        signum: the signal.
    """

    def __init__(self, folder: Path, signum: int):
        self.folder, self.signum = folder, signum
        super().__init__(f"Stopped, everything is saved. Resume with: revzoo train --resume {quote(folder)}")


class StopRequested(Exception):
    """A signal arrived between two batches.

    Args:
        signum: the signal.
    """

    def __init__(self, signum: int):
        self.signum = signum
        super().__init__(signum)


class StopSignal:
    """Record the first SIGINT or SIGTERM inside the block; a second one reaches the previous handler.

    Signals can only be caught in the main thread: in any other, nothing is recorded.
    """

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self._handlers: dict[int, Any] = {}
        self._received = 0

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._handlers = {signum: signal.signal(signum, self._record) for signum in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._handlers = {}

    def poll(self) -> int:
        """Return the signal that any process has received, or 0; all processes must call this at the same points."""
        if self._accelerator.num_processes == 1:
            return self._received
        signums = self._accelerator.gather(torch.tensor([self._received], device=self._accelerator.device))
        return int(signums.max())

    def watch(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches until a signal arrives; all processes must iterate together.

        Raises:
            StopRequested: a signal has arrived; the batches from there on are not yielded.
        """
        for batch in batches:
            if signum := self.poll():
                raise StopRequested(signum)
            yield batch

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self._received = signum
        self.__exit__()
