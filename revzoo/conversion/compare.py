"""An original and its reversible conversion on the same examples."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from revzoo.conversion.report import Comparison
from revzoo.conversion.sources.base import STRENGTHS
from revzoo.errors import ConversionError, InputError
from revzoo.model.network import Model
from revzoo.runtime.nested import tensors_in

_EXAMPLES = 8  # random ones, where none are given
_POINTS = 400  # of logits, for the picture


@torch.no_grad()
def compared(what: str, original: nn.Module, model: Model, batch: Any, note: str) -> Comparison:
    """Return how far the outputs of two networks in eval mode are apart.

    Args:
        what: the two are called.
        note: what the difference is due to.
        batch: images (B, C, H, W), ids (B, N), or a mapping with input_ids and attention_mask; None: random ones, of texts
            every other one padded.
    """
    inputs, mask = _inputs(model, batch)
    what = f"{what}, on random examples" if batch is None else what
    model.schedule = "store"
    ours = model(inputs) if mask is None else model(inputs, mask.bool())
    theirs = _outputs(original(inputs) if mask is None else original(input_ids=inputs, attention_mask=mask), ours)
    ours, theirs = (x.double().flatten(0, -2) if x.dim() > 1 else x.double()[:, None] for x in (ours, theirs))
    if mask is not None and len(ours) == mask.numel():  # what stands at padding is nobody's business
        ours, theirs = ours[mask.flatten().bool()], theirs[mask.flatten().bool()]
    chosen = torch.linspace(0, ours.numel() - 1, min(_POINTS, ours.numel())).long()
    pairs = zip(theirs.flatten()[chosen].tolist(), ours.flatten()[chosen].tolist(), strict=True)
    return Comparison(
        what=what,
        examples=len(inputs),
        largest_difference=float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)),
        cosine=float(torch.cosine_similarity(ours, theirs, dim=1).mean()),
        agreement=float((ours.argmax(1) == theirs.argmax(1)).double().mean()),
        note=note,
        points=tuple(pairs),
    )


@torch.no_grad()
def largest_state(model: Model, batch: Any) -> float:
    """Return the largest magnitude of the streams in a forward of the network, computed as if b = 0 and in floating point."""
    found: list[Tensor] = []

    def look(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        found.extend(x.abs().amax() for x in inputs if isinstance(x, Tensor) and x.is_floating_point())

    inputs, mask = _inputs(model, batch)
    handles = [part.register_forward_pre_hook(look) for part in (*model.steps, model.fuse)]
    try:
        model.schedule = "store"
        with without_past(model):
            model(inputs) if mask is None else model(inputs, mask.bool())
    finally:
        for handle in handles:
            handle.remove()
    return float(torch.stack(found).max())


@contextmanager
def without_past(model: Model) -> Iterator[None]:
    """Let a converted network be the original's function, b = 0, for a while."""
    kept = model.spec, model.coupling
    model.set_coupling(kept_bits=None, **{STRENGTHS[model.spec.coupling.type]: 0.0})
    try:
        yield
    finally:
        model.spec, model.coupling = kept


def _inputs(model: Model, batch: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(batch, Mapping) and "input_ids" in batch:
        ids = batch["input_ids"]
        return ids, batch.get("attention_mask", torch.ones_like(ids))
    if batch is not None and (not isinstance(batch, Tensor) or not len(batch)):
        raise InputError(f"A batch is images, ids, or a mapping with input_ids. Received: {type(batch).__name__}.")
    found = batch if isinstance(batch, Tensor) else _examples(model)
    if found.is_floating_point():
        return found, None
    padding = getattr(model.spec.input, "padding", None)
    mask = torch.ones_like(found) if padding is None else (found != padding).long()
    return found, mask


def _examples(model: Model) -> Tensor:
    examples = model.example_input(_EXAMPLES)
    padding = getattr(model.spec.input, "padding", None)
    if padding is not None and not examples.is_floating_point():
        examples = examples[:, :64]
        examples[1::2, examples.shape[1] // 2 :] = padding
    return examples


def _outputs(found: Any, like: Tensor) -> Tensor:
    """Return, of what a library's model returned, the tensor that ours corresponds to: the first of its shape."""
    named = [getattr(found, name, None) for name in ("logits", "prediction_logits", "pooler_output", "last_hidden_state")]
    fitting = [t for t in (*named, *tensors_in(found)) if isinstance(t, Tensor) and t.shape == like.shape]
    if not fitting:
        raise ConversionError(f"The original returns nothing of shape {tuple(like.shape)}, as the converted network does.")
    return fitting[0]
