"""The picture and the table of a plan for any module show what they are given."""

import pytest
from matplotlib.colors import to_hex
from rich.console import Console

from revzoo.display.style import LIGHT_GREY, LIGHT_ORANGE, MODE_COLORS
from revzoo.graph import CallDetails, FrontPoint, ModulePlan, Phase, PlanDetails
from revzoo.graph.graph_plan import GraphPlan
from revzoo.graph.plan_figure import plot_module_plan
from revzoo.graph.plan_table import name_parts, tabulate_module_plan
from revzoo.planning.setting import Setting

MIB = 1 << 20
SETTING = Setting("Net_with_$_and_[brackets]", "0" * 64, "float32", "cpu", True, False, ("[4, 3, 8, 8] float32",))


def make_plan(blocks: int) -> tuple[ModulePlan, PlanDetails]:
    """Return a plan of a stem, blocks of a convolution and a norm, and a head; every block's norm runs again."""
    calls = [CallDetails("stem (conv2d)", 100, MIB, 0, 0), CallDetails("add", 0, 0, 0, 0)]
    for i in range(blocks):
        calls += [
            CallDetails(f"blocks.{i}.conv (conv2d)", 100, MIB, 0, 0),
            CallDetails(f"blocks.{i}.norm (norm)", 0, 0, MIB, 1),
        ]
    calls.append(CallDetails("head (linear)", 50, MIB, 0, 0))
    count = len(calls)
    phases = [Phase("forward", i, (i + 2) * MIB, 10) for i in range(count)] + [Phase("loss", -1, (count + 2) * MIB, 0)]
    for i in reversed(range(count)):
        if calls[i].num_reruns:
            phases.append(Phase("recovery", i, (i + 3) * MIB, 10))
        phases.append(Phase("backward", i, (i + 2) * MIB, 20))
    front = tuple(FrontPoint(size * MIB, 400 - 20 * size, None) for size in (4, 8, 12))
    plan = ModulePlan(
        graphs=(GraphPlan("0" * 64, (("x",),) * count, (), (), (2, count), ("x",), ()),),
        schedules=(),
        peak_bytes=(count + 2) * MIB,
        budget_bytes=(count + 3) * MIB,
        extra_flops=100,
        total_flops=2000,
        min_peak_bytes=4 * MIB,
        no_recompute_peak_bytes=2 * count * MIB,
        left_bytes=MIB,
        gradient_bytes=0,
        loss_bytes=0,
        setting=SETTING,
    )
    return plan, PlanDetails(tuple(calls), tuple(phases), front, MIB, 0)


@pytest.mark.parametrize("blocks", [2, 40])
def test_a_step_is_drawn_as_it_is(blocks, figures, tmp_path):
    plan, details = make_plan(blocks)
    plot_module_plan(plan, details, tmp_path / "plan.png")
    memory, cells, names, front = figures[0].axes
    stairs = [patch for patch in memory.patches if hasattr(patch, "get_data")]
    assert [list(each.get_data().values) for each in (stairs[0], stairs[-1])] == [[p.bytes for p in details.phases]] * 2
    again = [each for each in stairs if to_hex(each.get_facecolor()) == LIGHT_ORANGE]
    widths = [each.get_data().edges[-1] - each.get_data().edges[0] for each in again]
    assert widths == [10.0] * blocks
    colors = [to_hex(patch.get_facecolor()) for patch in cells.patches]
    keep, rerun = MODE_COLORS["store"], MODE_COLORS["recompute"]
    assert colors == [keep, LIGHT_GREY, *[keep, rerun] * blocks, keep, *[rerun] * blocks]
    parts = ["stem", "blocks.0", "blocks.1", "head"] if blocks == 2 else ["blocks"]  # as fine as there is room for
    assert [text.get_text() for text in names.texts if text.get_text()] == [*parts, "the same, last one first"]
    assert len(figures[0].legends[0].get_texts()) == 3
    marked = [(line.get_xdata()[0], line.get_ydata()[0]) for line in front.lines if len(line.get_xdata()) == 1]
    assert marked == [(0, plan.no_recompute_peak_bytes), (5.0, plan.peak_bytes)]


@pytest.mark.parametrize(
    ("paths", "most", "names"),
    [
        (["conv1", "layer1.0.conv1", "layer1.0", "layer1.1.bn1", "fc"], 9, ["conv1", "layer1.0", "layer1.0", "layer1.1", "fc"]),
        (["conv1", "layer1.0.conv1", "layer1.0", "layer1.1.bn1", "fc"], 3, ["conv1", "layer1", "layer1", "layer1", "fc"]),
        (["", "encoder.layer.0.attn", "", "encoder.layer.1"], 9, ["encoder.layer.0"] * 3 + ["encoder.layer.1"]),
        (["0", "1", "2"], 2, ["all"] * 3),
    ],
)
def test_parts_are_named_by_their_paths(paths, most, names):
    assert name_parts(paths, most) == names


def print_table(plan: ModulePlan, details: PlanDetails) -> str:
    console = Console(width=140)
    with console.capture() as captured:
        console.print(tabulate_module_plan(plan, details))
    return captured.get()


def test_the_table_says_what_every_part_keeps():
    printed = print_table(*make_plan(2))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    assert rows == [
        ["this plan", "9.0 MiB", "yes", "2 kFLOP +5.0%"],
        ["all stored", "14.0 MiB", "no", "2 kFLOP"],
        ["smallest found", "4.0 MiB", "yes", ""],
        ["stem", "1.0 MiB", "", "", ""],
        ["blocks.0", "1.0 MiB", "1.0 MiB", "1 of 2", ""],
        ["blocks.1", "1.0 MiB", "1.0 MiB", "1 of 2", ""],
        ["head", "1.0 MiB", "", "", ""],
    ]
    assert "Backward needs 6.0 MiB of what forward makes. 4.0 MiB are kept." in printed
    assert len(print_table(*make_plan(40)).splitlines()) < 22
