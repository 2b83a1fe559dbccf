"""Labels of images become numbers of classes, and the order in which people expect names: 2 before 10, a next to A."""

import re
from collections.abc import Iterable, Sequence
from typing import SupportsInt

from revzoo.errors import DataError, join_names

_MOST_CLASSES = 1 << 20  # a network has an output for each


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Return what sorts names in natural order; no two names have the same, as those of timm's function have, "a" and "A".

    So the order of names does not depend on the order that they come in, that of a folder or a set.
    """
    parts = re.split(r"([0-9]+)", name.lower())  # every second one is a number
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], name


def read_label(value: object) -> str | None:
    """Return a label as text, a number without leading zeros; None for a missing one, as which data sets also write -1."""
    text = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if text.isdecimal():
        return str(int(text))
    return None if not text or text.removeprefix("-").isdecimal() else text


def name_classes(labels: Sequence[str], source: str) -> list[str]:
    """Return the names of the classes in order: label 7 is the eighth of "0", "1", ...; labels that are words are sorted.

    Args:
        labels: the labels of all training images.
        source: where they are from, for messages.

    Raises:
        DataError: there are fewer than two classes, or a number so large that it names no class.
    """
    names = sorted(set(labels), key=natural_key)
    if names and all(name.isdecimal() for name in names):
        if (highest := max(map(int, names))) >= _MOST_CLASSES:
            raise DataError(f"{source} has the label {highest}. Classes are numbered from 0: is this the label of a class?")
        names = [str(number) for number in range(highest + 1)]
    if len(names) < 2:
        raise DataError(f"{source} has one class: {join_names(names)}. Classification needs two or more.")
    return names


def number_labels(labels: Sequence[str], names: list[str], source: str) -> list[int]:
    """Return the number of each label among the names of the classes.

    Args:
        labels: the label of each image.
        names: the names of the classes.
        source: where the labels are from, for messages.

    Raises:
        DataError: a label is none of the classes of the training images.
    """
    numbers = {name: number for number, name in enumerate(names)}
    if unknown := sorted(set(labels) - set(names)):
        raise DataError(f"{source} has the labels {join_names(unknown)}. The training images have: {join_names(names)}.")
    return [numbers[label] for label in labels]


def describe_missing(numbers: Iterable[SupportsInt], names: list[str], source: str) -> list[str]:
    """Return a line that names the classes without images; no line if there are none."""
    present = set(map(int, numbers))
    missing = [name for number, name in enumerate(names) if number not in present]
    return [f"{source} has no images of {join_names(missing)}"] if missing else []
