"""What rounding does to a model, as a picture: the noise of every rebuilt state, alpha of every layer, a training."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from revzoo.analysis.numerics import LayerAlpha, NumericsReport, RebuiltState, TrainingPoint
from revzoo.display.figures.base import draw_heading, new_figure, save, simplify_axes
from revzoo.display.style import BLUE, FAINT, INK, ORANGE, PALE

_LEFT, _WIDTH, _GAP, _RIGHT = 0.85, 4.6, 0.95, 0.75  # margins, width of a panel and distance of two [inch]
_BOTTOM, _RISE, _TOP = 0.6, 3.1, 1.5  # margins and height of a panel [inch]


def plot_numerics(title: str, report: NumericsReport, training: Sequence[TrainingPoint], path: str | Path) -> None:
    """Draw the signal-to-noise ratio of the rebuilt states, alpha of the layers, and a training if there was one; write a PNG.

    Args:
        title: what was measured.
        report: the figures.
        training: those of a training, in the order of updates.
        path: of the picture.
    """
    count = 1 + bool(report.layers) + bool(training)
    width, height = _LEFT + count * _WIDTH + (count - 1) * _GAP + _RIGHT, _BOTTOM + _RISE + _TOP
    figure = new_figure(width, height)
    draw_heading(figure, title, [str(report)], left=_LEFT)
    panels = [
        figure.add_axes(
            ((_LEFT + i * (_WIDTH + _GAP)) / width, _BOTTOM / height, _WIDTH / width, _RISE / height),
        )
        for i in range(count)
    ]
    draw_states(panels[0], report.states)
    if report.layers:
        _draw_layers(panels[1], report.layers)
    if training:
        _draw_training(panels[-1], training)
    save(figure, path)


def draw_states(axes: Axes, states: Sequence[RebuiltState]) -> None:
    """Draw the ratio of every state against its place in forward; states between steps are dots."""
    places = range(1, len(states) + 1)
    for values, color, style, label in (
        ([state.predicted_snr for state in states], PALE, ":", "predicted"),
        ([state.snr for state in states], BLUE, "-", "measured"),
    ):
        axes.plot(places, [_hide(value) for value in values], style, color=color, lw=1.4, label=label)
    of_steps = [(place, _hide(state.snr)) for place, state in zip(places, states, strict=True) if not state.of_layer]
    if 0 < len(of_steps) < len(states):
        axes.plot(*zip(*of_steps, strict=True), "o", ms=4, color=BLUE, label="between steps")
    if any(math.isfinite(state.snr) for state in states):
        axes.set_yscale("log")
        axes.legend(frameon=False, fontsize=8)
        axes.tick_params(which="minor", left=False)
    else:
        words = "every bit is rebuilt" if states else "nothing is rebuilt"
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", color=INK)
        axes.set_yticks([])
    _finish(axes, "signal-to-noise ratio", "rebuilt state, in the order of forward")
    axes.set_xlim(0.4, len(states) + 0.6)


def _draw_layers(axes: Axes, layers: Sequence[LayerAlpha]) -> None:
    places = range(1, len(layers) + 1)
    axes.plot(places, [layer.measured for layer in layers], "o", ms=4, color=BLUE, label="measured")
    formulas = [math.nan if layer.formula is None else layer.formula for layer in layers]
    axes.plot(places, formulas, "_", ms=9, mew=1.5, color=ORANGE, label="formula")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
    _finish(axes, "alpha: change of the ratio by the inverse", "layer with an inverse, in the order of forward")
    axes.set_xlim(0.4, len(layers) + 0.6)


def _draw_training(axes: Axes, points: Sequence[TrainingPoint]) -> None:
    updates = [point.update for point in points]
    axes.plot(updates, [point.angle for point in points], color=BLUE)
    axes.set_ylim(bottom=0)
    ratios = axes.twinx()
    ratios.plot(updates, [_hide(point.snr) for point in points], "--", color=PALE, label="lowest ratio (right)")
    if any(math.isfinite(point.snr) for point in points):
        ratios.set_yscale("log")
        ratios.legend(frameon=False, fontsize=8)
    simplify_axes(ratios)
    ratios.tick_params(which="minor", labelsize=8, color=FAINT)
    ratios.grid(False)  # its ticks are not those of the angle
    _finish(axes, "angle of the gradients [degrees]", "updates")


def _hide(value: float) -> float:
    """Return NaN, which is not drawn, for what a logarithmic axis cannot show."""
    return value if 0 < value < math.inf else math.nan


def _finish(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_xlabel(label, fontsize=9, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    simplify_axes(axes)
