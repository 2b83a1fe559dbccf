"""The tables of profiles and plans."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

import revzoo
from revzoo.display.tables.plan import tabulate_plan
from revzoo.display.tables.profile import fold_names, tabulate_profile
from revzoo.planning.comparison import inversion_ratio
from revzoo.planning.profiling.timing import Timing


@pytest.fixture(scope="module")
def profile() -> revzoo.Profile:
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=2"], device="meta")
    return revzoo.profile(model, model.example_input(4))


def text_of(renderable: object) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_equal_units_are_folded(profile):
    stem, f, g, *_ = profile.memory.units
    eight = [replace(unit, name=f"stages.0.blocks.{i}.{branch}") for i in range(8) for branch, unit in (("f", f), ("g", g))]
    text = text_of(tabulate_profile(replace(profile, memory=replace(profile.memory, units=(stem, *eight)))))
    rows = [line.split()[:2] for line in text.splitlines() if "blocks" in line]
    assert rows[:2] == [["stages.0.blocks.0-7.f", "8"], ["stages.0.blocks.0-7.g", "8"]]


@pytest.mark.parametrize(
    ("names", "together"),
    [
        (["head"], "head"),
        (["stages.1.blocks.4.f"], "stages.1.blocks.4.f"),
        ([f"stages.1.blocks.{i}.f" for i in (0, 1, 2, 4)], "stages.1.blocks.0-2,4.f"),
        ([f"steps.{i}" for i in range(0, 8, 2)], "steps.0,2,4,6"),
    ],
)
def test_names_that_stand_for_many(names, together):
    assert fold_names(names) == together


def test_seconds_of_the_table_and_the_papers_observation(profile):
    """Inverting takes 1.5, 2, 2 and 4 times the forward of four steps; nodes and the first of a run do not count."""
    forward = (0.5, 1e-3, 1e-3, 2e-3, 3e-4, 0.5, 0.5)
    extra = [{"store": 0, "selective": 10, "recompute": 5_000} for _ in forward]
    for k, invert in enumerate((1_500_000, 2_000_000, 4_000_000, 1_200_000), 1):
        extra[k] |= {"invert": invert, "first": 7}
    timed = replace(profile, timing=Timing(0.25, forward, tuple(extra), 0.125, 16))
    assert inversion_ratio(timed) == 2.0
    text = text_of(tabulate_profile(timed))
    assert "A training step takes 250 ms with everything stored." in text
    assert "Medians of 16 runs, which would differ by 12.5% if measured again (standard error)." in text
    assert "Inverting a step takes 2.00 times as long as its forward." in text
    kept, extra = (line.split() for line in text.splitlines() if "stages.0.blocks.1.f" in line)
    assert kept[2:4] == ["2", "ms"]
    assert kept[-2:] == ["16.0", "KiB"]  # by mode recompute: a stream of 4 x 16 tokens x 64 channels in float32
    assert extra[1:] == ["0.01", "us", "5", "us", "4", "ms", "/", "0.007", "us"]
    assert inversion_ratio(profile) is None


def test_the_plan_beside_others(profile):
    plan = replace(revzoo.solve(profile, "1TB"), seconds=1.25, budget_bytes=3 << 20, peak_bytes=1 << 20)
    beside = {
        "all stored": {"peak_bytes": 4 << 20, "seconds": 1.0, "extra_flops": 0},
        "all inverted": {"peak_bytes": 1 << 20, "seconds": 2.0, "extra_flops": 5},
    }
    rows = [
        " ".join(line.replace("│", " ").split()) for line in text_of(tabulate_plan(plan, beside)).splitlines() if " MiB" in line
    ]
    assert rows[:4] == [
        "Peak 1.0 MiB of the budget of 3.0 MiB (33%).",
        "this plan 1.0 MiB yes 1.25 s +25.0% time",
        "all stored 4.0 MiB no 1 s +0.0% time",
        "all inverted 1.0 MiB yes 2 s +100.0% time",
    ]
