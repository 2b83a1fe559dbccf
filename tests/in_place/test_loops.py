"""Reversible blocks in the loops of others, which stop early, branch or change states; compiled and exported."""

from collections import OrderedDict

import pytest
import timm
import torch
from torch import nn

import revzoo
from revzoo.errors import InputError, ScheduleError
from tests.in_place.networks import IDS, NETWORKS, SPLIT, TEXT, Tanh, Toy, X, assert_equal, gpt2, llama, train_step, vit


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
    revzoo.reversible_(model)
    batch = {**TEXT, "output_hidden_states": True}
    stored, inverted = (
        train_step(model, batch, schedule, lambda outputs: outputs.loss + outputs.hidden_states[2].pow(3).mean())[0]
        for schedule in ("store", "invert")
    )
    assert_equal(inverted, stored)
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


@pytest.mark.parametrize("split", [None, SPLIT])
def test_generation_is_that_of_the_full_forward(split):
    model = gpt2().eval()
    revzoo.reversible_(model, batch=TEXT, split=split)
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


def test_one_function_in_inference_mode_and_compiled():
    toy = Toy()
    with torch.no_grad():
        ordinary = toy(X)
        revzoo.reversible_(toy, kept_bits=2)
        expected = toy(X)
        assert torch.equal(torch.compile(toy, backend="eager")(X), expected)
    assert (expected - ordinary).abs().max() > 1e-3  # so few bits change the function
    with torch.inference_mode():
        assert torch.equal(toy(X), expected)
    assert torch.equal(toy(X), expected)  # with gradients


def test_export_and_a_foreign_schedule_are_refused(monkeypatch):
    # PyTorch 2.11 leaves a hook behind when an export fails, at which torch.compile breaks the graphs of other modules.
    monkeypatch.setattr(nn.modules.module, "_global_buffer_registration_hooks", OrderedDict())
    toy = Toy()
    (chain,) = revzoo.reversible_(toy).chains
    with pytest.raises(InputError, match=r"Export the ordinary network: revzoo\.ordinary_"):
        torch.export.export(toy, (X,), strict=False)
    with pytest.raises(ScheduleError, match="A schedule is a mode .* or a list of modes"):
        chain.schedule = revzoo.plan(nn.Linear(6, 6), X, budget="1GiB")
    revzoo.ordinary_(toy)
    assert torch.export.export(toy, (X,), strict=False) is not None


class StateCache(list):
    """A cache of states, as that of Mamba in Transformers: it cannot tell how many tokens it has seen."""

    def get_seq_length(self):
        raise ValueError("This cache holds no keys.")

    def update(self, state):
        self.append(state.detach())


class Recurrent(Tanh):
    def forward(self, x, cache):
        y = super().forward(x) + sum(cache)
        cache.update(y)
        return y


def test_blocks_run_once_with_a_cache_that_holds_states_instead_of_keys():
    gradients = []
    for schedule in ("store", "invert"):
        torch.manual_seed(0)
        toy = Toy(*(Recurrent() for _ in range(3)))
        revzoo.reversible_(toy).chains[0].schedule = schedule
        x, cache = X, StateCache()
        for block in toy.blocks:
            x = block(x, cache)
        gradients.append(dict(enumerate(torch.autograd.grad(toy.head(x).sum(), list(toy.parameters())))))
    assert_equal(*gradients)
