"""`revzoo profile` and `revzoo plan`: what they print is what the model takes when it is run, and mistakes come first."""

import json
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2

import revzoo
import revzoo.planning.batch  # imports `profile`: now, and not while it is replaced
from revzoo.errors import InputError
from revzoo.planning.plan import Plan

BATCH = 4
COUNTED = ("--meta", "--batch", BATCH, "--optimizer", "adamw")
PLANNED = (*COUNTED, "--loss", "sum")


def middle(profile: revzoo.Profile) -> int:
    """Return a budget half way between the smallest peak and that of storing everything."""
    plan = revzoo.solve(profile, "1TB")
    return (plan.min_peak_bytes + plan.no_recompute_peak_bytes) // 2


@pytest.fixture
def counted_once(monkeypatch, profile_of):
    """Let the command have the profile that other tests have of the same model, batch and optimizer."""

    def profile(model, batch, optimizer, loss=None, budget=None, **settings):
        assert (len(batch), type(optimizer).__name__, next(model.parameters()).device.type) == (BATCH, "AdamW", "meta")
        assert not any(settings.values())
        return profile_of(model.spec.name)

    monkeypatch.setattr("revzoo.planning.planner.profile", profile)
    monkeypatch.setattr("revzoo.planning.profiling.profile.profile", profile)


@pytest.mark.parametrize("name", ["rev_vit_digits", "rev_roberta_mini"])
def test_the_saved_plan_takes_what_it_promises(name, file, short, profile_of, tmp_path, run, counted_once):
    """Counted on the meta device, measured on a model that is run, with the optimizer that was named."""
    out = tmp_path / "plan.json"
    budget = middle(profile_of(name))
    printed = run("plan", file(name), *PLANNED, "--budget", budget, "--out", out)
    plan = Plan.load(out)
    model = short(name, "cpu")
    batch = model.example_input(BATCH)
    model.schedule = plan
    measured = revzoo.measure_memory(model, batch, create_optimizer_v2(model, "adamw"))
    assert measured.peak_bytes == plan.peak_bytes <= plan.budget_bytes == budget
    assert measured.optimizer_bytes == profile_of(name).other_bytes > 0
    assert f"Peak {plan.peak_bytes / (1 << 20):.1f} MiB of the budget" in printed
    counts = {mode: str(plan.schedule.count(mode)) for mode in ("store", "selective", "recompute", "invert")}
    (line,) = (line for line in printed.splitlines() if line.startswith("│ all  "))
    assert [cell for cell in line.replace("│", " ").split()[1:] if cell] == [count for count in counts.values() if count != "0"]
    assert f"revzoo.Plan.load({str(out)!r}).apply(model)" in printed.replace("\n", "")


def test_json_is_the_whole_profile(file, run, profile_of):
    printed = json.loads(run("profile", file("rev_vit_digits"), *COUNTED, "--json"))
    assert printed == json.loads(json.dumps(asdict(profile_of("rev_vit_digits"))))
    assert printed["timing"] is None


def test_json_of_a_plan_is_what_the_picture_shows(file, tmp_path, run, profile_of, monkeypatch, counted_once):
    drawn = []
    monkeypatch.setattr("revzoo.display.figures.plan.plot_plan", lambda *arguments: drawn.append(arguments))
    picture, saved = tmp_path / "plan.png", tmp_path / "plan.json"
    budget = middle(profile_of("rev_vit_digits"))
    arguments = (*PLANNED, "--budget", budget, "--solver", "knapsack", "--json", "--plot", picture, "--out", saved)
    printed = json.loads(run("plan", file("rev_vit_digits"), *arguments))
    ((plan, path, points, beside, fixed_bytes),) = drawn
    assert path == picture
    assert Plan.load(saved) == plan == revzoo.solve(profile_of("rev_vit_digits"), budget, "knapsack")
    assert printed == json.loads(
        json.dumps({"plan": asdict(plan), "others": beside, "front": points, "fixed_bytes": fixed_bytes})
    )
    assert fixed_bytes == profile_of("rev_vit_digits").memory.fixed_bytes


