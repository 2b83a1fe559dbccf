"""A loss over chunks of tokens: the logits of all tokens never exist, in neither pass.

Gradients are computed in forward, chunk by chunk, and kept; backward multiplies them by the incoming gradient. So no product of
the head runs twice, and a chunk's logits are gone before those of the next one are made.

N tokens that count, D channels, V outputs of the head.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from revzoo.device import has_value, is_sharded
from revzoo.dtype import HALF
from revzoo.errors import InputError
from revzoo.runtime.chunk_size import choose_chunk
from revzoo.runtime.compiling import exclude_from_compilation, is_traced
from revzoo.runtime.independence import OF_MODULES, find_known_mixing, find_mixing
from revzoo.runtime.inventory import take_inventory
from revzoo.runtime.known_gradients import KnownGradients
from revzoo.runtime.ownership import is_held_alone
from revzoo.runtime.tiles import Tile
from revzoo.runtime.traced_logits import TracedLogits

Head = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Reduction = Literal["mean", "sum", "none"]

_TRIED = 64  # tokens, of each of the first two texts
_NO_LABEL = torch.iinfo(torch.int64).min  # those that are ignored never come; -100 is out of range where another is ignored
_UNKNOWN_WIDTH = 2**18  # outputs of a head without parameters of its own, before it was called


def chunked_loss(
    head: Head,
    hidden: Tensor,
    labels: Tensor,
    *,
    loss: Loss | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """Return the loss of head(hidden) without ever holding the logits of all tokens.

    Loss and gradients are those of `cross_entropy(head(hidden).float(), labels)`, or of another loss. Gradients reach the
    hidden states and whatever in the head requires one. Tokens whose label is ignored never reach the head. What the head
    draws at random, as LoRA's dropout does, is drawn for each chunk.

    Shapes: hidden: (..., D); labels: (...), of any dtype that the loss takes. Returns a number; with reduction="none" (...).
    Args:
        head: a module, or any function, of (n, D) to (n, V), each token for itself: with bias, LoRA, soft cap, scale.
        loss: of (n, V) logits and (n,) labels, a number for each token (n,). None: cross-entropy, in float32 at least.
        reduction: "mean" divides by the number of labels that count. "none" is for losses that are weighted afterwards.
        ignore_index: a label that does not count.
        label_smoothing: of the cross-entropy, in [0, 1].
        z_loss: weight of the squared logarithm of the softmax's denominator, which is added to the cross-entropy.
        chunk: tokens at a time. None: an eighth of them but at least 64, or fewer where their logits in float32, and what
            cross-entropy keeps of them, would take more than 256 MiB.
    Raises:
        InputError: shapes that do not fit, a loss of another shape, a chunk that is no positive integer, a head that processes
            divide or that has a BatchNorm in training, several chunks of a head that uses a tensor computed outside which needs
            a gradient, or a second derivative.
    Cost: forward holds, beside a chunk, the gradient of the hidden states, and that of the head's parameters (in float32 where
        they are in half precision). FLOPs are those of the ordinary loss; with "none" the head runs once more in backward. The
        host waits for a GPU once, to know how many labels count.
    Source: Liger (arXiv:2410.10989) computes gradients in forward, too; Cut Cross-Entropy (arXiv:2411.09009).
    """
    _require(hidden, labels, reduction, chunk)
    is_usual = not (loss or z_loss or reduction == "none")
    if is_traced() and is_usual and type(head) is nn.Linear and not (head._forward_hooks or head._forward_pre_hooks):
        logits, targets = TracedLogits(partial(functional_call, head), head, hidden, chunk).flatten(0, -2), labels.flatten()
        options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
        return F.cross_entropy(logits, targets, **options)
    return _compute_uncompiled(head, hidden, labels, loss, reduction, ignore_index, label_smoothing, z_loss, chunk)


@exclude_from_compilation
def _compute_uncompiled(
    head: Head,
    hidden: Tensor,
    labels: Tensor,
    loss: Loss | None,
    reduction: Reduction,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk: int | None,
) -> Tensor:
    refuse_sharded(hidden, *(head.parameters() if isinstance(head, nn.Module) else ()))
    if isinstance(head, nn.Module):
        refuse_mixing(head, "", head, hidden)
    if loss is None:
        loss = partial(cross_entropy, label_smoothing=label_smoothing, z_loss=z_loss)
    elif label_smoothing or z_loss:
        raise InputError("label_smoothing and z_loss belong to the cross-entropy. Received: a loss too. Put them into it.")
    return compute_in_chunks(head, hidden, labels, loss, reduction, ignore_index, chunk)


def compute_in_chunks(
    head: Head,
    hidden: Tensor,
    labels: Tensor,
    loss: Loss,
    reduction: str,
    ignore_index: int,
    chunk: int | None,
    places: Tensor | None = None,
    width: int = 0,
) -> Tensor:
    """Do as `chunked_loss` for labels of tokens in any places.

    Args:
        loss: of (n, V) logits and (n,) labels, a number for each token (n,).
        places: which of the hidden states belongs to each label, counted through all of them, of the labels' shape. None: they
            are in one order.
        width: outputs of the head; 0 where that is not known.
    """
    targets = labels.flatten()
    places = torch.arange(len(targets), device=hidden.device) if places is None else places.flatten()
    counts, kept = targets != ignore_index, None
    if has_value(counts) and has_value(hidden):  # else all may count
        kept = counts.nonzero().flatten()
        places, targets = places[kept], targets[kept]
    if isinstance(head, nn.Module):
        width = max((max(p.shape, default=0) for p in head.parameters()), default=0)
    tokens = _Tokens(hidden.flatten(0, -2), places, targets, chunk, width or _UNKNOWN_WIDTH)

    def run(x: Tensor, y: Tensor) -> Tensor:
        logits = head(x)
        tokens.note_width(logits.shape[-1])
        losses = loss(logits, y)
        if losses.shape != y.shape:
            raise InputError(
                f"loss returns a number for each token. Received: {tuple(losses.shape)} of {len(y)} tokens. Give the loss "
                "reduction='none'; chunked_loss has a reduction of its own."
            )
        return losses

    if reduction == "none":
        run_again = partial(checkpoint, run, use_reentrant=False) if torch.is_grad_enabled() else run
        losses = torch.cat([run_again(x, y) for _, x, y in tokens])
        if kept is not None:
            losses = losses.new_zeros(labels.numel()).index_put((kept,), losses)
        return losses.view(labels.shape)

    gradients, count = _Gradients(hidden), len(targets)
    total: Tensor | None = None
    for place, x, y in tokens:
        part = gradients.add(run, place, x, y)
        total = part if total is None else total + part
    assert total is not None
    if gradients.sums:
        total = KnownGradients.apply(total, len(gradients.sums), *gradients.sums, *gradients.sums.values())
    if reduction == "mean":  # divided here: gradients of a mean would be smaller than what float16 has
        total = total / max(count, 1)
    return total if count or reduction == "sum" else total + float("nan")  # as in PyTorch, also in that gradients are zero


class _Tokens:
    """The chunks of the tokens that count: their places, hidden states (n, D) and labels (n,).

    Without a token there is one chunk of none, so that the head's parameters have a gradient of zero, as they always have.
    """

    def __init__(self, rows: Tensor, places: Tensor, targets: Tensor, chunk: int | None, width: int):
        self._rows, self._places, self._targets, self._is_fixed = rows, places, targets, chunk is not None
        self._chunk = chunk or choose_chunk(width, len(targets))

    def note_width(self, width: int) -> None:
        """Let the following chunks fit the logits of this one."""
        if not self._is_fixed:
            self._chunk = choose_chunk(width, len(self._targets))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        count, begin = len(self._targets), 0
        while begin < count or begin == 0:
            size = min(self._chunk, count - begin)
            places = self._places.narrow(0, begin, size)
            # Labels are copied: with a view, `LiveBytes` would count all of them again.
            yield places, self._rows[places], self._targets.narrow_copy(0, begin, size)
            begin += max(size, 1)


class _Gradients:
    """Sums of gradients over chunks, of the hidden states and of every leaf that requires one.

    Args:
        hidden: all hidden states, (..., D).
    """

    def __init__(self, hidden: Tensor):
        self.sums = dict[Tensor, Tensor]()
        self._hidden = hidden

    def add(self, run: Callable[[Tensor, Tensor], Tensor], places: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the losses of the tokens in these places, and add their gradients."""
        hidden = self._hidden
        x = x.detach().requires_grad_(torch.is_grad_enabled() and hidden.requires_grad)
        with no_hooks():
            losses = run(x.view_as(x), y)  # hooks of modules, as FlopCounterMode has them, fail at a leaf
        if losses.requires_grad:
            leaves = [leaf for leaf in find_leaves(losses) if leaf is not x]
            if any(leaf is hidden for leaf in leaves):
                raise _refuse_outer()
            inputs = [*([x] if x.requires_grad else []), *leaves]
            with no_hooks(leaves), torch.autocast(losses.device.type, enabled=False):  # backward belongs outside of it
                try:
                    parts = torch.autograd.grad(losses, inputs, torch.ones_like(losses))
                except RuntimeError as error:
                    if "the graph a second time" not in str(error):
                        raise
                    raise _refuse_outer() from error
            if x.requires_grad:
                if hidden not in self.sums:
                    self.sums[hidden] = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
                self.sums[hidden].view(-1, hidden.shape[-1]).index_add_(0, places, parts[0])
            for leaf, part in zip(leaves, parts[len(inputs) - len(leaves) :], strict=True):
                if leaf in self.sums:
                    self.sums[leaf].add_(part)
                elif leaf.dtype in HALF:
                    self.sums[leaf] = part.float()
                else:
                    self.sums[leaf] = part if is_held_alone(part) else part.clone()
        return losses.detach().sum()


