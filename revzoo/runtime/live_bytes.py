"""Exact count of live bytes: what a forward and backward hold, storage by storage.

A dispatch mode sees the outputs of every operation, sets a weak reference to each new storage and logs when it is created,
resized and freed. The log is kept, so the peak of any set of storages can be computed after the run, once it is known which
storage was what. This works for real tensors on any device and under `FakeTensorMode`, where nothing is allocated.

Not counted: the workspace that a kernel allocates and frees within one operation. On a CPU, the allocator's own events give
the same peak to the byte for a chain of transformer blocks, and one 4 to 11 % higher for a chain of convolutions. One thing is
different from a run without it: autograd adds up the gradients of a tensor used twice in place if nobody else holds the first,
but out of place under any dispatch mode. Such a sum is counted as if it were in place. The gradient of `max(dim)` or `gather`
is likewise scattered into zeros in place without a mode; here both count.
"""

import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from revzoo.runtime.compiling import leave_uncompiled
from revzoo.runtime.nested import tensors_in, wraps_tensors
from revzoo.runtime.ownership import is_held_alone
from revzoo.runtime.update import is_dense

Storages = frozenset[int]

_RESIZE = "resize_"
DEVICE = torch.ops.prim.device.default  # asked for by each `.device` of a FakeTensor; it makes nothing to count
_ADD = torch.ops.aten.add.Tensor
_REFERENCES_OF_A_CALL = 4  # to an argument that nobody else holds: what calls an operation, and what hands it to this mode
_ROWS = Tensor.crow_indices, Tensor.col_indices, Tensor.values
_COLUMNS = Tensor.ccol_indices, Tensor.row_indices, Tensor.values
_SPARSE_PARTS: dict[torch.layout, tuple[Callable[[Tensor], Tensor], ...]] = {
    torch.sparse_coo: (Tensor._indices, Tensor._values),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}
_DISPATCHING = ("__torch_dispatch__", "_fn", "inner")  # what lies between an operation and its caller


