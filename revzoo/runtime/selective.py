"""Mode `selective`: keep the outputs of a call's compute-intensive operations from its first run to the second.

Matrix products, convolutions and attention are nearly all of a step's work (`operations.py`), but only a part of what autograd
saves in it: norms, activations and dropout save their own inputs and outputs too. As in PyTorch's selective checkpointing
(`torch.utils.checkpoint.create_selective_checkpoint_contexts`), one dispatch mode keeps the outputs of products in the first
run and another hands them out in the second, so that only what is cheap is computed again. It differs in this:

- For every storage it is known which products its contents were computed from. An output that no saved tensor depends on (the
  last layer of nearly every branch, the convolution of a shortcut) is not kept: a transformer block keeps 10 streams instead of
  12. In the second run NaN of its shape stands in for it; where that raises, all is computed again.
- An output that was changed in place is computed again instead of being an error.
- A second run that calls other products than the first, or in another order, does not count: all is computed again. So it is in
  a further backward through a retained graph.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import call
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from revzoo.device import can_read_now
from revzoo.runtime import seams
from revzoo.runtime.compiling import leave_uncompiled
from revzoo.runtime.fingerprint import take_fingerprint
from revzoo.runtime.nested import tensors_in, wraps_tensors
from revzoo.runtime.operations import Operation, describe_operation

_Set = int  # of outputs: bit i is set if output i is in it
_ANY_SO_FAR = -1  # what fills uninitialised memory unseen may have read every output so far


class KeptProducts:
    """The outputs of the compute-intensive operations in one call of a step or node.

    Use: the first run inside `record()`, with `note_saved` whenever autograd saves a tensor in it, then `end_first_run()`. Each
    later run inside `hand_out()`; if it raises while `has_handed_out` is true, or if `have_fitted` is false after it, forget
    what it did and run once more.

    Attributes:
        have_fitted: whether the latest run called the products whose outputs it was given.
        has_handed_out: whether it was given something that it did not compute.
    """

    def __init__(self) -> None:
        self.have_fitted, self.has_handed_out, self.is_paused = True, False, False
        self.outputs: list[_Output] = []
        self._needed: _Set = 0
        self.was_written = False  # whether an output was changed where no dispatch mode sees it
        self._samples = False
        self._fixed: set[int] = set()  # the storages of parameters and the like
        self._known: dict[int, _Set] = {}  # by storage, during the first run: the outputs that its contents were computed from

    def begin(self, fixed: Iterable[Tensor], samples: bool) -> None:
        """Begin the first run.

        Args:
            fixed: tensors that do not change until backward: a product that reads another one is another product.
            samples: whether to look for outputs that are changed unseen.
        """
        self._fixed, self._samples = set(map(_find_storage, fixed)), samples

    def record(self) -> AbstractContextManager[Any]:
        """Return a dispatch mode for the first run."""
        return _Record(self)

    def note_saved(self, slot: int, tensor: Tensor) -> None:
        """Note that autograd saves a tensor: the outputs that it was computed from are needed."""
        sources = _ANY_SO_FAR if wraps_tensors(type(tensor)) else self._known.get(_find_storage(tensor), 0)
        self._needed |= self._resolve(sources)

    def follow(self, operation: Operation, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note an operation of the first run: keep what a product returns, and note what results were computed from."""
        known, sources = self._known, 0
        results = list(tensors_in(out))
        if operation.written:
            written = list(tensors_in(operation.list_written(args, kwargs)))
            keys = set(map(_find_storage, written))
            for output in self.outputs:  # version counters do not always show it
                if not keys.isdisjoint(map(_find_storage, output.tensors)):
                    output.free()
            for key in keys:
                if known.get(key) == _ANY_SO_FAR:
                    known[key] = 0
            results += written
        for x in () if operation.reads_layout_only else tensors_in((args, kwargs)):
            sources |= self._resolve(known.get(_find_storage(x), 0))
        if operation.decides:
            self._needed |= sources
        if operation.leaves_contents_open:
            sources = _ANY_SO_FAR
        elif operation.is_product and not operation.draws(args, kwargs):
            self.outputs.append(_Output((func, self.describe(args)), out, sources, self._samples))
            sources = 1 << (len(self.outputs) - 1)
        for x in results:
            known[_find_storage(x)] = sources

    def describe(self, args: Any) -> list[Any]:
        """Return what tells the operands of one product from those of another: shapes, and which of the fixed tensors."""
        operands = [(x.shape, _find_storage(x)) for x in args if isinstance(x, Tensor)]
        return [(shape, storage if storage in self._fixed else None) for shape, storage in operands]

    def _resolve(self, sources: _Set) -> _Set:
        return (1 << len(self.outputs)) - 1 if sources == _ANY_SO_FAR else sources

    def end_first_run(self) -> None:
        """Free the outputs that no saved tensor was computed from, and those that were changed in place."""
        for i, output in reversed(list(enumerate(self.outputs))):
            is_needed = self._needed >> i & 1
            if output.was_modified():
                output.free()
            elif output.was_written():
                self.was_written = True
                output.free()
            if not is_needed:
                output.leave_out()
            elif not output.tensors:  # it is computed again, from these
                self._needed |= output.sources
        self._known.clear()

    def hand_out(self) -> AbstractContextManager[Any]:
        """Return a context for a later run. The first of these uses up the outputs; others compute everything."""
        self.have_fitted, self.has_handed_out = True, False
        outputs, self.outputs = self.outputs, []
        return _HandOut(self, outputs) if outputs else nullcontext()


