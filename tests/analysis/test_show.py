"""What `revzoo show` says: every part, what it keeps, and that the parts add up."""

import io

import pytest
import torch
from rich.console import Console

import revzoo
from revzoo.analysis.memory import memory_table
from revzoo.analysis.show import kept_bytes, show


def text_of(model: revzoo.Model, batch_size: int) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(show(model, batch_size))
    return console.export_text()


@pytest.mark.parametrize("name", ["rev_vit_digits", "revnet_digits"])
@pytest.mark.parametrize("mode", ["store", "invert", "recompute"])
def test_what_the_units_keep_adds_up(name, mode):
    model = revzoo.create(name, device="meta")
    x = model.example_input(4, device="cpu")
    kept = kept_bytes(model, x, mode)
    assert list(kept) == list(model.units)
    assert sum(kept.values()) + 4 == memory_table(model, x).reports[mode].after_forward_bytes  # 4: the loss
    assert set(model.schedule) == {"store", "invert"}


def test_inverted_steps_keep_one_pair_of_streams_a_chain():
    model = revzoo.create("rev_vit_b", device="meta")
    kept = kept_bytes(model, model.example_input(2, device="cpu"), "invert")
    stream = 2 * 196 * 768 * 4
    assert kept["stages.0.blocks.11.f"] == kept["stages.0.blocks.11.g"] == stream
    assert sum(size for unit, size in kept.items() if unit.startswith("stages.0.blocks")) == 2 * stream


def test_show_answers_the_questions():
    model = revzoo.create("revnet_digits")
    before = {key: t.clone() for key, t in model.state_dict().items()}
    text = text_of(model, 8)
    for answer in (
        "revnet_digits (revnet)",
        f"{sum(p.numel() for p in model.parameters()):,}, of them",
        f"{len(model.steps)}, coupling additive",
        "What is kept for backward, batch of 8",
        "node: residual_pair",
        "stages.1.transition",
        "GFLOP per image",
        "activations at the peak",
        "source",
        "expected",
    ):
        assert answer in text
    assert len([line for line in text.splitlines() if "node: " in line]) == 3 + sum("transition" in u for u in model.units)
    assert all(torch.equal(before[key], t) for key, t in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_without_shipped_weights_says_none():
    model = revzoo.create("rev_vit_digits", overrides=["name=mine", "stages.0.depth=1"], device="meta")
    lines = text_of(model, 2).splitlines()
    (line,) = (line for line in lines if line.lstrip().startswith("weights ") and "iB" not in line)
    assert line.split() == ["weights", "none"]


def test_names_are_no_markup_and_no_batch_is_allocated():
    model = revzoo.create("rev_vit_digits", overrides=["name='[/red]'", "family='[bold]'", "stages.0.depth=1"])
    text = text_of(model, 10**9)
    assert "[/red] ([bold])" in text
    assert "batch of 1000000000" in text
