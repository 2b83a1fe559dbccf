"""Ctrl-C and SIGTERM as a request that training answers at its next update, when everything can be saved."""

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator


class Interrupted(KeyboardInterrupt):
    """Training was stopped from outside and can be resumed.

    Args:
        folder: of the run.
        signum: the signal that stopped it.
    """

    def __init__(self, folder: Path, signum: int):
        self.folder, self.signum = folder, signum
        super().__init__(f"Stopped, everything is saved. Go on with: revzoo train --resume {folder}")


class StopSignal:
    """Notes the first SIGINT or SIGTERM; the second acts as if nobody had noted the first.

    In another thread than the main one signals cannot be caught, and nothing is noted.
    """

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self._handlers: dict[int, Any] = {}
        self._received = 0

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._handlers = {signum: signal.signal(signum, self._note) for signum in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._handlers = {}

    def received(self) -> int:
        """Return the signal, or 0; the same in all processes, which have to ask at the same places."""
        if self._accelerator.num_processes == 1:
            return self._received
        signums = self._accelerator.gather(torch.tensor([self._received], device=self._accelerator.device))
        return int(signums.max())

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._received = signum
        self.__exit__()
