"""`reversible_` on tiny random networks of many architectures: exact gradients, every parameter reached, the same function.

Whole blocks are steps, then each branch of a block is one; networks whose blocks are not two branches are refused.
"""

import pytest
import timm
import torch
import transformers as hf

import revzoo
from revzoo.errors import ConversionError
from tests.in_place.networks import SPLIT, assert_equal, train_step

IDS = torch.arange(24).view(2, 12) % 30 + 3
CAUSAL = {"input_ids": IDS, "labels": IDS}
UNCACHED = {**CAUSAL, "use_cache": False}  # in old versions they need the cache that a block returns
LABELLED = {"input_ids": IDS, "attention_mask": (IDS < 20).long(), "labels": torch.tensor([0, 1])}
PIXELS = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
SEEN = {"pixel_values": PIXELS}
BOTH = {"input_ids": IDS, "pixel_values": PIXELS, "return_loss": True}

TOKENS = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT, IMAGE = {**TOKENS, **SIZES, "num_labels": 8}, {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 8}
GROUPED = {"num_key_value_heads": 2, "attention_dropout": 0.1}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
ROUTED = {"moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "num_key_value_heads": 4}
SEQ2SEQ = {"d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
SEQ2SEQ |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.1, "decoder_start_token_id": 1}
WAVES = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
WAVES |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.3}


def text_model(name, kind, batch, *paths, **options):
    return lambda: (getattr(hf, kind), getattr(hf, f"{name}Config")(**{**TEXT, **options})), paths, batch


def model(name, config, batch, *paths, **options):
    return lambda: (getattr(hf, name), getattr(hf, config)(**options)), paths, batch


def causal(name, *paths, **options):
    return text_model(name, f"{name.removesuffix('Text')}ForCausalLM", CAUSAL, *paths, **options)


def classifier(name, *paths, **options):
    return text_model(name, f"{name}ForSequenceClassification", LABELLED, *paths, **options)


def seen(name, *paths, **options):
    return model(f"{name}ForImageClassification", f"{name}Config", SEEN, *paths, **IMAGE, **options)


def from_timm(name, *paths, size=32, **options):
    options = {"embed_dim": 32, "num_heads": 4, "depth": 3, "drop_path_rate": 0.2, **options}
    options = {key: value for key, value in options.items() if value is not None}
    make = lambda: timm.create_model(name, num_classes=5, **options)  # noqa: E731
    return make, paths, {"x": torch.linspace(-1, 1, 2 * 3 * size * size).view(2, 3, size, size).sin()}


def vit_like(name, *paths, size=32, **options):
    return from_timm(name, *paths, size=size, img_size=size, **options)


