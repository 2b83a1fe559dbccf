"""Write the files of a state with torch.distributed.checkpoint, at once or in a thread, and complete it behind them."""

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import distributed, futures
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult

from revzoo.training.seal import hash_file

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