class _Output:
    """What one product has returned, kept apart from autograd's graph.

    Args:
        product: the operation and its operands.
        out: what it has returned.
        sources: the outputs that this was computed from.
        samples: whether to take fingerprints on a CPU, which show a change that raises no version.
    """

    __slots__ = ("_sample", "_value", "_versions", "is_left_out", "product", "sources", "tensors")

    def __init__(self, product: Any, out: Any, sources: _Set, samples: bool):
        self.product = product
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # keeps the version counter
            self._value: Any = _map(Tensor.detach, out)
        self.tensors = [x for x in ((self._value,) if isinstance(out, Tensor) else self._value) if isinstance(x, Tensor)]
        self._versions = [x._version for x in self.tensors]
        self._sample = self._read() if samples else []
        self.sources = sources
        self.is_left_out = False

    @property
    def is_kept(self) -> bool:
        """Whether its contents are kept."""
        return bool(self.tensors)

    def was_modified(self) -> bool:
        """Return whether its contents have changed since."""
        return [x._version for x in self.tensors] != self._versions

    def was_written(self) -> bool:
        """Return whether its bytes have changed although no version has."""
        return bool(self._sample) and self._read() != self._sample

    def _read(self) -> list[Any]:
        taken = (take_fingerprint(x, bits=True) for x in self.tensors if can_read_now(x))
        return [each.values for each in taken if each is not None and isinstance(each.values, list)]

    def free(self) -> None:
        """Free it: it will be computed again."""
        self._value, self.tensors, self._versions, self._sample = None, [], [], []

    def leave_out(self) -> None:
        """Free it: nothing that is needed is computed from it. NaN of the same shape will stand in for it."""
        if self.is_kept:
            self._value = _map(_describe_layout, self._value)
            self.is_left_out, self.tensors, self._versions, self._sample = True, [], [], []

    def take(self) -> Any:
        """Return the output; None if it has to be computed."""
        if self.is_left_out:
            return _map(call, self._value, partial)
        return None if self.was_modified() else self._value


class _Mode(TorchDispatchMode):
    """A dispatch mode whose handler PyTorch does not wrap to leave it uncompiled; it must be marked by `leave_uncompiled`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Self:
        is_first = torch._C._len_torch_dispatch_stack() == 0
        super().__enter__()
        if is_first:
            # PyTorch notes for all threads together that a mode is on, and each sets back what was noted before it. If that was
            # another thread's it would stay for good, and the compiler of PyTorch 2.10 captures nothing then.
            self.old_dispatch_mode_flags[-1] = self.old_non_infra_dispatch_mode_flags[-1] = False
            self.old_without_ignore_compile_internals_dispatch_mode_flags[-1] = False
        return self


class _Record(_Mode):
    def __init__(self, kept: KeptProducts):
        super().__init__()
        self._kept = kept

    @leave_uncompiled
    def __torch_dispatch__(self, func: Any, types: Collection[type], args: Any = (), kwargs: Any = None) -> Any:
        if types and any(map(wraps_tensors, types)):
            return NotImplemented  # the subclass runs first, and its inner operations come here
        operation, kwargs = describe_operation(func), kwargs or {}
        out = operation.run(*args, **kwargs)
        if not self._kept.is_paused:
            self._kept.follow(operation, func, args, kwargs, out)
        return out


class _HandOut(_Mode):
    def __init__(self, kept: KeptProducts, outputs: list[_Output]):
        super().__init__()
        self._kept = kept
        self._outputs = outputs[::-1]

    @leave_uncompiled
    def __torch_dispatch__(self, func: Any, types: Collection[type], args: Any = (), kwargs: Any = None) -> Any:
        if types and any(map(wraps_tensors, types)):
            return NotImplemented
        operation = describe_operation(func)
        if operation.is_product and self._outputs and not operation.draws(args, kwargs or {}):
            output = self._outputs.pop()
            if output.product != (func, self._kept.describe(args)):
                self._kept.have_fitted = False  # what was handed out before may have been wrong, too
                self._outputs.clear()
            elif (out := output.take()) is not None:
                self._kept.has_handed_out = True
                return out
        return operation.run(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if any(output.is_kept for output in self._outputs):
            self._kept.have_fitted = False
        self._outputs.clear()


def _describe_layout(x: Tensor) -> Callable[[], Tensor]:
    """Return what makes a tensor that stands in for x, from its layout alone."""
    return partial(_make_stand_in, x.size(), x.stride(), dtype=x.dtype, device=x.device)


def _make_stand_in(size: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    x = torch.empty_strided(size, strides, dtype=dtype, device=device)
    return x.fill_(torch.nan) if dtype.is_floating_point else x.zero_()


def _map(function: Callable[[Any], Any], value: Any, kind: type = Tensor) -> Any:
    """Return an output of one tensor or several with a function applied to what is of a kind."""
    return function(value) if isinstance(value, kind) else type(value)(function(x) if isinstance(x, kind) else x for x in value)


def _find_storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):  # sparse tensors have no single one, lazy parameters none
        return 0


seams.keep_products = KeptProducts
