"""timm's ViT, Swin, MViTv2 and ResNet become reversible ones and are the same function."""

from functools import partial

import pytest
import timm
import torch
from timm.layers import BlurPool2d, resample_abs_pos_embed
from timm.models import mvitv2, swin_transformer
from timm.models.deit import VisionTransformerDistilled
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from timm.models.res2net import Bottle2neck
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.sources.tensors import merge_qkv
from revzoo.conversion.sources.timm_mvit import TimmMViT
from revzoo.conversion.sources.timm_resnet import TimmResNet
from revzoo.conversion.sources.timm_swin import TimmSwin, rename_microsoft_keys
from revzoo.conversion.sources.timm_vit import TimmViT
from revzoo.errors import ConversionError
from tests.conversion.conftest import measure_distance

SOURCES = {"vit": TimmViT(), "swin": TimmSwin(), "mvit": TimmMViT(), "resnet": TimmResNet()}
MEAN = {"global_pool": "avg", "class_token": False}
EXPANDING_MLP = {"expand_attn": False, "depths": (2, 3, 2)}  # as mvitv2_large


def vit(kind=VisionTransformer, **options):
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
    return kind(**sizes | options)


def swin(pool=None, **options):
    """Return a small Swin; `pool` is set afterwards, since some versions of timm make none with "max"."""
    sizes = {"img_size": 32, "patch_size": 2, "embed_dim": 8, "depths": (2, 1, 2), "num_heads": (2, 2, 4), "window_size": 4}
    original = SwinTransformer(**sizes | {"num_classes": 5} | options)
    if pool is not None:
        original.reset_classifier(5, global_pool=pool)
    return original


def mvit(model=None, **cfg):
    sizes = {"depths": (1, 2, 3), "embed_dim": 8, "num_heads": 2, "mlp_ratio": 2.0, "stride_q": ((1, 1), (2, 2), (2, 2))}
    sizes |= {"stride_kv_adaptive": (2, 2), "patch_kernel": (3, 3), "patch_stride": (2, 2), "patch_padding": (1, 1)}
    return MultiScaleVit(MultiScaleVitCfg(**sizes | cfg), **{"img_size": 16, "num_classes": 5} | (model or {}))


