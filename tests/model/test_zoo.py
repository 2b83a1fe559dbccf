"""Every family: its small member's gradients, exact arithmetic and command line, its largest member's memory."""

from pathlib import Path

import pytest
import torch

import revzoo
import zoo_cli
from revzoo.analysis.zoo import read

TABLE = read(Path(__file__).parents[2] / "docs" / "zoo.json")  # tests/analysis/test_zoo.py sees that it is of these specs

# The member that trains in seconds, and the one with the most layers or parameters.
FAMILIES = {
    "irevnet": ("irevnet_digits", "irevnet_300"),
    "reformer": ("reformer_mini", "reformer_enwik8"),
    "rev_bert": ("rev_bert_mini", "rev_bert_large"),
    "rev_mvit": ("rev_mvit_digits", "rev_mvit_h"),
    "rev_roberta": ("rev_roberta_mini", "rev_roberta_large_1024"),
    "rev_swin": ("rev_swin_digits", "rev_swin_g"),
    "rev_vit": ("rev_vit_digits", "rev_vit_h"),
    "revnet": ("revnet_digits", "revnet_104"),
}
SMALL = [small for small, _ in FAMILIES.values()]


def test_every_family_is_here():
    models = revzoo.list_models()
    assert {revzoo.load_spec(name).family for name in models} == set(FAMILIES)
    assert len(models) >= 45


def gradients(model, batch, schedule):
    """Return gradients with dropout and drop path at work, streams that differ from the start, and a fixed loss."""
    unequal = model.split.register_forward_hook(lambda split, inputs, pair: (pair[0], 0.7 * pair[1].flip(-1)))
    model.schedule = schedule
    model.zero_grad()
    torch.manual_seed(1)
    outputs = model(batch)
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(2), dtype=outputs.dtype)
    outputs.backward(weights)
    unequal.remove()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("schedule", ["invert", "recompute"])
def test_gradients_equal_stored_ones(name, schedule):
    torch.manual_seed(0)
    model = revzoo.create(name, dtype=torch.float64, overrides=["block.drop_path.max=0.2"])
    batch = model.example_input(3)
    expected, found = gradients(model, batch, "store"), gradients(model, batch, schedule)
    assert all(g is not None for g in expected.values()), "every parameter takes part"
    typical = torch.stack([g.norm() for g in expected.values()]).square().mean().sqrt()
    worst = max(float((found[k] - g).norm() / max(g.norm(), 1e-6 * typical)) for k, g in expected.items())
    assert worst < 1e-10


@pytest.mark.parametrize("name", SMALL)
def test_exact_gradients_are_bit_identical_in_float32(name):
    torch.manual_seed(0)
    model = revzoo.create(name, exact=True)
    batch = model.example_input(3)
    expected, found = gradients(model, batch, "store"), gradients(model, batch, "invert")
    assert [k for k, g in expected.items() if not torch.equal(g, found[k])] == []


@pytest.mark.parametrize("name", SMALL)
def test_the_check_passes(name, capsys):
    assert zoo_cli.main(["check", name]) == 0
    assert "Safe to train in float32" in capsys.readouterr().out


@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_member_needs_less_than_a_quarter_of_stored_activations(family):
    name = FAMILIES[family][1]
    sizes = TABLE[name]["activation_bytes"]
    inverted = sizes["invert"]
    if family == "revnet":  # half of what RevNet-104 stores is in its stem and four transitions
        model = revzoo.create(name, device="meta")
        model.schedule = [mode if mode == "invert" else "recompute" for mode in model.schedule]
        inverted = revzoo.measure_memory(model, model.example_input(TABLE[name]["batch_size"])).activation_bytes
    assert inverted < sizes["store"] / 4


def test_a_step_of_two_billion_parameters_is_counted_without_allocating_them():
    row = TABLE["rev_swin_g"]
    assert row["parameters"] == 2_602_122_440
    model = revzoo.create("rev_swin_g", device="meta")
    report = revzoo.measure_memory(model, model.example_input(row["batch_size"]))
    assert report.weight_bytes == report.gradient_bytes == 4 * row["parameters"]
    assert report.activation_bytes == row["activation_bytes"]["invert"]
