"""The assembled network: schedules, modes, heads, and gradients through every kind of unit."""

import re

import pytest
import torch
from timm.optim import create_optimizer_v2

import revzoo
from revzoo.checkpoint.files import save_weights
from revzoo.errors import InputError, ScheduleError, UnknownNameError

FAMILIES = ("rev_vit_digits", "revnet_digits")


@pytest.fixture(params=FAMILIES)
def model(request):
    torch.manual_seed(0)
    return revzoo.create(request.param, dtype=torch.float64)


@pytest.mark.parametrize("size", [4, 8])
def test_exact_gradients_are_bit_identical_down_to_a_single_pixel(size, gradients):
    model = revzoo.create("irevnet_digits", exact=True, overrides=[f"input.size=[{size},{size}]"])
    x = model.example_input(3)
    seen = {step.name: [] for step in model.steps}
    for step in model.steps:
        step.register_forward_pre_hook(lambda step, inputs: seen[step.name].append(inputs[0].stride()))
    assert gradients.differing(gradients.compute(model, "invert", x), gradients.compute(model, "store", x)) == []
    assert {name: len(set(strides)) for name, strides in seen.items()} == dict.fromkeys(seen, 1)


def test_batch_norm_of_stem_transitions_and_steps_counts_once(gradients):
    model = revzoo.create("revnet_digits")
    gradients.compute(model, gradients.draw_modes(model, 0), model.example_input(3))
    counts = {k: b.item() for k, b in model.named_buffers() if k.endswith("num_batches_tracked")}
    # Stem and fuse; two units of two in each transition, less the first one's first; two in each step.
    assert len(counts) == 2 + (3 * 4 - 1) + 12 * 2
    assert set(counts.values()) == {1}


def test_streams_are_float32_under_autocast():
    model = revzoo.create("rev_vit_digits")
    seen = set()
    for step in model.steps:
        step.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(model.example_input(4)).sum()
    loss.backward()
    assert seen == {torch.float32}


