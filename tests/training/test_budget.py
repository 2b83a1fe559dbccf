"""Training within a budget: the bytes of the real loop, the weights at the end, and what becomes of the plan."""

import json
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from revzoo.errors import BudgetError, PlanError, SpecError
from revzoo.planning import planner
from revzoo.planning.plan import Plan
from revzoo.runtime.live_bytes import LiveBytes
from revzoo.training import epochs, loop
from revzoo.training.budget import apply_plan
from revzoo.training.interrupt import Interrupted, StopSignal
from revzoo.training.options import Recipe
from revzoo.training.planned_step import WholeStep
from revzoo.training.recipe import load_recipe
from revzoo.training.recipe_check import find_ineffective_settings
from revzoo.training.setup import Run, build_run
from zoo_cli import main

VIT = "stem.width=8,stages.0.width=8,stages.0.depth=1,block.f.heads=2,block.drop_path.max=0.2,head.dropout=0.1"
REVNET = ",".join(["stem.width=8", *(f"stages.{i}.width=8,stages.{i}.depth=1" for i in range(3))])
REFORMER = "stem.width=16,stages.0.width=16,stages.0.depth=1,block.f.heads=2,block.f.hashes=1,block.g.chunks=1,input.length=64"
FAST = ["data.batch_size=320", "train.epochs=2", "schedule.warmup_epochs=0"]
# Every kind of loss and batch, and everything that is alive beside them.
SETTINGS = {
    "averaged": ("digits", [*FAST, f"model.overrides=[{VIT}]"]),
    "added up, mixed": (
        "digits",
        [*FAST, f"model.overrides=[{VIT}]", "train.accumulate=2", "mixup={mixup_alpha: 0.8}", "ema=null"],
    ),
    "bf16 and BatchNorm": (
        "digits_revnet",
        [*FAST, f"model.overrides=[{REVNET}]", "train.mixed_precision=bf16", "data.batch_size=16"],
    ),
    "looked ahead": ("digits", [*FAST, f"model.overrides=[{VIT.replace('depth=1', 'depth=2')}]", "memory.lookahead=1"]),
    "updated in backward": (
        "digits",
        [*FAST, f"model.overrides=[{VIT}]", "train.optimizer_in_backward=true", "train.clip_grad=null", "data.batch_size=32"],
    ),
    "bytes": ("text_reformer", [f"model.overrides=[{REFORMER}]", "data.batch_size=32", "train.epochs=1"]),
}
EXACT = {"rev_vit": ("digits", VIT.replace("depth=1", "depth=2")), "revnet": ("digits_revnet", REVNET)}


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
    wide = VIT.replace("width=8", "width=32")
    settings = [*FAST, f"model.overrides=[{wide}]", "data.batch_size=2", "ema=null"]
    settings += ["optimizer.foreach=true", "optimizer.weight_decay_of=all"]  # in one group
    with interrupted_after(updates=3), pytest.raises(Interrupted):
        loop.train(load_recipe("digits", [*settings, "memory.budget=1TiB", "train.clip_grad=null"]), tmp_path / "run")
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert "The peak is at the optimizer's update." in plan.notes
    steps, training, _ = counted[-1]
    assert plan.peak_bytes == plan.min_peak_bytes == plan.no_recompute_peak_bytes
    assert steps < training == plan.peak_bytes - 4  # by then there is no loss divided by the batches of an update
    budget = plan.peak_bytes - 1
    message = rf"at least .*\({plan.peak_bytes} bytes\) are needed, at the optimizer's update\. .* Try foreach=False, or"
    with pytest.raises(BudgetError, match=message):
        loop.train(load_recipe("digits", [*settings, f"memory.budget={budget}"]), tmp_path / "less")


