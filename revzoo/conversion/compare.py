"""Compare the outputs of an original and of its reversible conversion on the same examples."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from revzoo.analysis.likeness import measure_cosines
from revzoo.conversion.choice import B_ARGUMENTS
from revzoo.conversion.report import Comparison
from revzoo.errors import ConversionError, InputError
from revzoo.model.model import Model
from revzoo.runtime.mode import Mode
from revzoo.runtime.nested import tensors_in

_EXAMPLES = 8  # random ones, if no batch is given


class ComparedBatch(NamedTuple):
    """What two networks are compared on: images and no mask, or ids and their attention mask."""

    inputs: Tensor
    mask: Tensor | None
    are_random: bool


def make_compared_batch(model: Model, batch: Any) -> ComparedBatch:
    """Return images (B, C, H, W), ids (B, N), or a mapping with input_ids and attention_mask as examples.

    Args:
        batch: None: random examples, of texts every other one padded.
    """
    if isinstance(batch, Mapping) and "input_ids" in batch:
        ids = batch["input_ids"]
        return ComparedBatch(ids, batch.get("attention_mask", torch.ones_like(ids)), False)
    if batch is not None and (not isinstance(batch, Tensor) or not len(batch)):
        raise InputError(f"A batch is images, ids, or a mapping with input_ids. Received: {type(batch).__name__}.")
    inputs, padding = model.example_input(_EXAMPLES) if batch is None else batch, getattr(model.spec.input, "padding", None)
    if inputs.is_floating_point():
        return ComparedBatch(inputs.float(), None, batch is None)  # as both networks are
    if batch is None:
        inputs = inputs[:, :64]
    if batch is None and padding is not None:
        inputs[1::2, inputs.shape[1] // 2 :] = padding
    mask = torch.ones_like(inputs) if padding is None else (inputs != padding).long()
    return ComparedBatch(inputs, mask, batch is None)


@torch.no_grad()
def run_original(network: nn.Module, examples: ComparedBatch) -> Any:
    """Return what a library's network returns for examples."""
    inputs, mask, _ = examples
    return network(inputs) if mask is None else network(input_ids=inputs, attention_mask=mask)


@torch.no_grad()
def run_converted(model: Model, examples: ComparedBatch) -> Tensor:
    """Return the output of a converted network, computed without keeping anything."""
    model.schedule = Mode.STORE
    inputs, mask, _ = examples
    takes_mask = mask is not None and getattr(model.spec.input, "padding", None) is not None  # else padding is at the end
    return model(inputs, mask) if takes_mask else model(inputs)


def compare(what: str, outputs: Any, model: Model, examples: ComparedBatch, note: str) -> Comparison:
    """Compare what the original returned for examples with the output of the converted network.

    Args:
        what: names of the two networks.
        outputs: of the original, in eval mode.
        note: what causes the difference.
    """
    ours, mask = run_converted(model, examples), examples.mask
    theirs = _select_output(outputs, ours)
    ours, theirs = (x.double().flatten(0, -2) if x.dim() > 1 else x.double()[:, None] for x in (ours, theirs))
    if mask is not None and len(ours) == mask.numel():  # ignore padded positions
        ours, theirs = ours[mask.flatten().bool()], theirs[mask.flatten().bool()]
    return Comparison(
        what=f"{what}, on random examples" if examples.are_random else what,
        examples=len(examples.inputs),
        largest_difference=float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)),
        cosine=float(measure_cosines(ours, theirs).mean()),
        agreement=float((ours.argmax(1) == theirs.argmax(1)).double().mean()),
        note=note,
    )


def measure_largest_state(model: Model, examples: ComparedBatch) -> float:
    """Return the largest magnitude in the streams during a forward pass with b = 0, in floating point.

    Raises: ConversionError: it is no finite number.
    """
    magnitudes: list[Tensor] = []

    def record(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        magnitudes.extend(x.abs().amax() for x in inputs if isinstance(x, Tensor) and x.is_floating_point())

    with ExitStack() as stack, zero_b(model):
        for module in (*model.steps, model.fuse):
            stack.callback(module.register_forward_pre_hook(record).remove)
        run_converted(model, examples)
    largest = float(torch.stack(magnitudes).max())
    if not math.isfinite(largest):
        raise ConversionError(f"States of the converted network reach {largest} on the batch. Do weights or batch hold NaN?")
    return largest


@contextmanager
def zero_b(model: Model) -> Iterator[None]:
    """Set b of the coupling to 0 for a while, which makes a converted network the original's function."""
    if model.coupling.in_evaluation.b == 0:
        yield
        return
    before = model.spec, model.coupling
    model.set_coupling(kept_bits=None, **{B_ARGUMENTS[model.spec.coupling.type]: 0.0})
    try:
        yield
    finally:
        model.spec, model.coupling = before


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
