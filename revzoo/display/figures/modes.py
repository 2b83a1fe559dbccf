"""Schedules as rows of coloured cells, with the names of the units below and a legend of the modes."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from revzoo.display.figures.base import LEFT
from revzoo.display.style import INK, MODE_COLORS, PALE
from revzoo.display.unit_name import parse_unit_name
from revzoo.runtime.mode import MODES, Mode

CHARACTER = 0.075  # width of a character at 8 points [inch]
_NARROWEST = 0.13  # units that are named [inch]
_LINE = 0.2  # height of a line of the legend [inch]
_MEANINGS = {
    Mode.STORE: "keeps all of its activations",
    Mode.SELECTIVE: "keeps expensive results, reruns the rest",
    Mode.RECOMPUTE: "keeps its input, runs again",
    Mode.INVERT: "keeps nothing, rebuilds from its output",
}


def draw_mode_cells(
    axes: Axes, schedules: Sequence[Sequence[str]], xs: Sequence[int], ys: Sequence[float], line_width: float
) -> None:
    """Draw schedules as a grid of cells, one row for each schedule and one column for each unit.

    Args:
        axes: to draw in.
        schedules: the first is the lowest row.
        xs: borders of the columns, one more than units.
        ys: borders of the rows, one more than schedules.
        line_width: of the white lines between the cells [points].
    """
    grid = [[MODES.index(mode) for mode in schedule] for schedule in schedules]
    colors = ListedColormap([MODE_COLORS[mode] for mode in MODES])
    axes.pcolormesh(xs, ys, grid, cmap=colors, vmin=-0.5, vmax=len(MODES) - 0.5, edgecolors="white", linewidth=line_width)


def draw_unit_names(axes: Axes, units: Sequence[str], cell: float, count: int, height: float) -> None:
    """Name the units below their cells, each stage once with a bracket over its units.

    Args:
        axes: of this height; its width is that of `count` cells.
        units: names of the units, which take the first cells.
        cell: width of a cell [inch].
        count: number of cells.
        height: as `unit_names_height` gives it [inch].
    """
    axes.set(xlim=(0, count), ylim=(0, height))
    axes.axis("off")
    for label, start, end in group_units(units, cell):
        pad = min(0.25, 0.03 / cell)
        axes.plot([start + pad, end - pad], [height - 0.05] * 2, color=PALE, lw=1.1, solid_capstyle="butt")
        style: dict[str, Any] = {"fontsize": 8, "color": INK, "ha": "center", "va": "top", "parse_math": False}
        upright = _is_turned(label, start, end, cell)
        axes.text((start + end) / 2, height - 0.12, label, rotation=90 if upright else 0, **style)


def unit_names_height(units: Sequence[str], cell: float) -> float:
    """Return the height that the names below cells of this width take [inch]."""
    upright = [len(label) for label, start, end in group_units(units, cell) if _is_turned(label, start, end, cell)]
    return 0.3 + 0.85 * CHARACTER * max(upright, default=0)


def _is_turned(label: str, start: int, end: int, cell: float) -> bool:
    """Return whether a label is turned by 90 degrees because it is wider than its cells."""
    return CHARACTER * len(label) > (end - start) * cell


def group_units(units: Sequence[str], cell: float) -> list[tuple[str, int, int]]:
    """Return (label, start, end) for each run of units that are named together and have room for a name.

    Args:
        units: names of the units.
        cell: width of a unit [inch].
    """
    runs = groupby(enumerate(units), key=lambda item: _group_key(item[1], item[0]))
    groups = [(label, [k for k, _ in run]) for (label, _), run in runs]
    return [(label, ks[0], ks[-1] + 1) for label, ks in groups if len(ks) * cell >= _NARROWEST]


def _group_key(name: str, k: int) -> tuple[str, int]:
    """Return the label of a unit, and a number that is equal for units that are named together."""
    unit = parse_unit_name(name)
    if unit.number is None:
        return name.rpartition(".")[2], k
    return "steps" if unit.stage is None else f"stage {unit.stage}", -1


def draw_mode_legend(figure: Figure, schedule: Sequence[str], with_counts: bool = True) -> None:
    """Explain at the bottom of the figure the modes that occur in a schedule, and how many units have each."""
    width, height = figure.get_size_inches()
    used = [mode for mode in MODES if mode in schedule]
    labels = [f"{mode}{f' ({schedule.count(mode)})' if with_counts else ''}: {_MEANINGS[mode]}" for mode in used]
    patches = [Patch(color=MODE_COLORS[mode]) for mode in used]
    where = (LEFT / width, 0.13 / height)
    style: dict[str, Any] = {"frameon": False, "fontsize": 8.5, "borderaxespad": 0, "borderpad": 0, "handlelength": 1.2}
    figure.legend(patches, labels, loc="lower left", bbox_to_anchor=where, ncols=_legend_columns(width), **style)


def mode_legend_height(schedule: Sequence[str], width: float) -> float:
    """Return the height that the legend takes in a figure of this width, with margins [inch]."""
    return 0.3 + _LINE * -(-len(set(schedule)) // _legend_columns(width))


def _legend_columns(width: float) -> int:
    return 4 if width > 12.5 else 2
