"""Mode `selective`: keep the outputs of a call's compute-intensive operations from its first run to the second.

Matrix products, convolutions and attention are nearly all of a step's work (`operations.py`), but only a part of what autograd
saves in it: norms, activations and dropout save their own inputs and outputs too. As in PyTorch's selective checkpointing
(`torch.utils.checkpoint.create_selective_checkpoint_contexts`), one dispatch mode keeps the outputs of products in the first run
and another hands them out in the second, so that only what is cheap is computed again. It differs in this:

- What is computed behind the last tensor that autograd saves (the last layer of nearly every branch) is not kept: the second run
  ends there. A transformer block keeps 10 streams instead of 12.
- An output that was changed in place is computed again instead of being an error.
- A second run that calls other products than the first, or in another order, does not count: all is computed again. So it is in
  a further backward through a retained graph.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from revzoo.runtime.compiling import leave_uncompiled
from revzoo.runtime.live_bytes import wraps_tensors
from revzoo.runtime.nested import tensors_in
from revzoo.runtime.operations import describe


class KeptProducts:
    """The outputs of the compute-intensive operations in one call of a step or node.

    Use: the first run inside `record()`, with `mark_needed` whenever autograd saves a tensor in it. Each later run inside
    `hand_out()`; if `have_fitted` is false after it, forget what it did and run once more.

    Attributes:
        have_fitted: whether the latest run called the products whose outputs it was given.
    """

    def __init__(self) -> None:
        self.have_fitted = True
        self.outputs: list[_Output] = []
        self._needed = 0  # how many products ran before the last tensor that autograd saved
        self._inside: set[int] = set()  # the storages of outputs, during the first run

    def record(self) -> "_Record":
        """Return a dispatch mode for the first run."""
        return _Record(self)

    def mark_needed(self) -> None:
        """Note that autograd saves a tensor: it may have been computed from any output so far."""
        self._needed = len(self.outputs)

    def holds(self, saved: Tensor) -> bool:
        """Return whether a tensor is, or lies in, an output that the first run has kept."""
        return _find_storage(saved) in self._inside

    def add(self, operation: Any, args: Any, out: Any) -> None:
        """Keep what a product has returned."""
        output = _Output(operation, args, out)
        self.outputs.append(output)
        self._inside.update(map(_find_storage, output.tensors))

    def note_written(self, values: Sequence[Any]) -> None:
        """Free the outputs that an operation has changed in place, which version counters do not always show."""
        written = set(map(_find_storage, tensors_in(values)))
        if not written.isdisjoint(self._inside):
            for output in self.outputs:
                if not written.isdisjoint(map(_find_storage, output.tensors)):
                    output.free()

    def end_first_run(self) -> None:
        """Free the outputs that no saved tensor can depend on, and those that were changed in place."""
        del self.outputs[self._needed :]
        for output in self.outputs:
            if output.was_modified():
                output.free()
        self._inside.clear()

    def hand_out(self) -> AbstractContextManager[Any]:
        """Return a context for a later run. The first of these uses up the outputs; others compute everything."""
        self.have_fitted = True
        outputs, self.outputs = self.outputs, []
        return _HandOut(self, outputs) if outputs else nullcontext()


class _Output:
    """What one product has returned, kept apart from autograd's graph."""

    __slots__ = ("_call", "_value", "_versions", "tensors")

    def __init__(self, operation: Any, args: Any, out: Any):
        self._call = operation, _list_shapes(args)
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # keeps the version counter
            self._value: Any = out.detach() if isinstance(out, Tensor) else type(out)(map(_detach, out))
        self.tensors = [x for x in ((self._value,) if isinstance(out, Tensor) else self._value) if isinstance(x, Tensor)]
        self._versions = [x._version for x in self.tensors]

    def was_modified(self) -> bool:
        return [x._version for x in self.tensors] != self._versions

    def is_of(self, operation: Any, args: Any) -> bool:
        """Return whether a call is the one that has returned this, as far as operation and shapes tell."""
        return self._call == (operation, _list_shapes(args))

    def free(self) -> None:
        self._value, self.tensors, self._versions = None, [], []

    def take(self) -> Any:
        """Return the output; None if it has to be computed."""
        return None if self.was_modified() else self._value


class _Mode(TorchDispatchMode):
    """A dispatch mode whose handler PyTorch does not wrap to leave it uncompiled; it must be marked by `leave_uncompiled`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Record(_Mode):
    def __init__(self, kept: KeptProducts):
        super().__init__()
        self._kept = kept

    @leave_uncompiled
    def __torch_dispatch__(self, func: Any, types: Collection[type], args: Any = (), kwargs: Any = None) -> Any:
        if types and any(map(wraps_tensors, types)):
            return NotImplemented  # the subclass runs first, and its inner operations come here
        operation = describe(func)
        out = operation.run(*args, **(kwargs or {}))
        if operation.is_product and not operation.draws(args, kwargs or {}):
            self._kept.add(func, args, out)
        if operation.written:
            written = [args[i] if i < len(args) else (kwargs or {}).get(name) for i, name in operation.written]
            self._kept.note_written(written)
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._kept.end_first_run()


class _HandOut(_Mode):
    def __init__(self, kept: KeptProducts, outputs: list[_Output]):
        super().__init__()
        self._kept = kept
        self._outputs = outputs[::-1]

    @leave_uncompiled
    def __torch_dispatch__(self, func: Any, types: Collection[type], args: Any = (), kwargs: Any = None) -> Any:
        if types and any(map(wraps_tensors, types)):
            return NotImplemented
        operation = describe(func)
        if operation.is_product and self._outputs and not operation.draws(args, kwargs or {}):
            output = self._outputs.pop()
            if not output.is_of(func, args):
                self._kept.have_fitted = False  # what was handed out before may have been wrong, too
                self._outputs.clear()
            elif (out := output.take()) is not None:
                return out
        return operation.run(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._outputs:
            self._kept.have_fitted = False
            self._outputs.clear()


def _list_shapes(args: Any) -> list[torch.Size]:
    return [x.shape for x in args if isinstance(x, Tensor)]


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _find_storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # it has no single one, such as a sparse tensor
        return 0
