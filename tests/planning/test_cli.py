"""`revzoo profile` and `revzoo plan`: what they print is what the model takes when it is run, and mistakes come first."""

import io
import json
from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from rich.console import Console
from timm.optim import create_optimizer_v2

import revzoo
import zoo_cli
from revzoo.display.tables.plan import folded, front, inversion_ratio, others, show_plan, show_profile
from revzoo.format import format_seconds
from revzoo.planning.clock import Times
from revzoo.planning.plan import Plan
from revzoo.planning.profile import Profile
from revzoo.planning.profile import profile as profiled

BATCH = 4
SHORT = {
    "rev_vit_digits": ["stages.0.depth=2"],
    "revnet_digits": ["stages.0.depth=1", "stages.1.depth=1", "stages.2.depth=1"],
    "rev_roberta_mini": ["stages.0.depth=1"],
}
NAMES = list(SHORT)
COUNTED = ("--meta", "--batch", BATCH, "--optimizer", "adamw")


def short(name: str, device: str = "meta") -> revzoo.Model:
    return revzoo.create(name, overrides=SHORT[name], device=device)


@cache
def counted(name: str) -> Profile:
    """Return the profile of a short model that AdamW is to train."""
    model = short(name)
    return profiled(model, model.example_input(BATCH), create_optimizer_v2(model, "adamw"))


@cache
def middle(name: str) -> int:
    """Return a budget half way between the leanest and all stored."""
    plan = revzoo.solve(counted(name), "1TB")
    return (plan.least_bytes + plan.stored_bytes) // 2


@pytest.fixture
def counted_once(monkeypatch):
    """Let the command have the profile of the same model, batch and optimizer that other tests have."""

    def profile(model, batch, optimizer, estimate=False):
        found = counted(model.spec.name)
        assert (len(batch), type(optimizer).__name__, next(model.parameters()).device.type) == (BATCH, "AdamW", "meta")
        return found

    monkeypatch.setattr("revzoo.profile", profile)


@pytest.fixture
def file(tmp_path):
    """Return where the spec of a short model is."""

    def write(name: str) -> str:
        path = tmp_path / f"{name}.yaml"
        path.write_text(short(name).spec.to_yaml())
        return str(path)

    return write


