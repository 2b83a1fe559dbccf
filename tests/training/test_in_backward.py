"""An optimizer inside backward: weights and state are those of an ordinary one, bit for bit; what needs more is refused."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import revzoo
from revzoo.analysis.step_memory import measure_modes
from revzoo.errors import InputError, SpecError
from revzoo.runtime.schedule import MODES
from revzoo.training import epochs, loop
from revzoo.training.in_backward import update_in_backward
from revzoo.training.optimizer import make_optimizer
from revzoo.training.options import Recipe
from revzoo.training.recipe import load_recipe
from revzoo.training.recipe_check import UPDATE_ONE_BY_ONE
from revzoo.training.setup import build_run

VIT = "stem.width=8,stages.0.width=8,stages.0.depth=2,block.f.heads=2,block.drop_path.max=0.2,head.dropout=0.1"
REVNET = ",".join(["stem.width=8", *(f"stages.{i}.width=8,stages.{i}.depth=1" for i in range(3))])
REFORMER = "stem.width=16,stages.0.width=16,stages.0.depth=1,block.f.heads=2,block.f.hashes=1,block.g.chunks=1,input.length=64"
ROBERTA = "stem.width=16,stages.0.width=16,stages.0.depth=1,block.f.heads=2,input.length=32"
FAST = ["data.batch_size=320", "train.epochs=1", "schedule.warmup_epochs=0", "train.clip_grad=null", "train.accumulate=1"]
INSIDE = "train.optimizer_in_backward=true"


def small(name: str, overrides: str, *settings: str) -> Recipe:
    return load_recipe(name, [*FAST, f"model.overrides=[{overrides}]", *settings])


@pytest.fixture
def assert_same_run(read_state) -> Callable[[Path, Path], None]:
    """Return a function that compares the weights of two runs, and of the newest states the optimizers'."""

    def compare(one: Path, other: Path) -> None:
        left, right = load_file(one / "last.safetensors"), load_file(other / "last.safetensors")
        assert left.keys() == right.keys()
        assert [key for key in left if not torch.equal(left[key], right[key])] == []
        left, right = (read_state(sorted((run / "state").glob("0*"))[-1]) for run in (one, other))
        assert left.keys() == right.keys()
        assert left.pop("settings") == right.pop("settings")
        assert [key for key in left if not torch.equal(left[key], right[key])] == []

    return compare


@pytest.mark.parametrize("mode", MODES)
def test_training_is_the_same_in_every_mode(mode, tmp_path, assert_same_run):
    for name, settings in (("ordinary", []), ("inside", [INSIDE])):
        loop.train(small("digits", VIT, f"model.schedule={mode}", *settings), tmp_path / name)
    assert_same_run(tmp_path / "ordinary", tmp_path / "inside")


