"""Each part against timm's own module or an independent formula, on the same weights."""

import re

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block, VisionTransformer

import revzoo
from revzoo.errors import InputError, PartArgumentError
from revzoo.parts.branches.attention import AttentionBranch
from revzoo.parts.branches.conv_unit import ConvBranch
from revzoo.parts.branches.mlp import MlpBranch
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.fuses import Concat, Mean
from revzoo.parts.heads.pooled_linear import PooledLinear
from revzoo.parts.inits import FanIn, FanOut, TruncatedNormal
from revzoo.parts.splits import ChannelSplit, Duplicate
from revzoo.parts.stems.conv import ConvStem
from revzoo.parts.stems.patch_embed import PatchStem
from revzoo.parts.transitions.residual_pair import ResidualPair

TOKENS = BuildContext(Shape(12, (2, 3), "tokens"), 12)
IMAGE = BuildContext(Shape(8, (6, 4), "image"), 8)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_attention_and_mlp_are_timms_block_without_the_residual():
    block = Block(12, num_heads=3, qkv_bias=True)
    block.norm1.eps = block.norm2.eps = 1e-6
    f, g = AttentionBranch(TOKENS, heads=3), MlpBranch(TOKENS, ratio=4.0)
    weights = block.state_dict()
    f.load_state_dict({k.replace("norm1", "norm"): w for k, w in weights.items() if k.startswith(("norm1", "attn"))})
    g.load_state_dict({k.replace("norm2", "norm"): w for k, w in weights.items() if k.startswith(("norm2", "mlp"))})
    x = torch.randn(2, 6, 12)
    h = x + f(x)
    torch.testing.assert_close(h + g(h), block(x), rtol=0, atol=0)


def test_patch_stem_is_timms_patch_embedding_and_position():
    vit = VisionTransformer(8, 2, 3, global_pool="avg", embed_dim=12, num_heads=3, class_token=False, depth=0)
    stem = PatchStem(BuildContext(Shape(3, (8, 8), "image"), 3), width=12, patch=2)
    stem.load_state_dict({k: w for k, w in vit.state_dict().items() if k.startswith(("patch_embed", "pos_embed"))})
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(stem(x), vit._pos_embed(vit.patch_embed(x)), rtol=0, atol=0)
    assert stem.out_shape == Shape(12, (4, 4), "tokens")
    plain = PatchStem(BuildContext(Shape(3, (8, 8), "image"), 3), width=12, patch=2, position="none")
    assert [k for k, _ in plain.named_parameters()] == ["patch_embed.proj.weight", "patch_embed.proj.bias"]


