"""The loss over a rising learning rate as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from revzoo.display.figures.base import new_figure, save, simplify_axes
from revzoo.display.style import BLUE, INK, ORANGE


def plot_learning_rates(lrs: Sequence[float], losses: Sequence[float], suggestion: float | None, path: str | Path) -> None:
    """Draw the training loss over the learning rate, and the suggested one; write a PNG."""
    figure = new_figure(7, 3.5)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    axes.plot(lrs, losses, color=BLUE)
    if suggestion is not None:
        at = losses[list(lrs).index(suggestion)]
        axes.axvline(suggestion, color=ORANGE, lw=1, ls="--")
        axes.plot(suggestion, at, "o", ms=6, color=ORANGE)
        above: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        axes.annotate(f"suggested: {suggestion:.1e}", (suggestion, 0.92), (6, 0), fontsize=9, color=INK, **above)
    axes.set_xscale("log")
    axes.set_xlabel("learning rate", fontsize=9, color=INK)
    axes.set_ylabel("training loss, running average", fontsize=9, color=INK)
    if losses:  # what rises at the end would hide the fall before it
        axes.set_ylim(min(losses) - 0.05 * (losses[0] - min(losses)) - 1e-3, max(losses[0], 1.0e-3) * 1.3)
    simplify_axes(axes)
    save(figure, path)