def assert_same_weights(one: Path, other: Path) -> None:
    for name in ("last.safetensors", "best.safetensors"):
        left, right = load_file(one / name), load_file(other / name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_table_counts_the_step_that_is_planned(setting, tmp_path, shown, unmeasured):
    """What stands on one screen is the same number: the peak with everything stored."""
    name, settings = SETTINGS[setting]
    step = WholeStep(build_run(load_recipe(name, [*settings]), tmp_path, resumed=False))
    reports, _ = step.measure_modes()
    assert reports["store"].peak_bytes == step.plan(2**40).no_recompute_peak_bytes


@pytest.mark.parametrize("setting", SETTINGS)
def test_training_takes_what_the_plan_says(setting, tmp_path, counted, unmeasured):
    """The largest step of the real loop is the plan's peak to the byte, and nothing in the loop is above it."""
    name, settings = SETTINGS[setting]
    run = build_run(load_recipe(name, [*settings, "memory.budget=1TiB"]), tmp_path / "wide", resumed=False)
    wide = apply_plan(run)
    budget = (wide.min_peak_bytes + wide.no_recompute_peak_bytes) // 2
    with interrupted_after(updates=3), pytest.raises(Interrupted):
        loop.train(load_recipe(name, [*settings, f"memory.budget={budget}"]), tmp_path / "run")
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert plan.min_peak_bytes <= plan.peak_bytes <= budget == plan.budget_bytes
    steps, training, evaluation = counted[-1]
    assert steps == training == plan.peak_bytes
    assert evaluation < plan.peak_bytes


@pytest.mark.parametrize("family", ["rev_vit", pytest.param("revnet", marks=pytest.mark.slow)])
def test_a_plan_changes_no_weight(family, tmp_path, unmeasured):
    """Everything stored; planned with room for that; planned with less, stopped in the middle, gone on with or without plan."""
    name, overrides = EXACT[family]

    def recipe(*settings: str) -> Recipe:
        return load_recipe(name, [*FAST, f"model.overrides=[{overrides}]", "model.exact=true", *settings])

    loop.train(recipe("model.schedule=store"), tmp_path / "store")
    loop.train(recipe("memory.budget=1TiB"), tmp_path / "wide")
    wide = Plan.load(tmp_path / "wide" / "plan.json")
    assert set(wide.schedule) == {"store"}
    assert_same_weights(tmp_path / "store", tmp_path / "wide")
    narrow = [f"memory.budget={(wide.min_peak_bytes + 2 * wide.no_recompute_peak_bytes) // 3}"]
    with interrupted_after(updates=5), pytest.raises(Interrupted):
        loop.train(recipe(*narrow), tmp_path / "narrow")
    plan = Plan.load(tmp_path / "narrow" / "plan.json")
    assert len(set(plan.schedule)) > 1
    shutil.copytree(tmp_path / "narrow", tmp_path / "anew")
    other("memory.solver=knapsack")(tmp_path / "anew")
    (tmp_path / "anew" / "plan.json").unlink()
    for folder in ("narrow", "anew"):
        loop.resume(tmp_path / folder, accept_changes=folder == "anew")
        assert_same_weights(tmp_path / "store", tmp_path / folder)
    assert Plan.load(tmp_path / "narrow" / "plan.json") == plan
    assert set(Plan.load(tmp_path / "anew" / "plan.json").schedule) == {"store", "invert"}


@contextmanager
def interrupted_after(updates: int) -> Iterator[None]:
    signals = iter([0] * (updates - 1) + [signal.SIGTERM])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopSignal, "watch", lambda self, batches: batches)  # evaluations do not count
        patch.setattr(StopSignal, "poll", lambda self: next(signals))
        yield