def resnet(block=BasicBlock, layers=(1, 2, 2, 2), size=(32, 32), **options):
    options = {"channels": (64 // block.expansion, 8, 12, 16), "num_classes": 5, "in_chans": 3} | options
    original = ResNet(block, layers, **options)
    original.pretrained_cfg = {"input_size": (options["in_chans"], *size)}
    return original


def bottlenecks(layers=(2, 2, 2, 2), channels=(4, 8, 8, 8), **options):
    return resnet(Bottleneck, layers, channels=channels, **options)


VARIANTS = {
    "vit, layer scale": lambda: vit(init_values=0.1),
    "vit, no class token": lambda: vit(**MEAN),
    "vit, mean without class token, approximated GELU": lambda: vit(global_pool="avg", act_layer="gelu_tanh"),
    "vit, mean with class token, no bias": lambda: vit(global_pool="avg", pool_include_prefix=True, qkv_bias=False),
    "vit, norm before the mean, no positions": lambda: vit(global_pool="avg", fc_norm=False, pos_embed="none"),
    "vit, norm after the class token": lambda: vit(fc_norm=True),
    "vit, maximum, other sizes": lambda: vit(global_pool="max", img_size=(12, 8), in_chans=1, mlp_ratio=1.7, act_layer="relu"),
    "vit, no pooling, no norm": lambda: vit(global_pool="", final_norm=False),
    "vit, position of patches alone, eps 1e-5": lambda: vit(
        no_embed_class=True, norm_layer=partial(torch.nn.LayerNorm, eps=1e-5), embed_norm_layer=torch.nn.LayerNorm
    ),
    "swin, shifted windows": swin,
    "swin, windows larger than the grid": lambda: swin(window_size=8),
    "swin, windows of each layer": lambda: swin(window_size=((4, 4), (2, 2), (4, 4)), mlp_ratio=(2.0, 3.0, 1.3)),
    "swin, oblong grid, no bias, maximum": lambda: swin(
        "max", img_size=(16, 32), depths=(2, 2), num_heads=(2, 2), qkv_bias=False, in_chans=1
    ),
    "mvit, widening attention": mvit,
    "mvit, widening MLP": lambda: mvit(**EXPANDING_MLP),
    "mvit, no pooling, no residual pooling": lambda: mvit(
        {"global_pool": "", "in_chans": 1}, residual_pooling=False, mlp_ratio=1.7
    ),
    "mvit, absolute positions": lambda: mvit({"img_size": (16, 24)}, use_abs_pos=True, rel_pos_type="none"),
    "mvit, a first stage that pools": lambda: mvit(stride_q=((2, 2), (1, 1), (2, 2)), depths=(2, 2, 2)),
    "resnet, basic": resnet,
    "resnet, bottleneck": lambda: bottlenecks((2, 2, 3, 2), (4, 8, 12, 16)),
    "resnet, groups": lambda: bottlenecks(channels=(8, 8, 8, 8), cardinality=2, base_width=16),
    "resnet, odd sides, one channel, maximum": lambda: resnet(size=(37, 50), in_chans=1, global_pool="max"),
}


def get_source(name):
    return SOURCES[name.partition(",")[0]]


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_the_converted_network_is_the_original(make_converter, randomise, name):
    converter = make_converter(get_source(name))
    original = randomise(VARIANTS[name](), scale=0.1 if name.startswith("resnet") else 0.2)
    spec = converter.source.make_spec(original, CouplingChoice())
    x = torch.randn(2, spec["input"]["channels"], *spec["input"]["size"])
    model, expected = converter.convert(original, original.state_dict()), original(x)
    assert expected.abs().max() > 0.01
    assert measure_distance(model(x), expected) <= 1e-5
    converter.check_way_back(original, model, original.state_dict())


@pytest.mark.parametrize(
    ("make", "golden"),
    [
        (lambda: vit(init_values=0.1), "vit"),
        (lambda: vit(**MEAN), "vit_mean"),
        (swin, "swin"),
        (mvit, "mvit"),
        (lambda: mvit(**EXPANDING_MLP), "mvit_expanding_mlp"),
        (resnet, "resnet"),
        (lambda: bottlenecks(channels=(4, 8, 12, 16)), "resnet_bottleneck"),
    ],
)
def test_every_tensor_goes_where_the_golden_list_says(make_converter, make, golden):
    make_converter(SOURCES[golden.partition("_")[0]]).check_keys(make(), f"timm_{golden}")


@pytest.mark.parametrize(
    ("name", "tensors", "steps"),
    [
        ("vit_tiny_patch16_224", 152, 24),
        ("deit3_small_patch16_224", 176, 24),
        ("swin_tiny_patch4_window7_224", 173, 24),
        ("mvitv2_tiny", 242, 14),
        ("resnet18", 122, 5),
        ("resnet50", 320, 12),
        pytest.param("resnext50_32x4d", 320, 12, marks=pytest.mark.slow),
        pytest.param("wide_resnet50_2", 320, 12, marks=pytest.mark.slow),
        pytest.param("mvitv2_large", 1116, 84, marks=pytest.mark.slow),
    ],
)
def test_named_models_are_read_without_weights(make_converter, name, tensors, steps):
    rate = 0.0 if name == "mvitv2_large" else 0.2
    original = timm.create_model(name, num_classes=1000, device="meta", drop_path_rate=rate)
    source = next(source for source in SOURCES.values() if source.handles(original))
    with torch.device("meta"):
        model = make_converter(source).build(original, CouplingChoice())
    shapes, theirs = {key: value.shape for key, value in model.state_dict().items()}, original.state_dict()
    assert {e.ours[0]: theirs[e.theirs[0]].shape for e in source.map_tensors(original)} == shapes
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in original.parameters())
    assert (len(shapes), len(model.steps), model.spec.input.size) == (tensors, steps, (224, 224))
    rates, ours = ({round(getattr(m, "drop_prob", 0.0) or 0.0, 6) for m in network.modules()} for network in (original, model))
    assert (max(rates), ours) == (rate, rates)


def test_dropout_and_its_rates_are_read():
    spec = SOURCES["vit"].make_spec(vit(drop_rate=0.1, drop_path_rate=0.3), CouplingChoice())
    of_mvit = SOURCES["mvit"].make_spec(mvit({"drop_rate": 0.2}), CouplingChoice())
    assert (spec["head"]["dropout"], of_mvit["head"]["dropout"]) == (0.1, 0.2)
    assert spec["block"]["drop_path"] == {"max": pytest.approx(0.3), "rule": "linear", "transitions": False}
    assert spec["block"]["coupling"] == {"type": "momentum", "kept_bits": 8, "gain": 1.0, "residual": True}


def test_statistics_of_a_training_step_are_the_originals(make_converter, randomise):
    original = randomise(resnet(), scale=0.1)
    model = make_converter(SOURCES["resnet"]).convert(original, original.state_dict()).train()
    x = torch.randn(4, 3, 32, 32)
    expected, outputs = original.train()(x), model(x)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    ours, theirs = model.state_dict(), original.state_dict()
    for mapping in SOURCES["resnet"].map_tensors(original):
        torch.testing.assert_close(ours[mapping.ours[0]], theirs[mapping.theirs[0]], rtol=1e-4, atol=1e-5)


def test_gradients_of_a_conversion_that_can_be_inverted_equal_stored_ones(make_converter, randomise):
    original = randomise(bottlenecks((2, 2, 3, 2), (4, 8, 12, 16)), scale=0.1)
    model = make_converter(SOURCES["resnet"]).build(original, CouplingChoice("momentum", kept_bits=None, b=0.5)).double()
    x, gradients = torch.randn(2, 3, 32, 32, dtype=torch.float64), {}
    for schedule in ("store", "invert"):
        model.schedule = schedule
        model.zero_grad()
        model(x).square().sum().backward()
        gradients[schedule] = {name: p.grad for name, p in model.named_parameters()}
    inverted = gradients["invert"]
    assert max(float((inverted[k] - g).norm() / (1e-12 + g.norm())) for k, g in gradients["store"].items()) < 1e-9


TWO = {"block": Bottleneck, "layers": (2, 2, 2, 2)}
REFUSED = {
    vit: {
        "VisionTransformerDistilled": {"kind": VisionTransformerDistilled},
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
    },
    swin: {
        "always_partition": {"always_partition": True},
        r"windows that do not divide the grid \(3x3 on 16x16\)": {"window_size": 3},
        "oblong windows": {"window_size": ((4, 2), (4, 2), (4, 2))},
        r"odd sides \(5x5\)": {"img_size": 10, "window_size": 5},
        "head_dim 8": {"head_dim": 8},
        "strict_img_size=False": {"strict_img_size": False},
        "pooling ''": {"global_pool": ""},
        "attn_drop_rate": {"attn_drop_rate": 0.1},
        "proj_drop_rate": {"proj_drop_rate": 0.1},
        "eps is not 1e-5": {"norm_layer": partial(torch.nn.LayerNorm, eps=1e-6)},
    },
    mvit: {
        r"a class token \(use_cls_token\)": {"use_cls_token": True},
        "pool_first": {"pool_first": True},
        "pooling by 'max'": {"mode": "max"},
        "does not pool all of queries, keys and values": {"kernel_qkv": (1, 1)},
        "kernels other than 3x3": {"kernel_qkv": (5, 5)},
        "qkv_bias": {"qkv_bias": False},
        "norm_eps": {"norm_eps": 1e-5},
        "a stage 1 of 1 block": {"depths": (1, 1, 2)},
        "a stage 1 of 2 block": {"depths": (2, 2, 2), "expand_attn": False},
        "other than one that widens and then one that pools": EXPANDING_MLP | {"stride_q": ((1, 1), (1, 1), (2, 2))},
        "two blocks become one transition": EXPANDING_MLP | {"model": {"drop_path_rate": 0.1}},
        "patch_kernel": {"patch_kernel": (4, 4)},
        "sides are not multiples of the strides": {"model": {"img_size": 20}},
    },
    resnet: {
        "a deep stem": {"stem_type": "deep"},
        "avg_down": {"avg_down": True},
        "attention in its blocks": {"block_args": {"attn_layer": "se"}},
        "replace_stem_pool, aa_layer": {"aa_layer": BlurPool2d},
        "dilation": {"output_stride": 8},
        "drop_block_rate": {"drop_block_rate": 0.1},
        "block_reduce_first": TWO | {"block_reduce_first": 2},
        "layer2 whose only block": {"layers": (2, 1, 2, 2)},
        "the activation SiLU": {"act_layer": torch.nn.SiLU},
        "blocks of class Bottle2neck": {"block": Bottle2neck, "layers": (1, 1, 1, 1)},
        "norms of class": {"norm_layer": "groupnorm", "channels": (64, 64, 64, 64)},
        "pooling 'catavgmax'": {"global_pool": "catavgmax"},
    },
}


@pytest.mark.parametrize(("make", "named"), [(make, named) for make, rows in REFUSED.items() for named in rows])
def test_what_cannot_be_expressed_is_refused_by_name(make, named):
    original, source = make(**REFUSED[make][named]), SOURCES[make.__name__]
    assert source.handles(original)
    with pytest.raises(ConversionError, match=named):
        source.make_spec(original, CouplingChoice())


@pytest.mark.parametrize(("rows", "grid"), [(0, None), (1, None), (1, (4, 9))])
def test_positions_of_a_square_grid_are_interpolated(rows, grid):
    source, positions = SOURCES["vit"], torch.randn(1, rows + 16, 12)
    resized = source.resize("pos_embed", positions, (1, rows + 36, 12), grid)
    assert torch.equal(resized, resample_abs_pos_embed(positions, list(grid or (6, 6)), num_prefix_tokens=rows))
    assert torch.equal(resized[:, :rows], positions[:, :rows])
    for key, tensor, shape in (
        ("pos_embed", positions, (1, rows + 35, 12)),
        ("pos_embed", positions, (1, rows + 36, 8)),
        ("pos_embed", torch.randn(1, rows + 35, 12), (1, rows + 36, 12)),
        ("head.weight", positions, (1, rows + 36, 12)),
    ):
        assert source.resize(key, tensor, shape, grid) is None


def test_distances_are_interpolated_as_timm_does(randomise):
    source, original, larger = SOURCES["mvit"], randomise(mvit()), mvit({"img_size": 24})
    own, expected = original.state_dict(), mvitv2.checkpoint_filter_fn(original.state_dict(), larger)
    changed = [key for key, value in larger.state_dict().items() if value.shape != own[key].shape]
    assert {key.rpartition(".")[2] for key in changed} == {"rel_pos_h", "rel_pos_w"}
    assert all(torch.equal(source.resize(key, own[key], larger.state_dict()[key].shape), expected[key]) for key in changed)
    table = own[changed[0]]
    assert source.resize(changed[0], table, (3, table.shape[1] + 1)) is None
    assert source.resize("norm.weight", table, (3, table.shape[1])) is None


def test_biases_of_another_square_window_are_interpolated():
    source, key = SOURCES["swin"], "layers.0.blocks.0.attn.relative_position_bias_table"
    table = torch.randn(49, 2)
    larger = source.resize(key, table, (169, 2))
    assert larger.shape == (169, 2)
    assert torch.allclose(larger.view(13, 13, 2)[6, 6], table.view(7, 7, 2)[3, 3])  # no distance
    assert torch.allclose(larger.view(13, 13, 2)[::12, ::12], table.view(7, 7, 2)[::6, ::6], atol=1e-4)  # the largest ones
    assert all(
        source.resize(name, table, shape) is None for name, shape in ((key, (168, 2)), (key, (169, 3)), ("norm", (169, 2)))
    )


def check_names(source, original, file, notes):
    """Assert that a file becomes the state dict of the original, and that its own state dict stays as it is."""
    expected = original.state_dict()
    renamed, said = source.canonicalise(original, file)
    assert renamed.keys() == expected.keys()
    assert all(torch.equal(renamed[key], value) for key, value in expected.items())
    assert [note.partition(":")[0] for note in said] == notes
    assert source.canonicalise(original, expected) == (expected, [])


@pytest.mark.parametrize("names", ["q k v", "q_proj k_proj v_proj"])
def test_vits_of_other_files_are_understood(randomise, names):
    original, file = randomise(vit(init_values=0.1)), {}
    for key, value in original.state_dict().items():
        parts = value.chunk(3) if ".qkv." in key else ()
        file |= {key.replace("qkv", name): part for name, part in zip(names.split(), parts, strict=bool(parts))}
        file |= {} if parts else {key.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): value}
    notes = [
        "12 tensors of separate queries, keys and values were merged into 4 (qkv)",
        "4 factors of LayerScale were renamed (gamma_1 to ls1.gamma)",
    ]
    check_names(SOURCES["vit"], original, file, notes)
    assert SOURCES["vit"].ignores("pre_logits.fc.weight")
    incomplete = {"a.q.weight": torch.ones(2, 2), "a.v.weight": torch.ones(2, 2), "b.q": torch.ones(2)}
    assert merge_qkv(incomplete) == (incomplete, [])