@pytest.mark.parametrize(
    ("name", "count"), [("rev_vit_digits", 1), ("rev_swin_digits", 4), ("revnet_digits", 0), ("rev_mvit_t", 2 * 10)]
)
def test_tables_of_positions_do_not_decay(name, count):
    model = revzoo.create(name, device="meta")
    tables = model.no_weight_decay()
    assert len(tables) == count
    decaying, spared = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.1).param_groups[::-1]
    assert (decaying["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    sizes = {id(p): p.dim() for p in decaying["params"]}
    assert not {id(model.get_parameter(name)) for name in tables} & set(sizes)
    assert min(sizes.values()) == 2


def test_training_with_a_frozen_stem(gradients):
    model = revzoo.create("rev_vit_digits", dtype=torch.float64)
    model.stem.requires_grad_(False)
    x = model.example_input(2)
    expected = gradients.compute(model, "store", x)
    inverted = gradients.compute(model, "invert", x)
    assert sum(g is None for g in inverted.values()) == 3
    assert all(g is None or (g - expected[name]).norm() <= 1e-12 * expected[name].norm() for name, g in inverted.items())


@pytest.mark.parametrize("name", ["irevnet_digits", "rev_vit_digits"])
@pytest.mark.parametrize("change", [(1, 1), (2, 8), (3, -7)])
def test_images_of_any_other_size_or_number_of_channels_are_refused(name, change):
    """Larger and smaller alike, also by convolutional networks, which could run on them."""
    model, (dimension, more) = revzoo.create(name, device="meta"), change
    shape = [1, 1, 8, 8]
    shape[dimension] += more
    with pytest.raises(InputError, match=rf"{name} takes images \(B, 1, 8, 8\)\. Received: .*input.channels=C.*input.size="):
        model(torch.empty(shape, device="meta"))


def test_units_and_schedule():
    model = revzoo.create("revnet_digits", overrides=["stages.1.depth=1", "stages.2.depth=1"])
    assert model.units == (
        *("stem", "stages.0.transition", "stages.0.blocks.0.f", "stages.0.blocks.0.g", "stages.0.blocks.1.f"),
        *("stages.0.blocks.1.g", "stages.1.transition", "stages.1.blocks.0.f", "stages.1.blocks.0.g"),
        *("stages.2.transition", "stages.2.blocks.0.f", "stages.2.blocks.0.g", "fuse", "head"),
    )
    assert [step.name for step in model.steps] == [name for name in model.units if name[-2:] in (".f", ".g")]
    assert model.schedule == ["invert" if name[-2:] in (".f", ".g") else "store" for name in model.units]
    model.schedule = "recompute"
    assert model.schedule == ["recompute" if name[-2:] in (".f", ".g") else "store" for name in model.units]
    model.schedule = "stage_inputs"
    assert model.schedule == ["invert" if name[-2:] in (".f", ".g") else "recompute" for name in model.units]
    with pytest.raises(ScheduleError, match="stem. Received: 'invert'"):
        model.schedule = ["invert"] * len(model.units)


def test_create_takes_what_it_says():
    model = revzoo.create("rev_vit_digits", num_outputs=7, overrides=["stages.0.depth=2"], schedule="store", exact=True)
    assert (model.num_outputs, len(model.steps), set(model.schedule), model.exact) == (7, 4, {"store"}, True)
    assert revzoo.create("rev_vit_digits", dtype=torch.float64).example_input(1).dtype == torch.float64
    assert revzoo.create("rev_vit_l", device="meta").stem.pos_embed.is_meta
    with pytest.raises(UnknownNameError, match="Did you mean 'rev_vit_digits'"):
        revzoo.create("rev_vit_digit")
    with pytest.raises(InputError, match=r"Exact arithmetic needs \|b\| = 1"):
        revzoo.create("rev_vit_digits", overrides=["block.coupling=momentum"], exact=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"overrides": "stages.0.depth=1"}, "overrides=['stages.0.depth=1']"),
        ({"dtype": "float32"}, "dtype=torch.float32"),
        ({"device": "cuda:99"}, "Received: 'cuda:99'"),
        ({"num_outputs": 0}, "Received: 0"),
        ({"exact": "no"}, "Received: 'no'"),
        ({"exact": True, "dtype": torch.bfloat16}, "Received: torch.bfloat16"),
        ({"num_classes": 3}, "num_outputs=3"),
        ({"img_size": 16}, "overrides=['img_size=16']"),
        ({"pretraned": True}, "'pretrained'"),
    ],
)
def test_an_argument_that_create_cannot_take(arguments, message):
    with pytest.raises(InputError, match=re.escape(message)):
        revzoo.create("rev_vit_digits", **arguments)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([[1.0]], "a tensor of floating-point images. Received: list"),
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "Received: torch.uint8"),
    ],
)
def test_images_unlike_the_parameters_are_named(x, message):
    with pytest.raises(InputError, match=re.escape(message)):
        revzoo.create("rev_vit_digits")(x)


def test_autocast_takes_half_precision_images():
    model = revzoo.create("rev_vit_digits")
    with torch.autocast("cpu", torch.bfloat16):
        assert model(model.example_input(2).bfloat16()).shape == (2, 10)


def test_create_honours_the_default_device(tmp_path):
    saved = revzoo.create("rev_swin_digits")
    save_weights(saved, path := tmp_path / "weights.safetensors")
    x = saved.example_input(2)
    with torch.device("meta"):
        model = revzoo.create("rev_vit_digits")
        on_cpu = revzoo.create("rev_swin_digits", device="cpu")
        loaded = revzoo.create("rev_swin_digits", checkpoint=path)
        shipped = revzoo.create("rev_vit_digits", pretrained=True)
    assert all(t.is_meta for t in model.state_dict().values())
    assert all(t.device.type == "cpu" for each in (on_cpu, loaded, shipped) for t in [*each.parameters(), *each.buffers()])
    assert torch.equal(loaded.eval()(x), saved.eval()(x))
