"""An optimizer inside backward: weights and state are those of an ordinary one, bit for bit; what needs more is refused."""

import copy

import pytest
import torch
from torch import nn

from revzoo.analysis.step_memory import measure_modes
from revzoo.errors import InputError
from revzoo.training import loop
from revzoo.training.in_backward import update_in_backward
from revzoo.training.optimizer import make_optimizer
from revzoo.training.recipe import load_recipe
from revzoo.training.recipe_check import UPDATE_ONE_BY_ONE
from tests.training.runs import CONSTANT, FAST, SMALL, assert_same_run

ROBERTA = "stem.width=16,stages.0.width=16,stages.0.depth=1,block.f.heads=2,input.length=32"
INSIDE = "train.optimizer_in_backward=true"
DEEP = [f"model.overrides=[{SMALL},stages.0.depth=2]", "model.schedule=[store,selective,invert,recompute,invert,store,store]"]
PLAIN = ["train.epochs=1", "train.clip_grad=null", "train.accumulate=1"]


@pytest.fixture
def assert_same_run_and_state(read_state):
    """Return a function that compares two runs, and of their newest states the optimizers' too."""

    def compare(one, other):
        assert_same_run(one, other)
        left, right = read_state(one), read_state(other)
        assert left.keys() == right.keys()
        assert left.pop("settings") == right.pop("settings")
        assert [key for key in left if not torch.equal(left[key], right[key])] == []

    return compare


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("digits", ["optimizer.layer_decay=0.5", "train.freeze=[stem]", "ema={decay: 0.9}", "train.mixed_precision=bf16"]),
        ("digits", ["optimizer={opt: sgd, lr: 0.1, momentum: 0.9, foreach: true}", "model.exact=true", *DEEP]),
        ("text_roberta", ["data.batch_size=400", f"model.overrides=[{ROBERTA}]"]),
    ],
    ids=["groups, frozen parts, averages, bf16", "modes, exact arithmetic", "tied weights"],
)
def test_training_is_the_same_whatever_is_set(recipe, settings, tmp_path, assert_same_run_and_state):
    for name, more in (("ordinary", []), ("inside", [INSIDE])):
        loop.train(load_recipe(recipe, [*FAST, *CONSTANT, *PLAIN, *settings, *more]), tmp_path / name)
    assert_same_run_and_state(tmp_path / "ordinary", tmp_path / "inside")


def test_the_state_of_the_one_is_that_of_the_other(tmp_path, assert_same_run_and_state):
    """Begun in the one way, extended in the other."""
    recipe = [*FAST, *CONSTANT, *PLAIN]
    loop.train(load_recipe("digits", [*recipe, "train.epochs=2"]), tmp_path / "ordinary")
    loop.train(load_recipe("digits", recipe), tmp_path / "turned")
    loop.resume(tmp_path / "turned", ["train.epochs=2", INSIDE])
    assert_same_run_and_state(tmp_path / "ordinary", tmp_path / "turned")
    with pytest.raises(InputError, match=r"cannot change optimizer\.fused\. Put that back"):  # which the state holds
        loop.resume(tmp_path / "turned", ["optimizer.fused=true"])


def test_gradients_are_gone_after_backward():
    """All but that of a weight that the last call may still need."""
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
