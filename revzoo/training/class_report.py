"""What a classifier gets right and wrong, class by class and example by example."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
from torch import Tensor

from revzoo.data.base import IGNORED

_KEYS = ("precision", "recall", "f1")


@dataclass(frozen=True)
class ClassReport:
    """The guesses of a classifier beside the true classes.

    Args:
        guesses: for each of n examples its class, the most probable class, and how probable that is; (n, 3). The class of one
            that could not be read is IGNORED.
        class_names: names of the classes in order.
        name_example: returns the file or row of an example.
    """

    guesses: Tensor
    class_names: Sequence[str]
    name_example: Callable[[int], str]

    def list_classes(self) -> list[dict[str, Any]]:
        """Return `class`, `examples`, `precision`, `recall` and `f1` (0 to 1) of each class.

        None stands where there is nothing to divide by: the precision of a class that is never guessed.
        """
        *columns, counts = self._score()
        return [
            {"class": name, "examples": int(count), **_name_scores(scores)}
            for name, count, *scores in zip(self.class_names, counts, *columns, strict=True)
        ]

    def average(self) -> dict[str, float | None]:
        """Return the means of `precision`, `recall` and `f1` over the classes, each of which counts the same."""
        return _name_scores(self._score(average="macro")[:3])

    def count_guesses(self) -> list[list[int]]:
        """Return the confusion matrix: a row for each class with the number of its examples by the class guessed."""
        from sklearn.metrics import confusion_matrix

        return confusion_matrix(*self._read_columns(), labels=range(len(self.class_names))).tolist()

    def list_errors(self) -> list[dict[str, Any]]:
        """Return `input`, `class`, `predicted` and `probability` of the examples guessed wrongly, the surest guess first."""
        rows = [(i, *row) for i, row in enumerate(self.guesses.tolist()) if row[0] not in (row[1], IGNORED)]
        rows.sort(key=lambda row: -row[3])
        return [
            {
                "input": self.name_example(i),
                "class": self.class_names[int(label)],
                "predicted": self.class_names[int(guess)],
                "probability": _or_none(round(probability, 6)),
            }
            for i, label, guess, probability in rows
        ]

    def _read_columns(self) -> Any:
        return self.guesses[self.guesses[:, 0] != IGNORED, :2].T.numpy().astype(np.int64)

    def _score(self, **settings: Any) -> Any:
        from sklearn.metrics import precision_recall_fscore_support  # here, because training does not need it

        classes = range(len(self.class_names))
        return precision_recall_fscore_support(*self._read_columns(), labels=classes, zero_division=nan, **settings)


def _name_scores(scores: Sequence[float]) -> dict[str, float | None]:
    return {key: _or_none(float(score)) for key, score in zip(_KEYS, scores, strict=True)}


def _or_none(value: float) -> float | None:
    """Return what JSON can hold."""
    return None if value != value else value
