"""RevNeXt, the layer-wise network and the ordinary network: sizes, gradients, memory, and what a spec cannot say."""

import pytest
import torch
from torch import nn

import revzoo
from benchmarks.pixel_terms import bytes_per_pixel
from revzoo.errors import InputError, SpecError


def build(name: str, overrides: list[str]) -> revzoo.Model:
    return revzoo.create(name, device="meta", overrides=overrides)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "depths", "parameters"),
    [
        ("revnext_cifar10", (1, 1, 1), 1_264_352),
        ("revnext_cifar10", (1, 3, 3), 3_776_224),
        ("layerwise_cifar10", (1, 2, 2), 2_520_032),  # nlayer [2, 2, 2] of the authors, which counts the stem as a unit
        ("layerwise_cifar10", (3, 4, 4), 5_038_688),
    ],
)
def test_parameters_of_the_authors_networks(name, depths, parameters):
    assert count(build(name, [f"stages.{i}.depth={depth}" for i, depth in enumerate(depths)])) == parameters


def test_layers_are_units_with_modes():
    model = build("layerwise_digits", [])
    assert model.units[:7] == (
        "stem.conv",
        "stem.norm",
        "stem.act",
        "stages.0.blocks.0.f.conv1",
        "stages.0.blocks.0.f.norm1",
        "stages.0.blocks.0.f.act1",
        "stages.1.blocks.0.f.conv1",
    )
    assert model.schedule == ["store", *["invert"] * 11, "store", "store"]
    assert model.steps == []
    with pytest.raises(revzoo.errors.ScheduleError, match=r"stem.conv. Received: 'invert'"):
        model.schedule = ["invert"] * 14


def test_what_is_between_the_stem_and_the_first_step_is_not_kept():
    """The layers of the stem go on from the state that the first step rebuilds: only the last pair of streams is kept.

    The head keeps no copy of it, because each stream is pooled before they are joined.
    """
    model = build("revnext_digits", [])
    batch = model.example_input(16)
    state = 16 * 16 * 8 * 8 * 4  # bytes of 16 channels of 8x8 pixels: both streams at any size
    pooled = 16 * 64 * 4  # of the last stage, whose images have 4x4 pixels
    kept = revzoo.measure_memory(model, batch).after_forward_bytes - state
    # What the two poolings and the linear layer keep, with which pixel was the largest (int64); and statistics of norms.
    assert 0 < kept - (2 + 1 + 1) * pooled < state / 16


@pytest.mark.parametrize(
    ("name", "channels"),
    [
        # Both streams and their gradients; within f the state and its gradient; half a stream of one operation.
        ("revnext_cifar10", 32 + 32 + 16 + 16 + 8),
        # The state and its gradient, and what one operation on half of the channels adds.
        ("layerwise_cifar10", 32 + 32 + 16),
    ],
)
def test_float32_channels_per_pixel_at_the_peak(name, channels):
    report = bytes_per_pixel(build(name, ["input.size=[240,240]"]))
    assert report.bytes_per_pixel // 4 == channels
    assert report.bytes_per_pixel - 4 * channels < 0.1  # statistics of norms, and which pixels were the largest


@pytest.mark.parametrize(("pool", "transition"), [("mean", "pixel_unshuffle"), ("max", "space_to_depth")])
def test_halves_that_stay_apart_have_the_gradients_of_storing(pool, transition):
    overrides = [f"fuse.pool={pool}", f"stages.1.transition={transition}"]
    model = revzoo.create("layerwise_digits", overrides=overrides, dtype=torch.float64)
    batch = model.example_input(4)
    found = []
    for schedule in ("store", "invert", "recompute"):
        model.schedule = schedule
        loss = model(batch).square().sum()
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        again = torch.autograd.grad(loss, list(model.parameters()))  # the layers run forward to the end again
        found += [torch.cat([g.flatten() for g in each]) for each in (grads, again)]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-8, atol=1e-8 * found[0].abs().max().item())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # as in test_compile.py
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "overrides"), [("layerwise_digits", ["stages.1.transition=pixel_unshuffle"]), ("revnext_digits", [])]
)
def test_compiled_as_a_whole_it_has_the_same_bits(name, overrides):
    model = revzoo.create(name, overrides=overrides)
    batch = model.example_input(4)
    eager, compiled = (
        torch.autograd.grad(run(batch).square().sum(), list(model.parameters()))
        for run in (model, torch.compile(model, backend="eager"))
    )
    assert all(map(torch.equal, eager, compiled))


def test_a_plan_of_single_layers_keeps_its_promise():
    model = revzoo.create("layerwise_digits")
    batch = model.example_input(16)
    plan = revzoo.plan(model, batch, 614_400)
    plan.apply(model)
    assert revzoo.measure_memory(model, batch).peak_bytes == plan.peak_bytes <= 614_400
    assert "invert" in plan.schedule


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("revnext_digits", ["stem.width=30", "stages.0.width=15", "stages.1.width=60"], "stages.0.f.type: .*even width.* 15"),
        ("revnext_digits", ["input.size=[9,8]"], "stages.1.transition.block: found 2"),
        ("revnext_digits", ["block.f.slope=0"], "block.f.slope: found 0"),
        ("revnext_digits", ["split=none"], "block.coupling: found 'additive'; allowed: none"),
        ("revnext_digits", ["split=none", "block.coupling=none", "fuse=none"], "stages.0.g: .*no g"),
        ("layerwise_digits", ["split=channel"], "block.coupling: found 'none'"),
        ("layerwise_digits", ["block.drop_path.max=0.1"], "block.drop_path.max: found 0.1; allowed: 0"),
        ("layerwise_digits", ["stages.1.transition={type: residual_pair, layout: basic, stride: 2}"], "one tensor"),
        ("revnet_digits", ["stages.1.transition=downsampling_block"], "stages.1.transition.*two streams"),
    ],
)
def test_what_cannot_be_built_is_named_with_its_place(name, overrides, message):
    with pytest.raises(SpecError, match=message):
        revzoo.create(name, overrides=overrides)


def test_a_weight_at_zero_without_a_floor_is_named():
    model = revzoo.create("layerwise_digits", overrides=["block.f.eps_i=0"])
    norm = model.get_submodule("stages.1.blocks.0.f.norm1")
    with torch.no_grad():
        norm.weight[:3] = 0
    with pytest.raises(InputError, match=r"^stages\.1\.blocks\.0\.f\.norm1: .* eps_i = 0 has no inverse .* Received: 3 of 64"):
        model(model.example_input(4))
    model.schedule = "store"
    model(model.example_input(4)).sum().backward()
