"""The picture of `finetune_llm.py`: what a step keeps and peaks at, how long it takes, and what is learned."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from revzoo.display.figures.base import draw_heading, new_figure, save, simplify_axes
from revzoo.display.style import INK, LIGHT_BLUE, LIGHT_ORANGE, MODE_COLORS, PALE

_COLORS = {
    "stored": MODE_COLORS["store"],
    "original": MODE_COLORS["store"],
    "checkpointed": MODE_COLORS["recompute"],
    "9 bits": LIGHT_BLUE,
    "8 bits": MODE_COLORS["invert"],
    "reversible": MODE_COLORS["invert"],
    "1 random bit": LIGHT_BLUE,
    "2 random bits": LIGHT_ORANGE,
    "4 bits": MODE_COLORS["selective"],
    "random bit": LIGHT_BLUE,
    "split, 4 bits": LIGHT_ORANGE,
    "split, random bit": PALE,
    "2 bits": PALE,
    "bfloat16": MODE_COLORS["store"],
    "deployed": MODE_COLORS["selective"],
}
_COUNTED = ("8 bits", "4 bits", "random bit", "split, 4 bits", "split, random bit")
_WIDTH, _TOP, _PANEL, _GAP, _BELOW = 8.4, 1.0, 2.1, 0.95, 0.6  # [inch]
_LEFT, _SPAN = 0.11, 0.87  # of the width


def plot(parts: Mapping[str, Any], path: str | Path) -> None:
    """Draw one panel, or two, for each part that was measured; write a PNG.

    Args:
        parts: "memory" (rows), "time" (rows), "similarity" (rows) and "accuracy" (summary), as in the JSON.
        path: of the picture.
    """
    panels = [
        ("memory", "kept by the blocks", partial(_draw_memory, what="block")),
        ("memory", "peak of a step", partial(_draw_memory, what="peak")),
        ("time", "CPU time of a step", _draw_time),
        ("similarity", "passages with the same nearest neighbour [%]", _draw_agreement),
        ("accuracy", "test accuracy of MiniLM on ten sections; dots are seeds [%]", _draw_accuracy),
    ]
    drawn = [panel for panel in panels if panel[0] in parts]
    height = _TOP + len(drawn) * (_PANEL + _GAP) - _GAP + _BELOW
    figure = new_figure(_WIDTH, height)
    draw_heading(
        figure,
        "Pretrained networks, reversible in place",
        ["memory and time relative to gradient checkpointing, on the same network"],
    )
    for i, (name, title, draw) in enumerate(drawn):
        bottom = height - _TOP - _PANEL - i * (_PANEL + _GAP)
        axes = figure.add_axes((_LEFT, bottom / height, _SPAN, _PANEL / height))
        simplify_axes(axes)
        axes.set_title(title, fontsize=9, loc="left", color=INK)
        draw(axes, parts[name])
        axes.legend(
            frameon=False, fontsize=6.5, ncols=7, columnspacing=1.2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0
        )
    save(figure, path)


def _draw_memory(axes: Axes, part: Mapping[str, Any], what: str) -> None:
    bars: dict[str, list[float]] = {name: [] for name in _COUNTED}
    for net in part["rows"]:
        methods = {row["method"]: row for row in net["methods"]}
        for name, values in bars.items():
            values.append(methods[name][f"{what}_bytes"] / methods["checkpointed"][f"{what}_bytes"])
    _draw_bars(axes, [_name(net) for net in part["rows"]], bars)
    axes.axhline(1, color=_COLORS["checkpointed"], lw=1.2, zorder=0.5, label="checkpointed")


def _draw_time(axes: Axes, part: Mapping[str, Any]) -> None:
    methods = [name for name in part["rows"][0]["of_checkpointed"] if name != "checkpointed"]
    bars = {name: [net["of_checkpointed"][name] for net in part["rows"]] for name in methods}
    _draw_bars(axes, [_name(net) for net in part["rows"]], bars)
    axes.axhline(1, color=_COLORS["checkpointed"], lw=1.2, zorder=0.5, label="checkpointed")


def _draw_agreement(axes: Axes, part: Mapping[str, Any]) -> None:
    bars: dict[str, list[float]] = {}
    for row in part["rows"]:
        bars.setdefault(row["method"], []).append(100 * row["agreement"])
    lengths = dict.fromkeys(row["tokens"] for row in part["rows"])
    _draw_bars(axes, [f"{length} tokens" for length in lengths], bars, form="{:.1f}")


def _name(net: Mapping[str, Any]) -> str:
    return f"{net['network']}, {net['layers']} blocks\n{net['dtype']}"


def _draw_bars(axes: Axes, labels: Sequence[str], bars: Mapping[str, Sequence[float]], form: str = "{:.2f}") -> None:
    width = 0.8 / len(bars)
    for i, (name, values) in enumerate(bars.items()):
        places = [k + (i - (len(bars) - 1) / 2) * width for k in range(len(values))]
        drawn = axes.bar(places, values, 0.9 * width, color=_COLORS[name], label=name)
        axes.bar_label(drawn, fmt=form, fontsize=6, color=INK)
    axes.set_xticks(range(len(labels)), labels, fontsize=7)
    axes.margins(y=0.15)


def _draw_accuracy(axes: Axes, part: Mapping[str, Any]) -> None:
    summary = part["summary"]
    for i, row in enumerate(summary):
        color = _COLORS[row["method"]]
        axes.plot([i] * len(row["accuracies"]), row["accuracies"], "o", color=color, ms=5)
        axes.plot([i - 0.25, i + 0.25], [row["mean"]] * 2, color=INK, lw=1.2, label="mean" if i == 0 else None)
    axes.set_xticks(range(len(summary)), [f"{row['training']}\n{row['method']}" for row in summary], fontsize=6)
