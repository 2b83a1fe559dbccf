"""Every family: its small member's gradients, exact arithmetic and command line, its largest member's memory."""

import json
from pathlib import Path

import pytest
import torch

import revzoo
import zoo_cli
from revzoo.analysis.twin import build_twin
from revzoo.format import format_bytes
from revzoo.spec.names import model_files

TABLE = json.loads((Path(__file__).parents[2] / "docs" / "zoo.json").read_text())  # tests/house sees that it is of these specs

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
    "revnext": ("revnext_digits", "revnext_cifar10"),
}
SMALL = [small for small, _ in FAMILIES.values()]


def slow_but_for(*names):
    """Return the small members as parameters of a test; all but these are slow."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in SMALL]


def test_every_family_is_here():
    folders = [file.parent.name for file in model_files().values()]  # tests/spec sees that a folder is named as its family
    assert set(folders) == {*FAMILIES, "resnext"}  # an ordinary network: test_resnext.py
    assert len(folders) >= 45


# test_text.py checks rev_roberta_mini, with padding and dropout.
@pytest.mark.parametrize("name", slow_but_for(*(name for name in SMALL if name != "rev_roberta_mini")))
def test_gradients_equal_stored_ones(name, gradients):
    torch.manual_seed(0)
    model = revzoo.create(name, dtype=torch.float64, overrides=["block.drop_path.max=0.2"])
    gradients.make_streams_unequal(model)
    batch = model.example_input(3)
    expected = gradients.compute(model, "store", batch)
    assert all(g is not None for g in expected.values()), "every parameter takes part"
    for schedule in ("invert", "recompute", "selective"):
        assert gradients.largest_error(gradients.compute(model, schedule, batch), expected) < 1e-10, schedule


# The other families have tests of exact gradients in test_model.py and test_text.py.
@pytest.mark.parametrize("name", slow_but_for("reformer_mini", "rev_mvit_digits", "rev_swin_digits"))
def test_exact_gradients_are_bit_identical_in_float32(name, gradients):
    torch.manual_seed(0)
    model = revzoo.create(name, exact=True)
    gradients.make_streams_unequal(model)
    batch = model.example_input(3)
    assert gradients.differing(gradients.compute(model, "invert", batch), gradients.compute(model, "store", batch)) == []


@pytest.mark.parametrize("name", slow_but_for("rev_bert_mini", "revnet_digits", "rev_swin_digits"))
def test_verifying_passes(name, capsys):
    assert zoo_cli.main(["verify", name]) == 0
    assert "Safe to train in float32" in capsys.readouterr().out


@pytest.mark.parametrize("name", slow_but_for("rev_vit_digits"))  # tests/house/test_zoo_page.py measures two more
def test_the_small_member_holds_the_bytes_of_the_table(name):
    row = TABLE[name]
    model = revzoo.create(name, device="meta")
    report = revzoo.measure_memory(model, model.example_input(row["batch_size"]))
    assert report.weight_bytes == report.gradient_bytes == 4 * row["parameters"]
    assert report.activation_bytes == row["activation_bytes"]["invert"]


def test_inverted_blocks_hold_the_same_bytes_at_any_depth():
    inverted, stored = [], []
    for depth in (1, 5):
        model = revzoo.create("rev_vit_digits", device="meta", overrides=[f"stages.0.depth={depth}"])
        batch = model.example_input(2)
        inverted.append(revzoo.measure_memory(model, batch).activation_bytes)
        model.schedule = "store"
        stored.append(revzoo.measure_memory(model, batch).activation_bytes)
    assert inverted[0] == inverted[1] < stored[1] / 4
    assert stored[1] > 3 * stored[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_member_needs_less_than_a_quarter_of_stored_activations(family, capsys):
    """A whole training step, counted without allocating a weight."""
    name = FAMILIES[family][1]
    row = TABLE[name]
    model = revzoo.create(name, device="meta")
    batch = model.example_input(row["batch_size"])
    if family == "revnet":  # half of what RevNet-104 stores is in its stem and four transitions
        model.schedule = "stage_inputs"
    report = revzoo.measure_memory(model, batch)
    with capsys.disabled():
        print(f"\n{name}, batch of {len(batch)}: {format_bytes(report.activation_bytes)} of activations")
    assert report.weight_bytes == report.gradient_bytes == 4 * row["parameters"]
    assert family == "revnet" or report.activation_bytes == row["activation_bytes"]["invert"]
    assert report.activation_bytes < row["activation_bytes"]["store"] / 4


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("irevnet_digits", []),
        pytest.param("irevnet_300_bottleneck", ["input.size=[32,32]"], marks=pytest.mark.slow),  # a hundred blocks
    ],
)
def test_features_give_the_input_back(name, overrides):
    torch.manual_seed(0)
    model = revzoo.create(name, overrides=overrides).eval()
    images = torch.randint(0, 256, model.example_input(2).shape) / 256
    torch.testing.assert_close(model.inverse(model.forward_features(images)), images, rtol=0, atol=1e-4)
    model.exact = True
    assert torch.equal(model.inverse(model.forward_features(images)), images)


def test_stage_inputs_of_revnet_104_need_a_quarter_of_its_twin():
    """What RevNet's table 5 publishes as a factor of 3.6; with transitions stored it is 1.9."""
    model = revzoo.create("revnet_104", device="meta", schedule="stage_inputs")
    twin = build_twin(model.spec)
    batch = model.example_input(32)
    counted = [revzoo.measure_memory(network, batch).activation_bytes for network in (twin, model)]
    assert counted == [3_738_301_960, 873_469_960]
    assert round(counted[0] / counted[1], 1) == 4.3
