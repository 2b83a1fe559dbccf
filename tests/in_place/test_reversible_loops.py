"""Reversible blocks in the loops of others: those that stop early, branch, or change states; hidden states and caches."""

import timm
import torch

import revzoo
from tests.in_place.networks import IDS, NETWORKS, TEXT, Toy, X, assert_equal, gpt2, llama, vit


def test_user_loops_see_the_blocks_and_the_same_function():
    model = vit().eval()
    revzoo.reversible_(model, "blocks")
    images = NETWORKS["vit"][2]["x"]
    x = model._pos_embed(model.patch_embed(images))
    assert len(model.blocks) == 6
    assert isinstance(model.blocks[1], timm.models.vision_transformer.Block)
    for block in model.blocks[:3]:
        x = block(model.norm_pre(x))
    for i in range(3, 6):
        x = model.blocks[i](x)
    assert torch.equal(model.forward_head(model.norm(x)), model(images))


def test_a_loop_that_stops_early_or_branches_has_right_gradients():
    torch.manual_seed(0)
    toy = Toy()
    chain = revzoo.reversible_(toy, "blocks").chains[0]
    gradients = []
    for schedule in ("store", "invert"):
        chain.schedule = schedule
        toy.zero_grad()
        x = toy.blocks[0](X)
        y = toy.blocks[1](x)
        early, late = toy.head(y), toy.head(toy.blocks[3](toy.blocks[2](y)))
        again = toy.blocks[1](x)  # from the same state
        (early.sum() + late.square().sum() + again.pow(3).sum()).backward()
        gradients.append({name: p.grad.clone() for name, p in toy.named_parameters()})
    assert_equal(gradients[1], gradients[0])


def test_a_changed_or_detached_state_begins_a_new_chain():
    torch.manual_seed(0)
    toy = Toy()
    toy.eval()
    revzoo.reversible_(toy, "blocks")
    x = toy.blocks[0](X)
    new = toy.blocks[1](x.clone())
    assert not torch.equal(new, toy.blocks[1](x))
    assert torch.equal(new, toy.blocks[1](x.detach()))
    toy.blocks[1](x.detach()).sum().backward()
    assert toy.blocks[0].layer.weight.grad is None


def test_hidden_states_are_the_states_of_the_chain():
    model = llama()
    chain = revzoo.reversible_(model).chains[0]
    gradients = []
    for schedule in ("store", "invert"):
        chain.schedule = schedule
        model.train().zero_grad()
        torch.manual_seed(1)
        outputs = model(**TEXT, output_hidden_states=True)
        assert len(outputs.hidden_states) == 4
        (outputs.loss + outputs.hidden_states[2].pow(3).mean()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert_equal(gradients[1], gradients[0])
    model.eval()
    with torch.no_grad():
        hidden = model(IDS, output_hidden_states=True).hidden_states
        rope = model.model.rotary_emb(hidden[0], torch.arange(12)[None])
        x = hidden[0]
        for block, state in zip(model.model.layers, [*hidden[1:-1], None], strict=True):
            x = block(x, position_embeddings=rope)
            x = x[0] if isinstance(x, tuple) else x
            assert state is None or torch.equal(x, state)
        assert torch.equal(model.model.norm(x), hidden[-1])


def test_generation_is_that_of_the_full_forward():
    model = gpt2().eval()
    revzoo.reversible_(model)
    prompt = IDS[:, :5]
    tokens = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(tokens, model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=False))
    expected = prompt
    for _ in range(6):
        with torch.no_grad():
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(tokens, expected)


def test_a_cache_is_filled_in_eval_mode_and_left_out_in_training():
    model = llama()
    revzoo.reversible_(model)
    trained = model.train()(IDS, use_cache=True)
    name = "cache" if "cache" in trained else "past_key_values"  # its name since Transformers 5.24, and before
    assert trained[name].get_seq_length() == 0
    model.eval()
    cache = model(IDS, use_cache=True)[name]
    assert cache.get_seq_length() == 12
    more = model(IDS[:, :1], **{name: cache}).logits
    whole = model(torch.cat([IDS, IDS[:, :1]], 1)).logits
    assert torch.allclose(more[:, 0], whole[:, -1], atol=1e-5)