class LiveBytes(TorchDispatchMode):
    """Count the bytes of live storages while active; it keeps nothing alive and changes no result.

    A storage counts once, with its full size, however many views there are, from the operation that returned it until it is
    freed. Pass tensors that already exist to `watch`, or they count from the first operation that returns them. Storages are
    numbered in order of appearance. `log` has an entry (storage, change in bytes) whenever a storage appears, is resized or is
    freed. Enter it innermost, inside a `FakeTensorMode`.

    Example:
        with LiveBytes() as live:
            weights = live.watch(model.parameters())
            model(x).sum().backward()
        live.peak(without=weights)
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[int, int]] = []
        self._sizes: list[int] = []
        self._known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._restore: list[Callable[[], None]] = []

    def watch(self, tensors: Any) -> Storages:
        """Return the storages of tensors (in nested collections); those not seen before count from now on."""
        return frozenset(self._number_of(storage) for tensor in tensors_in(tensors) for storage in _storages(tensor))

    def find(self, tensors: Any) -> Storages:
        """Return those storages of tensors (in nested collections) that count already."""
        keys = (id(storage) for tensor in tensors_in(tensors) for storage in _storages(tensor))
        return frozenset(self._known[key][0] for key in keys if key in self._known)

    def size(self, storages: Collection[int]) -> int:
        """Return the bytes that these storages hold now."""
        return sum(self._sizes[storage] for storage in storages)

    def now(self) -> int:
        """Return the current time, which is a position in the log, for `alive` and `alive_by_birth`."""
        return len(self.log)

    def alive(self, without: Collection[int] = (), at: int | None = None) -> int:
        """Return the bytes alive at a time (default: now) in storages other than `without`."""
        return sum(change for storage, change in self.log[:at] if storage not in without)

    def alive_by_birth(self, times: Sequence[int], without: Collection[int], at: int) -> list[int]:
        """Return the bytes alive at `at`, by time of creation.

        Entry i is the sum over the storages created between times[i] and times[i+1], the last one over all created later.
        """
        born: dict[int, int] = {}
        sums = [0] * (len(times) + 1)
        for i, (storage, change) in enumerate(self.log[:at]):
            sums[bisect_right(times, born.setdefault(storage, i))] += 0 if storage in without else change
        return sums[1:]

    def peak(self, without: Collection[int] = (), since: int = 0) -> int:
        """Return the largest number of bytes alive at once, from a time on, in storages other than `without`."""
        highest = total = self.alive(without, at=since)
        for storage, change in self.log[since:]:
            if storage not in without:
                total += change
                highest = max(highest, total)
        return highest

    @leave_uncompiled
    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Collection[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if any(wraps_tensors(t) for t in types):
            return NotImplemented  # the subclass runs first, and its inner operations come here
        if func is _ADD and _adds_up_gradients(args):
            out = func(*args)
            self._log_size(self._number_of(args[0].untyped_storage()), 0)  # the sum has its memory
        else:
            out = func(*args, **(kwargs or {}))
        self.watch(out)
        return out

    def __enter__(self) -> "LiveBytes":
        # FSDP frees and refills its parameters with UntypedStorage.resize_, which no dispatch mode sees.
        own = vars(torch.UntypedStorage).get(_RESIZE)
        resize = getattr(torch.UntypedStorage, _RESIZE)

        def resize_and_log(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            if id(storage) in self._known:
                self._number_of(storage)
            return out

        def restore() -> None:
            if own is None:
                delattr(torch.UntypedStorage, _RESIZE)
            else:
                setattr(torch.UntypedStorage, _RESIZE, own)

        setattr(torch.UntypedStorage, _RESIZE, resize_and_log)
        self._restore.append(restore)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._restore.pop()()

    def _number_of(self, storage: torch.UntypedStorage) -> int:
        # The Python object of a storage lives as long as the storage itself, so its id and a weak reference identify it.
        key = id(storage)
        if key not in self._known:
            self._known[key] = len(self._sizes), weakref.ref(storage, partial(self._log_freed, key))
            self._sizes.append(0)
        number = self._known[key][0]
        self._log_size(number, storage.nbytes())
        return number

    def _log_freed(self, key: int, _: object) -> None:
        self._log_size(self._known.pop(key)[0], 0)

    def _log_size(self, number: int, size: int) -> None:
        if change := size - self._sizes[number]:
            self._sizes[number] = size
            self.log.append((number, change))


class LiveBytesOfReplacedCalls(LiveBytes):
    """The same for modules with calls that `replaced_call.py` replaces: under a plain `LiveBytes`, the compiler steps aside.

    The backend there runs each torch call as it is, so that this sees all of them.
    """

    supports_higher_order_operators = True  # those that draw random numbers again

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def _adds_up_gradients(args: tuple[Any, ...]) -> bool:
    """Return whether autograd adds two gradients of one tensor, and would do so in place without a dispatch mode.

    Then no function in Python stands between the operation and backward, which on a device has a thread of its own.
    """
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name in _DISPATCHING:
        frame = frame.f_back
    if frame is not None and frame.f_code is not _engine_run_backward.__code__:
        return False
    first, second = args
    is_only_reference = first._use_count() <= _REFERENCES_OF_A_CALL and is_held_alone(first)
    return is_only_reference and is_dense(first) and first.shape == second.shape


def list_parts(tensor: Tensor) -> list[Tensor]:
    """Return the indices and values of a sparse tensor (a gradient of an embedding, for example); any other one as it is."""
    parts = _SPARSE_PARTS.get(tensor.layout)
    return [tensor] if parts is None else [part(tensor) for part in parts]


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(inner := getattr(tensor, name), Tensor):  # DTensor also names its mesh
                yield from _storages(inner)
    else:
        yield from (part.untyped_storage() for part in list_parts(tensor))
