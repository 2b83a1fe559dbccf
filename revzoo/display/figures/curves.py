"""The curves of a training run as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import FixedLocator, MaxNLocator

from revzoo.display.figures.base import new_figure, save, simplify_axes
from revzoo.display.style import BLUE, INK, ORANGE, PALE
from revzoo.metric import CHOSEN

_FEW = 20  # epochs up to which each is a point: one alone is no line
_LABELLED = 8  # epochs up to which each has a tick
_ABOVE: dict[str, Any] = {"frameon": False, "borderaxespad": 0, "fontsize": 9}  # of a legend where no curve can be
_COUPLING = ("kept_bits", "m", "alpha", "beta")  # keys of a record, where training moves the coupling


def plot_curves(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw losses and the CHOSEN metric over epochs, and the coupling where it moves; write a PNG.

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
    losses.legend(**_ABOVE, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    accuracy.plot(epochs, [record[CHOSEN.key] for record in records], color=BLUE, **style)
    accuracy.set_ylabel(f"test {CHOSEN.label} [{CHOSEN.unit}]", fontsize=9, color=INK)
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
    if moving := [key for key in _COUPLING if key in records[0]]:
        couplings = accuracy.twinx()
        around = (
            style | {"marker": "s", "ms": 8, "mfc": "none"} if style else {}
        )  # a point of the metric may be in the same place
        for key in moving:
            couplings.step(epochs, [record[key] for record in records], "--", where="post", color=PALE, label=key, **around)
        simplify_axes(couplings)
        couplings.grid(False)  # its ticks are not those of the metric
        couplings.legend(**_ABOVE, loc="lower right", bbox_to_anchor=(1, 1))
        if moving == ["kept_bits"]:
            couplings.yaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    save(figure, path)
