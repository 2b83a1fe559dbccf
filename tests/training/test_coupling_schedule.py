"""The coupling during fine-tuning: its values, what is saved with it, and gradients that stay right."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

import revzoo
from revzoo.checkpoint.files import read_metadata
from revzoo.errors import InputError, SpecError
from revzoo.planning import planner
from revzoo.runtime.mode import Mode
from revzoo.training.coupling_schedule import CouplingSchedule
from revzoo.training.loop import resume, train
from revzoo.training.options import CouplingOptions
from revzoo.training.recipe import load_recipe
from revzoo.training.run_plan import apply_plan
from revzoo.training.setup import build_run
from tests.training.runs import assert_same_run, interrupted, read_records

SHORT = ["train.epochs=2", "schedule.warmup_epochs=0"]
FALLING = "coupling={kept_bits: [8, 4], share: 1.0}"


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    network = VisionTransformer(img_size=8, patch_size=2, in_chans=1, embed_dim=16, depth=2, num_heads=2, num_classes=10)
    return network.eval()


@pytest.fixture(scope="module")
def folder(vit, tmp_path_factory):
    """A converted network; nothing changes it."""
    out = tmp_path_factory.mktemp("converted") / "rev"
    revzoo.convert(vit, out=out)
    return out


def recipe(folder, *overrides):
    return load_recipe("finetune", [f"model={folder}", "data={name: digits, batch_size: 320}", *SHORT, *overrides])


def test_bits_fall_in_equal_parts_and_then_stay():
    schedule = CouplingSchedule(CouplingOptions(kept_bits=(8, 4), share=0.5), 100, [])
    assert [schedule.at(u)["kept_bits"] for u in (0, 9, 10, 20, 30, 39, 40, 50, 99)] == [8, 8, 7, 6, 5, 5, 4, 4, 4]
    rising = CouplingSchedule(CouplingOptions(kept_bits=(0, 2), share=1.0), 9, [])
    assert [rising.at(u)["kept_bits"] for u in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    moving = CouplingSchedule(CouplingOptions(alpha=(1.0, 0.5), beta=(0.0, 0.5), share=0.5), 8, [])
    assert [moving.at(u) for u in (0, 2, 4, 8)] == [
        {"alpha": 1.0, "beta": 0.0}, {"alpha": 0.75, "beta": 0.25}, {"alpha": 0.5, "beta": 0.5}, {"alpha": 0.5, "beta": 0.5},
    ]  # fmt: skip


def test_the_recipe_leaves_the_coupling_as_it_was_converted(folder, tmp_path):
    run = build_run(recipe(folder), tmp_path / "run", resumed=False)
    assert (run.coupling, run.model.coupling.kept_bits) == (None, 8)


def test_a_moving_coupling_is_trained_saved_and_resumed(folder, tmp_path):
    """An interruption in the first epoch, and the rest: the same weights as without; the checkpoint has the last coupling."""
    options = recipe(folder, "ema.decay=0.9", FALLING, "train.freeze=[stem]")
    stem = revzoo.create(folder).stem.state_dict()
    train(options, tmp_path / "whole")
    records = read_records(tmp_path / "whole")
    assert [record["kept_bits"] for record in records] == [6, 4]
    for name in ("last.safetensors", "best.safetensors"):
        facts = read_metadata(tmp_path / "whole" / name)
        assert f"kept_bits: {records[int(facts['revzoo.epoch']) - 1]['kept_bits']}" in facts["revzoo.spec"]
    best = next(record["kept_bits"] for record in records if record["top1"] == max(each["top1"] for each in records))
    assert revzoo.create(tmp_path / "whole").coupling.kept_bits == best
    saved = load_file(tmp_path / "whole" / "last.safetensors")
    assert all(torch.equal(saved[f"stem.{key}"], tensor) for key, tensor in stem.items())
    with interrupted(3):
        train(options, tmp_path / "cut")
    resume(tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_plan_is_made_for_the_first_coupling(folder, tmp_path, monkeypatch):
    """A resumed run has moved on, and its plan is the one of the first update; afterwards it is where it was."""
    monkeypatch.setattr(planner, "profile", partial(planner.profile, run=False))
    options = recipe(folder, "ema.decay=0.9", FALLING, "memory.budget=1GiB")
    first, later = (build_run(options, tmp_path / name, resumed=False) for name in ("first", "later"))
    later.progress.updates = 8
    later.set_coupling(8)
    assert replace(apply_plan(later), seconds=0.0) == replace(apply_plan(first), seconds=0.0)
    assert [run.model.coupling.kept_bits for run in (first, later)] == [8, 4]
    assert [run.evaluated.coupling.kept_bits for run in (first, later)] == [8, 4]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["coupling={m: [0.0, 0.5]}"], "m, alpha or beta for a network converted with m or beta"),
        (["coupling={beta: [0.0, 0.5]}"], r"coupling.beta: found a schedule; .*momentum: m, gain, residual, kept_bits"),
        (["train.freeze=[steem]"], r"train.freeze: found 'steem'; allowed: parts of the model, such as stem"),
        (["train.freeze=[stem,split,stages,fuse,head]"], "allowed: some parts of the model, not all"),
        ([FALLING, "coupling.m=[0,0.5]"], "coupling.m: found .*allowed: null with coupling.kept_bits"),
        (["coupling={m: [0.1, 0.5]}", "memory.budget=1GiB"], "null with memory.budget"),
        (["coupling.kept_bits=[16,0]"], "an integer from 0 to 15"),
        (["coupling.kept_bits=null"], "kept_bits, or m, alpha or beta, or null for a coupling that stays"),
        (["coupling.kept_bits=[0,8]", "memory.budget=1GiB"], "the larger number first with memory.budget"),
    ],
)
def test_recipes_that_contradict_themselves_or_the_model(folder, overrides, message, tmp_path):
    with pytest.raises(SpecError, match=message):
        build_run(recipe(folder, *overrides), tmp_path / "run", resumed=False)


@pytest.mark.parametrize(
    ("coupling", "options"),
    [
        ("momentum", CouplingOptions(m=(0.0, 0.9), share=1.0)),
        ("dual_residual", CouplingOptions(alpha=(1.0, 0.3), beta=(0.0, 0.7), share=1.0)),
    ],
)
def test_floating_point_gradients_stay_right_all_the_time(coupling, options):
    """Relative error 1e-3 against stored ones, in float32, from the first to the last value, with steps that are inverted."""
    deep = VisionTransformer(img_size=8, patch_size=2, in_chans=1, embed_dim=16, depth=12, num_heads=2, num_classes=10)
    model = revzoo.convert(deep, coupling=coupling, **{"momentum": {"m": 0.0}, "dual_residual": {"beta": 0.0}}[coupling]).model
    model.train()
    schedule, x, inverted = CouplingSchedule(options, 20, model.schedule), torch.randn(4, 1, 8, 8), []
    for update in range(0, 21, 5):
        schedule.apply(update, model)
        inverted.append(model.schedule.count("invert"))
        limited, gradients = model.schedule, []
        for modes in (limited, "store"):
            model.schedule = modes
            model.zero_grad()
            model(x).square().sum().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.schedule = limited
        assert (gradients[0] - gradients[1]).norm() <= 1e-3 * gradients[1].norm()
    assert inverted[0] == 0
    assert inverted[-1] >= 20
    assert inverted == sorted(inverted)


def test_layer_wise_learning_rates_follow_the_depth(folder):
    from timm.optim import create_optimizer_v2

    model = revzoo.create(folder)
    groups = create_optimizer_v2(model, "adamw", lr=1.0, weight_decay=0.1, layer_decay=0.5).param_groups
    scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    names = (
        "stem.pos_embed",
        "stages.0.blocks.0.f.attn.qkv.weight",
        "stages.0.blocks.1.g.mlp.fc1.weight",
        "head.linear.weight",
    )
    assert [scales[id(model.get_parameter(name))] for name in names] == [0.125, 0.25, 0.5, 1.0]


def test_what_was_stored_stays_stored_where_few_steps_may_be_inverted():
    """Nothing has moved at the first update."""
    deep = VisionTransformer(img_size=8, patch_size=2, in_chans=1, embed_dim=16, depth=6, num_heads=2, num_classes=10)
    model = revzoo.convert(deep, m=0.1).model
    schedule = CouplingSchedule(CouplingOptions(m=(0.1, 0.9)), 10, [Mode.STORE] * 5 + [Mode.INVERT] * 8 + [Mode.STORE] * 2)
    schedule.apply(0, model)
    limited = ["invert", "invert", "recompute"] * 2 + ["invert"] * 2
    assert model.schedule == ["store"] * 5 + limited + ["store"] * 2


def test_a_coupling_takes_what_it_can_have(vit):
    model = revzoo.convert(vit).model
    model.set_coupling(kept_bits=3)
    assert (model.coupling.b, model.spec.coupling.arguments["kept_bits"]) == (-0.125, 3)
    model.set_coupling(kept_bits=None, m=0.5)
    assert (model.coupling.kept_bits, model.coupling.b) == (None, -0.5)
    for arguments, message in (
        ({"m": 1.5}, r"m of the coupling momentum is a number in \[0, 1\). Received: 1.5"),
        ({"kept_bits": 2}, "null when m is given: kept_bits determines m"),
        ({"bits": 2}, "has no 'bits'. Did you mean 'kept_bits'"),
    ):
        with pytest.raises(InputError, match=message):
            model.set_coupling(**arguments)
    assert model.coupling.b == -0.5
    exact = revzoo.create("rev_vit_digits", overrides=["block.coupling={type: momentum, kept_bits: 2}"], exact=True)
    with pytest.raises(InputError, match=r"Exact arithmetic needs \|b\| = 1"):
        exact.set_coupling(kept_bits=None, m=0.5)
