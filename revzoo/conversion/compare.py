"""Compare the outputs of an original and of its reversible conversion on the same examples."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from revzoo.conversion.choice import B_ARGUMENTS
from revzoo.conversion.report import Comparison
from revzoo.errors import ConversionError, InputError
from revzoo.model.model import Model
from revzoo.runtime.mode import Mode
from revzoo.runtime.nested import tensors_in

_EXAMPLES = 8  # random ones, if no batch is given


@torch.no_grad()
def compare(what: str, original: nn.Module, model: Model, batch: Any, note: str) -> Comparison:
    """Compare the outputs of two networks in eval mode.

    Args:
        what: names of the two networks.
        batch: images (B, C, H, W), ids (B, N), or a mapping with input_ids and attention_mask; None: random examples, of texts
            every other one padded.
        note: what causes the difference.
    """
    inputs, mask = _make_inputs(model, batch)
    what = f"{what}, on random examples" if batch is None else what
    model.schedule = Mode.STORE
    ours = model(inputs) if mask is None else model(inputs, mask.bool())
    theirs = _select_output(original(inputs) if mask is None else original(input_ids=inputs, attention_mask=mask), ours)
    ours, theirs = (x.double().flatten(0, -2) if x.dim() > 1 else x.double()[:, None] for x in (ours, theirs))
    if mask is not None and len(ours) == mask.numel():  # ignore padded positions
        ours, theirs = ours[mask.flatten().bool()], theirs[mask.flatten().bool()]
    return Comparison(
        what=what,
        examples=len(inputs),
        largest_difference=float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)),
        cosine=float(torch.cosine_similarity(ours, theirs, dim=1).mean()),
        agreement=float((ours.argmax(1) == theirs.argmax(1)).double().mean()),
        note=note,
    )


@torch.no_grad()
def measure_largest_state(model: Model, batch: Any) -> float:
    """Return the largest magnitude in the streams during a forward pass with b = 0, in floating point."""
    magnitudes: list[Tensor] = []

    def record(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        magnitudes.extend(x.abs().amax() for x in inputs if isinstance(x, Tensor) and x.is_floating_point())

    inputs, mask = _make_inputs(model, batch)
    handles = [module.register_forward_pre_hook(record) for module in (*model.steps, model.fuse)]
    try:
        model.schedule = Mode.STORE
        with zero_b(model):
            model(inputs) if mask is None else model(inputs, mask.bool())
    finally:
        for handle in handles:
            handle.remove()
    return float(torch.stack(magnitudes).max())


@contextmanager
def zero_b(model: Model) -> Iterator[None]:
    """Set b of the coupling to 0 for a while, which makes a converted network the original's function."""
    before = model.spec, model.coupling
    model.set_coupling(kept_bits=None, **{B_ARGUMENTS[model.spec.coupling.type]: 0.0})
    try:
        yield
    finally:
        model.spec, model.coupling = before


def _make_inputs(model: Model, batch: Any) -> tuple[Tensor, Tensor | None]:
    """Return images and None, or ids and their attention mask."""
    if isinstance(batch, Mapping) and "input_ids" in batch:
        ids = batch["input_ids"]
        return ids, batch.get("attention_mask", torch.ones_like(ids))
    if batch is not None and (not isinstance(batch, Tensor) or not len(batch)):
        raise InputError(f"A batch is images, ids, or a mapping with input_ids. Received: {type(batch).__name__}.")
    inputs = batch if isinstance(batch, Tensor) else _make_examples(model)
    if inputs.is_floating_point():
        return inputs, None
    padding = getattr(model.spec.input, "padding", None)
    mask = torch.ones_like(inputs) if padding is None else (inputs != padding).long()
    return inputs, mask


def _make_examples(model: Model) -> Tensor:
    examples = model.example_input(_EXAMPLES)
    padding = getattr(model.spec.input, "padding", None)
    if padding is not None and not examples.is_floating_point():
        examples = examples[:, :64]
        examples[1::2, examples.shape[1] // 2 :] = padding
    return examples


def _select_output(outputs: Any, like: Tensor) -> Tensor:
    """Return the tensor that corresponds to ours among the outputs of a library's model: the first of its shape.

    Logits of begin and end of an answer, or one logit for each token, have no last dimension.
    """
    candidates = list(tensors_in(outputs))
    if hasattr(outputs, "start_logits"):
        candidates.insert(0, torch.stack((outputs.start_logits, outputs.end_logits), -1))
    fitting = [t for t in (*candidates, *(t[..., None] for t in candidates)) if t.shape == like.shape]
    if not fitting:
        raise ConversionError(f"The original returns nothing of shape {tuple(like.shape)}, as the converted network does.")
    return fitting[0]
