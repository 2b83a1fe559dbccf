"""Logits that are not there yet: what a network's own code does to them is recorded until it asks for their loss.

    logits = self.lm_head(hidden)                   LazyLogits: hidden (..., D), and the head
    logits = logits.float()[..., :-1, :]            the head of each token is followed by float(); hidden[..., :-1, :]
    loss = cross_entropy(logits.view(-1, V), y)     `chunked_loss` of that head and those hidden states

What changes the numbers of one token only is recorded as part of the head, and what chooses or arranges tokens is done to the
hidden states. Anything else gets the whole logits, with a warning that names it.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils._python_dispatch import _disable_current_modes

from revzoo.errors import InputError
from revzoo.runtime.chunked_loss import chunked_loss, refuse_sharded
from revzoo.runtime.compiling import leave_uncompiled
from revzoo.runtime.nested import map_tensors, tensors_in

Head = Callable[[Tensor], Tensor]

# Of each number by itself, or of one token with numbers that are the same for all of them.
_FOR_EACH_TOKEN = {
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "neg", "negative", "tanh", "clone"),
    *("__radd__", "__rsub__", "__rmul__", "float", "double", "half", "bfloat16", "to", "type", "type_as", "contiguous"),
}
_ARRANGING = {"view", "reshape", "flatten"}
# What needs no numbers.
_ABOUT_SHAPE = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex"),
    *("element_size", "get_device", "__len__", "__hash__"),
}
_NEEDING_NUMBERS = {"T", "H", "mT", "mH", "real", "imag", "data"}  # attributes


class WholeLogitsWarning(UserWarning):
    """Logits were made as a whole, since something else than their cross-entropy was asked for."""


class LazyLogits(Tensor):
    """The logits of hidden states, as a tensor without memory.

    Shapes: hidden: (..., D); the logits have (..., V).
    Args:
        head: of (n, D) to (n, V).
        hidden: the hidden states.
        module: has the parameters of the head; once they have changed, the logits are not to be had any more.
        chunk: as for `chunked_loss`.
        is_turned: whether the logits are (B, V, N), of hidden states (B, N, D).
    """

    _lazy: "tuple[Head, Tensor, Tensor, nn.Module, int | None, bool]"
    _made: Tensor | None
    _versions: list[int]
    _writes: list[int]  # how often something was written into these logits or others that share their numbers
    _seen: int  # of them, by these logits

    def __new__(
        cls, head: Head, hidden: Tensor, sample: Tensor, module: nn.Module, chunk: int | None, is_turned: bool = False
    ) -> Self:
        """`sample` has the logits of no token, (0, V): the dtype and V."""
        shape = (*hidden.shape[:-1], sample.shape[-1])
        shape = (shape[0], shape[2], shape[1]) if is_turned else shape

        def make() -> LazyLogits:
            return Tensor._make_wrapper_subclass(cls, shape, dtype=sample.dtype, device=sample.device)

        self: Self = _Unmade.apply(torch.empty(0, requires_grad=True), make)
        self._lazy, self._made = (head, hidden, sample, module, chunk, is_turned), None
        self._versions = _count_changes(module)
        self._writes, self._seen = [0], 0
        return self

    @property
    def hidden(self) -> Tensor:
        """The hidden states."""
        return self._lazy[1]

    def make(self) -> Tensor:
        """Return the whole logits, with their graph. Raises InputError if the head has changed since it was called."""
        head, hidden, _, module, _, is_turned = self._lazy
        if self._made is None:
            refuse_sharded(*module.parameters())
            if _count_changes(module) != self._versions:
                raise InputError(
                    "These logits were never made: chunk_loss_ computes their loss in chunks. Received: a request for them "
                    "after the weights have changed. Ask before optimizer.step(), or run the network in eval mode."
                )
            with torch.enable_grad():
                made = head(hidden)
                self._made = made.transpose(1, 2) if is_turned else made
        return self._made

    @classmethod
    @leave_uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else None
        if name in _ABOUT_SHAPE or (attribute is not None and attribute not in _NEEDING_NUMBERS):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        logits = args[0] if args and isinstance(args[0], LazyLogits) else next(_find_lazy((args, kwargs)), None)
        assert logits is not None
        if logits._seen != logits._writes[0]:
            raise InputError(
                "Logits that chunk_loss_ leaves out share no memory. Received: a use of some after others, of which they are a "
                "view or the reverse, were written into. Take the view afterwards, or write into a clone."
            )
        if logits._made is None:
            if func is F.cross_entropy:
                recorded: Tensor | None = _compute_loss(*args, **kwargs)
            else:
                recorded = _record(logits, func, name, args, kwargs)
            if recorded is not None:
                if isinstance(recorded, LazyLogits) and recorded._lazy[2] is logits._lazy[2]:  # the same numbers
                    recorded._writes, recorded._seen = logits._writes, logits._seen
                return recorded
            warnings.warn(
                f"The whole logits are made, {tuple(logits.shape)} in {str(logits.dtype).removeprefix('torch.')}: "
                f"{attribute or _name(func)} is neither the cross-entropy that chunk_loss_ computes in chunks nor an "
                "operation on each token.",
                WholeLogitsWarning,
                stacklevel=2,
            )
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            logits._writes[0] += 1
            logits._seen = logits._writes[0]
        args, kwargs = map_tensors(lambda t: t.make() if isinstance(t, LazyLogits) else t, (list(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _refuse(str(func))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype})"


class _Unmade(torch.autograd.Function):
    """Makes lazy logits; who has taken them past `__torch_function__` is told in backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, make: Callable[[], LazyLogits]) -> LazyLogits:
        ctx.set_materialize_grads(False)
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is not None:  # DDP hands on those of what has none
            raise _refuse("an autograd.Function")
        return None, None