def unit(x, parameters, kernels, stride=1, preactivate=True):
    """BN-ReLU-conv in functional form; parameters in order of the unit's own."""
    left = iter(parameters)
    for i, kernel in enumerate(kernels):
        if i > 0 or preactivate:
            x = F.relu(F.batch_norm(x, None, None, next(left), next(left), training=True, eps=1e-3))
        x = F.conv2d(x, next(left), stride=stride if i == 0 else 1, padding=kernel // 2)
    assert next(left, None) is None
    return x


@pytest.mark.parametrize(("layout", "kernels"), [("basic", (3, 3)), ("bottleneck", (1, 3, 1))])
def test_conv_unit_is_the_formula(layout, kernels):
    branch = ConvBranch(IMAGE, layout=layout)
    x = torch.randn(2, 8, 6, 4)
    torch.testing.assert_close(branch(x), unit(x, branch.parameters(), kernels))


@pytest.mark.parametrize("preactivate", [True, False])
def test_basic_residual_pair_is_the_formula(preactivate):
    pair = ResidualPair(BuildContext(IMAGE.shape, 12), stride=2, layout="basic", preactivate=preactivate)
    assert pair.out_shape == Shape(12, (3, 2), "image")
    x1, x2 = torch.randn(2, 2, 8, 6, 4).unbind()

    def shortcut(x):
        zeros = torch.zeros(2, 2, 3, 2)
        return torch.cat((zeros, F.avg_pool2d(x, 2), zeros), 1)

    y1 = shortcut(x1) + unit(x2, pair.f.parameters(), (3, 3), 2, preactivate)
    y2 = shortcut(x2) + unit(y1, pair.g.parameters(), (3, 3))
    torch.testing.assert_close(pair(x1, x2), (y1, y2))


def test_bottleneck_residual_pair_is_the_formula():
    pair = ResidualPair(BuildContext(IMAGE.shape, 16), stride=2, layout="bottleneck")
    x1, x2 = torch.randn(2, 2, 8, 6, 4).unbind()
    y1 = F.conv2d(x1, pair.shortcut1.weight, stride=2) + unit(x2, pair.f.parameters(), (1, 3, 1), 2)
    y2 = F.conv2d(x2, pair.shortcut2.weight, stride=2) + unit(y1, pair.g.parameters(), (1, 3, 1))
    torch.testing.assert_close(pair(x1, x2), (y1, y2))
    unchanged = ResidualPair(IMAGE, layout="basic", preactivate=False)
    z1 = x1 + unit(x2, unchanged.f.parameters(), (3, 3), 1, False)
    torch.testing.assert_close(unchanged(x1, x2)[0], z1)


def test_conv_stem_is_the_formula():
    stem = ConvStem(BuildContext(Shape(3, (8, 8), "image"), 3), width=4, kernel=7, stride=2, pool=True)
    x = torch.randn(2, 3, 8, 8)
    y = F.conv2d(x, stem.conv.weight, stride=2, padding=3)
    y = F.relu(F.batch_norm(y, None, None, stem.norm.weight, stem.norm.bias, training=True, eps=1e-3))
    torch.testing.assert_close(stem(x), F.max_pool2d(y, 3, 2, 1))
    assert stem.out_shape == Shape(4, (2, 2), "image")


def test_splits_and_fuses():
    x = torch.randn(2, 8, 6, 4)
    assert all(half is x for half in Duplicate(IMAGE)(x))
    x1, x2 = ChannelSplit(IMAGE)(x)
    assert torch.equal(torch.cat((x1, x2), 1), x)
    assert ChannelSplit(IMAGE).out_shape.width == 4
    assert torch.equal(Concat(IMAGE, norm="none")(x, x + 1), torch.cat((x, x + 1), 1))
    assert torch.equal(Mean(IMAGE, norm="none")(x, 3 * x), (x + 3 * x) / 2)
    t1, t2 = ChannelSplit(TOKENS)(tokens := torch.randn(2, 6, 12))
    assert torch.equal(torch.cat((t1, t2), 2), tokens)
    joined = F.layer_norm(torch.cat((tokens, 2 * tokens), 2), (24,), eps=1e-6)
    torch.testing.assert_close(Concat(TOKENS)(tokens, 2 * tokens), joined)


def test_head_pools_and_resets():
    head = PooledLinear(IMAGE, outputs=5)
    x = torch.randn(2, 8, 6, 4)
    torch.testing.assert_close(head(x), head.linear(x.mean((2, 3))))
    largest = PooledLinear(TOKENS, outputs=5, pool="max")
    tokens = torch.randn(2, 6, 12)
    torch.testing.assert_close(largest(tokens), largest.linear(tokens.max(1).values))
    head.double().reset(3)
    assert head.outputs == 3
    assert head.linear.weight.dtype == torch.float64


def test_head_of_a_class_token():
    tokens, mask = torch.randn(2, 6, 12), torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    first = PooledLinear(TOKENS, outputs=5, pool="first", fc_norm="layer_norm")
    expected = first.linear(F.layer_norm(tokens[:, 0], (12,), eps=1e-6))
    torch.testing.assert_close(first(tokens), expected)
    torch.testing.assert_close(first(tokens, mask), expected)
    for pool, function in (("mean", lambda x: x.mean(0)), ("max", lambda x: x.amax(0))):
        others = PooledLinear(TOKENS, outputs=5, pool=pool, class_token=True)
        pooled = torch.stack([function(x[1:]) for x in tokens])
        torch.testing.assert_close(others(tokens), others.linear(pooled))
        seen = torch.stack([function(tokens[0, 1:4]), function(tokens[1, 1:])])
        torch.testing.assert_close(others(tokens, mask), others.linear(seen))


@pytest.mark.parametrize(("position", "rows"), [("learned", 7), ("patches", 6), ("none", None)])
def test_patch_stem_puts_a_class_token_first(position, rows):
    at = BuildContext(Shape(3, (4, 6), "image"), 3)
    stem = PatchStem(at, width=12, patch=2, class_token=True, position=position, position_std=0.5)
    torch.nn.init.normal_(stem.cls_token)
    assert stem.out_shape == Shape(12, (7,), "tokens")
    assert (None if stem.pos_embed is None else stem.pos_embed.shape[1]) == rows
    x = torch.randn(2, 3, 4, 6)
    y, patches = stem(x), stem.patch_embed(x)
    added = torch.zeros(1, 7, 12) if rows is None else F.pad(stem.pos_embed, (0, 0, 7 - rows, 0))
    torch.testing.assert_close(y[:, 1:], patches + added[:, 1:])
    torch.testing.assert_close(y[:, :1], (stem.cls_token + added[:, :1]).expand(2, -1, -1))


def test_branches_scale_what_they_return():
    x = torch.randn(2, 6, 12)
    for kind, options in ((AttentionBranch, {"heads": 3}), (MlpBranch, {})):
        plain, scaled = kind(TOKENS, **options), kind(TOKENS, **options, layer_scale=True)
        assert scaled.ls.gamma.unique().tolist() == pytest.approx([1e-5])
        torch.nn.init.normal_(scaled.ls.gamma)
        plain.load_state_dict({key: value for key, value in scaled.state_dict().items() if key != "ls.gamma"})
        torch.testing.assert_close(scaled(x), plain(x) * scaled.ls.gamma, rtol=0, atol=0)


def test_inits_have_the_stated_spread():
    linear, conv, norm = torch.nn.Linear(400, 300), torch.nn.Conv2d(20, 50, 3), torch.nn.LayerNorm(4)
    TruncatedNormal(std=0.02, bias=0.02)(linear)
    assert linear.weight.std().item() == pytest.approx(0.02 * 0.8796, rel=0.02)  # of a normal cut at two units
    assert linear.weight.abs().max() <= 0.04
    assert linear.bias.unique().tolist() == pytest.approx([0.02])
    TruncatedNormal(bias=0.02)(norm)
    assert norm.bias.unique().tolist() == pytest.approx([0.02])
    FanIn()(linear)
    assert linear.weight.std().item() == pytest.approx(400**-0.5 * 0.8796, rel=0.02)
    FanOut()(conv)
    assert conv.weight.std().item() == pytest.approx((2 / (9 * 50)) ** 0.5 * 0.8796, rel=0.05)
    FanOut()(linear)
    assert linear.weight.abs().max().item() == pytest.approx((3 / 400) ** 0.5, rel=0.01)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: AttentionBranch(TOKENS, heads=5), "heads"),
        (lambda: AttentionBranch(IMAGE, heads=2), "type"),
        (lambda: MlpBranch(IMAGE), "type"),
        (lambda: ConvBranch(TOKENS), "type"),
        (lambda: ConvBranch(BuildContext(Shape(6, (2, 2), "image"), 6), layout="bottleneck"), "layout"),
        (lambda: PatchStem(IMAGE, width=8, patch=4), "patch"),
        (lambda: ConvStem(IMAGE, width=8, kernel=4), "kernel"),
        (lambda: ConvStem(IMAGE, width=8, stride=4), "stride"),
        (lambda: ResidualPair(IMAGE, stride=4), "stride"),
        (lambda: ResidualPair(BuildContext(IMAGE.shape, 6)), "layout"),
        (lambda: ChannelSplit(BuildContext(Shape(3, (2, 2), "image"), 3)), "type"),
        (lambda: Concat(TOKENS, norm="batch_norm"), "norm"),
        (lambda: PooledLinear(IMAGE, outputs=5, pool="first"), "pool"),
        (lambda: PooledLinear(IMAGE, outputs=5, class_token=True), "class_token"),
    ],
)
def test_misfits_name_the_argument(make, argument):
    with pytest.raises(PartArgumentError) as error:
        make()
    assert error.value.argument == argument


