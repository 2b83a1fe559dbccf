"""Rev-ViT's parts against timm's ViT on the same weights, and the whole network against its equations."""

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block, VisionTransformer

import revzoo
from revzoo.parts.branches.attention import AttentionBranch
from revzoo.parts.branches.mlp import MlpBranch
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.stems.patches import PatchStem

TOKENS = BuildContext(Shape(12, (2, 3), "tokens"), 12)


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


def test_attention_ignores_masked_tokens():
    f = AttentionBranch(TOKENS, heads=3).eval()
    x, mask = torch.randn(2, 6, 12), torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    y = f(x, mask)
    torch.testing.assert_close(y[0], f(x)[0])
    torch.testing.assert_close(y[1, :4], f(x[1:, :4])[0])


def test_patch_stem_is_timms_patch_embedding_and_position():
    vit = VisionTransformer(8, 2, 3, global_pool="avg", embed_dim=12, num_heads=3, class_token=False, depth=0)
    stem = PatchStem(BuildContext(Shape(3, (8, 8), "image"), 3), width=12, patch=2)
    stem.load_state_dict({k: w for k, w in vit.state_dict().items() if k.startswith(("patch_embed", "pos_embed"))})
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(stem(x), vit._pos_embed(vit.patch_embed(x)), rtol=0, atol=0)
    assert stem.out_shape == Shape(12, (4, 4), "tokens")
    plain = PatchStem(BuildContext(Shape(3, (8, 8), "image"), 3), width=12, patch=2, position="none")
    assert [k for k, _ in plain.named_parameters()] == ["patch_embed.proj.weight", "patch_embed.proj.bias"]


def test_a_whole_rev_vit_is_its_equations():
    model = revzoo.create("rev_vit_digits").eval()
    x = model.example_input(3)
    x1 = x2 = model.stem(x)
    for block in model.stages[0].blocks:
        x1 = x1 + block.f(x2)
        x2 = x2 + block.g(x1)
    fused = F.layer_norm(torch.cat((x1, x2), 2), (128,), model.fuse.norm.weight, model.fuse.norm.bias, 1e-6)
    torch.testing.assert_close(model(x), model.head.linear(fused.mean(1)))