def test_the_loss_and_accumulated_gradients_count(file, short, run):
    """Cross-entropy unless another is named; of earlier batches one gradient for each parameter."""

    def plan_peak(*options) -> int:
        printed = run("plan", file("rev_roberta_mini"), "--meta", "--batch", BATCH, "--budget", "1GiB", "--json", *options)
        return json.loads(printed)["plan"]["no_recompute_peak_bytes"]

    def loss(logits):
        logits = logits.flatten(0, -2)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))

    model = short("rev_roberta_mini")
    batch = model.example_input(BATCH)
    with_loss, summed, both = plan_peak(), plan_peak("--loss", "sum"), plan_peak("--accumulate")
    assert with_loss == revzoo.plan(model, batch, "1GiB", loss=loss).no_recompute_peak_bytes
    assert both == revzoo.plan(model, batch, "1GiB", loss=loss, accumulate=True).no_recompute_peak_bytes
    assert summed < with_loss < both


def test_with_look_ahead(file, run):
    printed = run("plan", file("rev_vit_digits"), *PLANNED, "--budget", "1GiB", "--lookahead", 1)
    assert "This plan looks ahead; the other schedules do not." in " ".join(printed.split())


def test_tiles_are_chosen_where_not_everything_can_be_stored(file, refused, monkeypatch):
    def choose_tiles(model, batch, loss):
        raise InputError("Tiles are asked for.")

    monkeypatch.setattr("revzoo.planning.planner.choose_tiles", choose_tiles)
    assert "Tiles are asked for." in refused("plan", file("rev_vit_digits"), *PLANNED, "--budget", "1500KiB", "--tiles", "auto")


def test_on_a_device_seconds_are_measured(file, short, tmp_path, run):
    """And the batch is looked for; the plan of the best one holds when it is run."""
    path, out, picture = file("rev_vit_digits"), tmp_path / "plan.json", tmp_path / "plan.png"
    assert "A training step takes " in run("profile", path, "--device", "cpu", "--batch", 2)
    arguments = ("--device", "cpu", "--batch", "auto:2-4", "--budget", "1GiB", "--plot", picture, "--out", out)
    printed = run("plan", path, *arguments)
    assert "samples a second, measured." in printed
    plan = Plan.load(out)
    model = short("rev_vit_digits", "cpu")
    batch = model.example_input(int(plan.setting.batch[0][1]))
    plan.apply(model, batch)
    assert revzoo.measure_memory(model, batch).peak_bytes == plan.peak_bytes
    assert plan.seconds > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan NAME", "required: --budget"),
        ("plan NAME --budget lots", "Received: 'lots'"),
        ("plan NAME --budget 0", "Received: '0'"),
        ("plan NAME --budget 1GiB --batch auto:0-2", "such as auto:16-256"),
        ("profile NAME --batch auto:2-5", "Received: 'auto:2-5'"),
        ("profile NAME --optimizer adamv", "'adamv'. Did you mean 'adam'?"),
        ("plan NAME --budget 1GiB --plot a.pdf", "--plot a.pdf"),
        ("plan NAME --budget 1GiB --out no/a.json", "There is no folder no"),
        ("plan NAME --budget 1GiB --meta --batch auto:2-4", "a model on the meta"),
        ("plan NAME --budget 1GiB --batch auto:2-4 --tiles auto", "--tiles: for one batch size"),
    ],
)
def test_mistakes_are_refused_before_anything_is_profiled(arguments, message, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("revzoo.planning.planner.profile", None)
    monkeypatch.setattr("revzoo.planning.profiling.profile.profile", None)
    assert message in refused(*arguments.replace("NAME", "rev_vit_digits").split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(refused):
    message = refused("profile", "rev_vit_digits", "--device", "cuda")
    assert "device is one that torch can use here, such as cpu or meta. Received: 'cuda' (" in message


def test_an_optimizer_that_cannot_be_made_says_why(refused, monkeypatch):
    def create_optimizer_v2(*arguments, **settings):
        raise AssertionError("no GPU")

    monkeypatch.setattr("revzoo.training.optimizer.create_optimizer_v2", create_optimizer_v2)
    message = refused("profile", "rev_vit_digits", "--meta", "--optimizer", "adamw")
    assert message == "timm's adamw cannot be made here (AssertionError: no GPU). Try adamw.\n"


def test_a_budget_that_nothing_fits_names_the_smallest_possible(file, refused, run, tmp_path, profile_of, counted_once):
    smallest = revzoo.solve(profile_of("rev_vit_digits"), "1TB").min_peak_bytes
    saved = tmp_path / "plan.json"
    arguments = ("plan", file("rev_vit_digits"), *PLANNED, "--out", saved, "--budget")
    assert f"({smallest} bytes) are needed" in refused(*arguments, smallest - 1)
    assert not saved.exists()
    run(*arguments, smallest)
