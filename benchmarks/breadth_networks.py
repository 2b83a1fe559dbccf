"""The networks of `breadth.py`: every one at a tiny width, with random weights and a batch of random examples.

Transformers' are made from their configurations by one table of small sizes, timm's by name, the others by their own arguments.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from breadth_others import OTHERS, make_other
from torch import nn

Network = Callable[[], tuple[nn.Module, Any]]

LIBRARIES = {  # name of the module: of the package
    "transformers": "transformers",
    "timm": "timm",
    "torchvision": "torchvision",
    "torch": "torch",
    "diffusers": "diffusers",
    "monai": "monai",
    "torch_geometric": "torch_geometric",
    "open_clip": "open_clip_torch",
    "x_transformers": "x-transformers",
    "vit_pytorch": "vit-pytorch",
    "segmentation_models_pytorch": "segmentation-models-pytorch",
}

_FIRST_IMPORTS = {
    "transformers": [
        f"transformers.models.{kind}.modeling_{kind}" for kind in ("auto", "bert", "llama", "vit", "t5", "wav2vec2")
    ]
}
# Sizes of configurations, by setting. A setting that is a list by default gets one size for each of its entries.
_SIZES = {
    size: names.split()
    for size, names in {
        32: "hidden_size d_model n_embd dim embed_dim emb_dim hidden_dim word_embed_proj_dim embedding_size "
        "decoder_hidden_size projection_dim crossattention_hidden_size d_latents output_hidden_size out_hidden_size "
        "trigram_input_size input_embedding_size image_size img_size moe_intermediate_size shared_expert_intermediate_size "
        "kv_lora_rank lru_width encoder_hidden_size",
        64: "intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim n_inner d_inner dim_feedforward ffn_hidden_size "
        "mlp_dim decoder_intermediate_size feed_forward_size max_position_embeddings n_positions max_source_positions "
        "max_target_positions n_ctx max_seq_len max_seq_length seq_length text_max_length max_2d_position_embeddings",
        4: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers "
        "layers depth num_blocks decoder_num_hidden_layers block_num num_attention_heads n_head n_heads num_heads heads "
        "encoder_attention_heads decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
        "decoder_num_attention_heads num_self_attention_heads num_cross_attention_heads num_experts n_routed_experts "
        "num_local_experts moe_num_experts n_experts num_memory_blocks",
        2: "num_key_value_heads num_kv_heads n_head_kv num_experts_per_tok moe_topk num_experts_per_token top_k_experts "
        "moe_k eos_token_id decoder_start_token_id r_layers x_layers l_layers num_self_attends_per_block",
        8: "head_dim d_kv d_head attention_head_dim attention_head_size kv_channels qk_rope_head_dim qk_nope_head_dim "
        "v_head_dim mamba_d_head mamba_head_dim linear_key_head_dim linear_value_head_dim patch_size sliding_window",
        16: "q_lora_rank state_size mamba_d_state ssm_state_size num_mel_bins",
        1: "bos_token_id n_group topk_group n_shared_experts",
        99: "vocab_size",
        3: "num_channels",
        0: "pad_token_id",
    }.items()
}
_SETTINGS = {name: size for size, names in _SIZES.items() for name in names}
_LISTS: dict[str, Callable[[int], list[int]]] = {
    **dict.fromkeys(("hidden_sizes", "embed_dim", "embed_dims", "neck_hidden_sizes"), lambda n: [16 * 2**i for i in range(n)]),
    **dict.fromkeys(("depths", "num_blocks", "layers"), lambda n: [3] * n),
    **dict.fromkeys(("num_heads", "num_attention_heads"), lambda n: [2**i for i in range(n)]),
    **dict.fromkeys(("image_size", "conv_dim"), lambda n: [32] * n),
}

_KINDS = """
afmoe aimv2 albert altclip apertus arcee audio-spectrogram-transformer bamba bart beit bert bert-generation big_bird
bigbird_pegasus biogpt bit bitnet blenderbot blenderbot-small blip bloom bridgetower camembert canine chinese_clip clip
clipseg codegen cohere cohere2 conditional_detr convbert convnext convnextv2 ctrl cvt data2vec-audio data2vec-text
data2vec-vision deberta deberta-v2 deepseek_v3 deit detr diffllama dinov2 dinov2_with_registers dinov3_vit distilbert doge
dots1 dpr dpt electra ernie ernie4_5 esm exaone4 falcon falcon_h1 falcon_mamba flaubert flava fnet focalnet gemma
gemma2 gemma3_text git glm glm4 glm4_moe glpn gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe groupvit
helium hiera hubert hunyuan_v1_dense ibert ijepa imagegpt jamba jetmoe layoutlm layoutlmv3 led levit lfm2 lilt llama
llama4_text llava longformer longt5 luke m2m_100 mamba mamba2 marian markuplm mask2former mbart megatron-bert minimax
ministral mistral mixtral mobilebert mobilenet_v2 mobilevit mobilevitv2 modernbert mpnet mpt mt5 mvp nemotron nllb-moe
nomic_bert nystromformer olmo olmo2 olmo3 olmoe openai-gpt opt owlvit paligemma pegasus pegasus_x perceiver persimmon phi phi3
phimoe pixtral plbart poolformer prophetnet pvt pvt_v2 qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next recurrent_gemma reformer
regnet rembert resnet roberta roberta-prelayernorm roc_bert roformer rwkv sam seed_oss segformer sew sew-d siglip smollm3
speech_to_text splinter squeezebert stablelm starcoder2 swiftformer swin swin2sr swinv2 switch_transformers t5 t5gemma tapas
timesformer umt5 unispeech unispeech-sat videomae vilt visual_bert vit vit_mae vit_msn vitdet vivit wav2vec2 wav2vec2-bert
wav2vec2-conformer wavlm whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod yolos yoso
"""  # of Transformers
_TINY_RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 32, 32],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage4"],
}
_TINY_SWIN = {
    "model_type": "swin",
    "embed_dim": 16,
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 2, 2, 2],
    "window_size": 4,
    "image_size": 64,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_DETR: dict[str, Any] = {"use_timm_backbone": False, "backbone": None, "backbone_config": _TINY_RESNET, "num_queries": 5}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 99,
}
_EYES: dict[str, Any] = {"image_size": 32, "patch_size": 8, "projection_dim": 32}
_ARGUMENTS: dict[str, dict[str, Any]] = {  # what one type of Transformers needs besides the table
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "bit": {"num_groups": 4},
    "bridgetower": {
        "hidden_size": 64,
        "text_config": {**_TOWER, "hidden_size": 64},
        "vision_config": {"hidden_size": 64, "num_hidden_layers": 4, "image_size": 32, "patch_size": 8},
    },
    "codegen": {"rotary_dim": 8},
    "conditional_detr": _DETR,
    "convnext": {"image_size": 64, "patch_size": 4},
    "convnextv2": {"image_size": 64, "patch_size": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "detr": _DETR,
    "flava": {"image_config": {**_TOWER, "image_size": 64, "patch_size": 16}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 8},
    "layoutlmv3": {"input_size": 64, "coordinate_size": 4, "shape_size": 8},
    "levit": {
        "hidden_sizes": [32, 48, 64],
        "num_attention_heads": [2, 3, 4],
        "key_dim": [16, 16, 16],
        "image_size": 64,
        "patch_size": 16,
    },
    "lilt": {"hidden_size": 48},
    "llava": {
        "text_config": {**_TOWER, "model_type": "llama"},
        "vision_config": {**_TOWER, **_EYES, "model_type": "clip_vision_model"},
        "image_token_index": 5,
    },
    "luke": {"entity_vocab_size": 9, "entity_emb_size": 32},
    "mamba2": {"num_heads": 8},
    "mobilevit": {
        "image_size": 64,
        "patch_size": 2,
        "hidden_sizes": [24, 32, 40],
        "neck_hidden_sizes": [16, 16, 24, 24, 32, 32, 64],
    },
    "mobilevitv2": {"image_size": 64, "patch_size": 2},
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [4, 6],
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
        "num_buckets": 2,
    },
    "roc_bert": {"pronunciation_vocab_size": 99, "shape_vocab_size": 99},
    "sam": {
        "vision_config": {"output_channels": 32, "global_attn_indexes": [1, 3], "window_size": 2, "num_pos_feats": 16},
        "prompt_encoder_config": {"hidden_size": 32},
        "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 32},
    },
    "swin": {"image_size": 128, "patch_size": 4, "window_size": 4},
    "swin2sr": {"image_size": 16, "patch_size": 1, "window_size": 8},
    "swinv2": {"image_size": 64, "patch_size": 4, "window_size": 4},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "paligemma": {
        "text_config": {**_TOWER, "model_type": "gemma", "num_key_value_heads": 2, "head_dim": 8},
        "vision_config": {**_TOWER, **_EYES, "model_type": "siglip_vision_model"},
        "projection_dim": 32,
        "image_token_index": 5,
    },
    "mask2former": {"backbone_config": _TINY_SWIN, "use_pretrained_backbone": False, "num_queries": 5},
}


def _shrink(config_class: Any) -> dict[str, Any]:
    """Return arguments that make a configuration tiny, by the table of sizes; those of its parts likewise."""
    try:
        default = config_class()
    except Exception:  # some cannot be made without arguments
        default = None
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(config_class.__init__).parameters.items():
        value = getattr(default, name, parameter.default)
        if isinstance(value, list | tuple):
            if name in _LISTS and all(isinstance(each, int) for each in value):
                arguments[name] = _LISTS[name](len(value))
        elif name in _SETTINGS:
            arguments[name] = _SETTINGS[name]
        part = getattr(config_class, "sub_configs", {}).get(name)
        if part is not None and part.__name__ != "AutoConfig":
            arguments[name] = _shrink(part)
    return arguments


def _merge(arguments: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with others in their place, also in those of parts."""
    parts = {key: _merge(arguments[key], value) for key, value in others.items() if isinstance(arguments.get(key), dict)}
    return {**arguments, **others, **parts}


