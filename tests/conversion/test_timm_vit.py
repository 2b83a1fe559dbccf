"""timm's ViT and DeiT become reversible ones and are the same function."""

from functools import partial

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.sources.tensors import merge_qkv
from revzoo.conversion.sources.timm_vit import TimmViT
from revzoo.errors import ConversionError

SOURCE = TimmViT()
TINY = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
MEAN = {"global_pool": "avg", "class_token": False}


def tiny(kind=VisionTransformer, **options):
    return kind(**TINY | options)


VARIANTS = {
    "class token": {},
    "no class token": MEAN,
    "mean without class token": {"global_pool": "avg"},
    "mean with class token": {"global_pool": "avg", "pool_include_prefix": True},
    "norm before the mean": {"global_pool": "avg", "fc_norm": False},
    "norm after the class token": {"fc_norm": True},
    "maximum": {"global_pool": "max"},
    "no pooling": {"global_pool": ""},
    "position of patches alone": {"no_embed_class": True},
    "no positions": {"pos_embed": "none"},
    "layer scale": {"init_values": 0.1},
    "no bias": {"qkv_bias": False},
    "no norm": {"final_norm": False},
    "other sizes": {"img_size": (12, 8), "in_chans": 1, "mlp_ratio": 1.7, "act_layer": "relu"},
    "approximated GELU": {"act_layer": "gelu_tanh"},
    "eps 1e-5": {"norm_layer": partial(torch.nn.LayerNorm, eps=1e-5), "embed_norm_layer": torch.nn.LayerNorm},
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
    converter.check_keys(tiny(init_values=0.1), "timm_vit")
    converter.check_keys(tiny(**MEAN), "timm_vit_mean")


@pytest.mark.parametrize(("name", "parameters"), [("vit_tiny_patch16_224", 5717416), ("deit3_small_patch16_224", 22059496)])
def test_named_models_are_read_without_weights(converter, name, parameters):
    original = timm.create_model(name, num_classes=1000, device="meta", drop_path_rate=0.2)
    with torch.device("meta"):
        model = converter.build(original, CouplingChoice())
    assert sum(p.numel() for p in model.parameters()) == parameters
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    theirs = original.state_dict()
    assert {e.ours[0]: theirs[e.theirs[0]].shape for e in SOURCE.map_tensors(original)} == shapes
    assert [step.drop_path.drop_prob for step in model.steps[::2]] == pytest.approx([0.2 * i / 11 for i in range(12)])


def test_dropout_and_its_rates_are_read():
    spec = SOURCE.make_spec(tiny(drop_rate=0.1, drop_path_rate=0.3), CouplingChoice())
    assert spec["head"]["dropout"] == 0.1
    assert spec["block"]["drop_path"] == {"max": pytest.approx(0.3), "rule": "linear", "transitions": False}
    assert spec["block"]["coupling"] == {"type": "momentum", "kept_bits": 8, "gain": 1.0, "residual": True}


REFUSED = {
    "qk_norm": {"qk_norm": True},
    r"register tokens \(reg_tokens=4\)": {"reg_tokens": 4},
    "pre_norm": {"pre_norm": True},
    "scale_attn_norm": {"scale_attn_norm": True},
    "scale_mlp_norm": {"scale_mlp_norm": True},
    "pooling 'map'": {"global_pool": "map"},
    "num_classes=0": {"num_classes": 0},
    "proj_bias": {"proj_bias": False},
    "attn_drop_rate": {"attn_drop_rate": 0.1},
    "proj_drop_rate": {"proj_drop_rate": 0.1},
    "pos_drop_rate": {"pos_drop_rate": 0.1},
    "patch_drop_rate": {"patch_drop_rate": 0.1},
    "blocks of class ParallelScalingBlock": {"block_fn": ParallelScalingBlock},
    "MLP of class SwiGLU": {"mlp_layer": timm.layers.SwiGLU},
    "the activation": {"act_layer": "quick_gelu"},
    "the norm RmsNorm": {"norm_layer": "rmsnorm"},
    "patches do not cover": {"img_size": 10},
}


@pytest.mark.parametrize(("named", "options"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_expressed_is_refused_by_name(named, options):
    with pytest.raises(ConversionError, match=named):
        SOURCE.make_spec(tiny(**options), CouplingChoice())


def test_distillation_tokens_are_refused_by_name():
    original = tiny(VisionTransformerDistilled)
    assert SOURCE.handles(original)
    with pytest.raises(ConversionError, match="A timm ViT with a distillation token cannot be converted"):
        SOURCE.make_spec(original, CouplingChoice())


@pytest.mark.parametrize("rows", [0, 1])
def test_positions_of_another_square_grid_are_interpolated(rows):
    positions = torch.randn(1, rows + 16, 12)
    resized = SOURCE.resize("pos_embed", positions, (1, rows + 36, 12))
    assert torch.equal(resized, resample_abs_pos_embed(positions, [6, 6], num_prefix_tokens=rows))
    assert torch.equal(resized[:, :rows], positions[:, :rows])
    assert SOURCE.resize("pos_embed", positions, (1, rows + 35, 12)) is None
    assert SOURCE.resize("pos_embed", positions, (1, rows + 36, 8)) is None
    assert SOURCE.resize("head.weight", positions, (1, rows + 36, 12)) is None


@pytest.mark.parametrize("rows", [0, 1])
def test_positions_of_a_grid_that_is_not_square_are_interpolated_from_a_square_one(rows):
    positions = torch.randn(1, rows + 16, 12)
    resized = SOURCE.resize("pos_embed", positions, (1, rows + 36, 12), (4, 9))
    assert torch.equal(resized, resample_abs_pos_embed(positions, [4, 9], num_prefix_tokens=rows))
    assert not torch.equal(resized, SOURCE.resize("pos_embed", positions, (1, rows + 36, 12)))
    assert SOURCE.resize("pos_embed", positions, (1, rows + 36, 12), (4, 8)) is None
    assert SOURCE.resize("pos_embed", torch.randn(1, rows + 35, 12), (1, rows + 36, 12), (4, 9)) is None


@pytest.mark.parametrize("names", ["q k v", "q_proj k_proj v_proj"])
def test_separate_queries_keys_and_values_are_merged(converter, randomise, names):
    expected = randomise(tiny()).state_dict()
    split = {}
    for key, value in expected.items():
        parts = value.chunk(3) if ".qkv." in key else ()
        split |= {key.replace("qkv", name): part for name, part in zip(names.split(), parts, strict=bool(parts))}
        split |= {} if parts else {key: value}
    merged, notes = merge_qkv(split)
    assert notes == ["12 tensors of separate queries, keys and values were merged into 4 (qkv)"]
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[key], value) for key, value in expected.items())
    assert merge_qkv(expected) == (expected, [])


def test_incomplete_sets_stay_as_they_are():
    tensors = {"a.q.weight": torch.ones(2, 2), "a.v.weight": torch.ones(2, 2), "b.q": torch.ones(2)}
    assert merge_qkv(tensors) == (tensors, [])


def test_a_file_with_other_names_is_understood(randomise):
    original = randomise(tiny(init_values=0.1))
    expected = original.state_dict()
    file = {}
    for key, value in expected.items():
        if key.endswith("attn.qkv.weight"):
            file |= {key.replace("qkv", name): part for name, part in zip("qkv", value.chunk(3), strict=True)}
        else:
            file[key.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2")] = value
    assert "blocks.1.gamma_2" in file
    merged, notes = SOURCE.canonicalise(original, file)
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[key], value) for key, value in expected.items())
    assert notes == [
        "6 tensors of separate queries, keys and values were merged into 2 (qkv)",
        "4 factors of LayerScale were renamed (gamma_1 to ls1.gamma)",
    ]
    assert SOURCE.canonicalise(original, expected) == (expected, [])
    assert SOURCE.ignores("pre_logits.fc.weight")


@pytest.mark.parametrize(
    ("network", "file", "message"),
    [
        (tiny(), tiny(**MEAN), "The network has a class token and the file has none"),
        (tiny(**MEAN), tiny(), "The network has no class token and the file has one"),
        (tiny(), tiny(VisionTransformerDistilled), "a distillation token"),
    ],
)
def test_tokens_that_are_not_in_both_are_named(network, file, message):
    with pytest.raises(ConversionError, match=message):
        SOURCE.canonicalise(network, file.state_dict())
