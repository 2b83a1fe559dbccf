"""Causal attention and decoder blocks: what they see. They equal Transformers' in tests/conversion."""

import pytest
import torch

import revzoo
from revzoo.errors import InputError
from revzoo.parts.branches.decoder import CausalAttention, DecoderBlock
from revzoo.parts.branches.mlp import MlpBranch
from revzoo.parts.context import BuildContext, Shape

TOKENS = BuildContext(Shape(16, (32,), "tokens"), 16)
GPT2, LLAMA = {"heads": 4}, {"heads": 4, "kv_heads": 2, "rotary_base": 100.0, "norm": "rms_norm", "bias": False}


@pytest.mark.parametrize("arguments", [GPT2, LLAMA], ids=["GPT-2", "Llama"])
@pytest.mark.parametrize("branch", [CausalAttention, DecoderBlock])
def test_a_token_depends_on_itself_and_on_earlier_ones_alone(branch, arguments):
    f = branch(TOKENS, **arguments)
    x = torch.randn(1, 6, 16, requires_grad=True)
    seen = torch.stack([torch.autograd.grad(f(x)[0, t].sum(), x)[0][0].abs().sum(1) > 0 for t in range(6)])
    assert torch.equal(seen, torch.ones(6, 6).tril().bool())


def test_rotary_positions_are_relative_and_grouped_queries_share_keys():
    f = CausalAttention(TOKENS, **LLAMA)
    assert f.qkv.weight.shape == (16 + 2 * 8, 16)
    x = torch.randn(2, 5, 16)
    first, last = f(x.tile(1, 2, 1)).chunk(2, 1)
    assert not torch.allclose(first, last, atol=1e-3), "the second half also sees the first"
    still = CausalAttention(TOKENS, **LLAMA | {"rotary_base": None})
    still.load_state_dict(f.state_dict())
    assert torch.allclose(still(x)[:, -1], still(x[:, [1, 0, 3, 2, 4]])[:, -1], atol=1e-6), (
        "without positions there is no order"
    )
    assert not torch.allclose(f(x)[:, -1], f(x[:, [1, 0, 3, 2, 4]])[:, -1], atol=1e-3)


def test_a_decoder_block_is_what_attention_and_mlp_add_in_turn():
    f = DecoderBlock(TOKENS, **LLAMA, act="silu", gated=True)
    x = torch.randn(2, 5, 16)
    y = x + f.attention(x)
    assert isinstance(f.mlp, MlpBranch)
    torch.testing.assert_close(x + f(x), y + f.mlp(y))


def test_masks_are_refused_and_padding_on_the_right_changes_nothing():
    model = revzoo.create("rev_gpt_mini", overrides=["stages.0.depth=1"]).eval()
    ids = model.example_input(2)[:, :9]
    with pytest.raises(InputError, match="takes no attention mask.*Pad texts on the right"):
        model(ids, torch.ones_like(ids))
    padded = torch.cat((ids, ids.new_zeros(2, 4)), 1)
    torch.testing.assert_close(model(padded)[:, :9], model(ids))
