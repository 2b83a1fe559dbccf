"""Following a training step through a model: when each unit begins, forward and backward, and what it is handed."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from revzoo.errors import InputError
from revzoo.model.network import Model
from revzoo.runtime.chain import ReversibleChain
from revzoo.runtime.layout import LayoutEntry
from revzoo.runtime.live_bytes import tensors_in

PlannableModel = Model | ReversibleChain


def layout_of(model: nn.Module) -> list[LayoutEntry]:
    """Return the layout of a model that can be planned.

    Raises:
        InputError: neither a `revzoo.Model` nor a `ReversibleChain`.
    """
    if isinstance(model, PlannableModel):
        return model.layout()
    raise InputError(f"A revzoo.Model or a ReversibleChain can be planned. Received: {type(model).__name__}.")


def units(model: nn.Module) -> list[LayoutEntry]:
    """Return what has a mode, in the order of the model's schedule."""
    return [entry for entry in layout_of(model) if entry.is_unit]


class Listener(Protocol):
    """Whoever wants to know; units are given by their number."""

    def forward(self, unit: int, inputs: Any, pair: Any) -> None:
        """Hear that a unit begins, with what it was given, and with that and the older stream as `identify` saw them."""

    def forward_ended(self, unit: int) -> None:
        """Hear that a unit has returned."""

    def backward(self, unit: int) -> None:
        """Hear that the gradient of what a unit returned is there."""

    def identify(self, tensors: Any) -> frozenset[int]:
        """Return what is to be remembered of tensors; they themselves must not be kept alive."""


class Walk:
    """Hooks on a model that tell a listener how a training step proceeds; use it as a context around forward and backward.

    `forward_ended` is to be called between the two: from then on units are called for recovery.
    """

    def __init__(self, model: nn.Module, listener: Listener):
        self._model = model
        self._listener = listener
        self._older: frozenset[int] = frozenset()
        self._passes = 0  # of the streams through the bijection at hand
        self._in_forward = True
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "Walk":
        number = 0
        if isinstance(self._model, ReversibleChain):
            register = partial(self._model.register_forward_pre_hook, with_kwargs=True)
            self._hook(register, self._pair_enters)
        for part in layout_of(self._model):
            if part.kind == "bijection":
                self._hook(part.module.register_forward_hook, self._stream_passes)
            elif part.kind == "split":
                self._hook(part.module.register_forward_hook, self._pair_leaves)
            else:
                self._hook(part.module.register_forward_pre_hook, partial(self._begins, number, part.kind))
                self._hook(part.module.register_forward_hook, partial(self._ends, number, part.kind))
                number += 1
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def forward_ended(self) -> None:
        """Take later calls of the units for recoveries."""
        self._in_forward = False

    def _hook(self, register: Callable[[Any], RemovableHandle], hook: Callable[..., None]) -> None:
        def in_forward_only(*arguments: Any) -> None:
            if self._in_forward:
                hook(*arguments)

        self._handles.append(register(in_forward_only))

    def _begins(self, number: int, kind: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        given = self._listener.identify(args[:1] if kind == "step" else args)  # a side input is no state
        if kind == "step":
            self._listener.forward(number, given, given | self._older)
            self._older = given
        else:
            self._listener.forward(number, given, given)
            self._older = frozenset()
        self._passes = 0

    def _ends(self, number: int, kind: str, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self._listener.forward_ended(number)
        heard = False

        def first_gradient(_: Tensor) -> None:
            nonlocal heard
            if not heard:
                heard = True
                self._listener.backward(number)

        for t in tensors_in(out):
            if t.requires_grad:
                t.register_hook(first_gradient)
        if kind == "node":
            self._pair_leaves(module, args, out)

    def _pair_enters(self, chain: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._older = self._listener.identify(args[0] if args else kwargs["x1"])

    def _pair_leaves(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self._older = self._listener.identify(out[0]) if isinstance(out, tuple) else frozenset()

    def _stream_passes(self, bijection: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        if self._passes == 0:
            self._older = self._listener.identify(out)
        self._passes += 1
