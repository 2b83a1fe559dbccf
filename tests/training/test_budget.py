"""Training within a budget: the bytes of the real loop, the weights at the end, and what becomes of the plan."""

import json
import random
import shutil
from functools import partial
from itertools import accumulate, islice
from pathlib import Path

import numpy as np
import pytest
import torch

from revzoo.errors import BudgetError, PlanError, SpecError
from revzoo.planning import budget, planner
from revzoo.planning.plan import Plan
from revzoo.runtime.live_bytes import LiveBytes
from revzoo.training import epochs, loop
from revzoo.training.interrupt import StopSignal
from revzoo.training.planned_step import PlannedStep
from revzoo.training.recipe import load_recipe
from revzoo.training.run import Run
from revzoo.training.run_plan import apply_plan
from revzoo.training.setup import build_run
from tests.training.runs import CONSTANT, FAST, SMALL, assert_same_weights, interrupted, make_recipe
from zoo_cli import main

STAGE = "{depth: 1, width: 8, transition: {type: residual_pair, layout: basic, preactivate: false, momentum: 0.1}}"
REVNET = f"model.overrides=[stem.width=8,'stages=[{STAGE}]',expect=null]"
REFORMER = "stem.width=16,stages.0.width=16,stages.0.depth=1,block.f.heads=2,block.f.hashes=1,input.length=64"
# Every kind of loss and batch, and everything that is alive beside them.
SETTINGS = {
    "added up, mixed": ("digits", ["train.accumulate=2", "mixup={mixup_alpha: 0.8}", "ema=null"]),
    "bf16 and BatchNorm": ("digits_revnet", [REVNET, "train.mixed_precision=bf16", "data.batch_size=16"]),
    "looked ahead": ("digits", [f"model.overrides=[{SMALL},stages.0.depth=2]", "memory.lookahead=1"]),
    "updated in backward": ("digits", ["train.optimizer_in_backward=true", "train.clip_grad=null", "data.batch_size=32"]),
    "bytes": ("text_reformer", [f"model.overrides=[{REFORMER}]", "data.batch_size=32"]),
}

MOMENTUM = f"model.overrides=[{SMALL},stages.0.depth=4,'block.coupling={{type: momentum, m: 0.9}}']"


@pytest.fixture
def unmeasured(monkeypatch) -> None:
    """Costs are counted: a plan then follows from model and budget alone, and is made sooner."""
    monkeypatch.setattr(planner, "profile", partial(planner.profile, run=False))
    monkeypatch.setattr(planner, "_time_step", lambda model, batch, plan, loss: plan)


@pytest.fixture
def counted(monkeypatch) -> list[tuple[int, int, int]]:
    """Count the bytes of training and evaluation; get a triple an epoch: most in a step, in all of training, in evaluation."""
    counts, train_epoch = [], epochs.train_epoch

    def count(run: Run, epoch: int, stop: StopSignal) -> int:
        live, steps = LiveBytes(), []
        live.watch(
            [run.model.parameters(), run.model.buffers(), [p.grad for p in run.model.parameters() if p.grad is not None]]
        )
        live.watch([] if run.ema is None else [run.ema.module.parameters(), run.ema.module.buffers()])
        live.watch(run.optimizer.state_dict()["state"].values())
        examples = live.watch(t for t in vars(run.data._examples).values() if isinstance(t, torch.Tensor))
        hook = run.model.register_forward_pre_hook(lambda *_: steps.append([live.now()]))
        backward = run.accelerator.backward

        def to_the_end(loss):
            backward(loss)
            steps[-1].append(live.now())

        with monkeypatch.context() as patch, live:
            patch.setattr(run.accelerator, "backward", to_the_end)
            signum = train_epoch(run, epoch, stop)
        hook.remove()
        trained = live.now()
        with live:
            epochs.evaluate(run.evaluated, islice(run.data.test, 1), run.accelerator)
        bytes_ = list(accumulate(0 if storage in examples else change for storage, change in live.log))
        highest = max(max(bytes_[start : end + 1]) for start, end in steps)
        counts.append((highest, max(bytes_[:trained]), max(bytes_[trained:])))
        return signum

    monkeypatch.setattr(epochs, "train_epoch", count)
    return counts