def _make_transformers(kind: str) -> tuple[nn.Module, Any]:
    import transformers

    transformers.logging.set_verbosity_error()
    config_class = transformers.CONFIG_MAPPING[kind]
    config = config_class(**_merge(_shrink(config_class), _ARGUMENTS.get(kind, {})))
    with torch.device("meta"):
        count = sum(p.numel() for p in transformers.AutoModel.from_config(config).parameters())
    assert count < 6_000_000, f"{count} parameters"
    model = transformers.AutoModel.from_config(config)
    return model, _make_batch(model)


def _make_batch(model: Any) -> dict[str, Any]:
    """Return random inputs of the names that a forward of Transformers takes."""
    names, config = inspect.signature(model.forward).parameters, model.config
    sight = getattr(config, "vision_config", config)
    side = getattr(sight, "image_size", None) or 64
    sides = side if isinstance(side, Sequence) else (side, side)
    ids, batch = torch.randint(6, 90, (2, 24)), dict[str, Any]()
    if hasattr(config, "image_token_id") and "pixel_values" in names:
        ids[:, :16] = config.image_token_id
    if "input_ids" in names:
        batch["input_ids"] = ids
    if "pixel_values" in names:
        frames = [config.num_frames] if hasattr(config, "num_frames") else []
        batch["pixel_values"] = torch.randn(2, *frames, getattr(sight, "num_channels", 3), *sides)
    if "input_values" in names:
        shape = (2, config.max_length, config.num_mel_bins) if hasattr(config, "num_mel_bins") else (2, 4000)
        batch["input_values"] = torch.randn(shape)
    if "inputs" in names and not batch:
        batch["inputs"] = torch.randn(2, 24, config.d_model)
    if hasattr(config, "input_feat_per_channel"):
        batch["input_features"] = torch.randn(2, 64, config.input_feat_per_channel)
    elif "input_features" in names:
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions) if hasattr(config, "encoder_layers") else (2, 32, 160)
        batch["input_features"] = torch.randn(shape)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        batch["decoder_input_ids"] = ids
    if "use_cache" in names:
        batch["use_cache"] = False
    return batch


