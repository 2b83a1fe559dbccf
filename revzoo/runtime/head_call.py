"""One call of a language model's head, whose logits are had later: in chunks, for their loss, or as a whole.

Until then the call keeps the hidden states, and what the head read: like a step that runs again, the head then computes with
the settings, flags and attributes of its call, and what cannot be put back, such as weights that have changed, is refused.

The call is a node of autograd's graph, from the hidden states and what in the head requires a gradient to the logits. These
have no memory, and neither has their gradient: a `HeadGradient` carries those of the node's inputs from the loss, or from
whatever else was computed of the logits, through all that stands around them (hooks, DDP, FSDP2), to the node.

    head ------> logits --> hook, DDP, FSDP2, float(), view() --> logits --> loss in chunks
    backward <------------- HeadGradient, without memory <------------------ gradients of hidden states and parameters

B examples, N tokens, D channels, V outputs of the head.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from revzoo.device import has_value
from revzoo.errors import InputError
from revzoo.runtime.attributes import Attributes
from revzoo.runtime.call_watch import CallWatch
from revzoo.runtime.chunked_loss import Head, find_leaves, no_hooks, refuse_mixing, refuse_sharded
from revzoo.runtime.conditions import Conditions
from revzoo.runtime.forward import Forward
from revzoo.runtime.inventory import find_plain_tensors
from revzoo.runtime.random_state import RandomState
from revzoo.runtime.round import begin_round
from revzoo.runtime.tripwire import Watch

_UNDO = "Undo it: revzoo.ordinary_(model)."


class HeadCall:
    """One call of a head.

    Args:
        module: the head.
        name: of it, for messages.
        run: computes its logits (n, V) of hidden states (n, D).
        hidden: the hidden states (..., D).
        chunk: as for `chunked_loss`.

    Attributes:
        sample: the logits of no token, (0, V).
        inputs: of the node: the hidden states, and the leaves in the head that require a gradient.
    Raises:
        InputError: the head mixes tokens, or changes a buffer; it is as it was.
    """

    def __init__(self, module: nn.Module, name: str, run: Head, hidden: Tensor, chunk: int | None):
        self.module, self.name, self._run, self.chunk = module, name, run, chunk
        self._conditions = Conditions(module, name, Forward(hidden))
        self._attributes = Attributes(*self._conditions.inventory.modules)
        self._version, self._memory = hidden._version, self._read_memory()
        self._leaves = [(t, t.requires_grad) for t in self._conditions.fixed if t.is_leaf]
        self._hidden: Tensor | None = hidden.detach().requires_grad_(hidden.requires_grad)
        refuse_mixing(module, name, run, hidden)
        self._round = begin_round(module, hidden)
        self._watch: CallWatch | None = None
        if self._round is not None and self._round.compares and (out := self._probe()) is not None:
            self._watch = CallWatch(hidden, self._conditions, reads_whole=True)
            self._watch.note(0, out)
            self._watch.end_first_run()
        # No token has no FLOPs. With its graph: autocast keeps its casts of weights, and those without one would freeze them.
        none = hidden.new_empty((0, hidden.shape[-1])).requires_grad_(hidden.requires_grad)
        self._plain = find_plain_tensors(self._conditions.inventory.modules)
        try:
            self.sample = self.head(none)
        except Exception as error:
            raise InputError(
                f"A head in chunks is called without a token, too. Received: {name}, which then raises {error!r}. {_UNDO}"
            ) from error
        self.inputs = [self._hidden, *(leaf for leaf in find_leaves(self.sample) if leaf is not none)]

    def head(self, x: Tensor) -> Tensor:
        """Return the logits (n, V) of hidden states (n, D), with the attributes that the head had when it was called."""
        self._attributes.restore()
        return self._run(x)

    def compute(self, logits: Tensor, function: Callable[[Tensor], Tensor], given: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return function(hidden states), in which the head runs as at its call; its gradient goes through these logits.

        Args:
            logits: of this call.
            function: of the hidden states (..., D).
            given: tensors that it is differentiated by, besides those of the call, each with what stands for it.
        Raises:
            InputError: something has changed since the call that cannot be put back, or backward has passed.
        """
        differentiates = torch.is_grad_enabled() and logits.requires_grad
        with self._as_at_call() as hidden, no_hooks(), torch.set_grad_enabled(differentiates):
            inputs = [x for x in (*self.inputs, *(copied for _, copied in given)) if x.requires_grad]
            edges = list(map(get_gradient_edge, inputs))  # which do not depend on what is frozen later
            result = function(hidden)
        if not result.requires_grad:
            return result
        if missing := [leaf for leaf in find_leaves(result) if all(leaf is not x for x in inputs)]:
            raise InputError(
                f"A head in chunks uses the same parameters for all tokens. Received: {self.name}, which uses "
                f"{self._conditions.inventory.name(missing[0])!r} for some alone. {_UNDO}"
            )
        return _Result.apply(logits, [result], inputs, edges)

    def end(self) -> None:
        """Let go of the hidden states: backward has passed."""
        self._hidden = None
        self.inputs.clear()

    @contextmanager
    def _as_at_call(self) -> Iterator[Tensor]:
        hidden, conditions = self._hidden, self._conditions
        if hidden is None:
            raise InputError(
                f"The logits of {self.name} were never made: chunk_loss_ computes their loss in chunks. Received: a request "
                "for them after backward. Ask before it, or run the network in eval mode."
            )
        refuse_sharded(*self.module.parameters())  # after its forward, fully_shard has divided a head that is a unit of its own
        present = Attributes(*conditions.inventory.modules)
        switched = [(leaf, flag) for leaf, flag in self._leaves if leaf.requires_grad is not flag]
        with conditions.forward:
            entered = conditions.forward.settings.enter()
            try:
                self._attributes.restore()
                self._require_unchanged(hidden)
                for leaf, flag in switched:
                    leaf.requires_grad_(flag)
                yield hidden
            finally:
                for leaf, flag in switched:
                    leaf.requires_grad_(not flag)
                present.restore()
                conditions.forward.settings.leave(entered)

    def _require_unchanged(self, hidden: Tensor) -> None:
        changed = "hidden states that were" if hidden._version != self._version else None
        if changed is None and (name := self._conditions.find_changed()) is not None:
            changed = f"its {name!r}, which was"
        if changed is None and self._read_memory() != self._memory:
            changed = "a parameter or buffer whose .data was"
        if changed is None and find_plain_tensors(self._conditions.inventory.modules) != self._plain:
            changed = "a tensor in one of its attributes, which was"
        if changed is not None:
            raise InputError(
                f"The logits of {self.name} are computed when they, or their loss, are asked for. Received: {changed} changed "
                "since the head was called. Ask before that, or undo chunk_loss_: revzoo.ordinary_(model)."
            )
        if self._watch is not None and (out := self._probe()) is not None:
            self._watch.compare({0: (out, out._version)}, Watch(), 0.0, same_input=True)
        if self._round is not None:
            self._round.note_compared()

    def _probe(self) -> Tensor | None:
        """Return the logits of one token; None without values, or if the head draws random numbers."""
        if self._hidden is None or not has_value(self._hidden):
            return None
        random = RandomState(self._conditions.random.generators)
        with _disable_current_modes(), no_hooks():  # but with its graph, as above
            out = self.head(self._hidden.flatten(0, -2)[:1]).detach()
        random.end_first_run()
        random.rewind()
        self._attributes.restore()
        return None if random.has_drawn else out

    def _read_memory(self) -> list[int]:
        """Return which memory parameters and buffers have: an exchange through .data changes no version."""
        fixed = (t for t in self._conditions.inventory.fixed if t.layout is torch.strided)
        return [t.untyped_storage()._cdata for t in fixed if not is_traceable_wrapper_subclass(t)]