def test_a_whole_rev_vit_is_its_equations():
    model = revzoo.create("rev_vit_digits").eval()
    x = model.example_input(3)
    x1 = x2 = model.stem(x)
    for block in model.stages[0].blocks:
        x1 = x1 + block.f(x2)
        x2 = x2 + block.g(x1)
    fused = F.layer_norm(torch.cat((x1, x2), 2), (128,), model.fuse.norm.weight, model.fuse.norm.bias, 1e-6)
    torch.testing.assert_close(model(x), model.head.linear(fused.mean(1)))


def test_a_part_that_would_build_and_not_run_is_refused():
    with pytest.raises(PartArgumentError, match="leaves a hidden channel of the width 12"):
        MlpBranch(TOKENS, ratio=0.01)
    with pytest.raises(PartArgumentError, match="a stem that gives images"):
        ResidualPair(TOKENS)


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ((float("nan"), 1, 1), "finite numbers. Received: (nan, 1, 1)"),
        ((0, "1", 1), "finite numbers. Received: (0, '1', 1)"),
        ((0, 1, float("inf")), "finite numbers"),
        ((1, 0.3, 1, 2), "kept for |b| = 2^-kept_bits"),
        ((0, 1, 0), "c = 0 leaves f out"),
    ],
)
def test_coefficients_that_make_no_coupling(coefficients, message):
    with pytest.raises(InputError, match=re.escape(message)):
        revzoo.runtime.Coupling(*coefficients)
