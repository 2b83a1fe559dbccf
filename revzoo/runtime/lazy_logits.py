"""Logits that are not there yet: what a network's own code does to them is recorded until it asks for their loss.

    logits = self.lm_head(hidden)                   LazyLogits: hidden (..., D), and the head's call
    logits = logits.float()[..., :-1, :]            the head of each token is followed by float(); the tokens are others
    loss = cross_entropy(logits.view(-1, V), y)     the loss in chunks of that head and those tokens

What changes the numbers of one token only is recorded as part of the head. What arranges or chooses tokens is done to their
numbers, and to a tensor of the logits' shape and strides without memory: so logits share memory where those of an ordinary
network would. Anything else gets the whole logits, with a warning that names it.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils._python_dispatch import _disable_current_modes

from revzoo.runtime.chunked_loss import Head, Reduction, compute_in_chunks, cross_entropy
from revzoo.runtime.compiling import leave_uncompiled
from revzoo.runtime.head_call import HeadCall, Node, refuse
from revzoo.runtime.nested import map_tensors, tensors_in

# Of each number by itself, or of one token with numbers that are the same for all of them.
_FOR_EACH_TOKEN = {
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "neg", "negative", "tanh", "clone"),
    *("__radd__", "__rsub__", "__rmul__", "float", "double", "half", "bfloat16", "to", "type", "type_as"),
}
_CASTING = {"float", "double", "half", "bfloat16", "to", "type", "type_as"}  # which may return what they are given
_ARRANGING = {
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous"),
    *("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "T", "mT", "narrow", "select", "__getitem__"),
    *("chunk", "split", "tensor_split", "unbind", "expand", "expand_as", "detach", "data"),
}
# What needs no numbers.
_NATIVE = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex"),
    *("element_size", "get_device", "__len__", "__hash__", "register_hook", "retain_grad", "requires_grad_"),
    "grad",  # of torch.autograd
}
_NEEDING_NUMBERS = {"T", "H", "mT", "mH", "real", "imag", "data"}  # attributes


class WholeLogitsWarning(UserWarning):
    """Logits were made as a whole, since something else than their cross-entropy was asked for."""


@dataclass(frozen=True)
class _Memory:
    """What all logits that would share one memory are computed from.

    Args:
        call: of the head.
        tokens: which of the hidden states, counted through all of them, belong to the logits, in their shape and contiguous.
        sample: the logits of no token, (0, V).
        follow: what is done to the logits of each token.
        given: tensors that require a gradient in what is done, with those that stand for them.
    """

    call: HeadCall
    tokens: Tensor
    sample: Tensor
    follow: tuple[Callable[[Tensor], Tensor], ...] = ()
    given: tuple[tuple[Tensor, Tensor], ...] = ()

    def head(self, x: Tensor) -> Tensor:
        """Return the logits (n, V) of hidden states (n, D)."""
        x = self.call.head(x)
        for each in self.follow:
            x = each(x)
        return x

    def of(self, tokens: Tensor, **changes: Any) -> "_Memory":
        """Return what logits of other tokens, in a memory of their own, are computed from."""
        return replace(self, tokens=tokens.clone(memory_format=torch.contiguous_format), **changes)


class LazyLogits(Tensor):
    """The logits of hidden states, as a tensor without memory.

    Args:
        memory: what they are computed from.
        layout: a tensor on the meta device like them.
        base: the logits that have the memory of which these are a view; None if they have one of their own.
    """

    _memory: _Memory
    _layout: Tensor
    _base_logits: "LazyLogits | None"
    _made: Tensor | None

    def __new__(cls, memory: _Memory, layout: Tensor | None = None, base: "LazyLogits | None" = None) -> Self:
        if layout is None:
            with _disable_current_modes():  # those that count bytes would count all logits
                shape = (*memory.tokens.shape, memory.sample.shape[-1])
                layout = torch.empty(shape, dtype=memory.sample.dtype, device="meta")
        size, strides, device = layout.shape, layout.stride(), memory.sample.device
        self = Tensor._make_wrapper_subclass(cls, size, strides=strides, dtype=layout.dtype, device=device)
        self._memory, self._layout, self._base_logits, self._made = memory, layout, base, None
        return self

    @classmethod
    def of(cls, module: nn.Module, name: str, run: Head, hidden: Tensor, chunk: int | None) -> "LazyLogits":
        """Return the logits of a head's call; see `HeadCall` for the arguments."""
        call = HeadCall(module, name, run, hidden, chunk)
        tokens = torch.arange(hidden.numel() // max(hidden.shape[-1], 1), device=hidden.device).view(hidden.shape[:-1])
        given = [hidden, *call.inputs[1:]]
        return Node.apply(lambda: cls(_Memory(call, tokens, call.sample)), call.inputs, call, *given)

    def make(self) -> Tensor:
        """Return the whole logits, with their graph.

        Raises:
            InputError: the head or its input has changed since it was called, or backward has passed.
        """
        if self._made is None:
            base, layout = self._base_logits, self._layout
            if base is None:
                self._made = self._memory.call.compute(self, self._compute, self._memory.given)
            else:
                made = base.make() if self.requires_grad else base.make().detach()
                is_all = layout.is_contiguous() and layout.numel() == made.numel()
                place = layout.size(), layout.stride(), layout.storage_offset()
                self._made = made.view(layout.shape) if is_all else made.as_strided(*place)
                for hook in (self._backward_hooks or {}).values():
                    self._made.register_hook(hook)
        return self._made

    def _compute(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2).index_select(0, self._memory.tokens.flatten())
        return self._memory.head(rows).view(self._layout.shape)

    def find_tokens(self) -> tuple[int, Tensor] | None:
        """Return the dimension of the outputs, and which token each of the others belongs to; None if outputs are left out."""
        size, offset, width = self._layout.shape, self._layout.storage_offset(), self._memory.sample.shape[-1]
        strides = self._layout.stride()
        dim = next((i for i, (n, step) in enumerate(zip(size, strides, strict=True)) if n == width > 1 == step), None)
        others = [i for i in range(len(size)) if i != dim]
        if dim is None or offset % width or any(strides[i] % width for i in others):
            return None
        place = [size[i] for i in others], [strides[i] // width for i in others], offset // width
        return dim, self._memory.tokens.as_strided(*place)

    @classmethod
    @leave_uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else ""
        logits = args[0] if args and isinstance(args[0], LazyLogits) else next(_find_lazy((args, kwargs)))
        base = logits if logits._base_logits is None else logits._base_logits
        is_attribute = bool(attribute) and attribute not in _NEEDING_NUMBERS
        if name in _NATIVE or is_attribute:
            of_gradient = name in ("register_hook", "retain_grad") or attribute == "grad"
            if of_gradient and base is not logits and logits._made is not None:
                return func(logits._made, *args[1:], **kwargs)  # whose gradients do not pass this view
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if base._made is None:
            if func is F.cross_entropy:
                recorded = _compute_loss(*args, **kwargs)
            else:
                recorded = _record(func, attribute if name == "__get__" else name, args, kwargs)
            if recorded is not None:
                return recorded
            warnings.warn(
                f"The whole logits are made, {tuple(logits.shape)} in {str(logits.dtype).removeprefix('torch.')}: "
                f"{attribute or _name(func)} is neither the cross-entropy that chunk_loss_ computes in chunks nor an "
                "operation on each token.",
                WholeLogitsWarning,
                stacklevel=2,
            )
        args, kwargs = map_tensors(lambda t: t.make() if isinstance(t, LazyLogits) else t, (list(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise refuse(str(func))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype})"


def _name(func: Any) -> str:
    return str(resolve_name(func) or getattr(func, "__name__", func)).removeprefix("torch.nn.functional.")


def _find_lazy(tree: Any) -> Iterator[LazyLogits]:
    return (t for t in tensors_in(tree) if isinstance(t, LazyLogits))


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
    found, memory = logits.find_tokens(), logits._memory
    if found is None or reduction not in get_args(Reduction) or any(x is not None for x in (weight, size_average, reduce)):
        return None
    dim, tokens = found
    if dim != min(1, logits.dim() - 1) or target.shape != tokens.shape:
        return None
    loss = partial(cross_entropy, label_smoothing=label_smoothing)

    def compute(hidden: Tensor) -> Tensor:
        options = reduction, ignore_index, memory.call.chunk, tokens, memory.sample.shape[-1]
        of_none = F.cross_entropy(memory.sample.detach(), target.new_empty(0), reduction="sum")  # under autocast, float32
        return compute_in_chunks(memory.head, hidden, target, loss, *options).to(of_none.dtype)

    return memory.call.compute(logits, compute, memory.given)


def _record(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the logits after an operation; None if it is none on each token, or none that arranges tokens."""
    if not args:  # all have names
        return None
    lazy, first = list(_find_lazy((list(args), kwargs))), args[0]
    if name in ("to", "type_as") and not isinstance(first, LazyLogits):  # it becomes like the logits
        return func(*map_tensors(lambda t: t._memory.sample if isinstance(t, LazyLogits) else t, list(args)), **kwargs)
    if name in _FOR_EACH_TOKEN:
        return _follow(lazy[0], func, name, args, kwargs) if len(lazy) == 1 and "out" not in kwargs else None
    if name not in _ARRANGING or any(isinstance(a, torch.dtype) for a in (*args[1:], *kwargs.values())):
        return None
    if name == "__getitem__" and any(_is_array(i) for i in (args[1] if isinstance(args[1], tuple) else args[1:])):
        return _choose(first, args[1])
    with _disable_current_modes():
        layouts = func(*map_tensors(lambda t: t._layout if isinstance(t, LazyLogits) else t, list(args)), **kwargs)
    if isinstance(layouts, Tensor):
        return _arrange(first, layouts, name)
    arranged = [_arrange(first, each, name) for each in layouts]
    return None if any(each is None for each in arranged) else type(layouts)(arranged)


def _arrange(logits: LazyLogits, layout: Tensor, name: str) -> LazyLogits | None:
    """Return the logits with another layout, in the same memory if the layouts are; None where that is not known."""
    if layout.untyped_storage()._cdata == logits._layout.untyped_storage()._cdata:
        after = LazyLogits(logits._memory, layout, logits if logits._base_logits is None else logits._base_logits)
        if after.find_tokens() is None:
            return None
        return after if name in ("detach", "data") else _attach(after, logits)
    tokens = _find_tokens_in_order(logits)
    if tokens is None or layout.shape[-1] != logits.shape[-1]:
        return None
    return _attach(LazyLogits(logits._memory.of(tokens.reshape(layout.shape[:-1]))), logits)


def _choose(logits: LazyLogits, index: Any) -> LazyLogits | None:
    """Return the logits of the tokens that an index with arrays chooses; None if it chooses outputs of the head."""
    if isinstance(index, list) and any(isinstance(i, Sequence) for i in index):  # as PyTorch reads it
        return None
    items = list(index) if isinstance(index, tuple) else [index]
    items = [torch.as_tensor(i) if _is_array(i) else i for i in items]
    counted = [i for i in items if i is not None and i is not ...]
    consumed = sum(i.dim() if isinstance(i, Tensor) and i.dtype is torch.bool else 1 for i in counted)
    if consumed == logits.dim() or (any(i is ... for i in items) and items[-1] is not ...):
        last, width = items[-1], logits.shape[-1]
        if not isinstance(last, slice) or last.indices(width) != (0, width, 1):
            return None
        items.pop()
    if (tokens := _find_tokens_in_order(logits)) is None:
        return None
    return _attach(LazyLogits(logits._memory.of(tokens[tuple(items)])), logits)


def _follow(logits: LazyLogits, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> LazyLogits | None:
    """Return the logits after an operation on each token."""
    memory, tokens, width = logits._memory, _find_tokens_in_order(logits), logits.shape[-1]
    copies = dict[Tensor, Tensor]()
    for t in tensors_in((list(args), kwargs)):
        if t is logits:
            continue
        if t.numel() != (t.shape[-1] if t.dim() else 1) or t.numel() not in (1, width) or t.dim() > logits.dim():
            return None  # these are no numbers for all tokens: one, or V
        copies[t] = t.detach().clone().requires_grad_(t.requires_grad)  # whatever becomes of them
    if tokens is None:
        return None

    def run(x: Tensor) -> Any:
        fixed, named = map_tensors(lambda t: x if t is logits else copies[t].view(t.shape[-1:]), (list(args), kwargs))
        return func(*fixed, **named)

    sample = run(memory.sample)
    if name in _CASTING and sample is memory.sample:
        return logits
    if not isinstance(sample, Tensor) or sample.shape != memory.sample.shape or sample.device != memory.sample.device:
        return None
    given = tuple((t, copied) for t, copied in copies.items() if t.requires_grad)
    after = memory.of(tokens, sample=sample, follow=(*memory.follow, run), given=(*memory.given, *given))
    return _attach(LazyLogits(after), logits, given)


def _attach(after: LazyLogits, logits: LazyLogits, given: Sequence[tuple[Tensor, Tensor]] = ()) -> LazyLogits:
    """Return logits with a node of the graph, from those that they are made from, and tensors with what stands for them."""
    keys, inputs = [None, *(copied for _, copied in given)], [logits, *(t for t, _ in given)]
    return Node.apply(lambda: after, keys, None, *inputs)


def _find_tokens_in_order(logits: LazyLogits) -> Tensor | None:
    """Return which token each of the logits belongs to if their outputs are the last dimension."""
    found = logits.find_tokens()
    return found[1] if found is not None and found[0] == logits.dim() - 1 else None


def _is_array(index: Any) -> bool:
    return not (index is None or index is ... or isinstance(index, int | slice))
