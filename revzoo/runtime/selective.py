"""Mode `selective`: keep the outputs of a call's compute-intensive operations from its first run to the second.

Matrix products, convolutions and attention are nearly all of a step's work (`operations.py`), but only a part of what autograd
saves in it: norms, activations and dropout save their own inputs and outputs too. A selective call keeps those outputs of
compute-intensive operations that its saved tensors were computed from, and computes everything else again.

As in PyTorch's selective checkpointing (`torch.utils.checkpoint.create_selective_checkpoint_contexts`), one dispatch mode
keeps outputs in the first run and another returns them in the second. Two things differ. For every storage it is known which
compute-intensive outputs its contents were computed from. So an output is not kept when no saved tensor depends on it (the last
layer of nearly every branch, the convolution of a shortcut): the second run gets zeros in its place, and a transformer block
keeps 10 streams instead of 12. And a further backward through a retained graph computes everything again.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from revzoo.errors import RecoveryError
from revzoo.runtime.live_bytes import wraps_tensors
from revzoo.runtime.nested import tensors_in
from revzoo.runtime.operations import is_compute_intensive

OperationCall = tuple[Any, int]  # (op, n): the n-th call of op within a run
_NONE = frozenset[OperationCall]()
# A tensor whose value decides what is computed next (`if x.max() > 1`, boolean indexing): zeros cannot stand in for it.
_CONTROL_FLOW = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class KeptOutputs:
    """The outputs of the compute-intensive operations in one call of a step or node.

    Use: the first run inside `record()`, `mark_needed` for every tensor that autograd saves in it, then `discard_unneeded()`.
    Each later run inside `replay()`.

    Args:
        name: name of the step or node, for messages.
    """

    def __init__(self, name: str):
        self._name = name
        self._outputs: dict[OperationCall, tuple[Any, list[int]]] = {}  # outputs, and the version of each of their tensors
        self._discarded: dict[OperationCall, Any] = {}  # outputs that no saved tensor depends on, without their contents
        self._calls: Counter[Any] = Counter()
        self._replays = 0
        # Used during the first run only:
        self._computed_from: dict[int, frozenset[OperationCall]] = {}  # by storage: the kept outputs behind its contents
        self._inputs: dict[OperationCall, frozenset[OperationCall]] = {}  # the kept outputs behind the inputs of each
        self._joins: list[OperationCall] = []  # cheap operations on several kept outputs
        self._needed: set[OperationCall] = set()
        self._kept_in: dict[int, list[OperationCall]] = defaultdict(list)  # by storage: the kept outputs in it
        self._modified: set[OperationCall] = set()  # modified in place; version counters do not see every such operation

    def record(self) -> TorchDispatchMode:
        """Return a dispatch mode for the first run, which keeps every compute-intensive output."""
        return _Dispatch(self._run_and_keep)

    def replay(self) -> TorchDispatchMode:
        """Return a dispatch mode for a later run. The first of these uses up the kept outputs; others compute everything."""
        self._calls.clear()
        self._replays += 1
        return _Dispatch(self._return_kept)

    def mark_needed(self, saved: Tensor) -> None:
        """Keep the outputs that a tensor saved by autograd was computed from."""
        self._needed |= self._computed_from.get(_key(saved), _NONE)

    def discard_unneeded(self) -> None:
        """Free the outputs that no saved tensor depends on, and those that are cheap to compute from others that are kept."""
        self._needed &= self._outputs.keys()
        waiting = list(self._needed)
        while waiting:  # an output that was modified in place is computed again, for which its own inputs are needed
            call = waiting.pop()
            if call in self._modified:
                waiting += self._inputs[call] - self._needed
                self._needed |= self._inputs[call]
        for call in self._joins:
            if call in self._needed and self._inputs[call] <= self._needed:
                del self._outputs[call]
        for call, (kept, _) in list(self._outputs.items()):
            if call not in self._needed:
                self._discarded[call] = tree_map_only(Tensor, _Blank, kept)
            if call not in self._needed or call in self._modified:
                del self._outputs[call]
        self._computed_from.clear()
        self._inputs.clear()
        self._kept_in.clear()

    def _run_and_keep(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        call = self._next_call(func)
        inputs = list(tensors_in((args, kwargs)))
        behind = _NONE.union(*(self._computed_from.get(_key(t), _NONE) for t in inputs))
        out = func(*args, **kwargs)
        outputs = list(tensors_in(out))
        modified = [t for argument, value in _arguments(func, args, kwargs) if _is_written(argument) for t in tensors_in(value)]
        for t in modified:
            self._modified.update(self._kept_in[_key(t)])
        intensive = is_compute_intensive(func)
        # The result of a cheap operation on several kept outputs (a residual sum) may be what is worth keeping instead of them.
        joins = len(behind) > 1 and outputs and not modified
        if (intensive or joins) and not _draws_random_numbers(func, args, kwargs):
            kept = tree_map_only(Tensor, _alias, out)
            self._outputs[call] = kept, _versions(kept)
            self._inputs[call] = behind
            for t in tensors_in(kept):
                self._kept_in[_key(t)].append(call)
            if not intensive:
                self._joins.append(call)
            behind = frozenset([call])
        if not _CONTROL_FLOW.isdisjoint(func.tags):
            self._needed |= behind
        for t in (*outputs, *modified):
            self._computed_from[_key(t)] = behind
        return out

    def _return_kept(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = self._next_call(func)
        if self._replays > 1 or (call not in self._discarded and call not in self._outputs):
            return func(*args, **kwargs)
        if call in self._discarded:
            return tree_map_only(_Blank, _Blank.zeros, self._discarded[call])
        kept, versions = self._outputs.pop(call)
        if _versions(kept) != versions:
            raise RecoveryError(
                f"The output of {func} that {self._name} keeps was modified in place after forward. Replace the in-place "
                f"operation, or set the schedule of {self._name} to 'recompute' or 'store'."
            )
        return kept

    def _next_call(self, func: Any) -> OperationCall:
        self._calls[func] += 1
        return func, self._calls[func]


class _Dispatch(TorchDispatchMode):
    """Pass every operation to `handle`."""

    def __init__(self, handle: Callable[[Any, Any, Any], Any]):
        super().__init__()
        self._handle = handle

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Collection[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(wraps_tensors(t) for t in types):
            return NotImplemented  # the subclass runs first, and its inner operations come here
        return self._handle(func, args, kwargs or {})


class _Blank:
    """Shape, strides, dtype and device of a tensor whose contents are not needed."""

    def __init__(self, tensor: Tensor):
        self._layout = tensor.size(), tensor.stride(), tensor.dtype, tensor.device

    def zeros(self) -> Tensor:
        """Return zeros with that layout."""
        size, stride, dtype, device = self._layout
        return torch.empty_strided(size, stride, dtype=dtype, device=device).zero_()


def _draws_random_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation advances the random stream, as attention with dropout does: it has to in every run."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    values = {argument.name: value for argument, value in _arguments(func, args, kwargs)}
    return bool(values.get("dropout_p", 1))


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each argument as the operation's schema describes it, and its value."""
    for i, argument in enumerate(func._schema.arguments):
        yield argument, args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor of the same storage and version counter, which autograd will not make part of the graph."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _versions(outputs: Any) -> list[int]:
    return [t._version for t in tensors_in(outputs)]