def test_planning_leaves_no_trace(tmp_path):
    """With everything measured: not in weights, statistics, gradients, the optimizer, random streams or the folder."""
    settings = ["data.batch_size=16", "ema={decay: 0.9}", "mixup={cutmix_alpha: 1.0}", "memory.budget=60%"]
    overrides = [*FAST, f"model.overrides=[{REVNET}]", *settings]
    run = build_run(load_recipe("digits_revnet", overrides), tmp_path / "run", resumed=False)

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
    assert main(["train", *FAST, f"model.overrides=[{VIT}]", "memory.budget=1MiB", "model.schedule=store"]) == 2
    out, err = capsys.readouterr()
    start, note = out.splitlines()
    assert start.startswith("rev_vit_digits: ")
    assert note == "Note: model.schedule has no effect with memory.budget."
    assert err.startswith("revzoo: No schedule fits 1.0 MiB: at least ")
    assert list(tmp_path.iterdir()) == []
    least = int(err.partition("(")[2].partition(" bytes")[0])
    with pytest.raises(BudgetError, match=f"{least} bytes"):
        loop.train(load_recipe("digits", [*FAST, f"model.overrides=[{VIT}]", f"memory.budget={least - 1}"]), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Path:
    """A run of one epoch within a budget, with measured times; tests change copies of it."""
    folder = tmp_path_factory.mktemp("planned") / "run"
    loop.train(load_recipe("digits", [*FAST, "train.epochs=1", f"model.overrides=[{VIT}]", "memory.budget=3MiB"]), folder)
    return folder


def test_the_plan_is_saved_and_reported(planned, tmp_path, capsys):
    plan = Plan.load(planned / "plan.json")
    assert plan.seconds > 0
    assert sorted(path.name for path in planned.iterdir() if path.suffix == ".json") == ["classes.json", "plan.json"]
    shutil.copytree(planned, tmp_path / "run")
    recipe = load_recipe(planned, ["train.epochs=2"])
    (tmp_path / "run" / "config.yaml").write_text(recipe.to_yaml())
    loop.resume(tmp_path / "run", accept_changes=True)
    assert f"The plan: {plan}\n" in capsys.readouterr().out
    assert Plan.load(tmp_path / "run" / "plan.json") == plan


def edited(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "plan.json"
        facts = json.loads(file.read_text())
        where = facts["setting"]
        file.write_text(json.dumps({**facts, "setting": where | {k: v for k, v in changes.items() if k in where}} | {
            k: v for k, v in changes.items() if k in facts
        }))  # fmt: skip

    return edit


def other(*overrides: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.yaml").write_text(load_recipe(folder, overrides).to_yaml())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            edited(batch=["[160, 1, 8, 8] float32"]),
            r"batch: \[160, 1, 8, 8\] float32 in the plan, \[320, 1, 8, 8\] float32 now\)\. Put back",
        ),
        (other("train.mixed_precision=bf16"), "dtype: float32 in the plan, float32, autocast bfloat16 now"),
        (other("model.exact=true"), "exact: False in the plan, True now"),
        (other("memory.budget=2500KiB"), r"budget: 3\.0 MiB in the plan, 2\.4 MiB now"),
        (edited(device="cuda NVIDIA X"), "device: cuda NVIDIA X in the plan, cpu now"),
        (edited(digest="0" * 64), "hash of the model's parts, sizes and frozen parameters: 0{12} in the plan, "),
        (edited(schedule=["store"] * 5, peak_bytes=1), r"peak: 1 B in the plan, 3\.\d MiB now, which is above the budget"),
    ],
)
def test_a_plan_for_something_else_is_refused(planned, tmp_path, change, reason):
    shutil.copytree(planned, tmp_path / "run")
    change(tmp_path / "run")
    file = tmp_path / "run" / "plan.json"
    run = build_run(load_recipe(tmp_path / "run"), tmp_path / "run", resumed=True)
    with pytest.raises(PlanError, match=rf"^{file} was made for other circumstances \({reason}") as caught:
        apply_plan(run)
    assert f"delete {file} to have it planned again, or start a new run" in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "facts"),
    [
        ("memory.budget=4MiB", {"budget_bytes": 4 << 20}),
        ("memory.solver=knapsack", {"solver": "knapsack"}),
        ("memory.lookahead=1", {"lookahead": 1}),
        ("train.clip_grad=2.0", {}),
    ],
)
def test_a_changed_budget_is_planned_anew(planned, tmp_path, setting, facts, unmeasured):
    """What no plan depends on leaves the plan, whose times were measured."""
    shutil.copytree(planned, tmp_path / "run")
    before = Plan.load(planned / "plan.json")
    loop.resume(tmp_path / "run", [setting])
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert (plan == before) == (not facts)
    asked = {name: getattr(before, name) for name in ("budget_bytes", "solver", "lookahead")} | facts
    assert {name: getattr(plan, name) for name in asked} == asked
    loop.resume(tmp_path / "run")  # with the plan that was saved
    assert Plan.load(tmp_path / "run" / "plan.json") == plan


def test_a_damaged_plan_is_refused(planned, tmp_path):
    shutil.copytree(planned, tmp_path / "run")
    file = tmp_path / "run" / "plan.json"
    file.write_text("{")
    run = build_run(load_recipe(tmp_path / "run"), tmp_path / "run", resumed=True)
    with pytest.raises(PlanError, match=f"^{file} is not a saved plan .* Put back .* delete {file} to have it planned again"):
        apply_plan(run)


@pytest.mark.parametrize("budget", ["8GiB", "1.5MB", "60%", "100 %", "auto", "24000000", "2e9", "null"])
def test_budgets(budget, tmp_path):
    recipe = load_recipe("digits", [f"memory.budget={budget}"])
    (tmp_path / "config.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path).memory == recipe.memory


@pytest.mark.parametrize("budget", ["8GB8", "8 gigs", "120%", "0", "-3", "true", "[1]", "all", "''", ".nan"])
def test_nonsense_budgets(budget):
    with pytest.raises(SpecError) as caught:
        load_recipe("digits", [f"memory.budget={budget}", "train.epochs=0"])
    problems = {problem.path: problem for problem in caught.value.problems}
    assert problems.keys() == {"memory.budget", "train.epochs"}
    assert problems["memory.budget"].allowed == "null or bytes, a size such as '8GiB', a share such as '60%', or 'auto'"


def test_settings_of_memory_without_effect():
    assert find_ineffective_settings(load_recipe("digits", ["memory.budget=1GiB", "memory.solver=knapsack"])) == []
    assert find_ineffective_settings(load_recipe("digits", ["memory.budget=1GiB", "model.schedule=store"])) == [
        "model.schedule has no effect with memory.budget"
    ]


@pytest.mark.parametrize(("lookahead", "said"), [("1", "during the gradient"), ("0", "")])
def test_look_ahead_without_a_budget_is_the_recipes(lookahead, said, tmp_path, capsys):
    run = build_run(load_recipe("digits", [*FAST, f"memory.lookahead={lookahead}"]), tmp_path / "run", resumed=False)
    assert apply_plan(run) is None
    assert str(run.model.lookahead) == lookahead
    loop._print_plan(run, None)
    printed = capsys.readouterr().out
    assert said in printed
    assert printed.count("Look-ahead: ") == bool(said)
