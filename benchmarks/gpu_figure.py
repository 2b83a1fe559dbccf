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
Methods = Mapping[str, Mapping[str, Any]]  # what was measured of one network, dtype and batch
Value = Callable[[Methods, str], float]  # of one method; KeyError if it was not measured


def find_ratio(methods: Methods, method: str) -> float:
    """Return the device's time over that of storing everything."""
    return float(methods[method]["gpu_ms"] / methods["store"]["gpu_ms"])


def find_peak(methods: Methods, method: str) -> float:
    """Return the allocator's peak [GiB]."""
    return float(methods[method]["peak_bytes"] / 2**30)


def find_counted(methods: Methods, method: str) -> float:
    """Return the counted peak [GiB]."""
    return float(methods[method]["counted_bytes"] / 2**30)


def plot(steps: Steps, title: str, line: str, label: str, values: dict[str, Value], path: Path) -> None:
    """Draw values over the batch size, by the style of their lines; "" is that of the method."""
    panels: dict[str, Steps] = {}
    for (network, dtype, batch), methods in steps.items():
        panels.setdefault(f"{network}, {dtype}", {})[network, dtype, batch] = methods
    figure, axes_by_name = lay_out(list(panels), title, [line])
    handles: dict[str, Any] = {}
    for name, axes in axes_by_name.items():
        for method, (color, marker, own) in _LOOKS.items():
            for style, value in values.items():
                points = []
                for (_, _, batch), methods in panels[name].items():
                    try:
                        points.append((batch, value(methods, method)))
                    except KeyError:
                        continue
                look = {"marker": marker, "ls": own, "ms": 4} if style == "" else {"marker": style, "ls": "none", "ms": 7}
                if points:
                    (drawn,) = axes.plot(*zip(*points, strict=True), color=color, lw=1.4, **look)
                    handles.setdefault(method, drawn)
        axes.set_ylabel(label, fontsize=9, color=INK)
        label_batches(axes, [batch for _, _, batch in panels[name]])
    add_legend(figure, handles)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="gpu.json")
    file = parser.parse_args().file
    cases = json.loads(file.read_text())["cases"]
    device = cases.get("facts/machine", {}).get("device", "an unknown device")
    steps = group_steps(cases, "speed")
    line = f"{device}; bf16 with SGD, fp32 with AdamW"
    plot(steps, "Time of a training step", line, "stored = 1", {"": find_ratio}, file.with_name("gpu_time.png"))
    memory = {"": find_peak, "x": find_counted}
    plot(steps, "Peak memory", f"{line}; crosses: counted", "peak [GiB]", memory, file.with_name("gpu_memory.png"))


if __name__ == "__main__":
    main()
