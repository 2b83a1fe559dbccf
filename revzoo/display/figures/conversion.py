"""A conversion as a picture: how many tensors were changed how, and the logits of both networks against each other."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.ticker import MaxNLocator

from revzoo.display.figures.base import new_figure, save
from revzoo.display.style import BLUE, INK, LIGHT_GREY, ORANGE

_THICK, _LEAST_ROWS = 0.6, 5  # of a bar, in rows, and for how many there is room at least


def plot_conversion(
    title: str, counts: Mapping[str, int], logits: Mapping[str, Sequence[tuple[float, float]]], path: str | Path
) -> None:
    """Draw the number of tensors by action, and one plot of logits for each comparison; write a PNG.

    Args:
        title: heading of the figure.
        counts: number of tensors by action, such as {"renamed": 40, "merged": 4}.
        logits: by the title of the plot, pairs of a logit of the original and the same logit of the converted network.
        path: the file to write.
    """
    count = 1 + len(logits)
    figure = new_figure(4.2 * count, 4.4)
    figure.set_layout_engine("constrained")
    figure.suptitle(title, color=INK, fontsize=12)
    bars, *plots = figure.subplots(1, count, squeeze=False)[0]
    largest_last = sorted(counts.items(), key=lambda item: item[1])
    drawn = bars.barh([action for action, _ in largest_last], [tensors for _, tensors in largest_last], _THICK, color=BLUE)
    bars.bar_label(drawn, padding=3, fontsize=9, color=INK)
    bars.set_ylim(len(counts) - max(len(counts), _LEAST_ROWS) - 0.6, len(counts) - 0.4)  # a bar alone is no block
    bars.margins(x=0.15)
    bars.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    bars.set_xlabel("tensors", fontsize=9, color=INK)
    for axes, (name, pairs) in zip(plots, logits.items(), strict=True):
        original, converted = zip(*pairs, strict=True)
        low, high = min(original), max(original)
        axes.plot([low, high], [low, high], color=LIGHT_GREY, lw=1, zorder=0)
        axes.plot(original, converted, ".", ms=4, color=ORANGE)
        axes.set_xlabel("logits of the original", fontsize=9, color=INK)
        axes.set_ylabel("logits of the converted network", fontsize=9, color=INK)
        axes.set_title(name, fontsize=8, color=INK)
    for axes in (bars, *plots):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    save(figure, path)
