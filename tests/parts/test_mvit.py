"""MViT's parts against timm's block and independent formulas; Rev-MViT's sizes and gradients."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from timm.layers import LayerNorm
from timm.models.mvitv2 import MultiScaleBlock, MultiScaleVit, MultiScaleVitCfg

import revzoo
from revzoo.parts.branches.attention import PoolingAttention
from revzoo.parts.branches.mlp import MlpBranch
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.stems.patches import OverlapPatchStem
from revzoo.parts.transitions.fuse_pool_split import FusePoolSplit

SQUARE = BuildContext(Shape(8, (4, 4), "tokens"), 8)
OBLONG = BuildContext(Shape(8, (4, 6), "tokens"), 8)
NORM = partial(LayerNorm, eps=1e-6)
V2 = {"relative_position": True, "residual_pooling": True}


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def redraw(module):
    """Draw every parameter anew, so that none is 0 or 1 by initialisation."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def layer_norm(x, norm):
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, eps=1e-6)


def pooled(x, conv, norm, grid, heads, stride):
    """Pool (B, H W, D) with one depthwise kernel for all heads: (B, M, H' W', D / M)."""
    images = x.transpose(1, 2).reshape(len(x), -1, *grid)
    kernel = conv.weight.repeat(heads, 1, 1, 1)
    images = F.conv2d(images, kernel, stride=stride, padding=1, groups=len(kernel))
    return layer_norm(images.flatten(2).unflatten(1, (heads, -1)).transpose(2, 3), norm)


def attention(x, attn, grid, heads, stride, kv_stride):
    """Pooled attention without relative positions or residual pooling; stride None leaves the queries alone."""
    q, k, v = F.linear(x, attn.qkv.weight, attn.qkv.bias).chunk(3, dim=2)
    k = pooled(k, attn.pool_k, attn.norm_k, grid, heads, kv_stride)
    v = pooled(v, attn.pool_v, attn.norm_v, grid, heads, kv_stride)
    q = (
        q.unflatten(2, (heads, -1)).transpose(1, 2)
        if stride is None
        else pooled(q, attn.pool_q, attn.norm_q, grid, heads, stride)
    )
    attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return F.linear(attended, attn.proj.weight, attn.proj.bias)


def mlp(x, layers):
    return F.linear(F.gelu(F.linear(x, layers.fc1.weight, layers.fc1.bias)), layers.fc2.weight, layers.fc2.bias)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kv_stride", [1, 2])
