"""A tensor whose contents were not computed, because nothing is expected to need them.

It has shape, strides, dtype and device, but no storage. Simple operations on it give further missing tensors. Everything else
that would look at its contents raises `NeedsFullRun`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from revzoo.runtime.operations import describe

# Ways to the contents of a tensor that are no operations.
_READS = {Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.untyped_storage, Tensor.__array__, Tensor.__dlpack__}


class NeedsFullRun(BaseException):
    """Raised in a second run that cannot go on with what it was given: all of it has to be computed.

    No Exception, which a user's function might catch.
    """


class Layout(NamedTuple):
    """What a tensor has besides its contents."""

    size: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> "Layout":
        """Return the layout of a tensor."""
        return Layout(tensor.size(), tensor.stride(), tensor.dtype, tensor.device)


class MissingTensor(Tensor):
    """A tensor without contents."""

    @staticmethod
    def __new__(cls, layout: Layout) -> "MissingTensor":
        size, strides, dtype, device = layout
        missing: MissingTensor = Tensor._make_wrapper_subclass(cls, size, strides=strides, dtype=dtype, device=device)
        torch._C._set_throw_on_mutable_data_ptr(missing)
        return missing

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise NeedsFullRun
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NeedsFullRun


def run_without_contents(operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the results of an operation, some of whose arguments are missing tensors: as a rule missing tensors themselves.

    Raises:
        NeedsFullRun: the operation does more than compute its results, or their layout cannot be told without contents.
    """
    if describe(operation).reads_layout_only:
        return operation(*map(_fill_in, args), **kwargs)
    if not describe(operation).may_be_skipped or kwargs.get("device") is not None:
        raise NeedsFullRun
    device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, MissingTensor))
    with _disable_current_modes():
        try:
            out = operation(*map(_to_meta, args), **{name: _to_meta(value) for name, value in kwargs.items()})
        except (RuntimeError, NotImplementedError):
            raise NeedsFullRun from None
        return _to_missing(out, device)


def _fill_in(value: Any) -> Any:
    """Return memory of any contents in place of a missing tensor."""
    if isinstance(value, MissingTensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return value


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return [_to_meta(item) for item in value] if isinstance(value, list | tuple) else value


def _to_missing(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return MissingTensor(Layout.of(value)._replace(device=device))
    return type(value)(_to_missing(item, device) for item in value) if isinstance(value, list | tuple) else value