@pytest.mark.parametrize(
    ("recipe", "overrides", "settings"),
    [
        ("digits", VIT, ["optimizer.layer_decay=0.5", "train.freeze=[stem]", "ema={decay: 0.9}", "train.mixed_precision=bf16"]),
        ("digits", VIT, ["optimizer.opt=sgd", "optimizer.momentum=0.9", "model.exact=true", "optimizer.foreach=true"]),
        ("digits_revnet", REVNET, ["schedule.sched=cosine"]),
        pytest.param("digits_revnext", "stages.1.depth=1", [], marks=pytest.mark.slow),
        pytest.param("text_reformer", REFORMER, ["data.batch_size=256"], marks=pytest.mark.slow),
        pytest.param("text_roberta", ROBERTA, ["data.batch_size=128"], marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_training_is_the_same_whatever_is_set(recipe, overrides, settings, tmp_path, assert_same_run):
    """Also with frozen parts, groups of several learning rates, averaged weights, BatchNorm and tied embeddings."""
    for name, more in (("ordinary", []), ("inside", [INSIDE])):
        loop.train(small(recipe, overrides, *settings, *more), tmp_path / name)
    assert_same_run(tmp_path / "ordinary", tmp_path / "inside")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_training_is_the_same_with_compiled_steps(tmp_path, monkeypatch, assert_same_run):
    monkeypatch.setattr(epochs, "compile_steps", partial(revzoo.compile_steps, backend="aot_eager"))
    modes = "model.schedule=[store,selective,invert,recompute,invert,store,store]"
    for name, more in (("ordinary", []), ("inside", [INSIDE])):
        torch.compiler.reset()
        loop.train(small("digits", VIT, modes, "train.compile=true", *more), tmp_path / name)
    assert_same_run(tmp_path / "ordinary", tmp_path / "inside")


def test_the_state_of_the_one_is_that_of_the_other(tmp_path, assert_same_run):
    """Begun in the one way, extended in the other."""
    constant = "schedule.sched=constant"
    loop.train(small("digits", VIT, constant, "train.epochs=2"), tmp_path / "ordinary")
    loop.train(small("digits", VIT, constant), tmp_path / "turned")
    loop.resume(tmp_path / "turned", ["train.epochs=2", INSIDE])
    assert_same_run(tmp_path / "ordinary", tmp_path / "turned")
    loop.resume(tmp_path / "turned", ["train.epochs=3", "train.optimizer_in_backward=false"])
    loop.resume(tmp_path / "ordinary", ["train.epochs=3"])
    assert_same_run(tmp_path / "ordinary", tmp_path / "turned")


def test_gradients_are_gone_after_backward():
    """All but that of a weight that the last call may still need."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    unused = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": [unused], "lr": 1.0}])
    groups = optimizer.param_groups
    before = [p.detach().clone() for p in model.parameters()]
    with update_in_backward(optimizer):
        model(torch.randn(3, 4)).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        assert not any(map(torch.equal, model.parameters(), before))
    assert optimizer.param_groups is groups
    assert list(optimizer.state) == list(model.parameters())[::-1]
    assert [state["step"] for state in optimizer.state.values()] == [1] * 4
    model(torch.randn(3, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_table_knows_that_gradients_are_not_kept():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    weight, optimizer = 4 * 64 * 64, torch.optim.AdamW(model.parameters(), foreach=True)
    kept, freed = (
        measure_modes(model, torch.randn(2, 64), optimizer, in_backward=each)[0]["as it is"] for each in (False, True)
    )
    assert kept.gradient_bytes == 8 * weight
    assert kept.update_bytes == 8 * weight
    assert kept.peak_bytes == 8 * (weight + weight + 2 * weight + 4 + weight) + kept.batch_bytes + 4  # the loss
    assert freed.gradient_bytes == freed.update_bytes == 0
    assert freed.optimizer_bytes == kept.optimizer_bytes
    # A gradient and as much for its update, beside the outputs of all layers but the last, the loss and its gradient.
    assert freed.activation_bytes == 2 * weight + 7 * freed.batch_bytes + 8
    assert freed.peak_bytes == 8 * (weight + 2 * weight + 4) + freed.batch_bytes + freed.activation_bytes


@pytest.mark.parametrize("opt", UPDATE_ONE_BY_ONE)
def test_optimizers_that_update_each_parameter_alone(opt):
    """They are tried out with a few small parameters, together and one after the other."""
    torch.manual_seed(0)
    together = nn.ParameterList([torch.randn(shape) for shape in ((3,), (4, 3), (2, 3, 2, 2))])
    apart = copy.deepcopy(together)
    first, second = (make_optimizer(parameters, opt, 0.1, 0.1) for parameters in (together, apart))
    for _ in range(8):
        gradients = [torch.randn(p.shape) for p in together]
        for p, gradient in zip(together, gradients, strict=True):
            p.grad = gradient.clone()
        first.step()
        with update_in_backward(second):
            torch.autograd.backward(list(apart), gradients)
        second.step()
        second.zero_grad()
    assert all(map(torch.equal, together, apart))


@pytest.mark.parametrize(
    ("setting", "path", "allowed"),
    [
        ("train.accumulate=2", "train.accumulate", "1 with train.optimizer_in_backward"),
        ("train.clip_grad=1.0", "train.clip_grad", "null with train.optimizer_in_backward"),
        ("train.mixed_precision=fp16", "train.mixed_precision", "bf16 or 'no' with train.optimizer_in_backward"),
        ("memory.lookahead=1", "memory.lookahead", "0 with train.optimizer_in_backward"),
        ("optimizer.opt=lamb", "optimizer.opt", "adadelta, adagrad"),
    ],
)
def test_what_needs_all_gradients_is_refused(setting, path, allowed):
    with pytest.raises(SpecError) as caught:
        small("digits", VIT, INSIDE, setting)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert problem.allowed.startswith(allowed)


def test_the_kind_of_update_is_the_optimizers(tmp_path):
    run = build_run(small("digits", VIT, "optimizer.foreach=false", "optimizer.fused=true"), tmp_path / "run", resumed=False)
    assert {(group["foreach"], group["fused"]) for group in run.optimizer.param_groups} == {(False, True)}


def test_another_kind_of_update_is_not_taken_up(tmp_path):
    """A state holds it, so it would have no effect."""
    loop.train(small("digits", VIT), tmp_path / "run")
    with pytest.raises(InputError, match=r"cannot change optimizer\.fused\. Put that back"):
        loop.resume(tmp_path / "run", ["optimizer.fused=true"])