def find_leaves(out: Tensor) -> list[Tensor]:
    """Return the leaves that a tensor depends on and that require a gradient, in order of their appearance in its graph."""
    leaves, seen, waiting = list[Tensor](), set[Node](), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if (leaf := getattr(node, "variable", None)) is not None:
                leaves.append(leaf)
            waiting += [following for following, _ in node.next_functions]
    return leaves


def _refuse_outer() -> InputError:
    return InputError(
        "A head uses parameters, and hidden states only as they are given to it. Received: a head or loss with a tensor that "
        "was computed outside and needs a gradient, which every chunk would want. Compute it inside of the head, detach it, or "
        "take reduction='none' and the mean of that, which runs the head once more in backward."
    )


@contextmanager
def no_hooks(leaves: tuple[Tensor, ...] | list[Tensor] = ()) -> Iterator[None]:
    """Keep what surrounds the loss away from a chunk's own graph: hooks of saved tensors, and those of leaves' gradients."""
    hooks = [leaf._backward_hooks for leaf in leaves]
    with saved_tensors_hooks(Tensor.detach, _return):  # detached: a result that its own node keeps would be a cycle
        try:
            for leaf in leaves:
                leaf._backward_hooks = None
            yield
        finally:
            for leaf, own in zip(leaves, hooks, strict=True):
                leaf._backward_hooks = own


