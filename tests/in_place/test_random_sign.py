"""`reversible_` with a random sign: one kept bit, gradients of storing, and the ordinary network in evaluation."""

import copy

import pytest
import torch

import revzoo
from revzoo.errors import InputError, UnknownNameError
from revzoo.runtime.nested import tensors_in
from tests.in_place.networks import NETWORKS, ONE_BIT, SPLIT, TEXT, Toy, X, assert_equal, count_bytes, llama, train_step


@pytest.mark.parametrize(("name", "split"), [*((name, None) for name in NETWORKS), ("llama", SPLIT)])
def test_gradients_are_those_of_storing_and_evaluation_is_the_ordinary_network(name, split):
    make, path, batch = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    evaluated, trained = copy.deepcopy(model).eval(), train_step(copy.deepcopy(model), batch)[0]
    report = revzoo.reversible_(model, path, batch=batch, split=split, **ONE_BIT)
    stored, _ = train_step(model, batch, "store")
    for schedule in ("invert", "recompute", ["invert", "store", "invert", "recompute", "invert", "invert"][: report.steps]):
        assert_equal(train_step(model, batch, schedule)[0], stored)
    assert not all(torch.equal(g, trained[key]) for key, g in stored.items())
    expected, outputs = evaluated(**batch), model.eval()(**batch)  # with gradients, as without
    assert all(map(torch.equal, tensors_in(outputs), tensors_in(expected)))
    assert report.similarity.least_cosine == pytest.approx(1, abs=1e-6)
    assert "1 bit kept of every element and step, with a random sign for each example" in str(report)


def test_the_signs_follow_the_seed_and_generate_does_not_draw_any():
    model = llama(4)
    ordinary = copy.deepcopy(model).eval()
    revzoo.reversible_(model, batch=TEXT, **ONE_BIT)
    first, again = train_step(model, TEXT)[0], train_step(model, TEXT)[0]
    assert_equal(again, first)
    state = torch.random.get_rng_state()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    ids = model.eval().generate(TEXT["input_ids"], **options)
    assert torch.equal(ids, ordinary.generate(TEXT["input_ids"], **options))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_step_keeps_an_eighth_of_what_8_bits_take_and_a_byte_for_each_example():
    sizes = {}
    for layers in (4, 8):
        model = llama(layers)
        (said,) = revzoo.reversible_(model, **ONE_BIT).kept_bytes_per_element
        sizes[layers] = count_bytes(model, TEXT)
        assert said == 8 + (layers - 1) / 8
    assert [b - a for a, b in zip(sizes[4], sizes[8], strict=True)] == 2 * [4 * (2 * 12 * 32 // 8 + 2)]


def test_blocks_that_begin_a_chain_of_their_own_are_named():
    class Scaled(Toy):
        def forward(self, x):
            for i, block in enumerate(self.blocks):
                x = block(x * 0.5 if i == 2 else x)
            return self.head(x)

    assert revzoo.reversible_(Scaled(), batch=X, **ONE_BIT).restarts == ("blocks.2",)


@pytest.mark.filterwarnings("ignore:.* begins a chain")
def test_a_grid_that_changes_the_function_in_training_is_warned_of():
    with pytest.warns(UserWarning, match="LlamaForCausalLM in training computes another function now"):
        report = revzoo.reversible_(llama(3), batch=TEXT, fraction_bits=4, **ONE_BIT)
    assert report.similarity.least_cosine == pytest.approx(1, abs=1e-6)


def test_a_plan_is_one_of_training():
    model = llama(3)
    revzoo.reversible_(model, batch=TEXT, **ONE_BIT)
    with pytest.raises(InputError, match=r"model\.layers\.0 in eval mode.*model\.train\(\)"):
        revzoo.plan(model.eval(), TEXT, "1MiB", loss=lambda outputs: outputs.logits.sum())


def test_a_frozen_block_in_eval_mode_stands_between_two_chains():
    toy = Toy()
    revzoo.reversible_(toy, **ONE_BIT)
    gradients = []
    for schedule in ("store", "invert"):
        toy.zero_grad()
        for step in (block.forward.__self__ for block in toy.blocks):
            step.chain.schedule = schedule
        toy.train().blocks[1].eval()
        torch.manual_seed(0)
        toy(X).square().sum().backward()
        gradients.append({name: p.grad for name, p in toy.named_parameters()})
    assert_equal(gradients[1], gradients[0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sign": "rnadom"}, UnknownNameError, "Did you mean 'random'"),
        ({"coupling": "dual_residual", **ONE_BIT}, InputError, "Received: dual_residual. Use coupling='momentum'"),
    ],
)
def test_refusals(options, error, message):
    with pytest.raises(error, match=message):
        revzoo.reversible_(Toy(), **options)
