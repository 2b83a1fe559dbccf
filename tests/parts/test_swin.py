"""Rev-Swin's parts against timm's Swin on the same weights, and against their equations."""

import pytest
import torch
import torch.nn.functional as F
from timm.models.swin_transformer import PatchMerging, SwinTransformerBlock

import revzoo
from revzoo.parts.branches.mlp import MlpBranch
from revzoo.parts.branches.window_attention import WindowBranch
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.transitions.fuse_merge_split import FuseMergeSplit


def on_grid(*grid: int, index: int = 0, kind: str = "tokens") -> BuildContext:
    return BuildContext(Shape(12, grid, kind), 12, index)


@pytest.mark.parametrize(
    ("grid", "window", "index", "shift"),
    [
        ((8, 12), 4, 0, (0, 0)),
        ((8, 12), 4, 1, (2, 2)),
        ((6, 9), 3, 3, (1, 1)),
        ((4, 4), 4, 1, (0, 0)),  # one window is the grid
        ((4, 4), 7, 1, (0, 0)),  # and a larger one is clipped to it
        ((3, 8), 4, 1, (0, 2)),  # clipped and not shifted along one side
    ],
)
def test_window_attention_and_mlp_are_timms_block_without_the_residual(grid, window, index, shift):
    block = SwinTransformerBlock(12, grid, num_heads=3, window_size=window, shift_size=window // 2 if index % 2 else 0)
    context = on_grid(*grid, index=index)
    f, g = WindowBranch(context, heads=3, window=window), MlpBranch(context, norm="layer_norm_1e-5")
    torch.nn.init.normal_(block.attn.relative_position_bias_table)
    weights = block.state_dict()
    f.load_state_dict({k.replace("norm1", "norm"): w for k, w in weights.items() if k.startswith(("norm1", "attn"))})
    g.load_state_dict({k.replace("norm2", "norm"): w for k, w in weights.items() if k.startswith(("norm2", "mlp"))})
    assert f.shift == tuple(block.shift_size) == shift
    x = torch.randn(2, *grid, 12)
    tokens = x.flatten(1, 2)
    h = tokens + f(tokens)
    torch.testing.assert_close(h + g(h), block(x).flatten(1, 2), rtol=0, atol=0)
    if any(shift):
        torch.testing.assert_close(f.mask, block.attn_mask, rtol=0, atol=0)


def test_a_shifted_window_sees_the_tokens_that_are_near_and_no_others():
    f = WindowBranch(on_grid(8, 8, index=1), heads=3, window=4)
    x = torch.randn(1, 64, 12, requires_grad=True)
    seen = torch.stack([torch.autograd.grad(f(x)[0, i].sum(), x)[0][0].norm(dim=1) > 1e-12 for i in (0, 18, 63)])
    rows, columns = torch.arange(64) // 8, torch.arange(64) % 8
    corner, middle = (rows < 2) & (columns < 2), (rows - 3.5).abs().maximum((columns - 3.5).abs()) < 2
    opposite = (rows >= 6) & (columns >= 6)
    assert torch.equal(seen, torch.stack((corner, middle, opposite)))


def linear(x, weight, bias=None):
    return x @ weight.T + (0 if bias is None else bias)


FUSES = {
    "mean": lambda x1, x2, p: (x1 + x2) / 2,
    "last": lambda x1, x2, p: x2,
    "mlp": lambda x1, x2, p: linear(
        F.gelu(linear(torch.cat((x1, x2), 2), p["fuse.fc1.weight"], p["fuse.fc1.bias"])),
        p["fuse.fc2.weight"],
        p["fuse.fc2.bias"],
    ),
    "proj": lambda x1, x2, p: linear(
        F.layer_norm(torch.cat((x1, x2), 2), (24,), p["fuse.norm.weight"], p["fuse.norm.bias"], 1e-5), p["fuse.weight"]
    ),
}


@pytest.mark.parametrize("fuse", FUSES)
def test_the_transition_is_the_fusion_and_timms_merging(fuse):
    part = FuseMergeSplit(BuildContext(Shape(12, (4, 6), "tokens"), 20), fuse=fuse, fuse_ratio=1.5).double()
    for p in part.parameters():
        torch.nn.init.normal_(p)
    merging = PatchMerging(12, 20).double()
    merging.load_state_dict(part.down.state_dict())
    x1, x2 = torch.randn(2, 2, 24, 12, dtype=torch.float64).unbind()
    y1, y2 = part(x1, x2)
    parameters = dict(part.named_parameters())
    fused = FUSES[fuse](x1, x2, parameters).view(2, 4, 6, 12)
    assert torch.equal(y1, y2)
    assert part.out_shape == Shape(20, (2, 3), "tokens")
    assert "fuse.fc1.weight" not in parameters or parameters["fuse.fc1.weight"].shape == (18, 24)
    torch.testing.assert_close(y1, merging(fused).flatten(1, 2))
    neighbours = torch.cat([fused[:, i::2, j::2] for i, j in ((0, 0), (1, 0), (0, 1), (1, 1))], 3)  # Microsoft's order
    normed = F.layer_norm(neighbours, (48,), parameters["down.norm.weight"], parameters["down.norm.bias"])
    expected = linear(normed, parameters["down.reduction.weight"]).flatten(1, 2)
    torch.testing.assert_close(y1, expected, rtol=1e-12, atol=1e-12)


def test_proj_begins_near_the_mean_of_the_normed_halves_in_a_whole_network_too():
    model = revzoo.create("rev_swin_digits", overrides=["stages.1.transition.fuse=proj"])
    assert model.spec.init is not None
    transition = model.stages[1].transition
    noise = transition.fuse.weight.detach() - 0.5 * torch.eye(48).repeat(1, 2)
    assert noise.std().item() == pytest.approx(0.02, rel=0.1)
    assert noise.mean().item() == pytest.approx(0, abs=2e-3)
    merging = transition.down.reduction.weight  # which the network's initialisation did reach
    assert merging.std().item() == pytest.approx(192**-0.5 * 0.8796, rel=0.05)


@pytest.mark.parametrize(("side", "window"), [(56, 7), (24, 6), (64, 8), (12, 6), (5, 5), (2, 2)])
def test_a_window_of_seven_is_the_nearest_that_divides_the_grid(side, window):
    assert WindowBranch(on_grid(side, side, index=1), heads=3, window=7).window == (window, window)
