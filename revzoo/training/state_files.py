"""The files of a state: tensors and settings, which each process writes its part of and any number of processes reads.

They are written by torch.distributed.checkpoint, at once or in a thread. Two library functions that look like they would do are
not used. Accelerate's `save_state` writes a folder in place, by the number of processes that there are, so that a kill in
between, or another number later, would lose the run. PyTorch's `get_optimizer_state_dict` makes a step with an optimizer that
has no state yet, which counts: a run whose first state is saved before its first update would end with other weights.
"""

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from revzoo.errors import CheckpointError, RevzooError, join_names
from revzoo.training.options import TrainOptions
from revzoo.training.run_folder import RunFolder
from revzoo.training.terminal import has_lost_others

METADATA = ".metadata"  # says which file holds which part of which tensor
_OF_METADATA = {  # what it is made of
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),  # of Python 3.13
    ("pathlib._local", "WindowsPath"),
}
_SETTINGS = "settings"
# The names are flat already; in the settings flattening would lose what is empty.
_AS_IT_IS = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


def list_contents(modules: Mapping[str, nn.Module], optimizer: Optimizer, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what is to be written, by name: tensors, which training goes on changing, and everything else.

    Args:
        modules: modules by name; the parameters of "model" are those of the optimizer.
        optimizer: the optimizer.
        settings: anything else that is needed to go on.
    """
    saved = optimizer.state_dict()
    values = {f"optimizer.{number}.{key}": value for number, row in saved["state"].items() for key, value in row.items()}
    tensors = {path: value for path, value in values.items() if isinstance(value, Tensor)}
    others = {path: value for path, value in values.items() if path not in tensors}
    return {**_list_tensors(modules), **tensors, _SETTINGS: {**settings, "optimizer": (saved["param_groups"], others)}}


def read_state_tensors(folder: Path, modules: Mapping[str, nn.Module], optimizer: Optimizer) -> dict[str, Any]:
    """Read modules and an optimizer from a folder; all processes call this together. Return the settings.

    Args:
        folder: where the contents were written, by whatever number of processes.
        modules: as they were written, with values of their own, sharded or not.
        optimizer: an optimizer that has made no step yet.

    Raises:
        CheckpointError: the files are of another model.
        Exception: the files are missing or damaged; their readers raise all kinds of errors.
    """
    with _ordinary_errors():
        saved = _Reader(folder).read_metadata()
        tensors = _list_tensors(modules)
        own = {path for path in saved.state_dict_metadata if not path.startswith("optimizer.")}
        if unfit := sorted(own ^ {*tensors, _SETTINGS}):
            raise CheckpointError(f"The state does not fit the model: only one of them has {join_names(unfit, most=3)}")
        state = _make_state(saved, optimizer)
        contents: dict[str, Any] = {**tensors, **state, _SETTINGS: None}
        load(contents, storage_reader=_Reader(folder), planner=_LoadPlanner(**_AS_IT_IS))
    settings: dict[str, Any] = contents[_SETTINGS]
    groups, others = settings.pop("optimizer")
    rows: dict[int, dict[str, Any]] = {}
    for path, value in {**state, **others}.items():
        _, number, key = path.split(".", 2)
        rows.setdefault(int(number), {})[key] = value
    optimizer.load_state_dict({"state": rows, "param_groups": groups})
    return settings


def _list_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return parameters and buffers of all modules by name, each tied one once."""
    first: dict[int, str] = {}
    tensors = {f"{name}.{key}": t for name, module in modules.items() for key, t in module.state_dict(keep_vars=True).items()}
    return {name: t.detach() for name, t in tensors.items() if first.setdefault(id(t), name) == name}


def _make_state(saved: Metadata, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return tensors to read an optimizer's state into: sharded as the parameter where they have its shape, else whole."""
    parameters, state = [p for group in optimizer.param_groups for p in group["params"]], {}
    for path, facts in saved.state_dict_metadata.items():
        if path.startswith("optimizer.") and isinstance(facts, TensorStorageMetadata):
            p = parameters[int(path.split(".")[1])]
            like = p.detach() if facts.size == p.shape != () else torch.empty(facts.size)
            state[path] = torch.empty_like(like, dtype=facts.properties.dtype)
    return state


@contextmanager
def _ordinary_errors() -> Iterator[None]:
    """Raise what went wrong in any process, without PyTorch's report of it, nor its warning that a process is alone.

    The warning is silenced for good: a thread that writes meanwhile has the filters of the process.
    """
    warnings.filterwarnings("ignore", ".*assuming the intent is to (save|load) in a single process")
    try:
        yield
    except CheckpointException as report:
        raise next(iter(report.failures.values()))[0] from None


class _MetadataUnpickler(pickle.Unpickler):
    """Reads what says which file holds what: PyTorch's records of that, and nothing that a stranger's file would run."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _OF_METADATA:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}, which is of no state and was not run")


class _Reader(FileSystemReader):
    """Reads a folder as PyTorch does, without running what is in it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            return cast(Metadata, _MetadataUnpickler(file).load())


class _LoadPlanner(DefaultLoadPlanner):
    """Plans as PyTorch does; what is no tensor is plain data."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        try:
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError("Its settings hold more than numbers and texts, which was not run") from error


class StateWriter(FileSystemWriter):
    """Writes a folder. When the files of all processes are on the disk, the first process completes it.

    torch.distributed.checkpoint raises an error of one process, also of `complete`, in all of them.

    Args:
        folder: of a file system that all processes see.
        complete: called at the end.
    """

    def __init__(self, folder: Path, complete: Callable[[], object]):
        super().__init__(folder)  # which waits until its files are on the disk
        self._complete = complete

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write what says where everything is, then call `complete`; only the first process does this."""
        super().finish(metadata, results)
        self._complete()


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

        Args:
            contents: tensors, and objects that all processes have alike.
            writer: of the folder.

        Raises:
            RevzooError: it could not be written; raised in all processes, or by `wait` in all of them.
        """
        # Of what all processes have alike but for rounding or statistics, the first one's is used in training, too.
        planner = DefaultSavePlanner(**_AS_IT_IS, dedup_save_to_lowest_rank=True)
        with self._folder.saving(), _ordinary_errors():
            if not self.is_async:
                save(contents, storage_writer=writer, planner=planner)
                return
            stager = DefaultStager(StagingOptions(False, False, False, False))  # copied when `async_save` returns
            group = self._open_group()
            written = async_save(contents, storage_writer=writer, planner=planner, process_group=group, async_stager=stager)
            stager.close()
            self._written = cast(Future[Any], written)

    def wait(self) -> None:
        """Wait until the state that is being written is complete. Errors: `start`."""
        written, self._written = self._written, None
        if written is not None:
            with self._folder.saving(), _ordinary_errors():
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
            if not has_lost_others(error):
                self.settle()
            raise
        self.wait()

    def _open_group(self) -> distributed.ProcessGroup | None:
        """Return a group for the thread, whose messages must not meet those of training."""
        if self._group is None and distributed.is_initialized():
            timeout = None if self._seconds is None else timedelta(seconds=self._seconds)
            self._group = cast(distributed.ProcessGroup, distributed.new_group(timeout=timeout, backend="gloo"))
        return self._group