def test_the_update_may_be_the_peak(tmp_path, counted, unmeasured):
    """Of a small batch; the real loop takes at its update what the plan says, to the byte, and less is refused."""
    settings = [f"model.overrides=[{SMALL.replace('width=8', 'width=32')}]", "data.batch_size=2", "ema=null"]
    settings += ["optimizer.foreach=true", "optimizer.weight_decay_of=all"]  # in one group
    with interrupted(3):
        loop.train(make_recipe(*CONSTANT, *settings, "memory.budget=1TiB", "train.clip_grad=null"), tmp_path / "run")
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert "The peak is at the optimizer's update." in plan.notes
    steps, training, _ = counted[-1]
    assert plan.peak_bytes == plan.min_peak_bytes == plan.no_recompute_peak_bytes
    assert steps < training == plan.peak_bytes - 4  # by then there is no loss divided by the batches of an update
    budget = plan.peak_bytes - 1
    message = rf"at least .*\({plan.peak_bytes} bytes\) are needed, at the optimizer's update\. .* Try foreach=False, or"
    with pytest.raises(BudgetError, match=message):
        loop.train(make_recipe(*settings, f"memory.budget={budget}"), tmp_path / "less")


@pytest.mark.parametrize("setting", SETTINGS)
def test_training_takes_what_the_plan_says(setting, tmp_path, shown, counted, unmeasured):
    """The largest step of the real loop is the plan's peak to the byte, nothing else is above it, and the table agrees."""
    name, settings = SETTINGS[setting]
    settings = [*FAST, *CONSTANT, *settings]
    step = PlannedStep(build_run(load_recipe(name, settings), tmp_path / "wide", resumed=False))
    wide = step.plan(2**40)
    assert step.measure_modes()[0]["store"].peak_bytes == wide.no_recompute_peak_bytes
    budget = (wide.min_peak_bytes + wide.no_recompute_peak_bytes) // 2
    with interrupted(5):  # the peak of accumulation is in the second epoch
        loop.train(load_recipe(name, [*settings, f"memory.budget={budget}"]), tmp_path / "run")
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert plan.min_peak_bytes <= plan.peak_bytes <= budget == plan.budget_bytes
    steps, training, evaluation = counted[-1]
    assert steps == training == plan.peak_bytes
    assert evaluation < plan.peak_bytes


def test_planned_tiles_take_what_the_plan_says_and_go_on(tmp_path, counted, unmeasured):
    settings = [*CONSTANT, "model.tiles=auto", "data.batch_size=64", "train.epochs=1"]
    run = build_run(make_recipe(*settings, "memory.budget=1TiB"), tmp_path / "wide", resumed=False)
    budget = PlannedStep(run).plan(2**40).min_peak_bytes - 1
    with interrupted(3):
        loop.train(make_recipe(*settings, f"memory.budget={budget}"), tmp_path / "run")
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert max(plan.setting.tiles) > 1
    assert counted[-1][0] == plan.peak_bytes <= budget
    loop.resume(tmp_path / "run")
    assert counted[-1][0] == plan.peak_bytes
    assert Plan.load(tmp_path / "run" / "plan.json") == plan


def test_a_plan_changes_no_weight(tmp_path, unmeasured):
    """Everything stored, and planned with less, stopped in the middle and gone on with."""
    exact = ["model.exact=true", *CONSTANT]
    loop.train(make_recipe(*exact, "model.schedule=store"), tmp_path / "store")
    with interrupted(3):
        loop.train(make_recipe(*exact, "memory.budget=3000KiB"), tmp_path / "run")
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert set(plan.schedule) > {"store"}
    loop.resume(tmp_path / "run")
    assert Plan.load(tmp_path / "run" / "plan.json") == plan
    assert_same_weights(tmp_path / "store", tmp_path / "run")


