"""Metrics and loss on a data set. Each example counts exactly once, however many processes share the work."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from revzoo.data.base import IGNORED, Data
from revzoo.errors import join_names
from revzoo.format import count_noun, format_loss
from revzoo.metric import METRICS
from revzoo.training.class_report import ClassReport


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
        classes: of a classifier, what it gets right and wrong; its classes and examples have numbers for names.
    """

    metrics: Mapping[str, float]
    loss: float
    count: int
    label_noun: str = "images"
    notes: tuple[str, ...] = ()
    num_outputs: int | None = field(default=None, compare=False)
    classes: ClassReport | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        loss = f"loss {format_loss(self.loss, self.label_noun)}"
        labels = count_noun(self.count, self.label_noun.removesuffix("s"))
        shown = [metric for metric in METRICS if self.num_outputs is None or self.num_outputs > metric.trivial_outputs]
        metrics = ", ".join(f"{metric.label} {metric.format(self.metrics[metric.key])}" for metric in shown)
        return f"{metrics}, {loss} on {labels}"


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: Iterable[tuple[Tensor, Tensor]], accelerator: Accelerator, label_noun: str = "images"
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
    rows = list[Tensor]()
    try:
        for batch, labels in loader:
            with accelerator.autocast():
                logits = model(batch).float()
            rows.append(_gather(_measure(logits, labels), accelerator))
    finally:
        model.train(training)
    examples, outputs = torch.cat(rows), logits.shape[-1]
    loss, count, *totals = examples[:, : 2 + len(METRICS)].sum(0).tolist()
    metrics = {metric.key: 100.0 * total / count for metric, total in zip(METRICS, totals, strict=True)}
    classes = ClassReport(examples[:, -3:], [*map(str, range(outputs))], str) if labels.dim() == 1 else None
    return Scores(metrics, loss / count, int(count), label_noun, num_outputs=outputs, classes=classes)


def gather_unreadable(data: Data) -> dict[str, list[str]]:
    """Return for each split what could not be read so far, in any process; all processes call this together."""
    [first, *others] = gather_object([data.list_unreadable()])
    return {split: sorted({*names, *(name for each in others for name in each[split])}) for split, names in first.items()}


def describe_unreadable(split: str, names: list[str]) -> str:
    """Return in words which images of a split could not be read."""
    consequence = "left out" if split == "test" else "others take their places"
    return f"{split} images that cannot be read, {consequence}: {len(names)} ({join_names(names, most=8)})"


def _measure(logits: Tensor, labels: Tensor) -> Tensor:
    """Return for each example loss, count and metrics, each summed over its labels; of one label also what is guessed.

    Summed before gathering, because the lengths of batches of texts differ between processes.
    """
    losses = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=IGNORED)
    counted = labels != IGNORED
    parts = losses.view_as(labels), counted, *(metric.measure(logits, labels) * counted for metric in METRICS)
    columns = [part.double().view(len(labels), -1).sum(1) for part in parts]
    if labels.dim() == 1:
        probabilities, guesses = logits.softmax(-1).max(-1)
        columns += [labels.double(), guesses.double(), probabilities.double()]
    return torch.stack(columns, 1)


def _gather(rows: Tensor, accelerator: Accelerator) -> Tensor:
    """Return the rows of a batch of every process, in the order of the data set."""
    gathered: Tensor = accelerator.gather(rows)
    state = accelerator.gradient_state  # which knows how many examples fill up the last batch
    remainder = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
    return gathered[:remainder].cpu()