@pytest.mark.parametrize(
    ("network", "file", "message"),
    [
        ({}, MEAN, "The network has a class token and the file has none"),
        (MEAN, {}, "The network has no class token and the file has one"),
        ({}, {"kind": VisionTransformerDistilled}, "a distillation token"),
    ],
)
def test_tokens_that_are_not_in_both_are_named(network, file, message):
    with pytest.raises(ConversionError, match=message):
        SOURCES["vit"].canonicalise(vit(**network), vit(**file).state_dict())


def test_microsofts_names_become_timms(randomise):
    original = randomise(swin())
    expected, file = original.state_dict(), {}
    for key, value in expected.items():
        for i in (1, 2):
            key = key.replace(f"layers.{i}.downsample", f"layers.{i - 1}.downsample")
        file[key.replace("head.fc.", "head.")] = value
    constants = ["layers.0.blocks.1.attn_mask", "layers.0.blocks.0.attn.relative_position_index"]
    file |= {key: torch.zeros(4) for key in constants}
    assert "layers.2.downsample.norm.weight" not in file
    assert rename_microsoft_keys(file).keys() == swin_transformer.checkpoint_filter_fn(dict(file), original).keys()
    check_names(SOURCES["swin"], original, file, ["Microsoft's names became timm's"])
    assert [key for key in file if SOURCES["swin"].ignores(key)] == constants


def test_facebooks_names_become_timms(randomise):
    original = randomise(mvit(**EXPANDING_MLP))
    expected, file, count = original.state_dict(), {}, 0
    for i, stage in enumerate(original.stages):
        for j in range(len(stage.blocks)):
            here = {key: value for key, value in expected.items() if key.startswith(f"stages.{i}.blocks.{j}.")}
            file |= {key.replace(f"stages.{i}.blocks.{j}", f"blocks.{count}"): value for key, value in here.items()}
            count += 1
    file |= {key.replace("head.fc", "head.projection"): value for key, value in expected.items() if "stages" not in key}
    file = {key.replace("shortcut_proj_attn", "proj").replace("shortcut_proj_mlp", "proj"): t for key, t in file.items()}
    check_names(SOURCES["mvit"], original, file, ["facebookresearch/mvit's names became timm's"])


def test_counts_that_an_old_file_lacks_are_zero():
    original = resnet()
    file = {key: value for key, value in original.state_dict().items() if not key.endswith("num_batches_tracked")}
    check_names(
        SOURCES["resnet"], original, file, ["18 counts of batches (num_batches_tracked) are not in the file and were set to 0"]
    )