T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "max_relative_positions": 8}
STACKS = ("model.encoder.layers", "model.decoder.layers")
DISTIL = {"dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4}
WHISPER = {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 10, "encoder_layerdrop": 0.3}
SPOKEN = {"input_features": torch.linspace(-3, 3, 320).view(2, 8, 20).sin(), "labels": IDS}
CLIP = {"text_config": {**TEXT, "attention_dropout": 0.1, "projection_dim": 16}, "projection_dim": 16}
CLIP |= {"vision_config": {**IMAGE, "attention_dropout": 0.1, "projection_dim": 16}}
SWIN = {"embed_dim": 16, "depths": (2, 2, 4, 2), "num_heads": (1, 2, 2, 4), "depth": None, "window_size": 4, "size": 64}
CONVNEXT = {"depths": (1, 1, 4, 1), "dims": (8, 16, 32, 32), "embed_dim": None, "num_heads": None, "depth": None}

FAST = {
    "Mixtral, auxiliary loss": causal("Mixtral", **EXPERTS, num_local_experts=4),
    "T5": model("T5ForConditionalGeneration", "T5Config", CAUSAL, "encoder.block", "decoder.block", **TOKENS, **T5),
    "DeBERTa-v2": classifier("DebertaV2", **DEBERTA, norm_rel_ebd="layer_norm", share_att_key=True),
    "ModernBERT": classifier("ModernBert", local_attention=4, mlp_dropout=0.1),
    "DINOv2": seen("Dinov2", drop_path_rate=0.2),
    "timm ConvNeXt, a stage": from_timm("convnext_tiny", "stages.2.blocks", **CONVNEXT, ls_init_value=0.1),
}
SLOW = {
    "Llama": causal("Llama", **GROUPED),
    "Qwen2-MoE": causal("Qwen2Moe", **EXPERTS, **ROUTED, num_experts=4, shared_expert_intermediate_size=16),
    "Qwen3-MoE": causal("Qwen3Moe", **EXPERTS, **ROUTED, num_experts=4, head_dim=8),
    "DeepSeek-V3": causal("DeepseekV3", **ROUTED, **LATENT, num_experts_per_tok=2),
    "Gemma2": causal("Gemma2", **GROUPED, head_dim=8),
    "GPT-NeoX": causal("GPTNeoX", hidden_dropout=0.1),
    "GPT-2": model("GPT2LMHeadModel", "GPT2Config", CAUSAL, **TOKENS, **GPT2),
    "OPT": text_model("OPT", "OPTForCausalLM", UNCACHED, ffn_dim=48, word_embed_proj_dim=32),
    "BLOOM": model(
        "BloomForCausalLM", "BloomConfig", UNCACHED, **TOKENS, hidden_size=32, n_layer=3, n_head=4, hidden_dropout=0.1
    ),
    "Falcon": text_model("Falcon", "FalconForCausalLM", UNCACHED, hidden_dropout=0.1),
    "BERT": classifier("Bert"),
    "DistilBERT": model("DistilBertForSequenceClassification", "DistilBertConfig", LABELLED, vocab_size=40, **DISTIL),
    "BART": model("BartForConditionalGeneration", "BartConfig", CAUSAL, *STACKS, **TOKENS, **SEQ2SEQ),
    "Whisper, layers dropped": model("WhisperForConditionalGeneration", "WhisperConfig", SPOKEN, *STACKS, **TOKENS, **WHISPER),
    "ViT": seen("ViT", hidden_dropout_prob=0.1),
    "BEiT": seen("Beit", drop_path_rate=0.2, use_relative_position_bias=True),
    "CLIP": model("CLIPModel", "CLIPConfig", BOTH, "text_model.encoder.layers", "vision_model.encoder.layers", **CLIP),
    "timm BEiT, one position bias": vit_like("beit_base_patch16_224", use_rel_pos_bias=False, use_shared_rel_pos_bias=True),
    "timm EVA02": vit_like("eva02_tiny_patch14_224", size=28),
    "timm DINOv3": vit_like("vit_small_patch16_dinov3"),
    "timm CaiT": vit_like("cait_xxs24_224", "blocks", init_values=0.1),
    "timm SwinV2, a stage": vit_like("swinv2_tiny_window8_256", "layers.2.blocks", **SWIN),
}
NETWORKS = FAST | SLOW
UNREACHED = {"mask_token"}  # in training nothing is masked in a DINOv2
assert (len(FAST), len(NETWORKS)) == (6, 28)


NOT_TWO_BRANCHES = {  # a norm after the sum, branches side by side, other branches
    *("DeBERTa-v2", "BLOOM", "BERT", "DistilBERT", "BART"),
    *("GPT-NeoX", "Falcon"),
    "timm ConvNeXt, a stage",
}
assert NETWORKS.keys() >= NOT_TWO_BRANCHES


def make_network(name):
    """Return a network, the paths of its lists, and a batch; skip what the present version of the library does not have."""
    make, paths, batch = NETWORKS[name]
    torch.manual_seed(0)
    try:
        made = make()
    except AttributeError as error:
        pytest.skip(str(error))
    return made if isinstance(made, torch.nn.Module) else made[0](made[1]), paths, batch


def compute_loss(outputs):
    if isinstance(outputs, torch.Tensor):
        return outputs.square().mean()
    loss = outputs.get("loss")
    return outputs.logits.square().mean() if loss is None else loss


def is_untouched(model):
    return not any(m.__dict__.keys() & {"forward", "_call_impl"} for m in model.modules())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in NETWORKS])
def test_gradients_are_those_of_storing_and_reach_what_they_reached(name):
    model, paths, batch = make_network(name)
    keys, original = list(model.state_dict()), train_step(model, batch, None, compute_loss)[0]
    known = {key: value for key, value in batch.items() if key != "labels" or paths}
    for split in (None, SPLIT):
        if split is not None and name in NOT_TWO_BRANCHES:
            with pytest.raises(ConversionError, match="cannot be two steps|no submodule that is known as 'attention'"):
                revzoo.reversible_(model, *paths, batch=known, split=split)
            assert is_untouched(model)
            continue
        report = revzoo.reversible_(model, *paths, batch=known, split=split)
        assert report.steps == (1 if split is None else 2) * sum(len(chain.blocks) for chain in report.chains)
        assert list(model.state_dict()) == keys
        assert report.similarity.least_cosine > 0.9999
        stored, inverted = (train_step(model, batch, schedule, compute_loss)[0] for schedule in ("store", "invert"))
        assert_equal(inverted, stored)
        assert "layers dropped" in name or stored.keys() == original.keys()
        revzoo.ordinary_(model)
        assert is_untouched(model)
    unreached = {name.rpartition(".")[2] for name, _ in model.named_parameters() if name not in original}
    assert "layers dropped" in name or unreached <= UNREACHED


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("split", [None, SPLIT])
def test_losses_of_extra_outputs_have_their_gradients(split):
    make, paths, batch = NETWORKS["T5"]
    kind, config = make()
    config._attn_implementation = "eager"
    model = kind(config)
    revzoo.reversible_(model, *paths, batch=batch, split=split)

    def loss(outputs):
        assert [a.shape for a in outputs.decoder_attentions] == 3 * [(2, 4, 12, 12)]
        extra = (*outputs.encoder_attentions[1:2], *outputs.cross_attentions)
        return outputs.loss + sum(a.square().sum() for a in extra)

    given = {**batch, "output_attentions": True}
    stored, inverted = (train_step(model, given, schedule, loss)[0] for schedule in ("store", "invert"))
    assert_equal(inverted, stored)
    assert stored["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"].abs().sum() > 0
