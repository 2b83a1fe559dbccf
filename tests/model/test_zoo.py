"""Every family: its small member's gradients and exact arithmetic, its largest member's memory."""

import json
from pathlib import Path

import pytest
import torch

import revzoo
from revzoo.analysis.twin import build_twin
from revzoo.format import format_bytes
from revzoo.spec.names import model_files

TABLE = json.loads((Path(__file__).parents[2] / "docs" / "zoo.json").read_text())  # tests/house sees that it is of these specs

# The member that trains in seconds, and the one with the most layers or parameters.
FAMILIES = {
    "irevnet": ("irevnet_digits", "irevnet_300"),
    "reformer": ("reformer_mini", "reformer_enwik8"),
    "rev_gpt": ("rev_gpt_mini", "rev_gpt_20m"),  # larger ones keep logits more than anything else
    "rev_bert": ("rev_bert_mini", "rev_bert_large"),
    "rev_mvit": ("rev_mvit_digits", "rev_mvit_h"),
    "rev_roberta": ("rev_roberta_mini", "rev_roberta_large_1024"),
    "rev_swin": ("rev_swin_digits", "rev_swin_g"),
    "rev_vit": ("rev_vit_digits", "rev_vit_h"),
    "revnet": ("revnet_digits", "revnet_104"),
    "revnext": ("revnext_digits", "revnext_cifar10"),
}
SMALL = [small for small, _ in FAMILIES.values()]


def test_every_family_is_here():
    folders = [file.parent.name for file in model_files().values()]  # tests/spec sees that a folder is named as its family
    assert set(folders) == {*FAMILIES, "resnext"}  # an ordinary network: test_resnext.py
    assert len(folders) >= 45


# Parts that no small member has; `f` and the transition of MViT have the features of its second version.
V2 = [f"block.f.{key}=true" for key in ("pool_query", "relative_position", "residual_pooling")]
VARIANTS = [
    ("irevnet_digits", ["block.f.dropout=0.2"]),
    ("reformer_mini_full", ["stages.0.depth=2"]),
    ("rev_llama_1b", ["input={length: 20, vocabulary: 30}", "stem.width=64", "stages=[{depth: 2, width: 64}]"]),
    ("rev_gpt_20m_midpoint", ["input={length: 20, vocabulary: 30}", "stages.0.depth=2"]),
    ("rev_mvit_digits", ["stages.1.transition.fuse=mean", *V2, "stages.1.transition.relative_position=true"]),
    ("rev_mvit_digits", ["stages.1.transition.fuse=mlp"]),
    ("rev_swin_digits", ["stages.1.transition.fuse=mlp"]),
    ("rev_swin_digits", ["stages.1.transition.fuse=proj"]),
    ("layerwise_digits", ["block.drop_path.max=0"]),
]


# test_text.py checks the small members for texts, with padding and dropout.
@pytest.mark.parametrize(("name", "overrides"), [*((name, []) for name in SMALL if "bert" not in name), *VARIANTS])
def test_gradients_equal_stored_ones(name, overrides, gradients):
    model = revzoo.create(name, dtype=torch.float64, overrides=["block.drop_path.max=0.2", *overrides])
    gradients.make_streams_unequal(model)
    batch = model.example_input(3)
    expected = gradients.compute(model, "store", batch)
    assert all(g is not None for g in expected.values()), "every parameter takes part"
    for schedule in ("invert", "recompute", "selective", *(gradients.draw_modes(model, seed) for seed in range(2))):
        assert gradients.largest_error(gradients.compute(model, schedule, batch), expected) < 1e-10, schedule


# The other families have tests of exact gradients in test_model.py and test_text.py.
@pytest.mark.parametrize(
    "name", ["reformer_mini", "rev_gpt_mini", "rev_mvit_digits", "rev_swin_digits", "rev_vit_digits", "revnet_digits"]
)
def test_exact_gradients_are_bit_identical_in_float32(name, gradients):
    model = revzoo.create(name, exact=True)
    gradients.make_streams_unequal(model)
    batch = model.example_input(3)
    expected = gradients.compute(model, "store", batch)
    for schedule in ("invert", "stage_inputs", gradients.draw_modes(model, 0)):
        assert gradients.differing(gradients.compute(model, schedule, batch), expected) == []


@pytest.mark.parametrize("name", ["rev_gpt_mini", "rev_gpt_20m_midpoint"])
@pytest.mark.parametrize(
    "coupling", ["midpoint", "leapfrog", "{type: momentum, gain: 1.0, kept_bits: 8}", "{type: dual_residual, kept_bits: 1}"]
)
def test_a_gpt_is_inverted_to_the_bit_with_every_coupling(name, coupling, gradients):
    small = ["input.length=12", "input.vocabulary=20", "stages.0.depth=2", f"block.coupling={coupling}"]
    model = revzoo.create(name, overrides=small, exact="kept_bits" not in coupling)
    batch = model.example_input(2)
    expected = gradients.compute(model, "store", batch)
    assert all(g.abs().sum() > 0 for g in expected.values()), "every parameter takes part"
    assert gradients.differing(gradients.compute(model, "invert", batch), expected) == []


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


def test_stage_inputs_of_revnet_104_need_a_quarter_of_its_twin():
    """What RevNet's table 5 publishes as a factor of 3.6; with transitions stored it is 1.9."""
    model = revzoo.create("revnet_104", device="meta", schedule="stage_inputs")
    twin = build_twin(model.spec)
    batch = model.example_input(32)
    counted = [revzoo.measure_memory(network, batch).activation_bytes for network in (twin, model)]
    assert counted == [3_738_301_960, 873_469_960]
    assert round(counted[0] / counted[1], 1) == 4.3


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