_AS_THEY_ARE = """
test_byobnet test_coatnet test_convnext test_convnext2 test_convnext3 test_efficientnet test_mambaout test_maxvit test_nfnet
test_resnet test_vit test_vit2 resnet18 resnet26 resnet26d resnetv2_18 res2net50_14w_8s resnest14d regnetx_002 regnety_002
regnetz_005 nf_resnet26 hgnetv2_b0 dla46_c dpn48b densenet121 ese_vovnet19b_slim selecsls42 skresnet18 legacy_seresnet18
ghostnet_050 lcnet_050 mobilenetv3_small_050 mobilenetv4_conv_small_035 rexnet_100 starnet_s050 fasternet_t0 repvit_m0_9
efficientvit_b0 edgenext_xx_small poolformer_s12 convformer_s18 caformer_s18 inception_next_atto swiftformer_xs mobilevit_xxs
mobilevitv2_050 pvt_v2_b0 fastvit_t8 cs3darknet_focus_s hrnet_w18_small rdnet_tiny
"""  # of timm; their images have 64 x 64 pixels
_COLUMNS = """
vit_tiny_patch16_224 deit_tiny_patch16_224 deit3_small_patch16_224 vit_small_patch14_reg4_dinov2 eva02_tiny_patch14_224
cait_xxs24_224 xcit_nano_12_p16_224
"""  # of timm, with blocks of one width
_TIMM: dict[str, dict[str, Any]] = {  # name: arguments; "side" is that of images
    **{name: {} for name in _AS_THEY_ARE.split()},
    **{
        name: {"embed_dim": 32, "depth": 6, "num_heads": 4, "img_size": 112 if "14_" in name else 64}
        for name in _COLUMNS.split()
    },
    **{name: {"side": 160} for name in ("test_vit3", "test_vit_relpos", "test_coatnet", "test_maxvit")},
    "beit_base_patch16_224": {"embed_dim": 32, "depth": 6, "num_heads": 4, "img_size": 64},
    "convit_tiny": {"embed_dim": 8, "depth": 12, "img_size": 64},
    "swin_tiny_patch4_window7_224": {"embed_dim": 16, "depths": (2, 2, 4, 2), "num_heads": (1, 2, 4, 8), "img_size": 224},
    "swinv2_tiny_window8_256": {"embed_dim": 16, "depths": (2, 2, 4, 2), "num_heads": (1, 2, 4, 8), "img_size": 256},
    "convnext_atto": {"dims": (16, 32, 64, 128)},
    "convnextv2_atto": {"dims": (16, 32, 64, 128)},
    "mvitv2_tiny": {"img_size": 64},
    "levit_128s": {"embed_dim": (32, 64, 96), "num_heads": (1, 2, 3), "side": 224},
    "davit_tiny": {"embed_dims": (16, 32, 64, 128), "num_heads": (1, 2, 4, 8), "side": 64},
    "hiera_tiny_224": {"embed_dim": 16, "num_heads": 1, "img_size": 224},
    "pit_ti_224": {"side": 224},
    "twins_pcpvt_small": {"embed_dims": (16, 32, 64, 128), "num_heads": (1, 2, 4, 8), "img_size": 64},
    "crossvit_9_240": {"side": 240},
    "coat_lite_tiny": {"img_size": 64},
    "visformer_tiny": {"img_size": 224},
    "tnt_s_patch16_224": {
        "embed_dim": 32,
        "inner_dim": 8,
        "num_heads_inner": 2,
        "num_heads_outer": 4,
        "depth": 6,
        "img_size": 64,
    },
    "sequencer2d_s": {"embed_dims": (16, 32, 32, 32), "hidden_sizes": (8, 8, 8, 8)},
    "samvit_base_patch16": {"embed_dim": 32, "depth": 6, "num_heads": 4, "img_size": 64, "global_attn_indexes": (2, 5)},
    "tiny_vit_5m_224": {"embed_dims": (16, 32, 32, 64), "num_heads": (1, 2, 2, 4), "side": 224},
    "efficientformer_l1": {"side": 224},
    "efficientvit_m0": {"side": 224},
}
_TIMM_CLASSES = {  # what a name of timm fixes too much of: module, class
    "mixer": ("mlp_mixer", "MlpMixer"),
    "convmixer": ("convmixer", "ConvMixer"),
    "gcvit": ("gcvit", "GlobalContextVit"),
    "focalnet": ("focalnet", "FocalNet"),
    "nest": ("nest", "Nest"),
    "volo": ("volo", "VOLO"),
}
_TIMM |= {
    "mixer": {"embed_dim": 32, "num_blocks": 6, "patch_size": 8, "img_size": 64},
    "convmixer": {"dim": 32, "depth": 8, "kernel_size": 5, "patch_size": 4},
    "gcvit": {"embed_dim": 16, "depths": (2, 2, 3, 2), "num_heads": (1, 2, 4, 8), "img_size": 224},
    "focalnet": {"embed_dim": 16, "depths": (2, 2, 4, 2)},
    "volo": {"layers": (2, 2, 2, 2), "embed_dims": (24, 48, 48, 48), "num_heads": (2, 4, 4, 4), "img_size": 64},
    "nest": {"embed_dims": (16, 32, 64), "num_heads": (1, 2, 4), "depths": (2, 2, 4), "img_size": 64},
}


