"""timm's and Microsoft's Swin become reversible ones and are the same function."""

from functools import partial

import pytest
import timm
import torch
from timm.models.swin_transformer import SwinTransformer, checkpoint_filter_fn

from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.sources.timm_swin import TimmSwin, rename_microsoft_keys
from revzoo.errors import ConversionError

SOURCE = TimmSwin()
TINY = {"img_size": 32, "patch_size": 2, "embed_dim": 8, "depths": (2, 1, 2), "num_heads": (2, 2, 4), "window_size": 4}
TINY |= {"num_classes": 5}


def tiny(pool=None, **options):
    """Return a small Swin; `pool` is set afterwards, since some versions of timm make none with "max"."""
    original = SwinTransformer(**TINY | options)
    if pool is not None:
        original.reset_classifier(5, global_pool=pool)
    return original


VARIANTS = {
    "shifted windows": {},
    "windows larger than the grid": {"window_size": 8},
    "windows of each layer": {"window_size": ((4, 4), (2, 2), (4, 4)), "mlp_ratio": (2.0, 3.0, 1.3)},
    "oblong grid": {"img_size": (16, 32), "window_size": 4, "depths": (2, 2), "num_heads": (2, 2)},
    "no bias": {"qkv_bias": False, "in_chans": 1},
    "maximum": {"pool": "max"},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_the_converted_network_is_the_original(converter, randomise, options):
    original = randomise(tiny(**options))
    x = torch.randn(2, original.patch_embed.proj.in_channels, *original.patch_embed.img_size)
    assert converter.measure_difference(original, x) <= 1e-5
    assert converter.measure_difference(original, x, CouplingChoice("dual_residual", kept_bits=None, b=0.0)) <= 1e-5
    assert converter.measure_difference(original, x, CouplingChoice("additive")) > 1e-3  # the same tensors, another function
    converter.check_round_trip(original)


def test_every_tensor_goes_where_the_golden_list_says(converter):
    converter.check_keys(tiny(), "timm_swin")


def test_a_named_model_is_read_without_weights(converter):
    original = timm.create_model("swin_tiny_patch4_window7_224", device="meta", drop_path_rate=0.2)
    with torch.device("meta"):
        model = converter.build(original, CouplingChoice())
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    theirs = original.state_dict()
    assert {e.ours[0]: theirs[e.theirs[0]].shape for e in SOURCE.map_tensors(original)} == shapes
    assert len(shapes) == 173
    assert [step.drop_path.drop_prob for step in model.steps[::2]] == pytest.approx([0.2 * i / 11 for i in range(12)])


def as_microsoft(tensors):
    """Return a state dict as Microsoft's code has it."""
    theirs = {}
    for key, value in tensors.items():
        for i in (1, 2):
            key = key.replace(f"layers.{i}.downsample", f"layers.{i - 1}.downsample")
        theirs[key.replace("head.fc.", "head.")] = value
    constants = ("layers.0.blocks.1.attn_mask", "layers.0.blocks.0.attn.relative_position_index")
    return theirs | {key: torch.zeros(4) for key in constants}


def test_microsofts_names_become_timms(randomise):
    original = randomise(tiny())
    expected = original.state_dict()
    file = as_microsoft(expected)
    assert "layers.1.downsample.norm.weight" in file
    assert "layers.2.downsample.norm.weight" not in file
    renamed = rename_microsoft_keys(file)
    assert renamed.keys() == expected.keys() == checkpoint_filter_fn(dict(file), original).keys()
    assert all(torch.equal(renamed[key], value) for key, value in expected.items())
    assert rename_microsoft_keys(expected) == expected
    assert SOURCE.canonicalise(original, expected) == (expected, [])
    named, notes = SOURCE.canonicalise(original, file)
    assert named.keys() == expected.keys()
    assert [note.partition(":")[0] for note in notes] == ["Microsoft's names became timm's"]
    assert [key for key in file if SOURCE.ignores(key)] == list(file)[-2:]
    assert not any(map(SOURCE.ignores, expected))


REFUSED = {
    "always_partition": {"always_partition": True},
    r"windows that do not divide the grid \(3x3 on 16x16\)": {"window_size": 3},
    "oblong windows": {"window_size": ((4, 2), (4, 2), (4, 2))},
    r"odd sides \(5x5\)": {"img_size": 10, "window_size": 5},
    "head_dim 8": {"head_dim": 8},
    "strict_img_size=False": {"strict_img_size": False},
    "pooling ''": {"global_pool": ""},
    "num_classes=0": {"num_classes": 0},
    "attn_drop_rate": {"attn_drop_rate": 0.1},
    "proj_drop_rate": {"proj_drop_rate": 0.1},
    "eps is not 1e-5": {"norm_layer": partial(torch.nn.LayerNorm, eps=1e-6)},
    "patches do not cover": {"img_size": 33},
}


@pytest.mark.parametrize(("named", "options"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_expressed_is_refused_by_name(named, options):
    original = tiny(**options)
    assert SOURCE.handles(original)
    with pytest.raises(ConversionError, match=named):
        SOURCE.make_spec(original, CouplingChoice())


def test_biases_of_another_square_window_are_interpolated():
    key, table = "layers.0.blocks.0.attn.relative_position_bias_table", torch.randn(49, 2)
    larger = SOURCE.resize(key, table, (169, 2))
    assert larger.shape == (169, 2)
    assert torch.allclose(larger.view(13, 13, 2)[6, 6], table.view(7, 7, 2)[3, 3])  # no distance
    assert torch.allclose(larger.view(13, 13, 2)[::12, ::12], table.view(7, 7, 2)[::6, ::6], atol=1e-4)  # the largest ones
    assert SOURCE.resize(key, table, (168, 2)) is None
    assert SOURCE.resize(key, table, (169, 3)) is None
    assert SOURCE.resize("norm.weight", table, (169, 2)) is None
