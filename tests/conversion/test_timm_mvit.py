"""timm's MViTv2 becomes a reversible one and is the same function, with and without widening attention."""

import pytest
import timm
import torch
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg, checkpoint_filter_fn

from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.sources.timm_mvit import TimmMViT
from revzoo.errors import ConversionError

SOURCE = TimmMViT()
TINY = {
    "depths": (1, 2, 3),
    "embed_dim": 8,
    "num_heads": 2,
    "mlp_ratio": 2.0,
    "stride_q": ((1, 1), (2, 2), (2, 2)),
    "stride_kv_adaptive": (2, 2),
    "patch_kernel": (3, 3),
    "patch_stride": (2, 2),
    "patch_padding": (1, 1),
}
MODEL = {"img_size": 16, "num_classes": 5}
LARGE = {"expand_attn": False, "depths": (2, 3, 2)}  # as mvitv2_large


def tiny(model=None, **cfg):
    return MultiScaleVit(MultiScaleVitCfg(**TINY | cfg), **MODEL | (model or {}))


VARIANTS = {
    "widening attention": {},
    "widening MLP": LARGE,
    "no pooling": {"model": {"global_pool": "", "in_chans": 1}},
    "absolute positions": {"use_abs_pos": True, "rel_pos_type": "none", "model": {"img_size": (16, 24)}},
    "no residual pooling": {"residual_pooling": False, "mlp_ratio": 1.7},
    "a first stage that pools": {"stride_q": ((2, 2), (1, 1), (2, 2)), "depths": (2, 2, 2)},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_the_converted_network_is_the_original(converter, randomise, options):
    original = randomise(tiny(**options))
    size = options.get("model", {}).get("img_size", (16, 16))
    x = torch.randn(2, original.patch_embed.proj.in_channels, *size)
    assert converter.measure_difference(original, x) <= 1e-5
    assert converter.measure_difference(original, x, CouplingChoice("dual_residual", kept_bits=None, b=0.0)) <= 1e-5
    assert converter.measure_difference(original, x, CouplingChoice("additive")) > 1e-3  # the same tensors, another function
    converter.check_round_trip(original)


def test_every_tensor_goes_where_the_golden_list_says(converter):
    converter.check_keys(tiny(), "timm_mvit")
    converter.check_keys(tiny(**LARGE), "timm_mvit_expanding_mlp")


@pytest.mark.parametrize(
    ("name", "tensors", "steps", "rate"),
    [
        ("mvitv2_tiny", 242, 14, 0.2),
        pytest.param("mvitv2_base", None, 42, 0.2, marks=pytest.mark.slow),
        pytest.param("mvitv2_large", None, 84, 0.0, marks=pytest.mark.slow),
    ],
)
def test_named_models_are_read_without_weights(converter, name, tensors, steps, rate):
    original = timm.create_model(name, device="meta", drop_path_rate=rate)
    with torch.device("meta"):
        model = converter.build(original, CouplingChoice())
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    theirs = original.state_dict()
    assert {e.ours[0]: theirs[e.theirs[0]].shape for e in SOURCE.map_tensors(original)} == shapes
    assert len(shapes) == tensors or tensors is None
    assert len(model.steps) == steps
    assert model.spec.input.size == (224, 224)
    ordinary = [block.drop_path1 for stage in model.stages[1:] for block in stage.transition.blocks]
    rates = [block.drop_path1 for stage in original.stages for block in stage.blocks]
    probabilities = {getattr(layer, "drop_prob", 0.0) for layer in rates}
    ours = {getattr(layer, "drop_prob", 0.0) for layer in ordinary} | {step.drop_path.drop_prob for step in model.steps}
    assert sorted(ours) == pytest.approx(sorted(probabilities), abs=1e-7)


REFUSED = {
    r"a class token \(use_cls_token\)": {"use_cls_token": True},
    "pool_first": {"pool_first": True},
    "pooling by 'max'": {"mode": "max"},
    "pooling by 'conv_unshared'": {"mode": "conv_unshared"},
    r"kernel_qkv": {"kernel_qkv": (1, 1)},
    "kernels other than 3x3": {"kernel_qkv": (5, 5)},
    "qkv_bias": {"qkv_bias": False},
    "norm_eps": {"norm_eps": 1e-5},
    "a stage 1 of 1 block": {"depths": (1, 1, 2)},
    "a stage 0 of 1 block": {"depths": (1, 3, 2), "expand_attn": False},
    "a stage 1 of 2 block": {"depths": (2, 2, 2), "expand_attn": False},
    "other than one that widens and then one that pools": LARGE | {"stride_q": ((1, 1), (1, 1), (2, 2))},
    "two blocks become one transition": LARGE | {"model": {"drop_path_rate": 0.1}},
    "num_classes=0": {"model": {"num_classes": 0}},
    "patch_kernel": {"patch_kernel": (4, 4)},
    "sides are not multiples of the strides": {"model": {"img_size": 20}},
}


@pytest.mark.parametrize(("named", "options"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_expressed_is_refused_by_name(named, options):
    original = tiny(**options)
    assert SOURCE.handles(original)
    with pytest.raises(ConversionError, match=named):
        SOURCE.make_spec(original, CouplingChoice())


def test_positions_of_distances_are_interpolated_as_timm_does(randomise):
    original, larger = randomise(tiny()), tiny(model={"img_size": 24})
    expected = checkpoint_filter_fn(original.state_dict(), larger)
    shapes = {key: value.shape for key, value in larger.state_dict().items()}
    changed = [key for key, value in original.state_dict().items() if value.shape != shapes[key]]
    assert {key.rpartition(".")[2] for key in changed} == {"rel_pos_h", "rel_pos_w"}
    for key in changed:
        assert torch.equal(SOURCE.resize(key, original.state_dict()[key], shapes[key]), expected[key])
    table = original.state_dict()[changed[0]]
    assert SOURCE.resize(changed[0], table, (3, table.shape[1] + 1)) is None
    assert SOURCE.resize("norm.weight", table, (3, table.shape[1])) is None


@pytest.mark.parametrize("options", [{}, LARGE], ids=["widening attention", "widening MLP"])
def test_facebooks_names_become_timms(randomise, options):
    original = randomise(tiny(**options))
    expected, file, count = original.state_dict(), {}, 0
    for i, stage in enumerate(original.stages):
        for j in range(len(stage.blocks)):
            here = {key: value for key, value in expected.items() if key.startswith(f"stages.{i}.blocks.{j}.")}
            file |= {key.replace(f"stages.{i}.blocks.{j}", f"blocks.{count}"): value for key, value in here.items()}
            count += 1
    file |= {key.replace("head.fc", "head.projection"): value for key, value in expected.items() if "stages" not in key}
    for shortcut in ("shortcut_proj_attn", "shortcut_proj_mlp"):
        file = {key.replace(shortcut, "proj"): value for key, value in file.items()}
    renamed, notes = SOURCE.canonicalise(original, file)
    assert renamed.keys() == expected.keys()
    assert all(torch.equal(renamed[key], value) for key, value in expected.items())
    assert notes == ["facebookresearch/mvit's names became timm's: blocks are counted by stage"]
    assert SOURCE.canonicalise(original, expected) == (expected, [])
