"""The loss of a language model in chunks, while its own code goes on calling its head and its loss function.

In training the head returns `LazyLogits`. Class, parameters, state-dict keys and configuration stay; in code that is compiled,
it returns `TracedLogits`; in eval mode, without gradients and inside torch.func its logits as before.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from revzoo.analysis.dry_run import LossFunction, call, compute_loss, in_mode, isolated
from revzoo.block_steps.conventions import look_for_state
from revzoo.dtype import HALF
from revzoo.errors import ConversionError, InputError, UnknownNameError
from revzoo.format import format_bytes
from revzoo.runtime.chunk_size import choose_chunk
from revzoo.runtime.chunked_loss import refuse_mixing, require_chunk
from revzoo.runtime.compiling import exclude_from_compilation, is_exporting, is_traced
from revzoo.runtime.lazy_logits import LazyLogits, WholeLogitsWarning
from revzoo.runtime.live_bytes import LiveBytes
from revzoo.runtime.nested import tensors_in
from revzoo.runtime.ownership import ModuleReference
from revzoo.runtime.traced_logits import TracedLogits
from revzoo.runtime.transforms import must_store

_TOLERANCE, _TOLERANCE_IN_HALF = 1e-4, 0.05  # of loss and gradients, relative; many networks compute the loss in float32


@dataclass(frozen=True)
class ChunkReport:
    """What `chunk_loss_` did with a network. Printed, it also says what it saves on the batch.

    Args:
        head: its path in the network.
        chunk: tokens at a time on the batch; 0 without one, as all below.
        tokens: of the batch.
        ordinary_bytes: the peak of a training step on the batch before, counted: weights, gradients, batch and activations.
        chunked_bytes: likewise with the loss in chunks.
    """

    head: str
    chunk: int = 0
    tokens: int = 0
    ordinary_bytes: int = 0
    chunked_bytes: int = 0

    def __str__(self) -> str:
        if not self.chunk:
            return f"{self.head}: its loss is computed in chunks of tokens. With batch= it is compared and counted"
        chunks = f"{-(-self.tokens // self.chunk)} chunks of {self.chunk} tokens"
        if self.tokens <= self.chunk:
            chunks = f"one chunk holds all {self.tokens} tokens, so nothing is saved on this batch: give a smaller chunk="
        return f"{self.head}: peak {format_bytes(self.ordinary_bytes)} -> {format_bytes(self.chunked_bytes)}, {chunks}"


def chunk_loss_(
    model: nn.Module, head: str | None = None, *, batch: Any = None, loss: LossFunction | None = None, chunk: int | None = None
) -> ChunkReport:
    """Let a language model compute the cross-entropy of its logits in chunks of tokens, in place: `chunked_loss`.

    The network's own code goes on calling its head and its loss. In training, the head returns logits that are not there yet:
    shifts, views, scales and soft caps are recorded, and `cross_entropy` runs head and loss in chunks. Whatever else is done to
    them gets the whole logits, with a warning that names it where it is not compiled. `generate` and evaluation are as before.
    A head that takes the place of this one in `resize_token_embeddings` is called likewise. Call it after peft has wrapped the
    head; undo it with `ordinary_`.

    Args:
        model: a language model of Transformers (causal, masked, sequence-to-sequence), of the zoo, or any with a named head.
        head: path of the module that returns the logits. None: what `get_output_embeddings` returns, or "head".
        batch: a mapping of keyword arguments, or positional ones. With one, loss and gradients are compared with the ordinary
            ones.
        loss: computes the loss from what the model returns. None: its `loss`.
        chunk: tokens at a time; None: an eighth of them but at least 64, and at most 256 MiB, see `chunked_loss`.
    Raises:
        UnknownNameError: no module of this path. InputError: no head, one whose loss is in chunks already or that has a
            BatchNorm, or a chunk that is no positive integer.
        ConversionError: the batch gives another loss or gradient, or the network does something else with its logits, which is
            named. The network is then as it was.
    Cost: as `chunked_loss`.
    """
    require_chunk(chunk)
    name, module = _find_head(model, head)
    if get_chunked_head(module) is not None:
        raise InputError(f"The loss of this {type(model).__name__} is in chunks already. Received: chunk_loss_ again.")
    refuse_mixing(module, name)
    find = getattr(model, "get_output_embeddings", None)
    owner = getattr(find, "__self__", None) if callable(find) and find() is module else None
    chunked = ChunkedHead(module, name, chunk, owner)
    if batch is None:
        chunked.install()
        return ChunkReport(name)
    loss = loss or _get_loss
    expected, ordinary_bytes = _differentiate(model, batch, loss)
    chunked.install()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", WholeLogitsWarning)
            received, chunked_bytes = _differentiate(model, batch, loss)
        if chunked.latest is None:
            raise ConversionError(
                f"{type(module).__name__} is not called on this batch. Name the head: chunk_loss_(model, PATH)."
            )
        _compare(expected, received)
    except WholeLogitsWarning as warning:
        chunked.remove()
        raise ConversionError(f"{type(model).__name__} does something else with its logits. {warning}") from warning
    except BaseException:
        chunked.remove()
        raise
    *tokens, width = chunked.latest
    count = math.prod(tokens)
    return ChunkReport(name, chunk or choose_chunk(width, count), count, ordinary_bytes, chunked_bytes)


class ChunkedHead:
    """Stands in place of a head's `forward`.

    Args:
        module: the head.
        name: its path in the network.
        chunk: as for `chunk_loss_`.
        owner: the network of Transformers whose head it is, which may replace it; it may be inside of what peft has made.
    """

    def __init__(self, module: nn.Module, name: str, chunk: int | None, owner: nn.Module | None):
        self._module, self._name, self._chunk, self._owner = ModuleReference(module), name, chunk, ModuleReference(owner)
        self._own_forward: Callable[..., Tensor] | None = module.__dict__.get("forward")
        self._is_own = False  # whether the head returns its own logits
        self.latest: torch.Size | None = None  # the shape of the latest logits that were not made

    def install(self) -> None:
        """Stand in place of the head's `forward`."""
        self.module.__dict__["forward"] = self.call
        if (owner := self._owner()) is not None:
            owner.__dict__["set_output_embeddings"] = self.replace

    def replace(self, head: nn.Module) -> None:
        """Give the network another head, and stand in place of the `forward` of that."""
        owner: Any = self._owner()
        self.remove()
        owner.set_output_embeddings(head)
        ChunkedHead(head, self._name, self._chunk, owner).install()

    def remove(self) -> None:
        """Give the head its own `forward` back."""
        if self._own_forward is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self._own_forward
        if (owner := self._owner()) is not None:
            owner.__dict__.pop("set_output_embeddings", None)

    @property
    def module(self) -> nn.Module:
        """The head."""
        module = self._module()
        assert module is not None
        return module

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return logits: lazy ones in training, those that are traced in code that is compiled."""
        if not self._is_own and not is_traced():
            return self._call(*args, **kwargs)
        module, own = self.module, self._own_forward
        has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
        if self._is_own or has_hooks or not module.training or not torch.is_grad_enabled() or len(args) != 1 or kwargs:
            return type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)
        self._require_single_tokens(args[0].shape[-1])
        return TracedLogits(self.run_own, module, args[0], self._chunk)

    def _require_single_tokens(self, channels: int) -> bool:
        """Raise InputError if the head mixes tokens. It runs while the code that calls it is compiled."""
        like = next(self.module.parameters(), torch.empty(0))
        tokens = torch.randn(2, 2, channels, dtype=like.dtype, device=like.device)
        refuse_mixing(self.module, self._name, lambda hidden: self.run_own({}, hidden), tokens)
        return True

    _require_single_tokens._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as by torch.compiler.assume_constant_result

    def run_own(self, parameters: dict[str, Tensor], hidden: Tensor) -> Tensor:
        """Return the head's own logits, with these in place of its parameters."""
        self._is_own = True
        try:
            logits: Tensor = torch.func.functional_call(self.module, parameters, (hidden,))
        finally:
            self._is_own = False
        return logits

    @exclude_from_compilation
    def _call(self, *args: Any, **kwargs: Any) -> Tensor:
        module = self.module
        run = self._own_forward or type(module).forward.__get__(module)
        hidden, key = look_for_state(module, args, kwargs)
        is_trained = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors_in(hidden), *module.parameters()))
        has_states = isinstance(hidden, Tensor) and hidden.dim() >= 2 and hidden.is_floating_point()
        is_lazy = module.training and is_trained and has_states
        others = [a for a in (*args, *kwargs.values()) if a is not None and a is not hidden]
        if is_lazy and others and not is_head_of_tokens(module):
            is_lazy = False
            warnings.warn(
                f"The whole logits are made: {type(module).__name__} is called with more than hidden states.",
                WholeLogitsWarning,
                stacklevel=2,
            )
        if not is_lazy or is_exporting() or must_store():
            return run(*args, **kwargs)
        logits = LazyLogits.of(module, self._name, lambda x: run(x) if key is None else run(**{key: x}), hidden, self._chunk)
        self.latest = logits.shape
        return logits


