"""The curves of a training run as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import FixedLocator, MaxNLocator

from revzoo.display.figures.base import new_figure, save, simplify_axes
from revzoo.display.style import BLUE, INK, ORANGE
from revzoo.metric import CHOSEN

_FEW = 20  # epochs up to which each is a point: one alone is no line
_LABELLED = 8  # epochs up to which each has a tick


def plot_curves(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw losses and the CHOSEN metric over epochs; write a PNG.

    Args:
        records: one for each epoch, as in the run's metrics file.
    """
    figure = new_figure(9, 3.5)
    figure.set_layout_engine("constrained", wspace=0.08)
    losses, accuracy = figure.subplots(1, 2)
    epochs = [record["epoch"] for record in records]
    style: dict[str, Any] = {"marker": "o", "ms": 4} if len(epochs) <= _FEW else {}
    curves = (("train_loss", "training (with its regularisation)", BLUE), ("loss", "test", ORANGE))
    for key, label, color in curves:
        losses.plot(epochs, [record[key] for record in records], label=label, color=color, **style)
    losses.set_ylabel("cross-entropy", fontsize=9, color=INK)
    above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2}  # where no curve can be
    losses.legend(**above, frameon=False, borderaxespad=0, fontsize=9)
    accuracy.plot(epochs, [record[CHOSEN.key] for record in records], color=BLUE, **style)
    accuracy.set_ylabel(f"test {CHOSEN.label} [%]", fontsize=9, color=INK)
    for axes in (losses, accuracy):
        simplify_axes(axes)
        axes.set_xlabel("epoch", fontsize=9, color=INK)
        if len(epochs) <= _LABELLED:
            axes.xaxis.set_major_locator(FixedLocator(epochs))
        else:
            axes.xaxis.set_major_locator(MaxNLocator(_LABELLED, integer=True, steps=[1, 2, 5, 10]))
            axes.margins(x=0.01)  # of a wider margin 0 would be a tick, which is no epoch
        if len(epochs) == 1:
            axes.set_xlim(epochs[0] - 1, epochs[0] + 1)
    save(figure, path)
