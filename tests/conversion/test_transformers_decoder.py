"""GPT-2 and Llama of Transformers: tiny random originals, converted, give equal logits, and their weights come back."""

import pytest
import torch
import transformers

import revzoo
from revzoo.conversion.sources.transformers_decoder import TransformersGPT2, TransformersLlama
from revzoo.errors import ConversionError
from tests.conversion.conftest import measure_distance

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 40, "bos_token_id": 0, "eos_token_id": 0}
LLAMA = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 50}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}, "max_position_embeddings": 16384}
CASES = {
    "gpt2": ("GPT2", {}),
    "gpt2_inner": ("GPT2", {"n_inner": 50, "activation_function": "relu", "layer_norm_epsilon": 1e-6}),
    "llama": ("Llama", {"num_key_value_heads": 2, "rms_norm_eps": 1e-5}),
    "llama3_tied": ("Llama", {"rope_theta": 500.0, "tie_word_embeddings": True, **SCALED}),
}


def make(kind, options):
    if kind == "GPT2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | options)), TransformersGPT2()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | options)), TransformersLlama()


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_at_b_0_it_is_the_original_and_the_weights_come_back(case, make_converter, randomise):
    network, source = make(*CASES[case])
    randomise(network)
    facts = network.config.to_dict() | {"architectures": [type(network).__name__]}
    converter = make_converter(source)
    model = converter.convert(facts, network.state_dict())
    ids = torch.randint(50, (2, 37))
    assert measure_distance(model(ids), network(ids).logits) <= 1e-5
    converter.check_way_back(facts, model, network.state_dict())
    if case in ("gpt2", "llama"):
        converter.check_keys(facts, f"transformers_{case}")
    bare = {key.removeprefix(source.prefix): t for key, t in network.state_dict().items() if key != "lm_head.weight"}
    if model.spec.head.arguments["tied"]:  # as the hub has them: tied tensors once, GPT-2 without prefix
        assert source.canonicalise(facts, bare)[0].keys() == network.state_dict().keys()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("GPT2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("Llama", {"attention_bias": True}, "attention_bias"),
        ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type"),
        ("Llama", {"head_dim": 16}, "head_dim"),
        ("Llama", {"rms_norm_eps": 1e-3}, "rms_norm_eps"),
    ],
)
def test_what_a_spec_cannot_express_is_refused_by_name(kind, options, message):
    with pytest.raises(ConversionError, match=f"{message} cannot be converted.*reversible_"):
        revzoo.convert(make(kind, options)[0])