def is_head_of_tokens(module: object) -> bool:
    """Return whether this is a head of the zoo that returns the logits of each token; it may be given a mask without effect."""
    return getattr(module, "per_token", False) is True


def get_chunked_head(module: nn.Module) -> ChunkedHead | None:
    """Return what stands in place of a head's `forward`, if something does."""
    chunked = getattr(module.__dict__.get("forward"), "__self__", None)
    return chunked if isinstance(chunked, ChunkedHead) else None


def _find_head(model: nn.Module, path: str | None) -> tuple[str, nn.Module]:
    modules = dict(model.named_modules())
    if path is not None and path not in modules:
        raise UnknownNameError("module", path, modules)
    find = getattr(model, "get_output_embeddings", None)
    head = modules[path] if path is not None else find() if callable(find) else modules.get("head")
    if not isinstance(head, nn.Module):
        raise InputError(
            f"The head of a {type(model).__name__} is not known. Received: none. Name it: chunk_loss_(model, 'lm_head')."
        )
    return next(name for name, module in modules.items() if module is head), head


def _get_loss(outputs: Any) -> Tensor:
    loss = getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor):
        raise InputError(
            f"What the model returns has a loss. Received: {type(outputs).__name__} without one. Put labels into the batch, or "
            "give loss=, a function of what the model returns."
        )
    return loss


