"""Write the files of a state with torch.distributed.checkpoint, at once or in a thread, and complete it behind them."""

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import distributed, futures
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult

from revzoo.errors import RevzooError
from revzoo.training.options import TrainOptions
from revzoo.training.run_folder import RunFolder, hash_file
from revzoo.training.terminal import has_lost_others

# The names are flat already; in the settings flattening would lose what is empty.
AS_IT_IS = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
_ALONE = ".*assuming the intent is to (save|load) in a single process"


class _Results(list[WriteResult]):
    """What one process has written, and the checksums of its files by name."""

    checksums: dict[str, str]


class StateWriter(FileSystemWriter):
    """Writes a folder. When the files of all processes are on the disk, the first process completes it.

    torch.distributed.checkpoint raises an error of one process, also of that, in all of them.

    Args:
        folder: of a file system that all processes see.
        complete: called with the checksums of all files but the last, by name.
    """

    def __init__(self, folder: Path, complete: Callable[[dict[str, str]], None]):
        super().__init__(folder)  # which waits until its files are on the disk
        self._complete = complete

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> futures.Future[list[WriteResult]]:
        """Write the files of this process."""
        results = _Results(super().write_data(plan, planner).wait())
        names = {result.storage_data.relative_path for result in results}
        results.checksums = {name: hash_file(Path(self.path) / name) for name in names}
        written: futures.Future[list[WriteResult]] = futures.Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write what says where everything is, then call `complete`; only the first process does this."""
        super().finish(metadata, results)
        self._complete({name: checksum for each in results for name, checksum in each.checksums.items()})  # type: ignore[attr-defined]


def write(contents: dict[str, Any], writer: StateWriter) -> None:
    """Write tensors, and objects that all processes have alike; all of them call this together.

    Raises:
        Exception: the error of the process that could not write.
    """
    with as_ordinary_errors():
        save(contents, storage_writer=writer, planner=_make_planner())


def write_behind(contents: dict[str, Any], writer: StateWriter, group: distributed.ProcessGroup | None) -> Future[Any]:
    """Copy tensors to the host, and return what waits until a thread has written them.

    Args:
        contents: as for `write`, with the same errors, which waiting raises.
        writer: as for `write`.
        group: of all processes, and of nobody else but the thread; None for one process without others.
    """
    if group is None:
        warnings.filterwarnings("ignore", _ALONE)  # for the thread, which shares the filters of the process
    stager = DefaultStager(StagingOptions(False, False, False, False))  # copied when this returns
    written = async_save(contents, storage_writer=writer, planner=_make_planner(), process_group=group, async_stager=stager)
    stager.close()
    return cast(Future[Any], written)


@contextmanager
def as_ordinary_errors() -> Iterator[None]:
    """Raise what went wrong in any process, without PyTorch's report of it."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _ALONE)
            yield
    except CheckpointException as report:
        raise next(iter(report.failures.values()))[0] from None


def _make_planner() -> DefaultSavePlanner:
    # Of what all processes have alike but for rounding or statistics, the first one's is used in training, too.
    return DefaultSavePlanner(**AS_IT_IS, dedup_save_to_lowest_rank=True)


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
        with self._folder.saving():
            if self.is_async:
                self._written = write_behind(contents, writer, self._open_group())
            else:
                write(contents, writer)

    def wait(self) -> None:
        """Wait until the state that is being written is complete. Errors: `start`."""
        written, self._written = self._written, None
        if written is not None:
            with self._folder.saving(), as_ordinary_errors():
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