def _return(x: Tensor) -> Tensor:
    return x


def cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    """Return the cross-entropy of each token, (n,), in float32 at least."""
    if logits.dtype in HALF:
        logits = logits.float()
    losses = F.cross_entropy(logits, labels, ignore_index=_NO_LABEL, reduction="none", label_smoothing=label_smoothing)
    return losses + z_loss * logits.logsumexp(-1).square() if z_loss else losses


def _require(hidden: Tensor, labels: Tensor, reduction: str, chunk: Any) -> None:
    if hidden.dim() < 2 or labels.shape != hidden.shape[:-1]:
        raise InputError(
            "Every token has hidden states (..., D) and a label (...). Received: "
            f"{tuple(hidden.shape)} and {tuple(labels.shape)}. Shift both before: hidden[:, :-1] and labels[:, 1:]."
        )
    if reduction not in get_args(Reduction):
        raise InputError(f"reduction is 'mean', 'sum' or 'none'. Received: {reduction!r}.")
    require_chunk(chunk)


def require_chunk(chunk: Any) -> None:
    """Raise InputError unless a chunk is None or a number of tokens."""
    if chunk is not None and not (type(chunk) is int and chunk >= 1):
        raise InputError(f"chunk is a number of tokens, an integer >= 1. Received: {chunk!r}.")


def refuse_mixing(head: nn.Module, name: str, run: Head | None = None, hidden: Tensor | None = None) -> None:
    """Raise InputError if a head mixes tokens: is known to, as BatchNorm, or is seen to by a trial.

    Args:
        head: the head.
        name: of it, for messages.
        run: it, for a trial.
        hidden: its hidden states (..., D), of which a trial takes a few.
    """
    inventory = take_inventory(head)
    if hidden is None or run is None or hidden.numel() == 0:
        reason = find_known_mixing(inventory, 0)
    else:
        given = hidden.detach()[(slice(2),) * (hidden.dim() - 2)][..., :_TRIED, :]
        rows, own, run_head = given.flatten(0, -2), [dict(vars(module)) for module in inventory.modules], run

        def run_anew(x: Tensor, piece: Tile) -> Tensor:
            for module, before in zip(inventory.modules, own, strict=True):  # with the attributes of its call
                for key in [key for key in vars(module) if key not in before]:
                    del vars(module)[key]
                vars(module).update({key: value for key, value in before.items() if key not in OF_MODULES})
            # Everything comes in the shape in which the head is called without chunks.
            return run_head(x.view_as(given)).flatten(0, -2) if piece.length == len(rows) else run_head(x)

        reason = find_mixing(run_anew, inventory, rows, 0, 1, given.dim())
    if reason is not None:
        raise InputError(
            f"A head in chunks takes each token for itself. Received: {name or 'it'}: {reason}. Compute what mixes "
            "tokens before the head; revzoo.ordinary_(model) undoes chunk_loss_."
        )


def refuse_sharded(*tensors: Tensor) -> None:
    """Raise InputError if processes divide one of the tensors of a head and its input."""
    if is_sharded(*tensors):
        raise InputError(
            "A head that processes divide cannot run in chunks: each would gather it anew. Received: parameters that are "
            "shards (DTensor). Leave the head to fully_shard of the whole model, or give its unit reshard_after_forward=False."
        )
