"""Tensors that have a shape, a dtype and a device, but no values: what a model runs on where nothing is to be allocated."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._python_dispatch import _disable_current_modes

from revzoo.runtime.nested import map_tensors, tensors_in


def find_fake_mode(tensors: list[Tensor], always: bool = False) -> FakeTensorMode | None:
    """Return the mode of the first FakeTensor; without one, a new mode if a tensor is on meta or `always` is set, else None."""
    for t in tensors:
        if isinstance(t, FakeTensor):
            return t.fake_mode
    return FakeMode(allow_non_fake_inputs=True) if always or any(t.is_meta for t in tensors) else None


def make_fake(t: Tensor, mode: FakeTensorMode, home: torch.device) -> Tensor:
    """Return a FakeTensor like t that requires no gradient, and knows t. In place of the meta device its device is `home`."""
    if t.is_meta and not isinstance(t, FakeTensor):
        return FakeTensor(mode, torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta"), home)
    if t.layout is not torch.strided:
        raise FakeKernelError(f"a tensor {tuple(t.shape)} of layout {t.layout}: its size depends on its values")
    fake = mode.from_tensor(t.detach())
    vars(fake)[_VALUES] = ref(t)  # which copies of it do not copy
    return fake


def find_values(given: Any) -> Any:
    """Return the tensor that `make_fake` has made a FakeTensor of; anything else as it is."""
    own = vars(given).get(_VALUES) if isinstance(given, FakeTensor) else None
    return given if own is None else own()


_VALUES = "revzoo_values"  # in the attributes of a FakeTensor
_ATEN = torch.ops.aten
_NORMS = {_ATEN.native_batch_norm.default, _ATEN.native_layer_norm.default, _ATEN.native_group_norm.default}
# Views of their first argument alone, of sizes that follow from the arguments.
_VIEWS = {
    _ATEN.detach.default,
    _ATEN.view.default,
    _ATEN._unsafe_view.default,
    _ATEN.t.default,
    _ATEN.transpose.int,
    _ATEN.permute.default,
    _ATEN.expand.default,
    _ATEN.slice.Tensor,
    _ATEN.select.int,
    _ATEN.unsqueeze.default,
    _ATEN.unbind.int,
    _ATEN.split.Tensor,
}
# What makes a sparse tensor of a size that does not depend on values.
_MAKE_SPARSE = _ATEN._sparse_coo_tensor_with_dims_and_tensors.default
_SPARSE = {_ATEN._embedding_bag_backward.default, _ATEN.detach.default, _MAKE_SPARSE}
_CLONE = _ATEN.clone.default
_LSTM_LAYER = _ATEN.mkldnn_rnn_layer.default
_LSTM_LAYER_BACKWARD = _ATEN.mkldnn_rnn_layer_backward.default
_LAST_OFFSET = 7  # whether the offsets of bags contain the end of the last one
_EMBEDDING_BAGS = {_ATEN._embedding_bag.default, _ATEN._embedding_bag_forward_only.default}
_MEAN_LOSSES = {_ATEN.mse_loss.default, _ATEN.smooth_l1_loss.default}
_GROUP_NORM_BACKWARD = _ATEN.native_group_norm_backward.default
_NORMS_BACKWARD = {_ATEN.native_batch_norm_backward.default, _ATEN.native_layer_norm_backward.default, _GROUP_NORM_BACKWARD}


class FakeKernelError(RuntimeError):
    """An operation that fails without values: it has other rules than the kernel of the device, or none."""


class FakeMode(FakeTensorMode):
    """One under which norms, LSTMs, bags of embeddings and losses return what their kernels do, and views take less time.

    With an input in half precision and weights in float32, norms compute statistics in float32, and a gradient of the input in
    half precision. Under PyTorch's mode it is the other way round. It also gives results the strides of another argument. The
    layout decides what later operations copy.

    oneDNN's layer of an LSTM saves gates and states in a workspace, most of what it keeps, which is empty under PyTorch's mode.
    Only oneDNN knows its size, so each layer is computed once, with zeros.

    Losses of squares keep the memory of all elements for the number that they return.

    A sparse tensor has no values under PyTorch's mode, and so no size: what makes one raises FakeKernelError, but for gradients
    of embeddings.

    PyTorch's mode looks every operation up in a cache. For a view, of which a step has more than of all else, that takes
    four times as long as the view itself.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_fake = func in _VIEWS and type(args[0]) is FakeTensor and args[0].fake_mode is self and args[0].constant is None
        if is_fake and args[0].layout is torch.strided:
            with in_kernel_invocation_manager(self):
                views = func(*args, **(kwargs or {}))
            return map_tensors(lambda t: FakeTensor(self, t, args[0].fake_device), views)
        try:
            out: Any = super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException, FakeKernelError):
            raise
        except RuntimeError as error:
            raise FakeKernelError(f"{func}: {error}".partition("\n")[0]) from error
        if any(t.layout is not torch.strided for t in tensors_in(out)) and func not in _SPARSE:
            if func is not _CLONE or out.layout is not torch.sparse_coo:
                raise FakeKernelError(f"{func}: the size of a sparse tensor depends on values")
            with self:  # PyTorch's own is empty
                parts = args[0]._indices().clone(), args[0]._values().clone()
                dims = args[0].sparse_dim(), args[0].dense_dim()
                return _MAKE_SPARSE(*dims, out.shape, *parts, dtype=out.dtype, layout=out.layout, device=out.device)
        if func in _NORMS and args[0].device.type == "cpu":
            dtypes = {t.dtype for t in args[1:] if isinstance(t, Tensor)}
            y, *statistics = out
            statistics = [t.to(torch.float32) if torch.float32 in dtypes - {t.dtype} else t for t in statistics]
            return _lay_out(func, y, args[0]), *statistics
        if func in _NORMS_BACKWARD and args[0].device.type == "cpu":
            dx, *others = out
            is_wanted, *_ = (kwargs or {}).get("output_mask", args[-1])
            dx = dx.to(args[1].dtype) if is_wanted and func is _GROUP_NORM_BACKWARD else dx
            return _lay_out(func, dx, args[1]) if is_wanted else None, *others
        if func in _MEAN_LOSSES and not out.dim():
            return out.new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape).numel() or 1)[0]
        if func is _LSTM_LAYER:
            *results, workspace = out
            return *results, workspace.new_empty(_compute_workspace_size(*map(_describe, args)))
        if func is _LSTM_LAYER_BACKWARD:
            *results, db, _, dh, dc = out  # it returns the gradient of the biases twice, and autograd copies one of them
            return *results, db, torch.empty_like(db), dh, dc
        if func in _EMBEDDING_BAGS and out[0].device.type == "cpu":
            y, bags, sizes, positions = out
            has_last_offset = len(args) > _LAST_OFFSET and args[_LAST_OFFSET]
            return y, _shorten(bags) if len(bags) else bags, _shorten(sizes) if has_last_offset else sizes, positions
        return out

    # `torch.compile` goes on capturing the calls that `replaced_call.py` replaces.
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def _lay_out(norm: Any, t: Tensor, x: Tensor) -> Tensor:
    """Return the result of a norm as kernels of the CPU lay it out: channels last where the input has them there."""
    has_channels = norm.overloadpacket not in (_ATEN.native_layer_norm, _ATEN.native_layer_norm_backward)
    return t.contiguous(memory_format=suggest_memory_format(x) if has_channels else torch.contiguous_format)


def _shorten(t: Tensor) -> Tensor:
    """Return a tensor like t as a kernel leaves it that makes one element more and drops the last."""
    return t.new_empty(len(t) + 1)[:-1]


class _Kind(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


def _describe(value: Any) -> Any:
    """Return an argument as a part of a key."""
    if isinstance(value, Tensor):
        return _Kind(tuple(value.shape), value.dtype)
    return tuple(value) if isinstance(value, list) else value


@cache
def _compute_workspace_size(*args: Any) -> int:
    """Return how many bytes a layer of an LSTM saves besides its results, given its described arguments."""
    with _disable_current_modes(), torch.enable_grad():  # without gradients it saves nothing
        *_, workspace = _LSTM_LAYER(*(torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, _Kind) else a for a in args))
    return cast(int, workspace.nbytes)


@contextmanager
def silence_failures() -> Iterator[None]:
    """Keep PyTorch from logging the tracebacks of operations that fail under `FakeTensorMode`: they raise, too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
