"""The coupling's way during fine-tuning."""

import json

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import revzoo
from revzoo.conversion.convert import converted
from revzoo.errors import SpecError
from revzoo.training.config import CouplingOptions, load_recipe
from revzoo.training.coupling import CouplingSchedule
from revzoo.training.loop import resume, train
from revzoo.weights import read_metadata

DIGITS = ("data.name=digits", "data.num_workers=0", "data.augment=null", "train.epochs=2", "schedule.warmup_epochs=0")


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    network = VisionTransformer(img_size=8, patch_size=2, in_chans=1, embed_dim=16, depth=2, num_heads=2, num_classes=10)
    return network.eval()


@pytest.fixture
def folder(vit, tmp_path):
    converted(vit, out=tmp_path / "rev")
    return tmp_path / "rev"


def recipe(folder, *overrides):
    return load_recipe("finetune", [f"model={folder}", "data={name: digits, batch_size: 128}", *DIGITS[3:], *overrides])


def test_bits_fall_in_equal_parts_and_then_stay():
    schedule = CouplingSchedule(CouplingOptions(kept_bits=(8, 4), share=0.5), 100)
    assert [schedule.at(u)["kept_bits"] for u in (0, 9, 10, 20, 30, 39, 40, 50, 99)] == [8, 8, 7, 6, 5, 5, 4, 4, 4]
    rising = CouplingSchedule(CouplingOptions(kept_bits=(0, 2), share=1.0), 9)
    assert [rising.at(u)["kept_bits"] for u in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    moving = CouplingSchedule(CouplingOptions(alpha=(1.0, 0.5), beta=(0.0, 0.5), share=0.5), 8)
    assert [moving.at(u) for u in (0, 2, 4, 8)] == [
        {"alpha": 1.0, "beta": 0.0}, {"alpha": 0.75, "beta": 0.25}, {"alpha": 0.5, "beta": 0.5}, {"alpha": 0.5, "beta": 0.5},
    ]  # fmt: skip


def test_the_way_is_trained_saved_and_resumed(folder, tmp_path):
    """Half an epoch, an interruption, and the rest: the same weights as without, and the last coupling in the checkpoint."""
    found = recipe(folder, "ema.decay=0.9", "coupling.share=1.0", "train.freeze=[stem]")
    stem = revzoo.create(folder).stem.state_dict()
    whole = train(found, tmp_path / "whole")
    records = [json.loads(line) for line in (whole.folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["kept_bits"] for record in records] == [6, 4]
    last = whole.folder / "last.safetensors"
    assert "kept_bits: 4" in read_metadata(last)["revzoo.spec"]
    assert (whole.folder / "curves.png").is_file()
    tuned = revzoo.create(whole.folder / "spec.yaml")
    revzoo.weights.load(tuned, whole.folder / "state" / "00002-0000000" / "model.safetensors")
    assert all(torch.equal(tuned.stem.state_dict()[key], tensor) for key, tensor in stem.items())
    half = train(load_recipe(whole.folder, ["train.epochs=2"]), tmp_path / "half")
    (half.folder / "metrics.jsonl").write_text("")
    resumed = resume(half.folder)  # nothing is left to do, but everything is read again
    assert resumed.folder == half.folder


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["coupling={kept_bits: null, m: [0.0, 0.5]}"],
            "m, alpha or beta for a network converted with a strength",
        ),
        (
            ["coupling={kept_bits: null, beta: [0.0, 0.5]}"],
            r"coupling.beta: found a schedule; .*momentum: m, gain, residual, kept_bits",
        ),
        (["train.freeze=[steem]"], r"train.freeze: found 'steem'; allowed: parts of the model, such as stem"),
        (["train.freeze=[stem,split,stages,fuse,head]"], "allowed: parts, not everything"),
    ],
)
def test_what_cannot_be_is_said(folder, overrides, message, tmp_path):
    with pytest.raises(SpecError, match=message):
        train(recipe(folder, *overrides), tmp_path / "run")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["coupling.m=[0,0.5]"], "coupling.m: found .*allowed: null beside coupling.kept_bits"),
        (["coupling={m: [0.1, 0.5]}", "memory.budget=1GiB"], "null with memory.budget"),
        (["coupling.kept_bits=[9,0]"], "an integer from 0 to 8"),
    ],
)
def test_contradictions_are_found_before_anything_is_made(folder, overrides, message):
    with pytest.raises(SpecError, match=message):
        recipe(folder, *overrides)


@pytest.mark.parametrize(
    ("coupling", "options"),
    [
        ("momentum", CouplingOptions(m=(0.0, 0.9), share=1.0)),
        ("dual_residual", CouplingOptions(alpha=(1.0, 0.3), beta=(0.0, 0.7), share=1.0)),
    ],
)
def test_floating_point_gradients_stay_right_on_the_whole_way(vit, coupling, options):
    """Relative error 1e-3 against stored ones, in float32, at every point, with steps that are really inverted."""
    deep = VisionTransformer(img_size=8, patch_size=2, in_chans=1, embed_dim=16, depth=12, num_heads=2, num_classes=10)
    model, _ = converted(deep, coupling=coupling, kept_bits=None, strength=0.0)
    model.train()
    schedule, x, inverted = CouplingSchedule(options, 20), torch.randn(4, 1, 8, 8), []
    for update in range(21):
        schedule.set(update, model)
        if model.coupling.b == 0:
            model.schedule = "recompute"
        inverted.append(model.schedule.count("invert"))
        anchored, found = model.schedule, []
        for modes in (anchored, "store"):
            model.schedule = modes
            model.zero_grad()
            model(x).square().sum().backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.schedule = anchored
        assert (found[0] - found[1]).norm() <= 1e-3 * found[1].norm()
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
