"""What a plan was made for, and how it says that something is otherwise."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import revzoo
from revzoo.planning.setting import read_setting
from revzoo.runtime import ReversibleChain, tiled


def test_a_models_setting(tiny):
    setting = read_setting(tiny, tiny.example_input(3))
    assert setting.model == "rev_vit_digits"
    assert len(setting.digest) == 64
    assert (setting.dtype, setting.device, setting.training, setting.exact) == ("float32", "cpu", True, False)
    assert setting.batch == ("[3, 1, 8, 8] float32",)


def test_a_chains_setting():
    chains = [ReversibleChain([nn.Linear(width, width)]) for width in (4, 4, 5)]
    setting = [read_setting(chain, {"x1": torch.zeros(2, 4), "x2": torch.zeros(2, 4), "side": None}) for chain in chains]
    assert setting[0] == setting[1] != setting[2]
    assert setting[0].model == "ReversibleChain"
    assert setting[0].batch == ("[2, 4] float32",) * 2


def test_autocast_is_part_of_the_dtype(tiny):
    with torch.autocast("cpu", torch.bfloat16):
        assert read_setting(tiny).dtype == "float32, autocast bfloat16"
    assert read_setting(tiny.double()).dtype == "float64"


def test_the_schedule_and_the_weights_are_no_part_of_it(tiny):
    before = read_setting(tiny)
    tiny.schedule = "recompute"
    nn.init.zeros_(tiny.head.linear.weight)
    assert read_setting(tiny) == before
    tiny.exact = True
    assert read_setting(tiny) == replace(before, exact=True)
    tiny.eval()
    assert read_setting(tiny).training is False


def test_frozen_parts_and_parts_in_evaluation_mode_are(tiny):
    digests = [read_setting(tiny).digest]
    tiny.stem.requires_grad_(False)
    digests.append(read_setting(tiny).digest)
    tiny.stem.eval()
    digests.append(read_setting(tiny).digest)
    assert len(set(digests)) == 3


def test_tiles_are_and_along_what(tiny):
    blocks = nn.ModuleDict({"blocks": nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)))})
    [chain] = revzoo.reversible_(blocks, "blocks").chains
    for model, units in ((tiny, tiny), (blocks, chain)):
        settings = []
        for tiles in (1, 2, 3, 1):
            units.tiles = tiles
            settings.append(read_setting(model))
        assert settings[0] == settings[3]
        assert len({setting.tiles for setting in settings}) == 3
        assert len({setting.digest for setting in settings}) == 1
        step = next(entry.module for entry in units.layout() if entry.kind == "step")
        tiled(step, 1, dim=-2)
        assert read_setting(model).digest != settings[0].digest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "revnet_digits", "digest": "1" * 64}, "model: revnet_digits in the plan, rev_vit_digits now"),
        ({"digest": "1" * 64}, "hash of the model's parts, sizes and frozen parameters: 111111111111 in the plan, "),
        ({"device": "cuda A"}, "device: cuda A in the plan, cpu now"),
        ({"training": False}, "training mode: False in the plan, True now"),
        ({"batch": ("[4] int64", "[5] bool")}, "batch: [4] int64, [5] bool in the plan, [3, 1, 8, 8] float32 now"),
    ],
)
def test_differences_are_described(change, words, tiny):
    setting = read_setting(tiny, tiny.example_input(3))
    (difference,) = replace(setting, **change).differences(setting)
    assert difference.startswith(words)


def test_what_is_open_fits_any(tiny):
    setting = read_setting(tiny, tiny.example_input(3))
    for change in ({"device": "meta"}, {"batch": ()}):
        assert not list(replace(setting, **change).differences(setting))
        assert not list(setting.differences(replace(setting, **change)))
    assert not list(
        read_setting(revzoo.create("rev_vit_digits", overrides=["stages.0.depth=2"], device="meta")).differences(setting)
    )
