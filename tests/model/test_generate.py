"""Texts are continued as without a cache, at the cost of one token for each."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.flop_counter import FlopCounterMode

import revzoo
import zoo_cli
from revzoo.errors import DataError, InputError

SMALL = ["input={length: 24, vocabulary: 40}", "stem.width=32", "stages=[{depth: 2, width: 32}]"]
NETWORKS = {
    "additive": ("rev_gpt_mini", ["stages.0.depth=2"]),
    "kept bits": ("rev_gpt2_small", [*SMALL, "block.f.heads=4", "block.coupling={type: momentum, kept_bits: 4}"]),
    "midpoint": ("rev_gpt_20m_midpoint", ["stages.0.depth=2", "input.length=24"]),
    "Llama": ("rev_llama_1b", [*SMALL, "block.f.heads=4", "block.f.kv_heads=2"]),
}


@pytest.mark.parametrize("case", NETWORKS)
def test_what_is_read_token_by_token_gives_the_logits_of_the_whole_text(case):
    name, overrides = NETWORKS[case]
    model, logits = revzoo.create(name, overrides=overrides).eval(), []
    hook = model.head.register_forward_hook(lambda head, inputs, out: logits.append(out))
    ids = model.generate(model.example_input(3)[:, :5], tokens=10**6, temperature=2.0)
    hook.remove()
    assert ids.shape == (3, model.spec.input.length), "it ends with the context"
    with torch.no_grad():
        expected = model(ids)[:, 4:-1]
    torch.testing.assert_close(torch.cat(logits, 1), expected, atol=1e-4 if case == "kept bits" else 1e-5, rtol=0)
    likeliest = model.generate(ids[:, :5], tokens=1, temperature=0)[:, 5]
    assert torch.equal(likeliest, expected[:, 0].argmax(-1))


def test_a_token_costs_the_products_of_one_token_however_long_the_text_is():
    model = revzoo.create("rev_gpt_mini")

    def count(length, tokens):
        with FlopCounterMode(display=False) as counter:
            model.generate(model.example_input(1)[:, :length], tokens=tokens)
        return sum(
            n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op) and "bmm" not in str(op)
        )

    products = [count(length, 3) - count(length, 2) for length in (5, 200)]
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert products == [2 * weights] * 2


def test_draws_follow_seed_temperature_and_top_k():
    model = revzoo.create("rev_gpt_mini", overrides=["stages.0.depth=1"])
    ids = model.example_input(2)[:, :4]
    assert torch.equal(model.generate(ids, tokens=9, seed=3), model.generate(ids, tokens=9, seed=3))
    assert not torch.equal(model.generate(ids, tokens=9, seed=3), model.generate(ids, tokens=9, seed=4))
    assert torch.equal(model.generate(ids, tokens=9, top_k=1), model.generate(ids, tokens=9, temperature=0))
    with pytest.raises(InputError, match="top_k is at least 1.*top_k=0"):
        model.generate(ids, top_k=0)
    with pytest.raises(InputError, match=r"reads 256 tokens in all.*256.*ids\[:, -128:\]"):
        model.generate(model.example_input(1))


def test_what_is_no_causal_language_model_is_refused_by_name():
    for name, lacking in (
        ("reformer_mini", "LSHAttention"),
        ("rev_roberta_mini", "SelfAttention"),
        ("rev_vit_digits", "Attention"),
    ):
        model = revzoo.create(name)
        with pytest.raises(InputError, match=rf"Received: {name} with {lacking}\w*\. Use one of"):
            model.generate(model.example_input(1))


def test_a_text_goes_through_the_tokenizer_of_the_weights_and_ends_where_texts_end(tmp_path):
    pieces = {"<pad>": 0, "<|endoftext|>": 1, "a": 2, "Ġb": 3, "b": 4, "Ġ": 5}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[("Ġ", "b")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = revzoo.create("rev_gpt_mini", overrides=["input.vocabulary=6", "stages.0.depth=1"])
    with pytest.raises(DataError, match="bytes.*256 tokens.*vocabulary of 6"):
        revzoo.generate(model, "a b")
    model.data_config = {"tokenizer": str(tmp_path / "tokenizer.json")}
    following = {2: 3, 3: 4, 4: 1, 1: 2}  # after "a" comes " b", then "b", then the end
    model.head.register_forward_hook(lambda head, inputs, out: torch.eye(6)[[following[int(last[-1])]]][None])
    last = [2]
    model.stem.register_forward_pre_hook(lambda stem, inputs: last.append(int(inputs[0][0, -1])))
    assert revzoo.generate(model, "a", temperature=0) == " bb"
    assert last[1:4] == [2, 3, 4]


def test_the_command_continues_a_text_of_bytes(tmp_path, capsys):
    model = revzoo.create("rev_gpt_mini", overrides=["stages.0.depth=1"])
    model.save_pretrained(tmp_path / "model")
    assert zoo_cli.main(["generate", str(tmp_path / "model"), "A text", "--tokens", "5", "--seed", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed == f"A text{revzoo.generate(model, 'A text', tokens=5, seed=1)}\n"
    assert revzoo.generate(model, "x" * 1000, tokens=5, seed=1) == revzoo.generate(model, "x" * 251, tokens=5, seed=1)
    assert zoo_cli.main(["generate", "rev_gpt2_small", "A text"]) == 2
    assert "rev_gpt2_small has no weights" in capsys.readouterr().err
