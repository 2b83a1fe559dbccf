"""Metrics and loss on a data set. Each example counts exactly once, however many processes share the work."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from revzoo.data.base import IGNORED
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
        num_outputs: of the model; a metric that cannot be below 100 % for so few is not printed. None: all are.
    """

    metrics: Mapping[str, float]
    loss: float
    count: int
    label_noun: str = "images"
    notes: tuple[str, ...] = ()
    num_outputs: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        loss = f"loss {self.loss:.4f}{format_bits(self.loss, self.label_noun, prefix=', ')}"
        labels = count_noun(self.count, self.label_noun.removesuffix("s"))
        shown = [metric for metric in METRICS if self.num_outputs is None or self.num_outputs > metric.trivial_outputs]
        metrics = ", ".join(f"{metric.label} {metric.format(self.metrics[metric.key])}" for metric in shown)
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
            with accelerator.autocast():
                logits = model(batch).float()
            sums += _sum_scores(logits, labels, accelerator)
    finally:
        model.train(training)
    loss, count, *totals = sums.tolist()
    metrics = {metric.key: 100.0 * total / count for metric, total in zip(METRICS, totals, strict=True)}
    return Scores(metrics, loss / count, int(count), label_noun, num_outputs=logits.shape[-1])


def _sum_scores(logits: Tensor, labels: Tensor, accelerator: Accelerator) -> Tensor:
    """Return loss, count and metrics, each summed over a batch of every process."""
    losses = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=IGNORED)
    counted = labels != IGNORED
    parts = losses.view_as(labels), counted, *(metric.measure(logits, labels) * counted for metric in METRICS)
    # Summed for each example before gathering, because the lengths of batches of texts differ between processes.
    rows = torch.stack([part.double().view(len(labels), -1).sum(1) for part in parts], 1)
    gathered: Tensor = accelerator.gather(rows)
    state = accelerator.gradient_state  # which knows how many examples fill up the last batch
    remainder = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
    return gathered[:remainder].sum(0).cpu()
