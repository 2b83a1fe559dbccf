"""Mode `selective`: keep the outputs of a call's compute-intensive operations from its first run to the second.

Matrix products, convolutions and attention are nearly all of a step's work (`operations.py`), but only a part of what autograd
saves in it: norms, activations and dropout save their own inputs and outputs too. A selective call keeps those outputs of
compute-intensive operations that its saved tensors were computed from, and computes everything else again.

As in PyTorch's selective checkpointing (`torch.utils.checkpoint.create_selective_checkpoint_contexts`), one dispatch mode
keeps outputs in the first run and another hands them out in the second. Three things differ:

- For every storage it is known which compute-intensive outputs its contents were computed from. An output that no saved tensor
  depends on (the last layer of nearly every branch, the convolution of a shortcut) is not kept: a transformer block keeps 10
  streams instead of 12.
- Nothing rests on that being known completely: values may be read and memory may be written where no dispatch mode sees it. In
  the second run an output that was not kept is a tensor without contents (`missing.py`). Whatever needs the contents ends that
  run. So does the first operation that was another one in the first run, or had other operands. A run that ends after more or
  fewer operations than the first does not count. Then all is computed again.
- A further backward through a retained graph computes everything again.

Known limit: a kernel that changes a kept output through a raw pointer and raises no version is noticed on the CPU only, and
there by the first and last bytes of the output.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_char, string_at
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from revzoo.runtime.compiling import leave_uncompiled
from revzoo.runtime.live_bytes import wraps_tensors
from revzoo.runtime.missing import Layout, MissingTensor, NeedsFullRun, run_without_contents
from revzoo.runtime.operations import Operation, describe

_Set = int  # of kept outputs: bit i is set if output number i is in it
_ANY_SO_FAR = -1  # what fills uninitialised memory unseen may have read every output so far
_SAMPLE_BYTES = 64
_Sample = c_char * _SAMPLE_BYTES


class KeptOutputs:
    """The outputs of the compute-intensive operations in one call of a step or node.

    Use: the first run inside `record()`, `mark_needed` for every tensor that autograd saves in it, then `discard_unneeded()`.
    Each later run inside `replay()`. If it raises an Exception or NeedsFullRun while `handed_out` is true, or if afterwards
    `has_run_alike` is false, forget what it did and run once more, inside another `replay()`.

    Attributes:
        handed_out: whether the latest run got something that it did not compute.
    """

    def __init__(self) -> None:
        self.handed_out = False
        self._first_run: _FirstRun | None = None
        self._second_run: _SecondRun | None = None
        self._operations: list[Any] = []  # of the first run, in order
        self._num_until_saved = 0  # operations before the last tensor that autograd saved
        self._kept: dict[int, _Kept] = {}  # by place in _operations
        self._replays = 0

    def record(self) -> TorchDispatchMode:
        """Return a dispatch mode for the first run, which keeps every compute-intensive output."""
        self._first_run = _FirstRun()
        return self._first_run

    def mark_needed(self, saved: Tensor) -> None:
        """Keep the outputs that a tensor saved by autograd was computed from."""
        assert self._first_run is not None
        self._first_run.mark_needed(saved)

    def holds(self, saved: Tensor) -> bool:
        """Return whether the first run has kept an output in the storage of this tensor."""
        return self._first_run is not None and self._first_run.holds(saved)

    def discard_unneeded(self) -> None:
        """Free the outputs that no saved tensor depends on, and those that are cheap to compute from others that are kept."""
        assert self._first_run is not None
        self._operations, self._kept = self._first_run.operations, self._first_run.choose_kept()
        self._num_until_saved = self._first_run.num_until_saved
        self._first_run = None

    def replay(self) -> AbstractContextManager[Any]:
        """Return a context for a later run. The first of these uses up the kept outputs; others compute everything."""
        self.handed_out = False
        self._replays += 1
        if self._replays > 1:
            self._kept.clear()
        self._second_run = _SecondRun(self, self._operations, self._kept) if self._kept else None
        return self._second_run or nullcontext()

    def has_run_alike(self, stopped_early: bool) -> bool:
        """Return whether the latest run, if it got anything, did as many operations as the first.

        Args:
            stopped_early: whether it has ended with the last tensor that autograd saves, and not with the function.
        """
        if self._second_run is None or not self.handed_out:
            return True
        return self._second_run.num_run == (self._num_until_saved if stopped_early else len(self._operations))


class _LightMode(TorchDispatchMode):
    """A dispatch mode whose handler PyTorch does not wrap to leave it uncompiled; it must be marked by `leave_uncompiled`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _FirstRun(_LightMode):
    """Run operations, and keep the outputs of the compute-intensive ones."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []
        self.num_until_saved = 0  # operations before the latest tensor that autograd saved
        self._recorded: list[_Kept] = []  # by number
        self._sources: dict[int | None, _Set] = {}  # by storage: the kept outputs that its contents were computed from
        self._inside: dict[int | None, _Set] = {}  # by storage: the kept outputs in it
        self._casts: set[int | None] = set()  # storages that a cast has filled
        self._needed: _Set = 0  # those that a saved tensor was computed from
        self._modified: _Set = 0  # those changed in place, which version counters do not always show

    def mark_needed(self, saved: Tensor) -> None:
        """Keep the outputs that a tensor was computed from."""
        self.num_until_saved = len(self.operations)
        if saved.__class__ is not Tensor and is_traceable_wrapper_subclass(saved):
            for name in saved.__tensor_flatten__()[0]:
                if isinstance(inner := getattr(saved, name), Tensor):  # DTensor also names its mesh
                    self.mark_needed(inner)
        elif sources := self._sources.get(_key(saved)):
            self._needed |= self._resolve(sources)

    def holds(self, saved: Tensor) -> bool:
        """Return whether an output in the storage of this tensor is kept."""
        return _key(saved) in self._inside

    def choose_kept(self) -> dict[int, "_Kept"]:
        """Return by place what the second run gets: outputs, and tensors without contents for those that were not needed."""
        waiting = self._needed
        while waiting:  # an output that was modified in place is computed again, for which its own inputs are needed
            number = waiting.bit_length() - 1
            waiting ^= 1 << number
            kept = self._recorded[number]
            if self._modified >> number & 1 or kept.was_modified():
                self._modified |= 1 << number
                waiting |= kept.sources & ~self._needed
                self._needed |= kept.sources
        chosen = {}
        for number, kept in enumerate(self._recorded):
            is_needed, is_modified = self._needed >> number & 1, self._modified >> number & 1
            if is_needed and not is_modified and not (kept.is_join and not kept.sources & ~self._needed):
                chosen[kept.place] = kept
            elif not is_needed and not kept.is_join:
                kept.discard()
                chosen[kept.place] = kept
        return chosen

    @leave_uncompiled
    def __torch_dispatch__(self, func: Any, types: Collection[type], args: Any = (), kwargs: Any = None) -> Any:
        if types and any(map(wraps_tensors, types)):
            return NotImplemented  # the subclass runs first, and its inner operations come here
        operation = describe(func)
        out = operation.run(*args) if operation.runs_as_called and not kwargs else _call(operation, func, args, kwargs or {})
        if operation.is_compared:
            self.operations.append(func)
        if types or not operation.is_view:  # the storage of a view is known already
            self._follow(operation, args, kwargs or {}, out)
        return out

    def _follow(self, operation: Operation, args: Any, kwargs: Any, out: Any) -> None:
        """Note what the outputs were computed from, and keep them if they are worth it."""
        known, sources = self._sources, 0
        values = (*args, *kwargs.values()) if kwargs else args
        written = [t for v in operation.written_values(args, kwargs) for t in _tensors_in(v)] if operation.written else []
        for key in map(_key, written):
            self._modified |= self._inside.get(key, 0)
            if known.get(key) == _ANY_SO_FAR:
                known[key] = 0
        for t in _tensors_in(values) if operation.takes_lists else values:
            if isinstance(t, Tensor):
                sources |= known.get(_key(t), 0)
        sources, outputs = self._resolve(sources), _tensors_in(out)
        # The result of a cheap operation on several kept outputs (a residual sum) may be what is worth keeping instead of them.
        is_join = not operation.is_compute_intensive and sources & (sources - 1) != 0
        if (operation.is_compute_intensive or is_join) and operation.is_pure and outputs and not operation.draws(args, kwargs):
            sources = self._keep(values, sources, is_join, out)
        if operation.decides:
            self._needed |= sources
        if operation.reads_layout_only:
            sources = 0
        if operation.leaves_contents_open:
            sources = _ANY_SO_FAR
        for t in (*outputs, *written) if written else outputs:
            key = _key(t)
            if key is None:  # what is computed from it cannot be followed
                self._needed |= self._resolve(sources)
                continue
            known[key] = sources
            if operation.is_cast:
                self._casts.add(key)

    def _keep(self, values: Sequence[Any], sources: _Set, is_join: bool, out: Any) -> _Set:
        """Keep the output of the latest operation."""
        number = 1 << len(self._recorded)
        kept = _Kept(len(self.operations) - 1, [self._describe(value) for value in values], sources, is_join, out)
        self._recorded.append(kept)
        for t in kept.tensors:
            key = _key(t)
            self._inside[key] = self._inside.get(key, 0) | number
        return number

    def _describe(self, value: Any) -> Any:
        """Return what an argument must be in the second run as well."""
        if isinstance(value, Tensor):
            key = _key(value)
            is_external = key is not None and key not in self._sources and key not in self._casts
            return _Operand(value.shape, value.dtype, ref(value.untyped_storage()) if is_external else None)
        return [self._describe(item) for item in value] if isinstance(value, list | tuple) else value

    def _resolve(self, sources: _Set) -> _Set:
        """Return a set of outputs with those up to now in place of _ANY_SO_FAR."""
        return sources if sources >= 0 else (1 << len(self._recorded)) - 1


class _SecondRun(_LightMode):
    """Run operations, but return what was kept of them, as long as they are those of the first run."""

    def __init__(self, kept_outputs: KeptOutputs, operations: list[Any], kept: dict[int, "_Kept"]):
        super().__init__()
        self._kept_outputs = kept_outputs
        self._operations = operations
        self._kept = kept
        self.num_run = 0  # operations so far
        self._casts: set[int | None] = set()  # storages that a cast has filled

    @leave_uncompiled
    def __torch_dispatch__(self, func: Any, types: Collection[type], args: Any = (), kwargs: Any = None) -> Any:
        if types and any(map(wraps_tensors, types)):
            return NotImplemented
        operation = describe(func)
        if operation.is_compared:
            place = self.num_run
            self.num_run += 1
            if place >= len(self._operations) or self._operations[place] is not func:
                self._stop_handing_out()
            elif (kept := self._kept.pop(place, None)) is not None:
                if self._fits(kept.operands, (*args, *kwargs.values()) if kwargs else args) and not kept.was_modified():
                    self._kept_outputs.handed_out = True
                    return kept.get()
                self._stop_handing_out()
        if types and MissingTensor in types:
            return run_without_contents(func, args, kwargs or {})
        out = operation.run(*args) if operation.runs_as_called and not kwargs else _call(operation, func, args, kwargs or {})
        if operation.is_cast:
            self._casts.add(_key(out))
        return out

    def _stop_handing_out(self) -> None:
        """Compute everything from here on. What was handed out before may have been wrong."""
        if self._kept_outputs.handed_out:
            raise NeedsFullRun
        self._kept.clear()

    def _fits(self, expected: Any, value: Any) -> bool:
        """Return whether an argument is what it was in the first run, as far as it can be seen without looking at contents."""
        if isinstance(expected, _Operand):
            return (
                isinstance(value, Tensor)
                and value.shape == expected.shape
                and value.dtype == expected.dtype
                and (expected.storage is None or self._has_storage(value, expected.storage))
            )
        if isinstance(expected, list):
            return isinstance(value, list | tuple) and len(value) == len(expected) and all(map(self._fits, expected, value))
        return not isinstance(value, Tensor) and bool(expected == value)

    def _has_storage(self, value: Tensor, storage: "ref[torch.UntypedStorage]") -> bool:
        key = _key(value)
        return key is not None and (key in self._casts or storage() is value.untyped_storage())


class _Operand(NamedTuple):
    """A tensor that an operation takes."""

    shape: torch.Size
    dtype: torch.dtype
    storage: "ref[torch.UntypedStorage] | None"  # None if operations of the same run have filled it


class _Kept:
    """The output of one operation, or its layout alone after `discard`.

    Args:
        place: which operation of the run it is.
        operands: its arguments, without the contents of tensors.
        sources: the kept outputs that its operands were computed from.
        is_join: whether it is a cheap operation on several kept outputs.
        out: what it returned.
    """

    def __init__(self, place: int, operands: list[Any], sources: _Set, is_join: bool, out: Any):
        self.place = place
        self.operands = operands
        self.sources = sources
        self.is_join = is_join
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # keeps the version counter
            self._out = _map(Tensor.detach, out, Tensor)  # autograd will not make these part of the graph
        self.tensors = _tensors_in(self._out)
        self._marks = [(t._version, _sample(t)) for t in self.tensors]

    def was_modified(self) -> bool:
        """Return whether its contents have changed since, as far as that can be seen."""
        return [(t._version, _sample(t)) for t in self.tensors] != self._marks

    def discard(self) -> None:
        """Free the contents."""
        self._out = _map(Layout.of, self._out, Tensor)
        self.tensors, self._marks = [], []

    def get(self) -> Any:
        """Return the output; tensors without contents, if those were discarded."""
        return self._out if self.tensors else _map(MissingTensor, self._out, Layout)


def _call(operation: Operation, func: Any, args: Any, kwargs: Any) -> Any:
    if operation.autocast_by is not None:
        return _call_autocast_inside(operation.autocast_by, func, args, kwargs)
    return operation.run(*args, **kwargs)


def _call_autocast_inside(autocast_by: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation whose kernel calls operations that autocast knows: below a dispatch mode, autocast is off."""
    device = next(t.device.type for t in _tensors_in(args))
    key = getattr(torch._C.DispatchKey, f"Autocast{device.upper()}", None)
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]  # as it is above the dispatch mode
        is_enabled = key is not None and torch.is_autocast_enabled(device)
    if key is None or not is_enabled or torch._C._dispatch_has_kernel_for_dispatch_key(autocast_by, key):
        return func(*args, **kwargs)
    with torch._C._IncludeDispatchKeyGuard(key), torch._C._SetExcludeDispatchKeyGuard(key, False):
        return func(*args, **kwargs)


def _tensors_in(value: Any) -> Sequence[Tensor]:
    """Return the tensors in an argument or a result of an operation."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return [t for item in value for t in _tensors_in(item)]
    return ()


def _map(function: Any, out: Any, kind: type) -> Any:
    if isinstance(out, kind):
        return function(out)
    return type(out)(_map(function, item, kind) for item in out) if type(out) in (list, tuple) else out


def _key(tensor: Tensor) -> int | None:
    """Return what identifies a tensor's storage while it is alive; None if it has no single one, such as a sparse tensor."""
    try:
        key: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
    return key


def _sample(tensor: Tensor) -> bytes:
    """Return some of a tensor's bytes, where that takes no operation."""
    if tensor.__class__ is not Tensor or not tensor.is_cpu:
        return b""
    storage = tensor.untyped_storage()
    start, size = storage.data_ptr(), storage.nbytes()
    if size < _SAMPLE_BYTES:
        return string_at(start, size)
    first: bytes = _Sample.from_address(start).raw  # faster than string_at
    last: bytes = _Sample.from_address(start + size - _SAMPLE_BYTES).raw
    return first + last
