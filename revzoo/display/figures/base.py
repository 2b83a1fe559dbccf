"""What all figures share: an empty page, its heading, plain axes, ticks in bytes, and how a picture is saved."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from revzoo.display.style import FAINT, GRID, INK
from revzoo.format import choose_byte_unit

LEFT = 0.95  # margin to the left of the axes and the heading [inch]
_CHARACTER = 0.064  # mean width of a character of the heading's small lines [inch]


def new_figure(width: float, height: float) -> Figure:
    """Return an empty white figure of this size [inch]."""
    return Figure(figsize=(width, height), dpi=120, facecolor="white")


def draw_heading(figure: Figure, title: str, lines: Sequence[str], left: float = LEFT) -> None:
    """Write a title and small lines below it at the top of the figure; lines that are too long for it are wrapped.

    Args:
        left: distance from the left edge [inch].
    """
    width, height = figure.get_size_inches()
    x = left / width
    figure.text(x, 1 - 0.42 / height, title, fontsize=16, fontweight="bold", color=INK, parse_math=False)
    most = int((width - left - 0.2) / _CHARACTER)
    text = "\n".join(piece for line in lines for piece in textwrap.wrap(line, most))
    figure.text(x, 1 - 0.52 / height, text, fontsize=9, color=INK, va="top", parse_math=False, linespacing=1.5)


def simplify_axes(axes: Axes) -> None:
    """Leave only the bottom spine and pale horizontal grid lines."""
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, color=FAINT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def mark_bytes(axis: Axis, low: float, high: float) -> None:
    """Put ticks at round sizes from low to high on an axis, labelled in one unit, such as "0.8 GiB" and "1.2 GiB"."""
    name, unit = choose_byte_unit(high)
    ticks = MaxNLocator(7, steps=[1, 2, 5, 10]).tick_values(low / unit, high / unit)
    axis.set_major_locator(FixedLocator([tick * unit for tick in ticks if low <= tick * unit <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda size, _: f"{size / unit:.6g} {name}" if size else "0 B"))


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG: the same bytes for the same figure, whatever the version of matplotlib."""
    figure.savefig(path, format="png", metadata={"Software": None})
