"""The pictures of plans: what is drawn is what was given, whatever the number of units, and the PNG repeats."""

from collections import Counter

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from revzoo.display.figures.plan import plot_plan
from revzoo.display.style import MODE_COLORS
from revzoo.planning.plan import Plan
from revzoo.planning.setting import Setting
from revzoo.planning.solvers.schedule_totals import PhasePeak

MIB = 1 << 20
WHERE = Setting("a_model_with_$_and_%_in_its_name", "0" * 64, "float32", "cpu", True, False, ("[4, 3, 8, 8] float32",))
OTHERS = {
    "all stored": {"peak_bytes": 90 * MIB, "seconds": 1.0, "extra_flops": 0},
    "all inverted": {"peak_bytes": 30 * MIB, "seconds": 2.0, "extra_flops": 900},
}
FRONT = [{"peak_bytes": size * MIB, "seconds": 1 + 20 / size, "extra_flops": 1000 - 10 * size} for size in (30, 50, 70)]


def plan_of(steps: int, **facts) -> Plan:
    """Return a plan for stem, steps of two stages with a transition between, fuse and head; modes in turn."""
    half = steps // 2
    blocks = [f"stages.{i}.blocks.{k // 2}.{'fg'[k % 2]}" for i in (0, 1) for k in range(half)]
    units = ("stem", *blocks[:half], "stages.1.transition", *blocks[half:], "fuse", "head")
    schedule = tuple(list(MODE_COLORS)[k % 4] if ".blocks." in name else "store" for k, name in enumerate(units))
    sizes = [10 + k for k in range(len(units))]
    up = [PhasePeak(name, "forward", size * MIB) for name, size in zip(units, sizes, strict=True)]
    down = [PhasePeak(name, "backward", (size + 1) * MIB) for name, size in zip(units, sizes, strict=True)]
    phases = (*up, PhasePeak("loss", "loss", sizes[-1] * MIB), *reversed(down))
    facts = {"budget_bytes": (sizes[-1] + 3) * MIB, "no_recompute_peak_bytes": 90 * MIB, **facts}
    return Plan(
        units,
        schedule,
        peak_bytes=(sizes[-1] + 1) * MIB,
        seconds=1.25,
        extra_flops=77,
        min_peak_bytes=9 * MIB,
        phase_peaks=phases,
        solver="timeline",
        setting=WHERE,
        **facts,
    )


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]]


def cells(axes) -> list[list[list[str]]]:
    """Return the colours of each mesh, row by row."""
    return [
        [[to_hex(mesh.cmap(mesh.norm(value))) for value in row] for row in np.ma.filled(mesh.get_array())]
        for mesh in axes.collections
    ]


@pytest.mark.parametrize("steps", [4, 100])
def test_a_plan_is_drawn_as_it_is(steps, tmp_path, figures):
    plan = plan_of(steps)
    plot_plan(plan, tmp_path / "plan.png", FRONT, OTHERS, 5 * MIB)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    memory, modes, _, trade = figure.axes
    for stairs in memory.patches[:3]:
        if hasattr(stairs, "get_data"):
            assert list(stairs.get_data().values) == [phase.bytes for phase in plan.phase_peaks]
    assert sum(hasattr(patch, "get_data") for patch in memory.patches) == 2
    colors = [MODE_COLORS[mode] for mode in plan.schedule]
    assert cells(modes) == [[colors], [colors[::-1]]]
    level = {line.get_ydata()[0] for line in memory.lines if len(set(line.get_ydata())) == 1 and len(line.get_ydata()) == 2}
    assert {plan.budget_bytes, plan.no_recompute_peak_bytes} <= level
    words = texts(figure)
    assert {"forward", "loss", "backward", "this plan", "all stored", "all inverted", "stage 0", "stage 1"} <= set(words)
    assert f"peak: {plan.peak_bytes / MIB:.1f} MiB\nin backward of head" in words
    assert f"budget: {plan.budget_bytes / MIB:.1f} MiB" in words
    assert any("1.25 s for a forward and backward, +25.0% against storing everything (1 s)" in text for text in words)
    count = Counter(plan.schedule)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [line.split(":")[0] for line in legend] == [f"{mode} ({count[mode]})" for mode in MODE_COLORS if mode in count]
    marked = [(line.get_xdata()[0], line.get_ydata()[0]) for line in trade.lines if len(line.get_xdata()) == 1]
    assert marked == [(1.0, 90 * MIB), (2.0, 30 * MIB), (1.25, plan.peak_bytes)]
    assert trade.get_ylim() == memory.get_ylim()


def test_the_front_is_a_staircase(tmp_path, figures):
    """Each schedule is the fastest up to the peak of the next; a dominated one is a dot beside it."""
    worse = {"peak_bytes": 60 * MIB, "seconds": 1.9, "extra_flops": 0}
    plot_plan(plan_of(4), tmp_path / "plan.png", [*FRONT, worse], OTHERS)
    stairs, dots = figures[0].axes[-1].lines[:2]
    corners = list(zip(stairs.get_xdata(), [y / MIB for y in stairs.get_ydata()], strict=True))
    low, mid, high = (1 + 20 / size for size in (30, 50, 70))
    assert corners[:5] == [(low, 30), (low, 50), (mid, 50), (mid, 70), (high, 70)]
    assert [y / MIB for y in dots.get_ydata()] == [30, 50, 60, 70]


def test_without_seconds_flops_are_drawn(tmp_path, figures):
    untimed = [{**point, "seconds": None} for point in FRONT]
    plan = plan_of(4)
    plan = Plan(**{**vars(plan), "seconds": None})
    plot_plan(plan, tmp_path / "plan.png", untimed, {"all stored": {**OTHERS["all stored"], "seconds": None}})
    trade = figures[0].axes[-1]
    assert trade.get_xlabel() == "FLOPs over storing everything"
    assert [line.get_xdata()[0] for line in trade.lines if len(line.get_xdata()) == 1] == [0, 77]
    assert any("77 FLOP more than storing everything" in text for text in texts(figures[0]))
