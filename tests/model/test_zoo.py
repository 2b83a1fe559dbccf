"""Every family: its small member's gradients, exact arithmetic and command line, its largest member's memory."""

from pathlib import Path

import pytest
import torch

import revzoo
import zoo_cli
from revzoo.analysis.zoo import read_table
from revzoo.format import format_bytes

TABLE = read_table(Path(__file__).parents[2] / "docs" / "zoo.json")  # tests/analysis/test_zoo.py sees that it is of these specs

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
@pytest.mark.parametrize("schedule", ["invert", "recompute", "selective"])
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
def test_verifying_passes(name, capsys):
    assert zoo_cli.main(["verify", name]) == 0
    assert "Safe to train in float32" in capsys.readouterr().out


@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_member_needs_less_than_a_quarter_of_stored_activations(family, capsys):
    """A whole training step, counted without allocating a weight."""
    name = FAMILIES[family][1]
    row = TABLE[name]
    model = revzoo.create(name, device="meta")
    batch = model.example_input(row["batch_size"])
    if family == "revnet":  # half of what RevNet-104 stores is in its stem and four transitions
        model.schedule = [mode if mode == "invert" else "recompute" for mode in model.schedule]
    report = revzoo.measure_memory(model, batch)
    with capsys.disabled():
        print(f"\n{name}, batch of {len(batch)}: {format_bytes(report.activation_bytes)} of activations")
    assert report.weight_bytes == report.gradient_bytes == 4 * row["parameters"]
    assert family == "revnet" or report.activation_bytes == row["activation_bytes"]["invert"]
    assert report.activation_bytes < row["activation_bytes"]["store"] / 4


def test_a_hundred_blocks_give_their_input_back():
    torch.manual_seed(0)
    model = revzoo.create("irevnet_300_bottleneck", overrides=["input.size=[32,32]"]).eval()
    images = torch.randint(0, 256, (2, 3, 32, 32)) / 256
    torch.testing.assert_close(model.inverse(model.forward_features(images)), images, rtol=0, atol=1e-4)
    model.exact = True
    assert torch.equal(model.inverse(model.forward_features(images)), images)
