"""Metrics and loss on a data set. Each example counts exactly once, however many processes share the work."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from revzoo.data.base import IGNORED, Data
from revzoo.errors import join_names
from revzoo.format import count_noun, format_bits
from revzoo.metric import METRICS


@dataclass(frozen=True)
class Scores:
    """Accuracy and loss of a classifier or a language model on a data set.

    Args:
        metrics: value of each of METRICS, by its key.
        loss: mean cross-entropy [nats], without label smoothing.
        count: number of labels.
        label_noun: what one label belongs to: "images", "texts", "tokens" or "bytes".
        notes: remarks on the data, such as which files were skipped.
    """

    metrics: Mapping[str, float]
    loss: float
    count: int
    label_noun: str = "images"
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        loss = f"loss {self.loss:.4f}{format_bits(self.loss, self.label_noun, prefix=', ')}"
        labels = count_noun(self.count, self.label_noun.removesuffix("s"))
        metrics = ", ".join(f"{metric.label} {metric.format(self.metrics[metric.key])}" for metric in METRICS)
        return f"{metrics}, {loss} on {labels}"


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    accelerator: Accelerator,
    label_noun: str = "images",
) -> Scores:
    """Compute the scores of a model on everything a loader yields; labels that are IGNORED do not count.

    Args:
        model: on the accelerator's device. It is evaluated in eval mode and then put back into the mode it was in.
        loader: yields (images or ids, labels); prepared by the accelerator.
        accelerator: gathers the scores of all processes.
        label_noun: what one label belongs to, for the scores' text.
    """
    training = model.training
    model.eval()
    sums = torch.zeros(2 + len(METRICS), dtype=torch.float64)
    try:
        for batch, labels in loader:
            sums += _sum_scores(model, batch, labels, accelerator)
    finally:
        model.train(training)
    loss, count, *totals = sums.tolist()
    metrics = {metric.key: 100.0 * total / count for metric, total in zip(METRICS, totals, strict=True)}
    return Scores(metrics, loss / count, int(count), label_noun)


def gather_unreadable(data: Data) -> dict[str, list[str]]:
    """Return for each split what could not be read so far, in any process; all processes call this together."""
    [first, *others] = gather_object([data.list_unreadable()])
    return {split: sorted({*names, *(name for each in others for name in each[split])}) for split, names in first.items()}


def describe_unreadable(split: str, names: list[str]) -> str:
    """Return in words which images of a split could not be read."""
    consequence = "left out" if split == "test" else "others take their places"
    return f"{split} images that cannot be read, {consequence}: {len(names)} ({join_names(names, most=8)})"


def _sum_scores(model: nn.Module, batch: Tensor, labels: Tensor, accelerator: Accelerator) -> Tensor:
    """Return loss, count and metrics, each summed over a batch of every process."""
    with accelerator.autocast():
        logits = model(batch).float()
    losses = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=IGNORED)
    counted = labels != IGNORED
    parts = losses.view_as(labels), counted, *(metric.measure(logits, labels) * counted for metric in METRICS)
    # Summed for each example before gathering, because the lengths of batches of texts differ between processes.
    rows = torch.stack([part.double().view(len(labels), -1).sum(1) for part in parts], 1)
    gathered: Tensor = accelerator.gather(rows)
    state = accelerator.gradient_state  # which knows how many examples fill up the last batch
    remainder = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
    return gathered[:remainder].sum(0).cpu()