def test_planning_leaves_no_trace(tmp_path):
    """With everything measured: not in weights, statistics, gradients, the optimizer, random streams or the folder."""
    settings = ["data.batch_size=16", "ema={decay: 0.9}", "mixup={cutmix_alpha: 1.0}", "memory.budget=700KiB"]
    run = build_run(load_recipe("digits_revnet", [REVNET, *settings]), tmp_path / "run", resumed=False)

    def snapshot() -> tuple:
        states = {**run.model.state_dict(), **{f"ema.{key}": t for key, t in run.ema.module.state_dict().items()}}
        return (
            {key: t.clone() for key, t in states.items()},
            [torch.get_rng_state(), torch.tensor(np.random.get_state()[1].astype(np.int64))],
            random.getstate(),
            [(p.grad, p.requires_grad, len(p._backward_hooks or ())) for p in run.model.parameters()],
            [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in run.model.modules()],
            dict(run.optimizer.state),
        )

    (states, streams, *others), plan = snapshot(), apply_plan(run)
    states_after, streams_after, *others_after = snapshot()
    assert all(torch.equal(t, states_after[key]) for key, t in states.items())
    assert all(map(torch.equal, streams, streams_after))
    assert others == others_after
    assert plan.seconds > 0
    assert run.model.schedule == list(plan.schedule)
    assert not run.folder.path.exists()


def test_a_budget_below_the_minimum_leaves_no_folder(tmp_path, monkeypatch, capsys, unmeasured):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *FAST, "memory.budget=1MiB", "model.schedule=store"]) == 2
    out, err = capsys.readouterr()
    start, note = out.splitlines()
    assert start.startswith("rev_vit_digits: ")
    assert note == "Note: model.schedule has no effect with memory.budget."
    assert err.startswith("revzoo: No schedule fits 1.0 MiB: at least ")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Path:
    """A run of one epoch within a budget, with measured times; tests change copies of it."""
    folder = tmp_path_factory.mktemp("planned") / "run"
    loop.train(make_recipe(*CONSTANT, "train.epochs=1", "memory.budget=3MiB"), folder)
    return folder


@pytest.fixture
def copy(planned, tmp_path) -> Path:
    return Path(shutil.copytree(planned, tmp_path / "run"))


def test_the_plan_is_saved_and_reported(planned, copy, capsys):
    plan = Plan.load(planned / "plan.json")
    assert plan.seconds > 0
    assert sorted(path.name for path in planned.iterdir() if path.suffix == ".json") == ["classes.json", "plan.json"]
    loop.resume(copy, ["train.clip_grad=2.0"])  # no plan depends on it
    assert f"The plan: {plan}\n" in capsys.readouterr().out
    assert Plan.load(copy / "plan.json") == plan


def edit(folder: Path, setting: dict[str, object], **changes: object) -> None:
    file = folder / "plan.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, **changes, "setting": {**facts["setting"], **setting}}))


@pytest.mark.parametrize(
    ("setting", "changes", "override", "reason"),
    [
        ({"batch": ["[160, 1, 8, 8] float32"]}, {}, "train.seed=0", r"batch: \[160, .* the plan, \[320, .* now\)\. Put back"),
        ({}, {}, "memory.budget=2500KiB", r"budget: 3\.0 MiB in the plan, 2\.4 MiB now"),
        ({}, {"schedule": ["store"] * 5, "peak_bytes": 1}, "train.seed=0", r"peak: 1 B in the plan, .* is above the budget"),
    ],
)
def test_a_plan_for_something_else_is_refused(copy, setting, changes, override, reason):
    edit(copy, setting, **changes)
    file = copy / "plan.json"
    run = build_run(load_recipe(copy, [override]), copy, resumed=True)
    with pytest.raises(PlanError, match=rf"^{file} was made for other circumstances \({reason}") as caught:
        apply_plan(run)
    assert f"delete {file} to have it planned again, or start a new run" in str(caught.value)


def test_a_damaged_plan_is_refused(copy):
    file = copy / "plan.json"
    file.write_text("{")
    run = build_run(load_recipe(copy), copy, resumed=True)
    with pytest.raises(PlanError, match=f"^{file} is not a saved plan .* Put back .* delete {file} to have it planned again"):
        apply_plan(run)


