"""Logits that are not there yet, in code that is being compiled, and their loss in chunks, which is compiled with it.

The compiler traces what is done to them; they are no tensor, so that nothing of them is in its graph. They are the logits of
hidden states in another arrangement, followed by what is done to each token. Whatever else is done needs the whole logits.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad_and_value

from revzoo.dtype import HALF
from revzoo.errors import InputError
from revzoo.runtime.chunk_size import choose_chunk
from revzoo.runtime.known_gradients import KnownGradients

_Run = Callable[[dict[str, Tensor], Tensor], Tensor]
_Follow = tuple[tuple[str, tuple[Any, ...]], ...]

_OF_EACH_TOKEN = (  # methods of tensors that, with numbers, do something to each number by itself
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__neg__", "__pow__"),
    *("__rpow__", "__mod__", "__rmod__", "__floordiv__", "__rfloordiv__", "__matmul__", "__rmatmul__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__abs__", "add", "sub", "mul", "div", "tanh"),
    *("float", "double", "half", "bfloat16"),
)
_IN_PLACE = frozenset(getattr(torch, name) for name in dir(torch) if name.endswith("_") and not name.startswith("_"))


class TracedLogits:
    """The logits (..., V) of hidden states.

    Args:
        run: computes the logits (n, V) of hidden states (n, D), with tensors in place of the head's parameters.
        head: the head.
        hidden: they, in the arrangement of the logits.
        chunk: as for `chunked_loss`.
        follow: what is done to the logits of each token: methods of tensors, with numbers.
    """

    def __init__(self, run: _Run, head: nn.Module, hidden: Tensor, chunk: int | None, follow: _Follow = ()):
        self.run, self.head, self.hidden, self.chunk, self.follow = run, head, hidden, chunk, follow
        sample = self._compute({}, hidden.new_empty(0, hidden.shape[-1]))
        self.dtype, self.device, self.shape = sample.dtype, hidden.device, torch.Size((*hidden.shape[:-1], sample.shape[-1]))

    def make(self) -> Tensor:
        """Return the whole logits.

        Raises:
            InputError: the code that was compiled has returned, so that weights may be others.
        """
        _require_compiling()
        return self._compute({}, self.hidden)

    def _compute(self, parameters: dict[str, Tensor], hidden: Tensor) -> Tensor:
        logits = self.run(parameters, hidden)
        for name, given in self.follow:
            logits = getattr(logits, name)(*given)
        return logits

    def _do(self, name: str, *given: Any, **named: Any) -> Any:
        if not named and all(isinstance(each, int | float | torch.dtype) for each in given):
            return TracedLogits(self.run, self.head, self.hidden, self.chunk, (*self.follow, (name, given)))
        return getattr(self.make(), name)(*given, **named)

    def _of(self, hidden: Tensor) -> "TracedLogits":
        return TracedLogits(self.run, self.head, hidden, self.chunk, self.follow)

    def to(self, *given: Any, **named: Any) -> Any:
        return self if given == (self.device,) and not named else self._do("to", *given, **named)

    def contiguous(self) -> Any:
        return self

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        is_of_tokens = end_dim not in (-1, len(self.shape) - 1)
        return self._of(self.hidden.flatten(start_dim, end_dim)) if is_of_tokens else self.make().flatten(start_dim, end_dim)

    def view(self, *shape: Any) -> Any:
        sizes = shape if isinstance(shape[0], int) else tuple(shape[0])
        if sizes[-1] == -1 and prod(sizes[:-1]) * self.shape[-1] == prod(self.shape):
            sizes = (*sizes[:-1], self.shape[-1])
        if sizes[-1] != self.shape[-1]:
            return self.make().reshape(sizes)
        return self._of(self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    reshape = view

    def __getitem__(self, index: Any) -> Any:
        items = index if isinstance(index, tuple) else (index,)
        if all(isinstance(each, int | slice) or each is ... for each in items) and (
            items[-1] == slice(None) or (len(items) < self.dim() and ... not in items)
        ):
            return self._of(self.hidden[index])
        return self.make()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        if name.endswith("__") or "follow" not in self.__dict__:
            raise AttributeError(name)
        if name.endswith("_"):
            _refuse(self)
        return getattr(self.make(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        if args and isinstance(args[0], TracedLogits):
            if func is torch.tanh:
                return args[0].tanh()
            if func is F.cross_entropy:
                return args[0]._compute_loss(*args[1:], **kwargs)
        if func in _IN_PLACE:
            _refuse(args[0])
        return func(*_make(args), **_make(kwargs))

    def _compute_loss(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Return the cross-entropy. Its gradients are computed in forward, chunk by chunk: no product runs twice."""
        _require_compiling()
        options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        is_plain = weight is None and size_average is None and reduce is None and not target.is_floating_point()
        if not is_plain or reduction == "none" or self.dim() != 2:
            return F.cross_entropy(self.make(), target, weight, size_average, reduce=reduce, reduction=reduction, **options)
        trained = {name: p for name, p in self.head.named_parameters() if p.requires_grad}

        def run(x: Tensor, fixed: dict[str, Tensor], y: Tensor) -> Tensor:
            logits = self._compute(fixed, x)
            logits = logits.float() if logits.dtype in HALF else logits
            return F.cross_entropy(logits, y, reduction="sum", **options)

        size = self.chunk or choose_chunk(self.shape[-1], len(target))
        fixed = {name: p.detach() for name, p in trained.items()}
        total: Tensor | None = None
        parts: list[Tensor] = []  # calls of list[Tensor] cannot be traced
        sums: dict[str, Tensor] = {}
        for x, y in zip(self.hidden.detach().split(size), target.split(size), strict=True):
            (part, others), loss = grad_and_value(run, argnums=(0, 1))(x, fixed, y)
            total = loss if total is None else total + loss
            parts.append(part)
            for name, each in others.items():
                wide = each.float() if each.dtype in HALF else each
                sums[name] = sums[name] + wide if name in sums else wide
        assert total is not None
        if total.requires_grad:
            raise InputError(
                "In compiled code the gradients of a loss in chunks are those of the head's parameters. Received: a head that "
                "uses another tensor that needs one. Register it in the head, detach it, or undo chunk_loss_."
            )
        total = KnownGradients.apply(total, 1 + len(trained), self.hidden, *trained.values(), torch.cat(parts), *sums.values())
        if reduction == "sum":
            return total
        count = (target != ignore_index).sum()  # of none the mean is NaN, and its gradients are zero
        return total / count.clamp(min=1) + torch.where(count > 0, 0.0, torch.nan)


def _make(given: Any) -> Any:
    """Return arguments with the whole logits in place of those that are not there."""
    if isinstance(given, TracedLogits):
        return given.make()
    if isinstance(given, tuple | list):
        return type(given)(map(_make, given))
    return {key: _make(each) for key, each in given.items()} if isinstance(given, dict) else given


def _refuse(self: TracedLogits, *_: Any) -> Any:
    raise InputError(
        "Logits with their loss in chunks are not changed in place in compiled code. Received: an operation that does. Write "
        "x = 2 * x for x *= 2, or undo chunk_loss_: revzoo.ordinary_(model)."
    )


def _require_compiling() -> None:
    if not torch.compiler.is_compiling():
        raise InputError(
            "Compiled code with its loss in chunks returns no logits. Received: a request for them. Ask inside of it, or "
            "in eval mode, or undo chunk_loss_: revzoo.ordinary_(model)."
        )


def _follow(name: str) -> Callable[..., Any]:
    return lambda self, *given, **named: self._do(name, *given, **named)


for each in _OF_EACH_TOKEN:
    setattr(TracedLogits, each, _follow(each))
for each in ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"):
    setattr(TracedLogits, each, _refuse)
