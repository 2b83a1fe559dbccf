"""Values that a run of a network writes to although they are not its own: parameters, and the batch."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)

from revzoo.device import has_value
from revzoo.runtime.compiling import leave_uncompiled
from revzoo.runtime.nested import tensors_in, wraps_tensors
from revzoo.runtime.operations import describe_operation


class KeptValues(TorchDispatchMode):
    """Keep what tensors hold when an operation is about to write to their memory, to put it back after the run.

    A teacher that follows its student by momentum moves parameters in forward, also through `.data`; `Embedding(max_norm)`
    renorms its own; ReLU(inplace=True) in the first layer overwrites the batch. Memory that nothing writes to is not copied.
    Not seen: what compiled kernels write, and shards (DTensor). Enter it before `LiveBytes`, which then counts no copies.

    Args:
        tensors: those to put back.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        super().__init__()
        owners = [t for t in tensors if has_value(t) and t.layout is torch.strided and not wraps_tensors(type(t))]
        self._storages = {s._cdata: s for s in (t.untyped_storage() for t in owners)}
        self._data = [(t, t.data) for t in owners]
        self._versions = [(t, t._version) for t in owners if not t.is_inference()]
        self._kept: dict[int, torch.UntypedStorage] = {}

    def restore(self) -> None:
        """Put back what was written to, and the counts of writes: a graph that has saved these tensors is valid again."""
        for t, data in self._data:
            if t.untyped_storage()._cdata != data.untyped_storage()._cdata:  # bitsandbytes packs weights anew in evaluation
                t.data = data
        for key, values in self._kept.items():
            self._storages[key].copy_(values)
        changed = [(t, version) for t, version in self._versions if t._version != version]
        if changed:
            torch._C._autograd._unsafe_set_version_counter(*map(tuple, zip(*changed, strict=True)))

    @leave_uncompiled
    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Collection[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(wraps_tensors, types)):
            return NotImplemented  # the subclass runs first, and its inner operations come here
        for t in tensors_in(describe_operation(func).list_written(args, kwargs or {})):
            key = t.untyped_storage()._cdata if t.layout is torch.strided else 0
            if key in self._storages and key not in self._kept:
                with _disable_current_modes():  # a FakeTensorMode would copy nothing
                    self._kept[key] = t.untyped_storage().clone()
        return func(*args, **(kwargs or {}))

    # `torch.compile` goes on capturing, and flex_attention, which is an operator of a higher order, running.
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    supports_higher_order_operators = True


@contextmanager
def leave_kept_values() -> Iterator[None]:
    """Leave `KeptValues` inside the block: for what is timed, after a run that has shown it all that is written to."""
    if isinstance(_get_current_dispatch_mode(), KeptValues):
        with _pop_mode_temporarily():
            yield
    else:
        yield
