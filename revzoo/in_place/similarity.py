"""Run a network on a batch before and after it is made reversible, and say how alike its outputs are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from revzoo.analysis.dry_run import call, in_mode, preserve, require_batch
from revzoo.analysis.likeness import measure_cosines
from revzoo.errors import InputError, join_names
from revzoo.runtime.nested import map_tensors, tensors_in


@dataclass(frozen=True)
class Similarity:
    """How alike the outputs of a network are before and after, on one batch, in eval mode.

    Args:
        cosine: of the outputs, the mean over rows (tokens or examples).
        least_cosine: the smallest.
        examples: number of examples.
    """

    cosine: float
    least_cosine: float
    examples: int

    def __str__(self) -> str:
        return f"outputs before and after, {self.examples} examples: cosine {self.cosine:.6f}, at least {self.least_cosine:.6f}"


def run_network(model: nn.Module, batch: Any, begin: Callable[[], object] = lambda: None) -> Tensor:
    """Return the main output of a network in eval mode; no trace of the run remains.

    Args:
        begin: called before the network is, which may be twice (`run_without_graph`).
    Raises:
        InputError: it returns no floating-point tensor with rows; or a batch without tensors.
    """
    require_batch(batch)

    def run(gradients: bool) -> Any:
        begin()
        with preserve(model, tensors_in(batch)), in_mode(model, training=False), torch.set_grad_enabled(gradients):
            return call(model, map_tensors(torch.detach, batch))

    outputs = run_without_graph(run)
    main = next((t.detach() for t in tensors_in(outputs) if t.is_floating_point() and t.dim() > 1), None)
    if main is None:
        received = [f"{t.dtype} of shape {tuple(t.shape)}" for t in tensors_in(outputs)] or [type(outputs).__name__]
        raise InputError(
            "The network returns no rows that could be compared before and after, that is no tensor of floating-point numbers "
            f"with two or more dimensions. Received: {join_names(received, most=3)}. Return one, alone or in a tuple, dict or "
            "dataclass; or leave `batch` out, and nothing is compared."
        )
    return main.float()


def run_without_graph(run: Callable[[bool], Any]) -> Any:
    """Run something with gradients disabled, which keeps nothing; again with them if its forward asks for gradients itself.

    Forces are gradients of an energy, for example. Such a run keeps as much as forward does in training.
    """
    try:
        return run(False)
    except RuntimeError as error:
        if "require grad" not in str(error):
            raise
    return run(True)


def measure_similarity(before: Tensor, after: Tensor, batch: Any) -> Similarity:
    """Compare two outputs on one batch; padded tokens, as `attention_mask` in the batch says, do not count."""
    if before.dim() > 3:  # images: a row of pixels may be nearly zero by chance
        before, after = before.flatten(1), after.flatten(1)
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    mask = torch.ones(before.shape[:-1]) if mask is None or mask.shape != before.shape[:-1] else mask
    counts = mask.to(before.device).bool()
    cosines = measure_cosines(before[counts], after[counts])
    return Similarity(float(cosines.mean()), float(cosines.min()), len(before))
