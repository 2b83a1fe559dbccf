"""A confusion matrix as a picture."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, PowerNorm

from revzoo.display.figures.base import new_figure, save
from revzoo.display.style import BLUE, FAINT, INK

_NAMED = 40  # classes up to which each has its name, and each cell its number
_CELL = 0.36  # side of a cell with a number [inch]
_LARGEST, _SMALLEST = 9.0, 2.0  # side of the matrix where cells have none, and of that of few classes [inch]


def plot_confusion(counts: Sequence[Sequence[int]], names: Sequence[str], path: Path) -> None:
    """Draw a row for each class and a column for each class guessed, darker for a larger share of the row; write a PNG.

    Args:
        counts: examples of each class by the class guessed.
        names: of the classes in order.
    """
    matrix, classes = np.asarray(counts), len(names)
    side = max(_SMALLEST, _CELL * classes) if classes <= _NAMED else _LARGEST
    figure = new_figure(side + 2.2, side + 2.2)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    colors = LinearSegmentedColormap.from_list("", ["white", BLUE])
    axes.imshow(shares, cmap=colors, norm=PowerNorm(0.5, 0, 1))  # the root, so that rare mistakes are seen
    axes.set_xlabel("predicted class", fontsize=9, color=INK)
    axes.set_ylabel("true class", fontsize=9, color=INK)
    axes.tick_params(labelsize=8, color=FAINT)
    axes.spines[:].set_color(FAINT)
    if classes <= _NAMED:
        labels = [textwrap.shorten(name, 24, placeholder="…") or name[:24] for name in names]
        axes.set_xticks(range(classes), labels, rotation=90, parse_math=False)
        axes.set_yticks(range(classes), labels, parse_math=False)
        for row, column in zip(*matrix.nonzero(), strict=True):
            color = "white" if shares[row, column] > 0.25 else INK
            axes.text(column, row, f"{matrix[row, column]}", fontsize=8, ha="center", va="center", color=color)
    save(figure, path)
