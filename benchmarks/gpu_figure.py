"""Pictures of what gpu.py has measured: a panel for each network and dtype, over the batch size.

python benchmarks/gpu_figure.py DIR/gpu.json            writes gpu_time.png and gpu_memory.png beside it
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpu import Steps, group_steps
from pareprop_figure import add_legend, label_batches, lay_out

from revzoo.display.figures.base import save
from revzoo.display.style import INK, MODE_COLORS, ORANGE, PALE, RED

_LOOKS = {  # color, marker and line of each method
    "store": (MODE_COLORS["store"], "s", "-"),
    "checkpoint": (PALE, "D", "--"),
    "recompute": (ORANGE, "v", "-"),
    "invert": (MODE_COLORS["invert"], "^", "-"),
    "ahead": (RED, "o", "-"),
    "graph": (MODE_COLORS["selective"], "P", "-"),
}
Value = Callable[[Mapping[str, Mapping[str, Any]], str], float | None]  # of the methods of a batch, and one of them


def find_ratio(methods: Mapping[str, Mapping[str, Any]], method: str) -> float | None:
    """Return the device's time over that of storing everything, if that fits."""
    return methods[method]["gpu_ms"] / methods["store"]["gpu_ms"] if "store" in methods else None


def find_peak(methods: Mapping[str, Mapping[str, Any]], method: str) -> float | None:
    """Return the allocator's peak [GiB]."""
    return float(methods[method]["peak_bytes"] / 2**30)


def plot(
    steps: Steps, title: str, lines: list[str], label: str, value: Value, path: Path, crosses: Value | None = None
) -> None:
    """Draw a value over the batch size, and crosses for another one."""
    names = list(dict.fromkeys(f"{network}, {dtype}" for network, dtype, _ in steps))
    figure, panels = lay_out(names, title, lines)
    handles: dict[str, Any] = {}
    for (name, axes), (method, (color, marker, line)) in ((p, look) for p in panels.items() for look in _LOOKS.items()):
        rows = {
            batch: each for (network, dtype, batch), each in steps.items() if f"{network}, {dtype}" == name and method in each
        }
        points = {batch: y for batch, each in rows.items() if (y := value(each, method)) is not None}
        if points:
            (handles[method],) = axes.plot(
                *zip(*points.items(), strict=True), color=color, marker=marker, ls=line, lw=1.4, ms=4
            )
        if crosses is not None and (more := {b: y for b, each in rows.items() if (y := crosses(each, method)) is not None}):
            axes.plot(*zip(*more.items(), strict=True), "x", color=color, ms=7, mew=1.5)
    for name, axes in panels.items():
        axes.set_ylabel(label, fontsize=9, color=INK)
        label_batches(axes, [batch for network, dtype, batch in steps if f"{network}, {dtype}" == name])
    add_legend(figure, handles)
    save(figure, path)


def find_counted(methods: Mapping[str, Mapping[str, Any]], method: str) -> float | None:
    """Return the counted peak [GiB], if it has been counted."""
    counted = methods[method].get("counted_bytes")
    return None if counted is None else float(counted / 2**30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="gpu.json")
    file = parser.parse_args().file
    content = json.loads(file.read_text())
    device = content["cases"].get("facts/machine", {}).get("device", "unknown device")
    steps = group_steps(content["cases"], "speed")
    title = "Time of a training step, stored = 1"
    plot(
        steps,
        title,
        [f"{device}; bf16 with SGD, fp32 with AdamW"],
        "time over stored",
        find_ratio,
        file.with_name("gpu_time.png"),
    )
    lines = [f"allocated on {device}; crosses: counted"]
    path = file.with_name("gpu_memory.png")
    plot(steps, "Peak memory of a training step", lines, "peak [GiB]", find_peak, path, find_counted)


if __name__ == "__main__":
    main()