class HeadGradient(Tensor):
    """The gradient of logits that have no memory. It has none, too, and carries those of what the logits are computed from.

    Args:
        like: shape, dtype and device of the logits.
        parts: the gradients, by what they belong to.
    """

    parts: dict[Tensor, Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, like: "Description", parts: dict[Tensor, Tensor]) -> Self:
        shape, dtype, device = like
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.parts = parts
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default):
            return cls(describe(args[0]), args[0].parts)
        if func is not torch.ops.aten.add.Tensor:
            raise refuse(f"{func}, of their gradient")
        if not all(isinstance(x, cls) for x in args):
            raise refuse("an autograd.Function")
        parts, others = (x.parts for x in args)  # of two uses of the same logits
        both = {x: parts[x] + others[x] for x in parts.keys() & others.keys()}
        return cls(describe(args[0]), parts | others | both)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"HeadGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


Description = tuple[torch.Size, torch.dtype, torch.device]


def describe(x: Tensor) -> Description:
    """Return shape, dtype and device of a tensor."""
    return x.shape, x.dtype, x.device


class Node(torch.autograd.Function):
    """Return what `make` returns: logits without memory, of the inputs.

    Args:
        make: makes them.
        keys: of each input, what its gradient belongs to in a `HeadGradient`; None for other logits that these are made from.
        call: of a head, which ends with a backward; None for others.
    """

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], keys: Sequence[Any], call: HeadCall | None, *inputs: Tensor) -> Tensor:
        ctx.keys, ctx.call, ctx.like = keys, call, describe(inputs[0])
        ctx.set_materialize_grads(False)
        if call is not None:
            ctx.save_for_backward(inputs[0])  # for those who ask what is kept: the call holds the hidden states
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:  # DDP hands on those of what has none
            return None, None, None, *(None for _ in ctx.keys)
        if not isinstance(gradient, HeadGradient):
            raise refuse("an autograd.Function")
        parts = gradient.parts
        given = [HeadGradient(ctx.like, parts) if key is None else parts.pop(key, None) for key in ctx.keys]
        if ctx.call is not None and not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.call.end()
        return None, None, None, *given


class _Result(torch.autograd.Function):
    """Return what was computed of logits, in a graph of its own; its gradient goes to the logits.

    Args:
        logits: of which it was computed.
        result: it, alone in a list, so that it is no input.
        inputs: what its own graph begins with.
        edges: of them.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, result: list[Tensor], inputs: Sequence[Tensor], edges: list[GradientEdge]) -> Tensor:
        ctx.result, ctx.inputs, ctx.edges, ctx.like = result[0], inputs, edges, describe(logits)
        return result[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise InputError(f"chunk_loss_ has first derivatives only. Received: a backward with create_graph=True. {_UNDO}")
        if ctx.result is None:
            raise InputError("A second backward through a loss in chunks. Pass retain_graph=True to the first.")
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        with no_hooks(ctx.inputs):
            parts = torch.autograd.grad(ctx.result, ctx.edges, gradients, retain_graph=keep, allow_unused=True)
        given = {x: part for x, part in zip(ctx.inputs, parts, strict=True) if part is not None}
        if not keep:
            ctx.result = ctx.inputs = ctx.edges = None
        return HeadGradient(ctx.like, given), None, None, None


def refuse(what: str) -> InputError:
    """Return the error of who asks for numbers that there are not."""
    return InputError(
        "chunk_loss_ leaves the logits out, of which only the cross-entropy is needed. Received: a request for their numbers "
        f"by {what}. {_UNDO}"
    )