def run(capsys, *arguments: object) -> str:
    assert zoo_cli.main([str(argument) for argument in arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def text_of(what: object) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(what)
    return console.export_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_saved_plan_takes_what_it_promises(name, file, tmp_path, capsys, counted_once):
    """Counted on the meta device, measured on a model that is run, with the optimizer that was named."""
    out = tmp_path / "plan.json"
    arguments = (*COUNTED, "--budget", middle(name), "--out", out)
    printed = run(capsys, "plan", file(name), *arguments)
    plan = Plan.load(out)
    model = short(name, "cpu")
    batch = model.example_input(BATCH)
    model.schedule = plan
    found = revzoo.measure_memory(model, batch, create_optimizer_v2(model, "adamw"))
    assert found.peak_bytes == plan.peak_bytes <= plan.budget_bytes == middle(name)
    assert found.optimizer_bytes == counted(name).other_bytes > 0
    assert f"Peak {plan.peak_bytes / (1 << 20):.1f} MiB of the budget" in printed
    counts = {mode: str(plan.schedule.count(mode)) for mode in ("store", "selective", "recompute", "invert")}
    (line,) = (line for line in printed.splitlines() if line.startswith("│ all  "))
    assert [cell for cell in line.replace("│", " ").split()[1:] if cell] == [count for count in counts.values() if count != "0"]
    assert f"{out}: give it to a model with revzoo.Plan.load({str(out)!r}).apply(model)." in printed.replace("\n", "")


@pytest.mark.parametrize("name", NAMES)
def test_what_a_plan_is_compared_with_is_what_these_schedules_take(name):
    model, profile = short(name), counted(name)
    beside = others(model, profile)
    for label, schedule in (("all stored", "store"), ("all inverted", "invert")):
        model.schedule = schedule
        optimizer = create_optimizer_v2(model, "adamw")
        found = revzoo.measure_memory(model, model.example_input(BATCH), optimizer).peak_bytes
        assert 0 <= beside[label]["peak_bytes"] - found <= 1e-4 * found  # a mask may count with two units
    assert beside["all stored"]["extra_flops"] == 0 < beside["all inverted"]["extra_flops"]


def test_nothing_is_compared_with_inverting_where_nothing_can_be_inverted_safely():
    profile = counted("rev_vit_digits")
    unsafe = replace(profile, counted=replace(profile.counted, max_invert_run=0))
    assert list(others(short("rev_vit_digits"), unsafe)) == ["all stored"]


@pytest.mark.parametrize("name", NAMES)
def test_the_front_goes_from_the_leanest_to_the_fastest(name):
    profile = counted(name)
    plan = revzoo.solve(profile, "1TB")
    points = front(profile, 9)
    assert points[0]["peak_bytes"] == plan.least_bytes
    assert all(before["peak_bytes"] < after["peak_bytes"] for before, after in pairwise(points))
    assert points[-1]["extra_flops"] == 0
    assert points[-1]["peak_bytes"] <= plan.stored_bytes
    step = (plan.stored_bytes - plan.least_bytes) / 8
    peaks = {revzoo.solve(profile, int(plan.least_bytes + step * i)).peak_bytes for i in range(9)}
    assert {point["peak_bytes"] for point in points} == peaks


def test_the_numbers_of_the_table_are_the_profiles(file, capsys, counted_once):
    """Bytes kept by each kind of unit, by hand: streams of BATCH x 16 tokens x 64 channels in float32."""
    printed = run(capsys, "profile", file("rev_vit_digits"), *COUNTED)
    assert f"[{BATCH}, 1, 8, 8] float32" in printed
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in printed.splitlines() if line.startswith("│")}
    assert list(rows) == [
        "stem",
        "stages.0.blocks.0.f",
        "stages.0.blocks.0-1.g",
        "stages.0.blocks.1.f",  # the first f has no step in front of it
        "fuse",
        "head",
    ]
    stream = BATCH * 16 * 64 * 4
    count, _, _, recompute, *_ = (cell.strip() for cell in rows["stages.0.blocks.0.f"])
    assert (count, recompute) == ("1", f"{stream / 1024:.1f} KiB")
    units = {unit.name: unit for unit in counted("rev_vit_digits").counted.units}
    stored = units["stages.0.blocks.1.f"].options[0]
    assert rows["stages.0.blocks.1.f"][1].strip() == f"{(stored.kept_bytes + stream) / 1024:.1f} KiB"
    assert rows["head"][-1].strip() == "-"  # a node cannot be inverted
    assert "extra FLOPs" in printed
    assert "Inverting takes" not in printed
    assert "On the meta device nothing is run" in printed


def test_equal_units_are_folded():
    profile = counted("rev_vit_digits")
    stem, f, g, *_ = profile.counted.units
    eight = [replace(unit, name=f"stages.0.blocks.{i}.{branch}") for i in range(8) for branch, unit in (("f", f), ("g", g))]
    text = text_of(show_profile(replace(profile, counted=replace(profile.counted, units=(stem, *eight)))))
    assert [line.split("│")[1:3] for line in text.splitlines() if "blocks" in line] == [
        [" stages.0.blocks.0-7.f ", "     8 "],
        [" stages.0.blocks.0-7.g ", "     8 "],
    ]


@pytest.mark.parametrize(
    ("names", "together"),
    [
        (["head"], "head"),
        (["stages.2.transition"], "stages.2.transition"),
        (["stages.1.blocks.4.f"], "stages.1.blocks.4.f"),
        ([f"stages.1.blocks.{i}.f" for i in (0, 1, 2, 4)], "stages.1.blocks.0-2,4.f"),
        ([f"steps.{i}" for i in range(0, 20, 2)], "steps.0,2,...,18"),
        (["steps.1", "steps.3"], "steps.1,3"),
    ],
)
def test_names_that_stand_for_many(names, together):
    assert folded(names) == together


def test_seconds_of_the_table_and_the_papers_observation():
    """Inverting takes 1.5, 2, 2 and 4 times the forward of four steps; nodes and the first of a run do not count."""
    profile = counted("rev_vit_digits")
    forward = (0.5, 1e-3, 1e-3, 2e-3, 3e-4, 0.5, 0.5)
    extra = [{"store": 0, "selective": 10, "recompute": 5_000} for _ in forward]
    for k, invert in enumerate((1_500_000, 2_000_000, 4_000_000, 1_200_000), 1):
        extra[k] |= {"invert": invert, "first": 7}
    timed = replace(profile, times=Times(0.25, forward, tuple(extra), 0.125, 16))
    assert inversion_ratio(timed) == 2.0
    text = text_of(show_profile(timed))
    assert "A step takes 250 ms with everything stored." in text
    assert "Median of 16 runs; half of the samples of a unit lie within 12% of their median." in text
    assert "Inverting takes 2.00 of the forward time (the paper assumes 1)." in text
    (line,) = (line for line in text.splitlines() if "stages.0.blocks.1.f" in line)
    assert [cell.strip() for cell in line.split("│")[3:4] + line.split("│")[7:10]] == [
        "2 ms",
        "0.01 us",
        "5 us",
        "4 ms / 0.007 us",
    ]
    assert inversion_ratio(profile) is None


def test_the_plan_beside_others():
    profile = counted("rev_vit_digits")
    plan = replace(revzoo.solve(profile, "1TB"), seconds=1.25, budget_bytes=3 << 20, peak_bytes=1 << 20)
    beside = {
        "all stored": {"peak_bytes": 4 << 20, "seconds": 1.0, "extra_flops": 0},
        "all inverted": {"peak_bytes": 1 << 20, "seconds": 2.0, "extra_flops": 5},
    }
    rows = [
        " ".join(line.replace("│", " ").split()) for line in text_of(show_plan(plan, beside)).splitlines() if " MiB" in line
    ]
    assert rows[:4] == [
        "Peak 1.0 MiB of the budget of 3.0 MiB (33%).",
        "this plan 1.0 MiB yes 1.25 s +25.0% time",
        "all stored 4.0 MiB no 1 s +0.0% time",
        "all inverted 1.0 MiB yes 2 s +100.0% time",
    ]


def test_json_is_the_whole_profile(file, capsys):
    printed = json.loads(run(capsys, "profile", file("rev_vit_digits"), *COUNTED, "--json"))
    assert printed == json.loads(json.dumps(asdict(counted("rev_vit_digits"))))
    assert printed["times"] is None


def test_json_of_a_plan_is_what_the_picture_shows(file, tmp_path, capsys, monkeypatch, counted_once):
    drawn = []
    monkeypatch.setattr("revzoo.display.figures.plan.plot_plan", lambda *arguments: drawn.append(arguments))
    picture, saved = tmp_path / "plan.png", tmp_path / "plan.json"
    budget = middle("rev_vit_digits")
    arguments = (*COUNTED, "--budget", budget, "--json", "--plot", picture, "--out", saved)
    printed = json.loads(run(capsys, "plan", file("rev_vit_digits"), *arguments))
    ((plan, path, points, beside, fixed_bytes),) = drawn
    assert path == picture
    assert Plan.load(saved) == plan
    assert printed == json.loads(
        json.dumps({"plan": asdict(plan), "others": beside, "front": points, "fixed_bytes": fixed_bytes})
    )
    assert fixed_bytes == counted("rev_vit_digits").counted.fixed_bytes


def test_the_knapsack_is_one_option_away(file, capsys, counted_once):
    plan = revzoo.solve(counted("rev_vit_digits"), middle("rev_vit_digits"), "knapsack")
    arguments = (*COUNTED, "--solver", "knapsack", "--budget", middle("rev_vit_digits"), "--json")
    printed = json.loads(run(capsys, "plan", file("rev_vit_digits"), *arguments))
    assert printed["plan"]["solver"] == "knapsack"
    assert tuple(printed["plan"]["schedule"]) == plan.schedule


def test_on_a_device_seconds_are_measured(file, tmp_path, capsys):
    """And the batch is looked for; the plan of the best one holds when it is run."""
    path, out, picture = file("rev_vit_digits"), tmp_path / "plan.json", tmp_path / "plan.png"
    printed = run(capsys, "profile", path, "--device", "cpu", "--batch", 2)
    assert "Inverting takes " in printed
    assert "A step takes " in printed
    arguments = ("--device", "cpu", "--batch", "auto:2-4", "--budget", "1GiB", "--plot", picture, "--out", out)
    printed = run(capsys, "plan", path, *arguments)
    assert "samples a second, as run." in printed
    plan = Plan.load(out)
    model = short("rev_vit_digits", "cpu")
    batch = model.example_input(int(plan.setting.batch[0][1]))
    plan.apply(model, batch)
    assert revzoo.measure_memory(model, batch).peak_bytes == plan.peak_bytes
    assert plan.seconds > 0
    names = ("plan.png", "plan-times.png", "plan-schedules.png")
    assert [(tmp_path / name).read_bytes()[:4] for name in names] == [b"\x89PNG"] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan NAME", "The following arguments are required: --budget. See revzoo plan --help."),
        (
            "plan NAME --budget lots",
            "A budget is bytes, a size such as '8GiB', a share such as '60%', or 'auto'. Received: 'lots'.",
        ),
        (
            "plan NAME --budget 8GiBs",
            "A budget is bytes, a size such as '8GiB', a share such as '60%', or 'auto'. Received: '8GiBs'.",
        ),
        ("plan NAME --budget 120%", "A share of the memory is above 0 % and at most 100 %. Received: '120%'."),
        ("plan NAME --budget 0", "A budget is bytes, a size such as '8GiB', a share such as '60%', or 'auto'. Received: '0'."),
        ("plan NAME --budget 1GiB --batch 0", "Argument --batch: expected an integer from 1 to 10^9. Received: '0'."),
        (
            "plan NAME --budget 1GiB --batch auto",
            "Argument --batch: a range goes from low to high, such as auto:16-256. Received:",
        ),
        ("plan NAME --budget 1GiB --batch auto:2-5 --estimate", "Received: --estimate and a range of batch sizes"),
        ("plan NAME --budget 1GiB --batch auto:5-2", "Argument --batch: a range goes from low to high, such as auto:16-256. "),
        ("plan NAME --budget 1GiB --batch auto:0-2", "Argument --batch: a range goes from low to high, such as auto:16-256. "),
        ("profile NAME --batch auto:2-5", "Argument --batch: expected an integer from 1 to 10^9. Received: 'auto:2-5'."),
        ("plan NAME --budget 1GiB --solver magic", "Argument --solver: invalid choice: 'magic' (choose from 'timeline', "),
        ("plan NAME --budget 1GiB --optimizer adamv", "Unknown optimizer 'adamv'. Did you mean 'adam'? Allowed: adabelief, "),
        ("profile NAME --optimizer adamv", "Unknown optimizer 'adamv'. Did you mean 'adam'? Allowed: adabelief, "),
        (
            "plan NAME --budget 1GiB --plot a.pdf",
            "A picture is written as PNG. Received: --plot a.pdf. Use --plot network.png.",
        ),
        ("plan NAME --budget 1GiB --plot no/a.png", "cannot read or write no/a.png: No such file or directory"),
        ("plan NAME --budget 1GiB --out no/a.json", "cannot read or write no/a.json: No such file or directory"),
        ("plan rev_vit_dgits --budget 1GiB", "Unknown model or spec file 'rev_vit_dgits'. Did you mean 'rev_vit_digits'?"),
        ("profile rev_vit_dgits", "Unknown model or spec file 'rev_vit_dgits'. Did you mean 'rev_vit_digits'?"),
        (
            "plan NAME --budget 1GiB --device nowhere",
            "device is one that torch can use here, such as cpu or meta. Received: 'now",
        ),
        (
            "plan NAME --budget 1GiB --device cpu --meta",
            "Received: --meta and --device cpu. --meta runs on no device: leave one",
        ),
        (
            "plan NAME --budget 1GiB --meta --batch auto:2-4",
            "The best batch is a matter of seconds. Received: a model on the meta",
        ),
        ("profile NAME --dtype int8", "Argument --dtype: invalid choice: 'int8' (choose from 'float64', 'float32', "),
    ],
)
def test_mistakes_are_said_before_anything_is_profiled(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("revzoo.profile", None)
    assert zoo_cli.main(arguments.replace("NAME", "rev_vit_digits").split()) == 2
    out, err = capsys.readouterr()
    assert (out, err[: len(message) + 8]) == ("", f"revzoo: {message}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without CUDA")
def test_a_card_that_is_not_there(capsys):
    assert zoo_cli.main(["profile", "rev_vit_digits", "--device", "cuda"]) == 2
    assert "device is one that torch can use here, such as cpu or meta. Received: 'cuda' (" in capsys.readouterr().err


def test_an_optimizer_that_cannot_be_made_says_why(capsys, monkeypatch):
    def create_optimizer_v2(*arguments, **settings):
        raise AssertionError("no card")

    monkeypatch.setattr("timm.optim.create_optimizer_v2", create_optimizer_v2)
    assert zoo_cli.main(["profile", "rev_vit_digits", "--meta", "--optimizer", "adamw"]) == 2
    expected = "revzoo: timm's adamw cannot be made here (AssertionError: no card). Try adamw.\n"
    assert capsys.readouterr().err == expected


def test_a_budget_that_nothing_fits_names_the_least(file, capsys, tmp_path, counted_once):
    plan = revzoo.solve(counted("rev_vit_digits"), "1TB")
    saved = tmp_path / "plan.json"
    arguments = ["plan", file("rev_vit_digits"), *map(str, COUNTED), "--out", str(saved), "--budget"]
    assert zoo_cli.main([*arguments, str(plan.least_bytes - 1)]) == 2
    assert f"({plan.least_bytes} bytes) are needed" in capsys.readouterr().err
    assert not saved.exists()
    assert zoo_cli.main([*arguments, str(plan.least_bytes)]) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (2.5e-6, "2.5 us"), (9.9999e-4, "1 ms"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (250, "250 s")],
)
def test_seconds_for_people(seconds, text):
    assert format_seconds(seconds) == text
