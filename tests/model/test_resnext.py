"""ResNeXt with in-place ABN, an ordinary network: its twin's function, fewer bytes, and the modes of nodes."""

import pytest
import torch
from torch import nn

import revzoo
from revzoo.runtime import InPlaceABN2d


def count_norms(model):
    return sum(isinstance(module, InPlaceABN2d | nn.BatchNorm2d) for module in model.modules())


def create_pair(**options):
    """Return the small member, and its twin with BatchNorm and the same weights."""
    twins = [f"stages.{i}.transition.norm=leaky_batch_norm" for i in range(3)]
    overrides = [*twins, *(f"{part}.norm=leaky_batch_norm" for part in ("stem", "block.f", "head"))]
    torch.manual_seed(0)
    model = revzoo.create("resnext_digits", **options)
    twin = revzoo.create("resnext_digits", overrides=overrides, **options)
    if "device" not in options:
        twin.load_state_dict(model.state_dict())
    return model, twin


def test_parameters_and_norms_are_those_of_the_authors():
    models = [revzoo.create(name, device="meta") for name in ("resnext_101_iabn", "resnext_101_bn")]
    assert [sum(p.numel() for p in model.parameters()) for model in models] == [42_902_312] * 2
    assert [count_norms(model) for model in models] == [102] * 2
    assert list(models[0].state_dict()) == list(models[1].state_dict())


def test_the_small_member_keeps_half_of_its_twin():
    reports = [revzoo.measure_memory(model, model.example_input(64)) for model in create_pair(device="meta")]
    assert [report.after_forward_bytes for report in reports] == [12_659_588, 25_253_636]
    assert reports[0].activation_bytes < 0.54 * reports[1].activation_bytes


def test_it_is_the_function_of_its_twin():
    model, twin = create_pair(dtype=torch.float64)
    x = model.example_input(4)
    results = []
    for each in (model, twin):
        y = each(x)
        results.append([y.detach(), *torch.autograd.grad(y.sin().sum(), list(each.parameters()))])
    assert torch.equal(results[0][0], results[1][0])
    assert max(float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in zip(*results, strict=True)) < 1e-9
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
    assert torch.equal(model.eval()(x), twin.eval()(x))


@pytest.mark.parametrize("mode", ["recompute", "selective"])
def test_blocks_have_the_modes_of_nodes(mode, gradients):
    model = revzoo.create("resnext_digits", dtype=torch.float64, overrides=["block.drop_path.max=0.2"])
    batch = model.example_input(3)
    expected = gradients.compute(model, "store", batch)
    assert all(g is not None for g in expected.values())
    kept = revzoo.measure_memory(model, batch).after_forward_bytes
    model.schedule = [mode] * len(model.units)
    assert revzoo.measure_memory(model, batch).after_forward_bytes < kept
    assert gradients.largest_error(gradients.compute(model, [mode] * len(model.units), batch), expected) < 1e-10
