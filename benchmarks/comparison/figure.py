"""The comparison of methods as a picture: memory of shallow and deep networks, FLOPs and checks."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from comparison.net import NETS, Net
from comparison.report import ComparisonReport
from revzoo.display.figures.base import draw_heading, new_figure, save
from revzoo.display.style import BLUE, FAINT, GRID, INK, PALE, RED

_ROW, _TOP, _BOTTOM = 0.27, 1.15, 0.65  # height of a method, and of what is above and below the axes [inch]
_PANELS = ((0.175, 0.245), (0.445, 0.245), (0.715, 0.13), (0.865, 0.12))  # left and width of the axes, as parts of the width


def plot_comparison(report: ComparisonReport, path: str | Path) -> None:
    """Draw a row for every method: peaks at the two numbers of blocks, FLOPs, and checks passed; write a PNG.

    Args:
        report: what was measured.
        path: of the picture.
    """
    names = [name for name in report.methods if name not in report.left_out]
    height = _TOP + _ROW * len(names) + _BOTTOM
    figure = new_figure(13, height)
    lines = ["a forward and backward of the same blocks; revzoo in red, a ring where the number of blocks is the smaller one"]
    draw_heading(figure, "Memory, FLOPs and checks of every method", lines, left=0.3)
    panels = [
        figure.add_axes((left, _BOTTOM / height, width, _ROW * len(names) / height), ylim=(len(names) - 0.5, -0.5))
        for left, width in _PANELS
    ]
    for axes, net in zip(panels[:2], NETS, strict=True):
        _draw_peaks(axes, report, net, names)
    _draw_flops(panels[2], report, names)
    _draw_checks(panels[3], report, names)
    for axes in panels:
        axes.grid(axis="x", color=GRID, lw=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8, color=FAINT, length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        axes.set_yticks(range(len(names)), names if axes is panels[0] else [""] * len(names), fontsize=9, color=INK)
    save(figure, path)


def _draw_peaks(axes: Axes, report: ComparisonReport, net: Net, names: list[str]) -> None:
    depths: list[int] = []
    for y, name in enumerate(names):
        peaks = report.find("peak", net.name, name)
        depths, values = list(peaks), [peak / net.stream_bytes for peak in peaks.values()]
        color = _choose_color(name)
        axes.plot(values, [y] * len(values), color=color, lw=1.4)
        axes.plot(values[0], y, "o", ms=6, mfc="white", mec=color)
        axes.plot(values[-1], y, "o", ms=6, color=color)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_title(f"{net.name}, {depths[0]} and {depths[-1]} blocks", fontsize=10, color=INK, loc="left")
    axes.set_xlabel("peak activation memory [streams]", fontsize=9, color=INK)


def _draw_flops(axes: Axes, report: ComparisonReport, names: list[str]) -> None:
    for net, marker in zip(NETS, ("o", "s"), strict=True):
        last = [list(report.find("flops", net.name, name).values())[-1] for name in (report.methods[0], *names)]
        for y, (name, flops) in enumerate(zip(names, last[1:], strict=True)):
            label = net.name if y == 0 else None
            axes.plot(flops / last[0], y, marker, ms=5, color=_choose_color(name), alpha=0.8, label=label)
    axes.legend(fontsize=8, frameon=False, loc="upper right", handletextpad=0.1)
    axes.set_title("FLOPs", fontsize=10, color=INK, loc="left")
    axes.set_xlabel("over plain autograd", fontsize=9, color=INK)


def _draw_checks(axes: Axes, report: ComparisonReport, names: list[str]) -> None:
    for y, name in enumerate(names):
        passed, rows = report.count_passed(name)
        axes.barh(y, passed, height=0.6, color=_choose_color(name))
        axes.text(passed, y, f" {passed}", fontsize=8, color=PALE, va="center")
        axes.set_xlim(0, 1.15 * max(rows, 1))
    axes.set_title("checks passed", fontsize=10, color=INK, loc="left")
    axes.set_xlabel(f"of {len(report.checks)}", fontsize=9, color=INK)


def _choose_color(name: str) -> str:
    return RED if name.startswith("revzoo") else BLUE
