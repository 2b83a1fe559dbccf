"""BatchNorms that fold into the activation after them, whatever code lies between.

In an ordinary network BatchNorm and activation are two modules, and the end of a residual block adds a shortcut between them. A
foldable BatchNorm computes what it always did, but returns a `NormalisedTensor`, which remembers its BatchNorm. When leaky ReLU
or ELU is applied to this tensor, or to its sum with one other tensor, an in-place ABN (`revzoo/inplace_abn`) computes the
result, and x is not kept. Any other use of the tensor is ordinary autograd.

    z = norm(x)              the ordinary graph: keeps x
    z += shortcut            the ordinary graph, and z remembers the shortcut
    y = leaky_relu(z)        in-place ABN of x and shortcut: keeps y and shortcut. z is freed, and with it the ordinary graph
    conv2d(z)                in-place ABN with activation identity: keeps z, as the convolution does

So nothing has to be known of the code of a network, and activations may be shared by several places.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, cast

import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy
from torch.nn import functional as F

from revzoo.errors import InputError, RecoveryError
from revzoo.inplace_abn.activation import Activation
from revzoo.inplace_abn.function import Normalised, activate, can_keep_output, normalise

_STRENGTHS: dict[Callable[..., Any], str] = {F.leaky_relu: "negative_slope", F.elu: "alpha"}
# Functions that keep their input for backward, or come before one that does: the squeeze before an excitation.
_KEEPERS = (F.conv2d, Tensor.__mul__, Tensor.mul, torch.mul, Tensor.mean, torch.mean, F.adaptive_avg_pool2d)
# An in-place ABN in the place of the tensor would not do, or not see, what these functions ask for.
_OBSERVERS = (Tensor.register_hook, Tensor.retain_grad)
_FOLD_PREVENTERS = (*_OBSERVERS, cast(Any, Tensor.data).__get__)
_ADDITIONS_IN_PLACE = (Tensor.__iadd__, Tensor.add_)
_ADDITIONS = (*_ADDITIONS_IN_PLACE, Tensor.__add__, Tensor.__radd__, Tensor.add, torch.add)


@dataclass
class _Term:
    """A tensor, and its version when it was used."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Term":
        return cls(tensor, tensor._version)

    @property
    def is_unchanged(self) -> bool:
        return self.tensor._version == self.version


@dataclass
class FoldInputs:
    """What a `NormalisedTensor` was made of."""

    layer: nn.BatchNorm2d
    x: _Term
    mean: Tensor
    inverse_deviation: Tensor
    version: int  # of the tensor itself
    hooks: object  # that packed saved tensors when BatchNorm was called
    shortcut: _Term | None = None


class NormalisedTensor(Tensor):
    """The output of a foldable BatchNorm, or its sum with a shortcut."""

    origin: FoldInputs | None
    folded: Tensor | None
    is_passed_by: bool  # by the gradient of what was folded

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not all(issubclass(cls, each) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        _watch_gradients(func, args, kwargs)
        if args and isinstance(args[0], NormalisedTensor):
            if (call := _read_activation(func, *args[1:], **kwargs)) is not None:
                if (y := _fold(args[0], *call)) is not None:
                    return y
            elif func in _KEEPERS:
                _fold_identity(args[0])
        if func in _ADDITIONS and len(args) == 2 and not kwargs:
            return _add(func, *args)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*map(_replace_folded, args), **kwargs)
            _forget_if_changed(out)
            return out


class NormalisedFakeTensor(NormalisedTensor, FakeTensor):
    """A `NormalisedTensor` without values."""


class FoldableBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` that keeps no input where its output can be rebuilt from the output of the next activation."""

    def forward(self, input: Tensor) -> Tensor:
        _refuse_tracing(self, input)
        return _normalise(self, input) if _is_foldable(self, input) else super().forward(input)


class FoldableBatchNormAct2d(BatchNormAct2d):
    """timm's BatchNorm with an activation, whose input is not kept where it can be rebuilt from the output."""

    def forward(self, x: Tensor) -> Tensor:
        _refuse_tracing(self, x)
        y: Tensor = self.act(self.drop(_normalise(self, x))) if _is_foldable(self, x) else super().forward(x)
        return y


def read_fold_inputs(z: object) -> FoldInputs | None:
    """Return what a tensor was made of; None if it is no output of a foldable BatchNorm, or was changed since."""
    if not isinstance(z, NormalisedTensor):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        origin: FoldInputs | None = getattr(z, "origin", None)
        if origin is None or origin.version != z._version or not origin.x.is_unchanged:
            return None
        return origin if origin.shortcut is None or origin.shortcut.is_unchanged else None


def _refuse_tracing(layer: nn.BatchNorm2d, x: object) -> None:
    if isinstance(x, Proxy):
        raise InputError(
            "torch.fx cannot look into a BatchNorm of inplace_abn_. Trace the model first, for example by "
            "create_feature_extractor, and call inplace_abn_ on what it returns; or trace with "
            f"leaf_modules=[{type(layer).__name__}]."
        )


def _is_foldable(layer: nn.BatchNorm2d, x: Tensor) -> bool:
    is_plain = type(x) in (Tensor, nn.Parameter, FakeTensor) or isinstance(x, NormalisedTensor)
    return is_plain and can_keep_output(layer, x) and x.dim() == 4 and not layer._forward_hooks  # hooks see the output


def _normalise(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    x = _replace_folded(x)
    z, mean, inverse_deviation = normalise(layer, x)
    return _mark(z, FoldInputs(layer, _Term.of(x), mean, inverse_deviation, z._version, _get_saving_hooks()))


def _mark(z: Tensor, origin: FoldInputs) -> Tensor:
    """Let a new tensor remember where it is from.

    Its class is assigned, as PyTorch does with lazy parameters. `as_subclass` would return a view, and a view's graph changes
    when an activation overwrites it.
    """
    if not isinstance(z, NormalisedTensor):
        cast(Any, z).__class__ = NormalisedFakeTensor if isinstance(z, FakeTensor) else NormalisedTensor
    with torch._C.DisableTorchFunctionSubclass():
        cast(NormalisedTensor, z).origin = origin
    return z


def _read_activation(func: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Activation, bool] | None:
    """Return the activation that a call computes, and whether in place; None if it cannot be undone."""
    if func not in _STRENGTHS:
        return None
    call = signature(func).bind(None, *args, **kwargs)
    call.apply_defaults()
    strength = call.arguments[_STRENGTHS[func]]
    return (Activation(cast(Any, func).__name__, strength), call.arguments["inplace"]) if strength > 0 else None


def _fold(z: NormalisedTensor, activation: Activation, inplace: bool) -> Tensor | None:
    """Return the activation's output, computed by an in-place ABN; None if this z has to be left to autograd."""
    origin = read_fold_inputs(z)
    if origin is None or not torch.is_grad_enabled():
        return None
    layer, shortcut = origin.layer, None if origin.shortcut is None else origin.shortcut.tensor
    if isinstance(shortcut, NormalisedTensor):
        _fold_identity(shortcut)  # two BatchNorms: the output of one has to be kept
        shortcut = _replace_folded(shortcut)
    with torch._C.DisableTorchFunctionSubclass():
        z.is_passed_by = True
        if inplace:
            z.origin = None
            _Overwrite.apply(z)
        normalised = Normalised(z.detach(), origin.mean, origin.inverse_deviation, activation, inplace, layer)
        return activate(normalised, origin.x.tensor, layer.weight, layer.bias, shortcut)


def _watch_gradients(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Leave a tensor to autograd if somebody wants its gradient, or can change it unseen.

    Raises:
        RecoveryError: it was folded before, so that its gradient is never computed.
    """
    asked: Sequence[Any] = ()
    if func in _FOLD_PREVENTERS:
        asked = args[:1]
    elif func is torch.autograd.grad:
        inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
        asked = [inputs] if isinstance(inputs, Tensor) else inputs
    for z in asked:
        if not isinstance(z, NormalisedTensor):
            continue
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(z, "is_passed_by", False) and (func in _OBSERVERS or func is torch.autograd.grad):
                raise RecoveryError(
                    "The gradient of a BatchNorm's output was asked for after the activation had run: an in-place ABN does "
                    "not compute it. Call z.retain_grad() or z.register_hook() before the activation; then z is ordinary."
                )
            z.origin = None


def _fold_identity(z: NormalisedTensor) -> None:
    """Let z be replaced, from now on, by a tensor whose graph keeps z instead of x.

    Not inside a checkpoint that z comes into: its second run would find z replaced, and save other tensors than the first.
    """
    origin = read_fold_inputs(z)
    if origin is None or origin.hooks != _get_saving_hooks() or _replace_folded(z) is not z:
        return
    if (y := _fold(z, Activation("identity"), inplace=False)) is not None:
        with torch._C.DisableTorchFunctionSubclass():
            z.folded = y


def _get_saving_hooks() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _replace_folded(value: Any) -> Any:
    if not isinstance(value, NormalisedTensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        folded = getattr(value, "folded", None)
    return value if folded is None else folded


def _add(func: Callable[..., Any], first: Any, second: Any) -> Tensor:
    """Return a sum that remembers the terms, if one is the output of a foldable BatchNorm."""
    is_in_place = func in _ADDITIONS_IN_PLACE
    z, shortcut = (first, second) if is_in_place or isinstance(first, NormalisedTensor) else (second, first)
    z = _replace_folded(z)
    origin, shortcut = read_fold_inputs(z), _replace_folded(shortcut)
    with torch._C.DisableTorchFunctionSubclass():
        out: Tensor = func(z, shortcut)
        if origin is None or origin.shortcut is not None or shortcut is z or not _has_same_form(shortcut, z):
            _forget_if_changed(out)
            return out
        return _mark(out, replace(origin, shortcut=_Term.of(shortcut), version=out._version))


def _forget_if_changed(out: Any) -> None:
    """Let what was changed in place hold the tensors that it was made of no longer."""
    origin = getattr(out, "origin", None) if isinstance(out, NormalisedTensor) else None
    if origin is not None and origin.version != out._version:
        out.origin = None


def _has_same_form(shortcut: object, z: Tensor) -> bool:
    return isinstance(shortcut, Tensor) and (shortcut.shape, shortcut.dtype) == (z.shape, z.dtype)


class _Overwrite(torch.autograd.Function):
    """Refuses the gradient of all that is computed of a tensor from now on."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.mark_dirty(z)
        return z

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise RecoveryError(
            "The output of a BatchNorm was used after an activation with inplace=True had overwritten it. Use what the "
            "activation returns, or inplace=False."
        )