def _refuse(what: str) -> InputError:
    return InputError(
        "chunk_loss_ leaves the logits out, of which only the cross-entropy is needed. Received: a request for their numbers "
        f"by {what}. Undo it: revzoo.ordinary_(model)."
    )


def _name(func: Any) -> str:
    return str(resolve_name(func) or getattr(func, "__name__", func)).removeprefix("torch.nn.functional.")


def _find_lazy(tree: Any) -> Any:
    return (t for t in tensors_in(tree) if isinstance(t, LazyLogits))


def _count_changes(module: nn.Module) -> list[int]:
    return [p._version for p in module.parameters()]


def _compute_loss(
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **unknown: Any,
) -> Tensor | None:
    """Return the cross-entropy in chunks; None where it is another one: with weights of classes, or of probabilities."""
    if unknown or not isinstance(logits, LazyLogits) or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    head, hidden, _, module, chunk, is_turned = logits._lazy
    is_plain = weight is None and size_average is None and reduce is None and (is_turned or logits.dim() == 2)
    if not is_plain or target.shape != hidden.shape[:-1]:
        return None
    refuse_sharded(*module.parameters())  # after its forward, fully_shard has divided a head that is a unit of its own
    options: Any = {"reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing, "chunk": chunk}
    return chunked_loss(head, hidden, target, **options)


def _record(logits: LazyLogits, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits | None:
    """Return the logits after an operation; None if it is none on each token, or none that arranges tokens."""
    head, hidden, sample, module, chunk, is_turned = logits._lazy
    if is_turned:
        return None
    if name in _FOR_EACH_TOKEN:
        with suppress(_NotForEachToken):
            follow = _fix_arguments(logits, func, args, kwargs)
            if (after := follow(sample)).device == sample.device:
                return LazyLogits(lambda x: follow(head(x)), hidden, after, module, chunk)
        return None
    if args[0] is not logits or any(isinstance(a, torch.dtype | LazyLogits) for a in args[1:]):
        return None
    if name in _ARRANGING:
        with _disable_current_modes():  # those that count bytes would count all logits
            shape = func(torch.empty(logits.shape, device="meta"), *args[1:], **kwargs).shape
        if shape and shape[-1] == sample.shape[-1]:
            return LazyLogits(head, hidden.reshape(*shape[:-1], hidden.shape[-1]), sample, module, chunk)
    if name == "__getitem__" and (index := _index_tokens(args[1], logits.dim(), sample.shape[-1])) is not None:
        return LazyLogits(head, hidden[index], sample, module, chunk)
    dims = {*args[1:], *kwargs.values()} if name == "transpose" else set[int]()
    if logits.dim() == 3 and dims in ({1, 2}, {-1, -2}, {1, -1}):
        return LazyLogits(head, hidden, sample, module, chunk, is_turned=True)
    return None


class _NotForEachToken(Exception):
    pass


def _fix_arguments(logits: LazyLogits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Head:
    """Return an operation as a function of the logits (n, V) alone."""
    if "out" in kwargs or sum(1 for _ in _find_lazy((list(args), kwargs))) != 1:
        raise _NotForEachToken
    for t in tensors_in((list(args), kwargs)):
        # Numbers for all tokens: one, or V. The graph of another than a leaf would be gone after the first chunk.
        width = t.shape[-1] if t.dim() else 1
        if t is not logits and (t.numel() != width or width not in (1, logits.shape[-1]) or t.dim() > logits.dim()):
            raise _NotForEachToken
        if t is not logits and t.requires_grad and not t.is_leaf:
            raise _NotForEachToken

    def follow(x: Tensor) -> Tensor:
        def fix(t: Tensor) -> Tensor:
            return x if t is logits else t.flatten() if t.dim() > 1 else t

        fixed, named = map_tensors(fix, (list(args), kwargs))
        out: Tensor = func(*fixed, **named)
        return out

    return follow


def _index_tokens(index: Any, dims: int, width: int) -> Any:
    """Return an index of logits as one of hidden states; None if it chooses outputs of the head."""
    items = list(index) if isinstance(index, tuple) else [index]
    counted = [i for i in items if i is not None and i is not ...]
    consumed = sum(i.dim() if isinstance(i, Tensor) and i.dtype is torch.bool else 1 for i in counted)
    if consumed == dims or (any(i is ... for i in items) and items[-1] is not ...):
        last = items[-1]
        if not isinstance(last, slice) or last.indices(width) != (0, width, 1):
            return None
        items[-1] = slice(None)
    return tuple(items)
