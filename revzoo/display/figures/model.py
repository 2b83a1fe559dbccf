"""The report of a model as a picture: its parts in a row, and below each part the bytes that it keeps for backward."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FuncFormatter, NullLocator

from revzoo.analysis.report import ModelReport, PartReport
from revzoo.display.figures.base import draw_heading, new_figure, save, simplify_axes
from revzoo.display.style import BLUE, INK, LIGHT_BLUE, LIGHT_GREY, MODE_COLORS, PALE
from revzoo.display.tables.model import describe_twin
from revzoo.format import format_bytes, format_count, format_macs, format_shape

_INCHES = {"stage": 1.75, "node": 1.35, "bijection": 1.3}  # width of a column
_FILL = {"stage": LIGHT_BLUE, "node": LIGHT_GREY, "bijection": "white"}
_EDGE = {"stage": BLUE, "node": PALE, "bijection": BLUE}
_MARGIN, _HEIGHT = 1.0, 6.6  # [inch]
_TOP, _BOTTOM, _BOX = 0.98, -0.98, (-0.62, 0.62)  # y in the diagram; the two streams are lines at +-0.3


def plot_model(report: ModelReport, path: str | Path) -> None:
    """Draw the network, and the bytes that each of its parts keeps in every mode; write a PNG."""
    widths = [_INCHES[part.kind] for part in report.parts]
    width = max(sum(widths) + _MARGIN + 0.3, 8.5)
    figure = new_figure(width, _HEIGHT)
    span = (width - _MARGIN - 0.3) / width
    diagram = figure.add_axes((_MARGIN / width, 0.47, span, 0.37))
    bars = figure.add_axes((_MARGIN / width, 0.09, span, 0.34))
    centers = [sum(widths[:i]) + w / 2 for i, w in enumerate(widths)]
    draw_heading(figure, report.name, _summarise(report), _MARGIN)
    _draw_network(diagram, report, centers, widths)
    _draw_bars(bars, report.parts, centers, sum(widths))
    save(figure, path)


def _summarise(report: ModelReport) -> list[str]:
    peaks = ", ".join(f"{format_bytes(report.memory[mode].activation_bytes)} {mode}" for mode in MODE_COLORS)
    lines = [
        f"{report.parameters:,} parameters, {format_macs(report.flops)} per {report.example}, "
        + (f"{report.steps} reversible steps" if report.steps else "one tensor instead of two streams"),
        f"activations at the peak, {report.batch_size} {report.example}s: {peaks}",
    ]
    if report.twin is not None:
        lines.append(f"ordinary twin {describe_twin(report.twin, report.example)}")
    return lines


def _draw_network(axes: Axes, report: ModelReport, centers: Sequence[float], widths: Sequence[float]) -> None:
    axes.set(xlim=(0, sum(widths)), ylim=(_BOTTOM, _TOP))
    axes.axis("off")
    first, last = centers[0], centers[-2]  # two streams from the split, drawn in the stem, to the fuse
    for y in (-0.3, 0.3) if report.steps else (0,):
        axes.plot([first, last], [y, y], color=BLUE, lw=2.2, zorder=1, solid_capstyle="round")
    axes.annotate("", (centers[-1], 0), (last, 0), arrowprops={"arrowstyle": "-", "color": _EDGE["node"], "lw": 2.2}, zorder=1)
    for part, x, width in zip(report.parts, centers, widths, strict=True):
        _draw_part(axes, part, x, width - 0.3)
        below = "" if part.shape is None else format_shape(part.shape)
        axes.text(x, _BOX[0] - 0.08, below, fontsize=8, color=BLUE, ha="center", va="top")
        axes.text(x, _BOX[1] + 0.07, _title(part), fontsize=9, fontweight="bold", color=INK, ha="center", va="bottom")


def _draw_part(axes: Axes, part: PartReport, x: float, width: float) -> None:
    low, high = _BOX
    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, low),
            width,
            high - low,
            boxstyle=style,
            facecolor=_FILL[part.kind],
            edgecolor=_EDGE[part.kind],
            linestyle="--" if part.kind == "bijection" else "-",
            lw=1.2,
            zorder=2,
        )
    )
    axes.text(x, 0, "\n".join(_box_lines(part)), fontsize=8, color=INK, ha="center", va="center", zorder=3, linespacing=1.35)


def _title(part: PartReport) -> str:
    return part.name.split(".")[-1] if part.kind != "stage" else f"stage {part.name.split('.')[-1]}"


def _box_lines(part: PartReport) -> list[str]:
    """Return the lines of text in a part's box."""
    blocks, _, branches = part.what.partition(": ")
    if part.kind == "stage":
        lines = [f"{blocks}, {part.steps} steps" if part.steps else blocks, *_wrap(branches, 20)]
    else:
        lines = _wrap(part.what.replace(", then", " +"), 15)
    return [*lines, "bijection" if part.kind == "bijection" else f"{format_count(part.parameters)} param."]


def _wrap(text: str, most: int) -> list[str]:
    """Break a text at spaces, and longer words after an underscore, into lines of about this many characters."""
    words = (word if len(word) <= most else word.replace("_", "_ ") for word in text.split(" "))
    return [line.replace("_ ", "_") for line in textwrap.wrap(" ".join(words), most)]


def _draw_bars(axes: Axes, parts: Sequence[PartReport], centers: Sequence[float], span: float) -> None:
    sizes = [size for part in parts for size in part.kept_bytes.values() if size]
    low, high = min(sizes) / 4, max(sizes) * 12  # room for the labels above
    offsets = {mode: (i - 1.5) * 0.3 for i, mode in enumerate(MODE_COLORS)}
    for mode, color in MODE_COLORS.items():
        xs = [x + offsets[mode] for x, part in zip(centers, parts, strict=True) if part.kind != "bijection"]
        kept = [part.kept_bytes[mode] for part in parts if part.kind != "bijection"]
        axes.bar(xs, [size - low if size else 0 for size in kept], 0.26, bottom=low, color=color, label=mode)
        for x, size in zip(xs, kept, strict=True):
            label = format_bytes(size) if size else "0"
            axes.text(x, max(size, low) * 1.25, label, fontsize=7, color=INK, ha="center", va="bottom", rotation=90)
    for x, part in zip(centers, parts, strict=True):
        if part.kind == "bijection":
            axes.text(x, low * 1.25, "nothing", fontsize=7.5, color=BLUE, ha="center", va="bottom")
    axes.set_yscale("log")
    axes.set(xlim=(0, span), ylim=(low, high))
    axes.set_ylabel("kept for backward (log scale)", fontsize=9, color=INK)
    ticks = [1024.0**i * 2**j for i in range(5) for j in (0, 5)]
    axes.set_yticks([tick for tick in ticks if low <= tick <= high])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size)))
    axes.xaxis.set_visible(False)
    simplify_axes(axes)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=4, frameon=False, fontsize=9)
