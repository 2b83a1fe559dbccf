"""BatchNorms that fold into the activation after them, whatever code lies between.

In an ordinary network BatchNorm and activation are two modules, and the end of a residual block adds a shortcut between them. A
foldable BatchNorm computes what it always did, and returns it as a `NormalisedTensor`, which remembers where it is from. When
leaky ReLU or ELU is applied to it, or to its sum with one other tensor, the result is computed by an in-place ABN
(`revzoo/inplace_abn.py`), and x is not kept. Anything else that happens to it is ordinary autograd.

    z = norm(x)              the ordinary graph: keeps x
    z += shortcut            the ordinary graph, and z remembers the shortcut
    y = leaky_relu(z)        in-place ABN of x and shortcut: keeps y and shortcut. z is freed, and with it the ordinary graph
    conv2d(z)                in-place ABN with activation identity: keeps z, as the convolution does

So nothing has to be known of the code of a network, and activations may be shared by several places.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from revzoo.errors import RecoveryError
from revzoo.inplace_abn import Activation, Normalised, activate, can_keep_output, normalise

# Functions that keep their input for backward, or come before one that does: the squeeze before an excitation.
_KEEPERS = (F.conv2d, Tensor.__mul__, Tensor.mul, torch.mul, Tensor.mean, torch.mean, F.adaptive_avg_pool2d)
_ADDITIONS_IN_PLACE = (Tensor.__iadd__, Tensor.add_)
_ADDITIONS = (*_ADDITIONS_IN_PLACE, Tensor.__add__, Tensor.__radd__, Tensor.add, torch.add)


@dataclass
class _Term:
    """A tensor, and its version when it was used."""

    tensor: Tensor
    version: int

    @classmethod
    def note(cls, tensor: Tensor) -> "_Term":
        return cls(tensor, tensor._version)

    @property
    def is_unchanged(self) -> bool:
        return self.tensor._version == self.version


@dataclass
class Origin:
    """What a `NormalisedTensor` was made of."""

    layer: nn.BatchNorm2d
    x: _Term
    mean: Tensor
    inverse_deviation: Tensor
    version: int  # of the tensor itself
    shortcut: _Term | None = None


class NormalisedTensor(Tensor):
    """The output of a foldable BatchNorm, or its sum with a shortcut."""

    origin: Origin | None
    folded: Tensor | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not all(issubclass(cls, each) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        if args and isinstance(args[0], NormalisedTensor):
            if (call := _read_activation(func, *args[1:], **kwargs)) is not None:
                if (y := _fold(args[0], *call)) is not None:
                    return y
            elif func in _KEEPERS:
                _fold_identity(args[0])
        if func in _ADDITIONS and len(args) == 2 and not kwargs:
            return _add(func, *args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*map(_replace_folded, args), **kwargs)


class NormalisedFakeTensor(NormalisedTensor, FakeTensor):
    """A `NormalisedTensor` without values."""


class FoldableBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` whose input is not kept where its output can be rebuilt from that of the activation after it."""

    def forward(self, input: Tensor) -> Tensor:
        return _normalise(self, input) if _is_foldable(self, input) else super().forward(input)


class FoldableBatchNormAct2d(BatchNormAct2d):
    """timm's BatchNorm with an activation, whose input is not kept where it can be rebuilt from the output."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.drop(_normalise(self, x))) if _is_foldable(self, x) else super().forward(x)
        return y


def read_origin(z: object) -> Origin | None:
    """Return what a tensor was made of; None if it is no output of a foldable BatchNorm, or was changed since."""
    if not isinstance(z, NormalisedTensor):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        origin: Origin | None = getattr(z, "origin", None)
        if origin is None or origin.version != z._version or not origin.x.is_unchanged:
            return None
        return origin if origin.shortcut is None or origin.shortcut.is_unchanged else None


def _is_foldable(layer: nn.BatchNorm2d, x: Tensor) -> bool:
    is_plain = type(x) in (Tensor, nn.Parameter, FakeTensor) or isinstance(x, NormalisedTensor)
    return is_plain and can_keep_output(layer, x) and x.dim() == 4 and not layer._forward_hooks  # hooks see the output


def _normalise(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    x = _replace_folded(x)
    z, mean, inverse_deviation = normalise(layer, x)
    return _mark(z, Origin(layer, _Term.note(x), mean, inverse_deviation, z._version))


def _mark(z: Tensor, origin: Origin) -> Tensor:
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
    if func is F.leaky_relu:
        slope, inplace = _bind(("negative_slope", 0.01), ("inplace", False), args, kwargs)
        return (Activation("leaky_relu", slope), inplace) if slope > 0 else None
    if func is F.elu:
        alpha, inplace = _bind(("alpha", 1.0), ("inplace", False), args, kwargs)
        return (Activation("elu", alpha), inplace) if alpha > 0 else None
    return None


def _bind(first: tuple[str, Any], second: tuple[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    given = {**dict(zip((first[0], second[0]), args, strict=False)), **kwargs}
    return [given.get(*each) for each in (first, second)]


def _fold(z: NormalisedTensor, activation: Activation, inplace: bool) -> Tensor | None:
    """Return the activation's output, computed by an in-place ABN; None if this z has to be left to autograd."""
    origin = read_origin(z)
    if origin is None or not torch.is_grad_enabled():
        return None
    layer, shortcut = origin.layer, None if origin.shortcut is None else origin.shortcut.tensor
    with torch._C.DisableTorchFunctionSubclass():
        if inplace:
            z.origin = None
            _Overwrite.apply(z)
        normalised = Normalised(z.detach(), origin.mean, origin.inverse_deviation, activation, inplace, layer)
        return activate(normalised, origin.x.tensor, layer.weight, layer.bias, shortcut)


def _fold_identity(z: NormalisedTensor) -> None:
    """Let z be replaced, from now on, by a tensor whose graph keeps z instead of x."""
    if _replace_folded(z) is z and (y := _fold(z, Activation("identity"), inplace=False)) is not None:
        with torch._C.DisableTorchFunctionSubclass():
            z.folded = y


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
    origin = read_origin(z)
    if origin is not None and isinstance(shortcut, NormalisedTensor) and shortcut is not z:
        _fold_identity(shortcut)  # two BatchNorms: the output of one has to be kept
    shortcut = _replace_folded(shortcut)
    with torch._C.DisableTorchFunctionSubclass():
        out: Tensor = func(z, shortcut)
        if origin is None or origin.shortcut is not None or shortcut is z or not _is_alike(shortcut, z):
            return out
        return _mark(out, replace(origin, shortcut=_Term.note(shortcut), version=out._version))


def _is_alike(shortcut: object, z: Tensor) -> bool:
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