@pytest.mark.parametrize("v2", [True, False])
def test_branches_are_timms_block_without_the_residual(heads, kv_stride, v2):
    features = {"relative_position": v2, "residual_pooling": v2}
    f, g = redraw(PoolingAttention(SQUARE, heads=heads, kv_stride=kv_stride, pool_query=v2, **features)), MlpBranch(SQUARE)
    block = MultiScaleBlock(
        8, 8, heads, (4, 4),
        kernel_q=(3, 3) if v2 else (1, 1), kernel_kv=(3, 3), stride_kv=(kv_stride, kv_stride), has_cls_token=False,
        rel_pos_type="spatial" if v2 else "none", residual_pooling=v2, norm_layer=NORM,
    )  # fmt: skip
    names = {("norm1" if n == "norm" else n): m for n, m in f.named_children()} | {"norm2": g.norm, "mlp": g.mlp}
    block.load_state_dict({f"{n}.{key}": w for n, module in names.items() for key, w in module.state_dict().items()})
    x = torch.randn(2, 16, 8)
    h = x + f(x)
    torch.testing.assert_close(h + g(h), block(x, [4, 4])[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_stride", [1, 2])
def test_branch_is_the_formula_on_an_oblong_grid(kv_stride):
    f = redraw(PoolingAttention(OBLONG, heads=2, kv_stride=kv_stride))
    assert not any(name.startswith("attn.pool_q") for name, _ in f.named_parameters())
    x = torch.randn(2, 24, 8)
    torch.testing.assert_close(f(x), attention(layer_norm(x, f.norm), f.attn, (4, 6), 2, None, kv_stride), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("width", [12, 16])
@pytest.mark.parametrize("fuse", ["concat", "mlp", "mean"])
@pytest.mark.parametrize("kv_stride", [1, 2])
def test_transition_is_the_formula(fuse, width, kv_stride):
    part = redraw(FusePoolSplit(BuildContext(OBLONG.shape, width), heads=2, kv_stride=kv_stride, fuse=fuse, fuse_ratio=3))
    assert part.out_shape == Shape(width, (2, 3), "tokens")
    x1, x2 = torch.randn(2, 2, 24, 8).unbind()
    x = torch.cat((x1, x2), 2)
    if fuse == "mean":
        x = 0.5 * x1 + 0.5 * x2
    elif fuse == "mlp":
        assert part.fuse.fc1.weight.shape == (48, 16)
        x = x + mlp(x, part.fuse)
    attended = attention(layer_norm(x, part.norm1), part.attn, (4, 6), 2, 2, kv_stride)
    if width != x.shape[2]:
        x = F.linear(x, part.shortcut_proj_attn.weight, part.shortcut_proj_attn.bias)
    shortcut = pooled(x, part.attn.pool_q, part.attn.norm_q, (4, 6), 2, 2).transpose(1, 2).flatten(2)
    x = shortcut + attended
    x = x + mlp(layer_norm(x, part.norm2), part.mlp)
    y1, y2 = part(x1, x2)
    assert y1 is y2
    torch.testing.assert_close(y1, x, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_transition_with_v2_features_is_timms_block_but_for_the_shortcut():
    part = redraw(FusePoolSplit(BuildContext(SQUARE.shape, 16), heads=2, kv_stride=2, fuse="concat", **V2))
    block = MultiScaleBlock(
        16, 16, 2, (4, 4), kernel_q=(3, 3), kernel_kv=(3, 3), stride_q=(2, 2), stride_kv=(2, 2), has_cls_token=False,
        norm_layer=NORM,
    )  # fmt: skip
    block.load_state_dict(part.state_dict())
    x1, x2 = torch.randn(2, 2, 16, 8).unbind()
    x = torch.cat((x1, x2), 2)
    block._shortcut_pool = lambda x, grid: pooled(x, part.attn.pool_q, part.attn.norm_q, grid, 2, 2).transpose(1, 2).flatten(2)
    torch.testing.assert_close(part(x1, x2)[0], block(x, [4, 4])[0], rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_transition_drops_the_shortcut_as_well():
    part = redraw(FusePoolSplit(BuildContext(SQUARE.shape, 16, drop_path=0.25), heads=2))
    x1, x2 = torch.randn(2, 64, 16, 8).unbind()
    dropped, kept = part(x1, x2)[0], part.eval()(x1, x2)[0]
    survived = dropped.abs().sum((1, 2)) > 0
    assert 0 < int(survived.sum()) < 64
    torch.testing.assert_close(dropped, torch.where(survived[:, None, None], kept / 0.75, 0.0), rtol=1e-12, atol=1e-12)


def test_stem_is_timms_patch_embedding_and_position():
    config = MultiScaleVitCfg(depths=(0,), embed_dim=(12,), num_heads=(1,), use_abs_pos=True, stride_q=((1, 1),))
    vit = MultiScaleVit(config, img_size=(8, 16), num_classes=0)
    stem = OverlapPatchStem(BuildContext(Shape(3, (8, 16), "image"), 3), width=12)
    stem.load_state_dict({k: w for k, w in vit.state_dict().items() if k.startswith(("patch_embed", "pos_embed"))})
    x = torch.randn(2, 3, 8, 16)
    tokens = (
        F.conv2d(x, stem.patch_embed.proj.weight, stem.patch_embed.proj.bias, stride=4, padding=3).flatten(2).transpose(1, 2)
    )
    torch.testing.assert_close(stem(x), tokens + vit.pos_embed, rtol=1e-5, atol=1e-5)
    assert stem.out_shape == Shape(12, (2, 4), "tokens")
    plain = OverlapPatchStem(BuildContext(Shape(3, (8, 16), "image"), 3), width=12, position="none")
    assert [k for k, _ in plain.named_parameters()] == ["patch_embed.proj.weight", "patch_embed.proj.bias"]


def test_mean_fusion_has_the_weights_of_mvitv2_and_a_wider_head():
    model = revzoo.create("rev_mvit_t", device="meta", overrides=[f"stages.{i}.transition.fuse=mean" for i in (1, 2, 3)])
    second_stream = model.spec.stages[-1].width * (1000 + 2)  # in the linear layer, and in the norm
    assert sum(p.numel() for p in model.parameters()) == model.spec.twin["parameters"] + second_stream == 24_942_856


def test_drop_path_runs_over_all_sixteen_layers():
    model = revzoo.create("rev_mvit_b", device="meta")
    rates = [round(stage.transition.drop_path.drop_prob, 6) for stage in model.stages[1:]]
    assert rates == [round(0.1 * layer / 15, 6) for layer in (1, 3, 14)]
    assert model.stages[3].blocks[0].f.drop_path.drop_prob == pytest.approx(0.1)
