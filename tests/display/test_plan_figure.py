"""The pictures of plans: what is drawn is what was given, whatever the number of units, and the PNG repeats."""

import struct
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from revzoo.display.figures.modes import group_units
from revzoo.display.figures.plan import plot_plan
from revzoo.display.style import MODE_COLORS
from revzoo.planning.plan import Plan
from revzoo.planning.setting import Setting
from revzoo.planning.solvers.schedule import PhasePeak

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


@pytest.fixture
def figures(monkeypatch):
    """Return the figures that are drawn, once they are."""
    drawn: list[Figure] = []
    save = Figure.savefig

    def save_and_keep(figure: Figure, *args, **options) -> None:
        drawn.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", save_and_keep)
    return drawn


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
    (figure,) = figures
    memory, modes, names, trade = figure.axes
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
    last = ["fuse", "head"] if steps == 4 else ["fuse, head"]
    below = ["stem", "stage 0", "transition", "stage 1", *last, "the same units, last one first"]
    assert [text.get_text() for text in names.texts if text.get_text()] == below


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


@pytest.mark.parametrize(("budget", "drawn"), [(100, True), (1000, False)])
def test_a_budget_far_above_does_not_flatten_the_picture(budget, drawn, tmp_path, figures):
    plot_plan(plan_of(4, budget_bytes=budget * MIB), tmp_path / "plan.png", FRONT, OTHERS)
    memory = figures[0].axes[0]
    assert any(set(line.get_ydata()) == {budget * MIB} for line in memory.lines) == drawn
    assert memory.get_ylim()[1] == pytest.approx(1.12 * (budget if drawn else 90) * MIB)
    assert ("budget: 1000.0 MiB, above this picture" in texts(figures[0])) != drawn


def test_names_do_not_overlap_in_any_picture(tmp_path, figures):
    for steps in (8, 100):
        plot_plan(plan_of(steps), tmp_path / "plan.png", FRONT, OTHERS)
        figure = figures[-1]
        renderer = FigureCanvasAgg(figure).get_renderer()
        boxes = [text.get_window_extent(renderer) for text in figure.axes[2].texts if text.get_text()]
        assert not [1 for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and figure.bbox.y0 <= box.y0 for box in boxes)
        (legend,) = figure.legends
        low = legend.get_window_extent(renderer)
        assert low.x1 <= figure.bbox.x1
        assert low.y1 <= min(box.y0 for box in boxes)


@pytest.mark.parametrize(
    ("cell", "labels"),
    [
        (0.3, ["stem", "stage 0", "transition", "stage 1", "fuse", "head"]),
        (0.05, ["stem", "stage 0", "transition", "stage 1", "fuse, head"]),
    ],
)
def test_units_are_named_in_groups(cell, labels):
    units = plan_of(8).units
    groups = group_units(units, cell)
    assert [label for label, _, _ in groups] == labels
    assert groups[0][1] == 0
    assert groups[-1][2] == len(units)
    assert all(before[2] == after[1] for before, after in pairwise(groups))
    assert group_units([f"steps.{k}" for k in range(5)], cell) == [("steps", 0, 5)]


def test_pictures_are_pngs_and_repeat(tmp_path):
    def draw(folder) -> None:
        folder.mkdir()
        plot_plan(plan_of(6), folder / "plan.png", FRONT, OTHERS, MIB)
        plot_plan(plan_of(6), folder / "alone.png")

    for name in ("a", "b"):
        draw(tmp_path / name)
    pictures = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    assert len(pictures) == 2
    assert pictures == {file.name: file.read_bytes() for file in (tmp_path / "b").iterdir()}
    assert all(picture[:8] == b"\x89PNG\r\n\x1a\n" for picture in pictures.values())
    widths = {name: struct.unpack(">I", picture[16:20])[0] for name, picture in pictures.items()}
    assert widths["plan.png"] - widths["alone.png"] == pytest.approx(120 * 3.45, abs=1)