def test_a_changed_budget_is_planned_anew(copy, unmeasured):
    loop.resume(copy, ["memory.budget=4MiB", "memory.solver=knapsack"])
    plan = Plan.load(copy / "plan.json")
    assert (plan.budget_bytes, plan.solver, plan.lookahead) == (4 << 20, "knapsack", 0)
    loop.resume(copy)  # with the plan that was saved
    assert Plan.load(copy / "plan.json") == plan


@pytest.mark.parametrize("budget", ["8GiB", "100 %", "auto", "24000000", "2e9", "null"])
def test_budgets(budget, tmp_path):
    recipe = load_recipe("digits", [f"memory.budget={budget}"])
    (tmp_path / "config.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path).memory == recipe.memory


@pytest.mark.parametrize("budget", ["8 gigs", "120%", "0", "true", "[1]", "''", ".nan"])
def test_nonsense_budgets(budget):
    with pytest.raises(SpecError) as caught:
        load_recipe("digits", [f"memory.budget={budget}", "train.epochs=0"])
    problems = {problem.path: problem for problem in caught.value.problems}
    assert problems.keys() == {"memory.budget", "train.epochs"}
    assert problems["memory.budget"].allowed == "null or bytes, a size such as '8GiB', a share such as '60%', or 'auto'"


@pytest.mark.parametrize(("lookahead", "said"), [("1", "during the gradient"), ("0", "")])
def test_look_ahead_without_a_budget_is_the_recipes(lookahead, said, tmp_path, capsys):
    run = build_run(make_recipe(f"memory.lookahead={lookahead}"), tmp_path / "run", resumed=False)
    assert apply_plan(run) is None
    assert str(run.model.lookahead) == lookahead
    loop._print_plan(run, None)
    printed = capsys.readouterr().out
    assert said in printed
    assert printed.count("Look-ahead: ") == bool(said)


@pytest.mark.parametrize(
    ("more", "offered"),
    [
        ([], r"free\. What fits: memory\.budget=auto, or data\.batch_size="),
        (
            ["mixup={mixup_alpha: 0.8}", "data.batch_size=1440"],
            r"free\. What fits: memory.budget=auto, or data.batch_size=\d+[02468]\.",
        ),
        (["coupling={m: [0.9, 0.5]}", MOMENTUM], r"free\. What fits: data\.batch_size="),
    ],
)
def test_a_step_that_does_not_fit_is_refused_with_what_does(more, offered, tmp_path, shown, monkeypatch):
    """What the error names trains; nothing is left of the run that was refused."""
    monkeypatch.chdir(tmp_path)
    settings = ["model.schedule=store", "data.batch_size=1442", f"model.overrides=[{SMALL},stages.0.depth=4]", *more]
    monkeypatch.setattr(budget, "_read_memory", lambda device: (40 * 2**20, 80 * 2**20))
    with pytest.raises(BudgetError, match=rf"14\d\d examples takes .* MiB, and .* are {offered}") as refused:
        loop.train(make_recipe(*settings))
    assert list(tmp_path.iterdir()) == []
    for setting in str(refused.value).partition("What fits: ")[2].rstrip(".").split(", or "):
        loop.preview(make_recipe(*settings, setting))


def test_a_resumed_run_that_does_not_fit_is_refused(finished, tmp_path, shown, monkeypatch):
    monkeypatch.setattr(budget, "_read_memory", lambda device: (2**20, 2**20))
    with pytest.raises(BudgetError, match=r"320 examples takes .*, or a new run with data\.batch_size=\d|fits: a new run with"):
        loop.resume(shutil.copytree(finished, tmp_path / "run"), ["train.epochs=2"], accept_changes=True)


def test_memory_that_runs_out_is_answered_in_the_same_way(tmp_path, monkeypatch):
    def fail(run, *_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(epochs, "train_batch", fail)
    with pytest.raises(
        BudgetError, match=r"takes .*, and memory ran out \(CUDA out of memory\). What fits: .*data.batch_size=\d"
    ):
        loop.train(make_recipe("model.schedule=store"), tmp_path / "run")
