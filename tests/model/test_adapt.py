"""Weights are adapted to another size of image and other numbers of channels, as timm does it; all else is refused."""

import re

import pytest
import torch
from timm.layers import resample_abs_pos_embed
from timm.models import adapt_input_conv
from torch.testing import assert_close

import revzoo
from revzoo.errors import CheckpointError, SpecError
from revzoo.model.adapt import adapt_input
from revzoo.parts.layers.position import resize_biases, resize_distances


def create(name, *overrides):
    return revzoo.create(name, pretrained=True, overrides=overrides).eval()


@pytest.mark.parametrize("name", ["rev_vit_digits", "revnet_digits"])
@torch.no_grad()
def test_grey_images_in_three_channels_give_what_they_gave(name):
    grey, coloured = create(name), create(name, "input.channels=3")
    x = grey.example_input(2)
    assert_close(coloured(x.expand(-1, 3, -1, -1)), grey(x), rtol=0, atol=1e-5)
    shapes = {key: tensor.shape for key, tensor in coloured.state_dict().items()}
    different = [key for key, tensor in grey.state_dict().items() if tensor.shape != shapes[key]]
    assert len(different) == 1
    assert different[0].startswith("stem.")


@pytest.mark.parametrize("channels", [1, 4])
def test_a_convolution_of_colours_is_adapted_as_by_timm(channels):
    original = revzoo.create("rev_vit_ti", overrides=["stages.0.depth=1"])
    adapted = adapt_input(original, revzoo.load_spec("rev_vit_ti", ["stages.0.depth=1", f"input.channels={channels}"]))
    key = "stem.patch_embed.proj.weight"
    expected = adapt_input_conv(channels, original.state_dict()[key]) if channels > 1 else None
    weight = adapted.state_dict()[key]
    assert weight.shape[1] == channels
    assert_close(weight, original.state_dict()[key].sum(1, keepdim=True) if expected is None else expected)


@pytest.mark.parametrize("size", [(224, 224), (256, 192)])
def test_positions_are_interpolated_as_by_timm(size):
    original = revzoo.create("rev_vit_ti", overrides=["stages.0.depth=1"])
    adapted = adapt_input(original, revzoo.load_spec("rev_vit_ti", ["stages.0.depth=1", f"input.size={list(size)}"]))
    expected = resample_abs_pos_embed(original.stem.pos_embed, [side // 16 for side in size], [14, 14], 0)
    assert torch.equal(adapted.stem.pos_embed, expected)
    assert adapted.spec.input.size == size
    same = [key for key, t in original.state_dict().items() if t.shape == adapted.state_dict()[key].shape]
    assert all(torch.equal(original.state_dict()[key], adapted.state_dict()[key]) for key in same)
    assert len(original.state_dict()) - len(same) == (size != (224, 224) and 12 * 16 != 14 * 14)


def test_a_turned_grid_is_another_grid():
    overrides = ["stages.0.depth=1", "input.size=[4,8]"]
    original = revzoo.create("rev_vit_digits", overrides=overrides)
    adapted = adapt_input(original, revzoo.load_spec("rev_vit_digits", [*overrides, "input.size=[8,4]"]))
    assert adapted.stem.pos_embed.shape == original.stem.pos_embed.shape
    expected = resample_abs_pos_embed(original.stem.pos_embed, [4, 2], [2, 4], 0)
    assert torch.equal(adapted.stem.pos_embed, expected)


def test_the_class_token_keeps_its_position():
    overrides = ["stages.0.depth=1", "stem.class_token=true", "head.class_token=true"]
    original = revzoo.create("rev_vit_digits", overrides=overrides)
    adapted = adapt_input(original, revzoo.load_spec("rev_vit_digits", [*overrides, "input.size=[12,12]"]))
    assert adapted.stem.pos_embed.shape == (1, 1 + 36, 64)
    assert torch.equal(adapted.stem.pos_embed[:, 0], original.stem.pos_embed[:, 0])


@pytest.mark.parametrize(
    ("name", "own", "other", "tables", "resize"),
    [
        ("rev_mvit_digits", ["block.f.relative_position=true"], [], (r"rel_pos_[hw]$", 8), resize_distances),
        ("rev_swin_digits", [], ["block.f.window=4"], (r"relative_position_bias_table$", 4), resize_biases),
    ],
)
def test_distances_and_biases_of_larger_windows_are_interpolated(name, own, other, tables, resize):
    original = revzoo.create(name, overrides=own)
    adapted = adapt_input(original, revzoo.load_spec(name, [*own, *other, "input.size=[16,16]"]))
    keys = [key for key in original.state_dict() if re.search(tables[0], key)]
    assert len(keys) == tables[1]
    for key in keys:
        before, after = original.state_dict()[key], adapted.state_dict()[key]
        assert len(after) > len(before)
        assert torch.equal(after, resize(before, after.shape))


def test_weights_of_a_folder_are_adapted(tmp_path):
    model = create("rev_vit_digits")
    model.save_pretrained(tmp_path)
    adapted = revzoo.create(tmp_path, overrides=["input.size=[16,16]"], dtype=torch.float64, num_outputs=3)
    assert (adapted.stem.pos_embed.shape, adapted.stem.pos_embed.dtype, adapted.num_outputs) == ((1, 64, 64), torch.float64, 3)
    assert torch.equal(adapted.fuse.norm.weight, model.fuse.norm.weight.double())
    adapted.schedule = "store"
    adapted.save_pretrained(tmp_path / "larger")
    assert torch.equal(revzoo.create(tmp_path / "larger").stem.pos_embed, adapted.stem.pos_embed.float())


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("irevnet_digits", ["input.channels=3"], "no first convolution that could be adapted from 1 to 3 channels"),
        ("rev_vit_digits", ["input.size=[16,16]", "stages.0.width=32", "stem.width=32"], "are of another network"),
        ("rev_vit_digits", ["input.size=[16,16]", "stages.0.depth=7"], "but stages.0.blocks.6.f.attn.proj.bias"),
    ],
)
@pytest.mark.filterwarnings("ignore:The weights of .* were made for another spec")
def test_what_cannot_be_adapted_is_named(name, overrides, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        create(name, *overrides)


def test_other_differences_are_told():
    with pytest.warns(
        UserWarning, match=r"The weights of rev_vit_digits were made for another spec\. Differing: stages\.0\.f\.heads"
    ):
        create("rev_vit_digits", "input.size=[16,16]", "block.f.heads=2")
    with pytest.raises(SpecError, match=r"stem\.patch"):
        create("rev_vit_digits", "input.size=[9,9]")