def _make_timm(name: str) -> tuple[nn.Module, Any]:
    import timm

    options = {"side": 64, **_TIMM[name]}
    side = options.pop("side")
    if "img_size" in options:
        side = options["img_size"]
    path, maker = _TIMM_CLASSES.get(name), partial(timm.create_model, name)
    if path is not None:
        maker = getattr(importlib.import_module(f"timm.models.{path[0]}"), path[1])
    return maker(num_classes=10, **options), torch.randn(2, 3, side, side)


def list_networks(libraries: Iterable[str]) -> dict[str, Network]:
    """Return the networks of these libraries by name; says which of them are not installed."""
    makers = {
        **{f"transformers/{kind}": partial(_make_transformers, kind) for kind in _KINDS.split()},
        **{f"timm/{name}": partial(_make_timm, name) for name in _TIMM},
        **{name: partial(make_other, name) for name in OTHERS},
    }
    networks = dict[str, Network]()
    for library in libraries:
        try:
            for module in _FIRST_IMPORTS.get(library, (library,)):
                importlib.import_module(module)  # here, once for the processes of all its networks
        except ImportError as error:
            print(f"{library} is not installed ({error}): its networks are left out")
            continue
        networks |= {name: make for name, make in makers.items() if name.startswith(f"{library}/")}
    return networks
