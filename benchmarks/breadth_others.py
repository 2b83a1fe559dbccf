"""The networks of `breadth.py` that are made by their own arguments: everything but Transformers and timm."""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

# The others: where a class is, its arguments, and its batch. A list in a batch is the shape of a random tensor.
_IDS, _TIMES = torch.randint(3, 90, (2, 16)), torch.tensor([3, 7])
_EDGES = torch.stack([torch.arange(12), (torch.arange(12) + 1) % 12])
_VIT: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 4, "heads": 4, "mlp_dim": 64}
_LAYERS: dict[str, Any] = {"num_layers": 4, "num_attention_heads": 4, "attention_head_dim": 8}
_TEXT: dict[str, Any] = {"encoder_hidden_states": [2, 6, 32], "timestep": _TIMES}
_CLIP: dict[str, Any] = {
    "embed_dim": 32,
    "vision_cfg": {"layers": 4, "width": 32, "patch_size": 8, "image_size": 32, "head_width": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 99, "width": 32, "heads": 4, "layers": 4},
}
_IMAGE, _VOLUME = ([2, 3, 32, 32],), ([2, 1, 32, 32, 32],)
OTHERS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "torchvision/vit": (
        "torchvision.models.VisionTransformer",
        {"image_size": 32, "patch_size": 8, "num_layers": 4, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64},
        _IMAGE,
    ),
    "torchvision/swin": (
        "torchvision.models.SwinTransformer",
        {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2, 4, 2], "num_heads": [1, 2, 4, 8], "window_size": [4, 4]},
        ([2, 3, 64, 64],),
    ),
    "torchvision/maxvit": (
        "torchvision.models.MaxVit",
        {
            "input_size": (64, 64),
            "stem_channels": 16,
            "partition_size": 2,
            "block_channels": [16, 32],
            "block_layers": [3, 3],
            "head_dim": 8,
            "stochastic_depth_prob": 0.1,
        },
        ([2, 3, 64, 64],),
    ),
    **{
        f"torchvision/{name}": (f"torchvision.models.{name}", {}, ([2, 3, 64, 64],))
        for name in (
            "resnet18",
            "resnext50_32x4d",
            "densenet121",
            "mobilenet_v2",
            "mobilenet_v3_small",
            "shufflenet_v2_x0_5",
            "efficientnet_b0",
            "regnet_x_400mf",
            "mnasnet0_5",
            "squeezenet1_1",
        )
    },
    "torch/encoder": ("breadth_others.make_encoder", {"norm_first": False}, ([2, 8, 32],)),
    "torch/encoder_norm_first": ("breadth_others.make_encoder", {"norm_first": True}, ([2, 8, 32],)),
    "torch/transformer": (
        "torch.nn.Transformer",
        {
            "d_model": 32,
            "nhead": 4,
            "num_encoder_layers": 4,
            "num_decoder_layers": 4,
            "dim_feedforward": 64,
            "batch_first": True,
        },
        ([2, 8, 32], [2, 6, 32]),
    ),
    "diffusers/DiT": (
        "diffusers.DiTTransformer2DModel",
        {**_LAYERS, "sample_size": 8, "in_channels": 4, "num_embeds_ada_norm": 100},
        {"hidden_states": [2, 4, 8, 8], "timestep": _TIMES, "class_labels": _TIMES},
    ),
    "diffusers/PixArt": (
        "diffusers.PixArtTransformer2DModel",
        {**_LAYERS, "sample_size": 8, "caption_channels": 32, "cross_attention_dim": 32},
        {"hidden_states": [2, 4, 8, 8], **_TEXT, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "diffusers/Sana": (
        "diffusers.SanaTransformer2DModel",
        {
            **_LAYERS,
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_cross_attention_heads": 4,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 32,
            "caption_channels": 32,
        },
        {"hidden_states": [2, 4, 8, 8], **_TEXT},
    ),
    "diffusers/Wan": (
        "diffusers.WanTransformer3DModel",
        {
            **_LAYERS,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 32,
            "freq_dim": 32,
            "ffn_dim": 64,
        },
        {"hidden_states": [2, 4, 2, 8, 8], **_TEXT},
    ),
    "diffusers/CogVideoX": (
        "diffusers.CogVideoXTransformer3DModel",
        {
            **_LAYERS,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 32,
            "text_embed_dim": 32,
            "max_text_seq_length": 6,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
        },
        {"hidden_states": [2, 2, 4, 8, 8], **_TEXT},
    ),
    "diffusers/StableAudio": (
        "diffusers.StableAudioDiTModel",
        {
            **_LAYERS,
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_key_value_attention_heads": 2,
            "cross_attention_dim": 32,
            "global_states_input_dim": 32,
            "cross_attention_input_dim": 32,
        },
        {"hidden_states": [2, 4, 8], "timestep": [2], "encoder_hidden_states": [2, 6, 32], "global_hidden_states": [2, 1, 32]},
    ),
    "diffusers/Prior": (
        "diffusers.PriorTransformer",
        {**_LAYERS, "embedding_dim": 32, "num_embeddings": 6},
        {"hidden_states": [2, 32], "timestep": _TIMES, "proj_embedding": [2, 32], "encoder_hidden_states": [2, 6, 32]},
    ),
    "diffusers/Flux": (
        "diffusers.FluxTransformer2DModel",
        {
            **_LAYERS,
            "num_single_layers": 4,
            "in_channels": 4,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (2, 2, 4),
            "guidance_embeds": False,
        },
        {
            "hidden_states": [2, 16, 4],
            "encoder_hidden_states": [2, 6, 32],
            "pooled_projections": [2, 32],
            "timestep": [2],
            "img_ids": [16, 3],
            "txt_ids": [6, 3],
        },
    ),
    "diffusers/SD3": (
        "diffusers.SD3Transformer2DModel",
        {
            **_LAYERS,
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 32,
            "pos_embed_max_size": 8,
        },
        {"hidden_states": [2, 4, 8, 8], **_TEXT, "pooled_projections": [2, 32]},
    ),
    "diffusers/UNet2D": (
        "diffusers.UNet2DModel",
        {
            "sample_size": 16,
            "block_out_channels": (32, 64),
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "layers_per_block": 2,
            "norm_num_groups": 8,
        },
        {"sample": [2, 3, 16, 16], "timestep": _TIMES},
    ),
    "diffusers/UNet2DCondition": (
        "diffusers.UNet2DConditionModel",
        {
            "sample_size": 16,
            "block_out_channels": (32, 64),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": 2,
            "cross_attention_dim": 32,
            "attention_head_dim": 4,
            "norm_num_groups": 8,
        },
        {"sample": [2, 4, 16, 16], **_TEXT},
    ),
    "diffusers/AutoencoderKL": (
        "diffusers.AutoencoderKL",
        {
            "block_out_channels": (16, 32),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "layers_per_block": 2,
            "norm_num_groups": 8,
        },
        {"sample": [2, 3, 16, 16]},
    ),
    "monai/ViT": (
        "monai.networks.nets.ViT",
        {
            "in_channels": 1,
            "img_size": (32, 32, 32),
            "patch_size": (8, 8, 8),
            "hidden_size": 32,
            "mlp_dim": 64,
            "num_layers": 4,
            "num_heads": 4,
        },
        _VOLUME,
    ),
    "monai/UNETR": (
        "monai.networks.nets.UNETR",
        {
            "in_channels": 1,
            "out_channels": 2,
            "img_size": (32, 32, 32),
            "feature_size": 4,
            "hidden_size": 32,
            "mlp_dim": 64,
            "num_heads": 4,
        },
        _VOLUME,
    ),
    "monai/SwinUNETR": (
        "monai.networks.nets.SwinUNETR",
        {"in_channels": 1, "out_channels": 2, "feature_size": 12, "spatial_dims": 2},
        ([2, 1, 64, 64],),
    ),
    "monai/UNet": (
        "monai.networks.nets.UNet",
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (4, 8, 16), "strides": (2, 2), "num_res_units": 2},
        ([2, 1, 32, 32],),
    ),
    "monai/SegResNet": ("monai.networks.nets.SegResNet", {"spatial_dims": 2, "blocks_down": (2, 3, 3, 4)}, ([2, 1, 32, 32],)),
    "monai/HighResNet": ("monai.networks.nets.HighResNet", {"spatial_dims": 2}, ([2, 1, 32, 32],)),
    "monai/DiffusionModelUNet": (
        "monai.networks.nets.DiffusionModelUNet",
        {
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 1,
            "channels": (8, 16),
            "attention_levels": (False, True),
            "num_res_blocks": 2,
            "num_head_channels": 8,
            "norm_num_groups": 8,
        },
        ([2, 1, 16, 16], _TIMES),
    ),
    "monai/DecoderOnlyTransformer": (
        "monai.networks.nets.DecoderOnlyTransformer",
        {"num_tokens": 99, "max_seq_len": 32, "attn_layers_dim": 32, "attn_layers_depth": 4, "attn_layers_heads": 4},
        (_IDS,),
    ),
    "torch_geometric/GCN": (
        "torch_geometric.nn.models.GCN",
        {"in_channels": 16, "hidden_channels": 16, "num_layers": 6},
        ([12, 16], _EDGES),
    ),
    "torch_geometric/GAT": (
        "torch_geometric.nn.models.GAT",
        {"in_channels": 16, "hidden_channels": 16, "num_layers": 6},
        ([12, 16], _EDGES),
    ),
    "torch_geometric/DeepGCN": ("breadth_others.DeepGraphNetwork", {"kind": "deep"}, ([12, 16], _EDGES)),
    "torch_geometric/GPS": ("breadth_others.DeepGraphNetwork", {"kind": "gps"}, ([12, 16], _EDGES)),
    "open_clip/CLIP": ("open_clip.model.CLIP", _CLIP, (_IMAGE[0], _IDS)),
    "open_clip/CoCa": (
        "open_clip.coca_model.CoCa",
        {
            **_CLIP,
            "vision_cfg": {**_CLIP["vision_cfg"], "attentional_pool": True, "attn_pooler_heads": 4, "output_tokens": True},
            "text_cfg": {**_CLIP["text_cfg"], "embed_cls": True, "output_tokens": True},
            "multimodal_cfg": {"context_length": 16, "vocab_size": 99, "width": 32, "heads": 4, "layers": 4},
        },
        (_IMAGE[0], _IDS),
    ),
    "x_transformers/Decoder": ("breadth_others.make_x", {"kind": "Decoder"}, (_IDS,)),
    "x_transformers/Encoder": ("breadth_others.make_x", {"kind": "Encoder"}, (_IDS,)),
    "x_transformers/ViT": ("breadth_others.make_x", {"kind": "ViT"}, _IMAGE),
    "vit_pytorch/ViT": ("vit_pytorch.ViT", _VIT, _IMAGE),
    "vit_pytorch/SimpleViT": ("vit_pytorch.SimpleViT", _VIT, _IMAGE),
    "vit_pytorch/CaiT": ("vit_pytorch.cait.CaiT", {**_VIT, "cls_depth": 2}, _IMAGE),
    "vit_pytorch/DeepViT": ("vit_pytorch.deepvit.DeepViT", _VIT, _IMAGE),
    "vit_pytorch/T2TViT": (
        "vit_pytorch.t2t.T2TViT",
        {"dim": 32, "image_size": 32, "depth": 4, "heads": 4, "mlp_dim": 64, "num_classes": 10},
        _IMAGE,
    ),
    "vit_pytorch/XCiT": ("vit_pytorch.xcit.XCiT", {**_VIT, "cls_depth": 2}, _IMAGE),
    "vit_pytorch/MaxViT": (
        "vit_pytorch.max_vit.MaxViT",
        {"num_classes": 10, "dim": 16, "depth": (2, 2), "window_size": 4, "dim_head": 8},
        ([2, 3, 64, 64],),
    ),
    "vit_pytorch/NesT": (
        "vit_pytorch.nest.NesT",
        {
            "image_size": 32,
            "patch_size": 4,
            "num_classes": 10,
            "dim": 16,
            "heads": 2,
            "num_hierarchies": 2,
            "block_repeats": (3, 3),
        },
        _IMAGE,
    ),
    "vit_pytorch/CCT": ("vit_pytorch.cct.CCT", {"img_size": 32, "embedding_dim": 32, "num_layers": 4, "num_heads": 4}, _IMAGE),
    "vit_pytorch/ParallelViT": ("vit_pytorch.parallel_vit.ViT", _VIT, _IMAGE),
    **{
        f"segmentation_models_pytorch/{name}": (
            f"segmentation_models_pytorch.{name}",
            {"encoder_name": encoder, "encoder_weights": None},
            ([2, 3, 64, 64],),
        )
        for name, encoder in (
            ("Unet", "resnet18"),
            ("FPN", "resnet34"),
            ("Linknet", "mobilenet_v2"),
            ("Segformer", "mit_b0"),
            ("DeepLabV3Plus", "resnet18"),
        )
    },
}


