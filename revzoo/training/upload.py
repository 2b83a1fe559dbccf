"""Write a state while training goes on: its values are copied to the host, and a thread writes the copy.

At most one state is being written. The next one, the end of training and a stop by a signal wait for it, and so do the results
of an epoch: they are written when the state before them is complete. An error is raised in all processes, at the latest then.
"""

import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch import distributed

from revzoo.errors import RevzooError, quote
from revzoo.training.options import TrainOptions
from revzoo.training.run_folder import RunFolder
from revzoo.training.state_writer import StateWriter, as_ordinary_errors, write, write_behind
from revzoo.training.terminal import has_lost_others


@contextmanager
def saving(folder: RunFolder) -> Iterator[None]:
    """Explain an error that ends the writing of a file inside the block, and make room by removing a half-written state.

    Raises:
        RevzooError: what was written could not be.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk raises any of these
        if has_lost_others(error):
            raise
        shutil.rmtree(folder.states / "writing", ignore_errors=True)
        raise RevzooError(
            f"Nothing more can be saved in {folder.path} ({error}). Is the disk full? What was saved before is complete: "
            f"make room and resume with revzoo train --resume {quote(folder.path)}"
        ) from error


class Upload:
    """The state that is being written, if there is one.

    Args:
        accelerator: Accelerate's object of the run.
        folder: of the run.
        options: of the run. `save_async` says whether training goes on meanwhile.
    """

    def __init__(self, accelerator: Accelerator, folder: RunFolder, options: TrainOptions):
        # Without a GPU the copy would take of the memory, and the thread of the processor, that training has.
        self.is_async = accelerator.device.type != "cpu" if options.save_async is None else options.save_async
        self._folder, self._seconds = folder, options.timeout_seconds
        self._group: distributed.ProcessGroup | None = None
        self._written: Future[Any] | None = None

    def start(self, contents: dict[str, Any], writer: StateWriter) -> None:
        """Write a state, or start to; none may be in the making. All processes call this together.

        Raises:
            RevzooError: it could not be written; raised in all processes, or by `wait` in all of them.
        """
        with saving(self._folder):
            if self.is_async:
                self._written = write_behind(contents, writer, self._open_group())
            else:
                write(contents, writer)

    def wait(self) -> None:
        """Wait until the state that is being written is complete. Errors: `start`."""
        written, self._written = self._written, None
        if written is not None:
            with saving(self._folder), as_ordinary_errors():
                written.result()

    def settle(self) -> None:
        """Wait until no state is being written, where another error is about to be raised: that of the state is not."""
        with suppress(RevzooError):
            self.wait()

    def collect(self) -> None:
        """Raise the error of a state, if there was one and all processes know it by now; all of them call this together."""
        if self._written is not None and all(gather_object([self._written.done()])):
            self.wait()

    @contextmanager
    def complete(self) -> Iterator[None]:
        """Wait at the end of the block, also if that is an error, unless it is that another process has ended or hangs."""
        try:
            yield
        except BaseException as error:
            if not (isinstance(error, Exception) and has_lost_others(error)):
                self.settle()
            raise
        self.wait()

    def _open_group(self) -> distributed.ProcessGroup | None:
        """Return a group for the thread, whose messages must not meet those of training."""
        if self._group is None and distributed.is_initialized():
            timeout = None if self._seconds is None else timedelta(seconds=self._seconds)
            self._group = cast(distributed.ProcessGroup, distributed.new_group(timeout=timeout, backend="gloo"))
        return self._group
