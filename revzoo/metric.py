"""What an evaluation measures besides the loss. A metric that is added to METRICS is computed, saved, printed and tracked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # revzoo list does without torch
    from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """A mean over the labels of a data set, in percent; more is better.

    Args:
        key: its name in metrics.jsonl.
        label: its name on the screen.
        measure: what each label adds, of logits (..., C) and labels (...); returns (...).
        trivial_outputs: with so many outputs C, or fewer, it is 100 % and not worth a word.
    """

    key: str
    label: str
    measure: "Callable[[Tensor, Tensor], Tensor]"
    trivial_outputs: int

    def format(self, value: float) -> str:
        """Return a value with its unit."""
        return f"{value:.2f} %"


def _count_hits(k: int) -> "Callable[[Tensor, Tensor], Tensor]":
    """Return a function that says of each label whether it is among the k highest logits; ties: one order for all k."""
    return lambda logits, labels: (logits.topk(min(max(5, k), logits.shape[-1])).indices[..., :k] == labels[..., None]).any(-1)


CHOSEN = Metric("top1", "top-1", _count_hits(1), 1)  # by which best weights are chosen, and training ends early
METRICS = (CHOSEN, Metric("top5", "top-5", _count_hits(5), 5))