def make_encoder(norm_first: bool) -> nn.Module:
    """Return PyTorch's encoder."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def make_x(kind: str) -> nn.Module:
    """Return a network of x-transformers."""
    import x_transformers as library

    layers = (library.Decoder if kind == "Decoder" else library.Encoder)(dim=32, depth=4, heads=4)
    if kind == "ViT":
        return library.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=10, attn_layers=layers)
    return library.TransformerWrapper(num_tokens=99, max_seq_len=64, attn_layers=layers)


class DeepGraphNetwork(nn.Module):
    """Residual layers of PyG, one after the other, as its examples have them."""

    def __init__(self, kind: str):
        super().__init__()
        from torch_geometric.nn import DeepGCNLayer, GENConv, GINConv, GPSConv

        def make() -> nn.Module:
            if kind == "gps":
                return GPSConv(16, GINConv(nn.Linear(16, 16)), heads=4)
            return DeepGCNLayer(GENConv(16, 16, num_layers=1), nn.LayerNorm(16), nn.ReLU(), block="res+", dropout=0.1)

        self.layers = nn.ModuleList(make() for _ in range(6))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edges)
        return x


def make_other(name: str) -> tuple[nn.Module, Any]:
    """Return a network of this file, and its batch."""
    path, arguments, batch = OTHERS[name]
    place, _, attribute = path.rpartition(".")
    maker = globals()[attribute] if place == __name__ else getattr(importlib.import_module(place), attribute)
    return maker(**arguments), _fill(batch)


def _fill(batch: Any) -> Any:
    """Return a batch with a random tensor in place of each list, which is a shape."""
    if isinstance(batch, list):
        return torch.randn(batch)
    if isinstance(batch, Mapping):
        return {key: _fill(value) for key, value in batch.items()}
    return tuple(map(_fill, batch)) if isinstance(batch, tuple) else batch