def _differentiate(model: nn.Module, batch: Any, loss: LossFunction) -> tuple[list[tuple[str, Tensor]], int]:
    """Return the loss of a training step and the gradients of parameters, with their names; and the peak in bytes."""
    with isolated(model, batch) as inputs, in_mode(model, training=True):
        with LiveBytes() as live:
            live.watch([*model.parameters(), *model.buffers(), *tensors_in(inputs)])
            total = compute_loss(loss, call(model, inputs))
            total.backward()
        gradients = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    return [("the loss", total.detach()), *gradients], live.peak()


def _compare(expected: list[tuple[str, Tensor]], received: list[tuple[str, Tensor]]) -> None:
    if [name for name, _ in expected] != [name for name, _ in received]:
        raise ConversionError("Other parameters have gradients with the loss in chunks.")
    tolerance = _TOLERANCE_IN_HALF if any(p.dtype in HALF for _, p in expected) else _TOLERANCE
    largest = max(float(gradient.norm()) for _, gradient in expected[1:])
    for (name, ordinary), (_, chunked) in zip(expected, received, strict=True):
        scale, distance = float(ordinary.norm()), float((chunked - ordinary).norm())
        if not distance <= tolerance * max(scale, largest / 1000):  # some gradients are zero but for rounding
            raise ConversionError(
                f"{name} differs with the loss in chunks: by {distance:.3g} of {scale:.3g}. Does the head draw random numbers, "
                "or mix tokens? Then its loss cannot be in chunks; revzoo.chunked_loss takes any function of each token."
            )
