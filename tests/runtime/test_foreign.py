"""Modules from PyTorch, torchvision, timm and Transformers as f of a chain, in every mode: gradients are those of `store`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.layers import ConvMlp, GatedMlp, GlobalResponseNormMlp, Mlp, SqueezeExcite, SwiGLU
from timm.models.convnext import ConvNeXtBlock
from timm.models.mlp_mixer import MixerBlock, ResBlock, SpatialGatingBlock
from timm.models.resnet import BasicBlock, Bottleneck
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.vision_transformer import Block, LayerScale, ParallelScalingBlock, ResPostBlock
from torch import Tensor, nn
from torchvision.models.convnext import CNBlock
from torchvision.models.densenet import _DenseLayer
from torchvision.models.efficientnet import FusedMBConv, FusedMBConvConfig, MBConv, MBConvConfig
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.models.resnet import BasicBlock as VisionBasicBlock
from torchvision.models.shufflenetv2 import InvertedResidual as ShuffleUnit
from torchvision.models.squeezenet import Fire
from torchvision.models.vision_transformer import EncoderBlock
from transformers import BertConfig, GPT2Config, LlamaConfig, ViTConfig
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.vit.modeling_vit import ViTLayer

from revzoo.runtime import ReversibleChain

MODES = ["selective", "recompute", "invert", ["invert", "selective", "invert", "invert"]]
TOKENS, IMAGE, SIGNAL = (2, 9, 16), (2, 8, 6, 6), (2, 8, 12)


class Calls(nn.Module):
    """Call a module in another way than as f(w), or take one of its outputs."""

    def __init__(self, module: nn.Module, call: Callable[[nn.Module, Tensor], Any]):
        super().__init__()
        self.module, self.call = module, call

    def forward(self, w: Tensor) -> Tensor:
        return self.call(self.module, w)


def first(module: nn.Module, w: Tensor) -> Tensor:
    out = module(w)
    return out[0] if isinstance(out, tuple) else out


def attend(module: nn.Module, w: Tensor) -> Tensor:
    return module(w, w, w)[0]


def channels_first(module: nn.Module, w: Tensor) -> Tensor:
    return module(w.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def recurrent(kind: type[nn.RNNBase], **kwargs: Any) -> nn.Module:
    return Calls(kind(16, 16, batch_first=True, **kwargs), first)


def encoder_layer(**kwargs: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, **kwargs)


def mbconv(config: Any, unit: Any) -> nn.Module:
    return unit(config(2.0, 3, 1, 8, 8, 1), 0.2, nn.BatchNorm2d)


def configured(kind: type, **kwargs: Any) -> Any:
    config = kind(**kwargs)
    config._attn_implementation = "sdpa"
    return config


BERT = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    # PyTorch
    "MultiheadAttention": (lambda: Calls(nn.MultiheadAttention(16, 2, dropout=0.1), attend), TOKENS),
    "MultiheadAttention_batch_first": (lambda: Calls(nn.MultiheadAttention(16, 2, batch_first=True), attend), TOKENS),
    "TransformerEncoderLayer": (encoder_layer, TOKENS),
    "TransformerEncoderLayer_norm_first": (lambda: encoder_layer(norm_first=True, activation="gelu"), TOKENS),
    "TransformerDecoderLayer": (
        lambda: Calls(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), lambda m, w: m(w, w)),
        TOKENS,
    ),
    "LSTM": (lambda: recurrent(nn.LSTM), TOKENS),
    "GRU": (lambda: recurrent(nn.GRU, num_layers=2, dropout=0.2), TOKENS),
    "Bilinear": (lambda: Calls(nn.Bilinear(16, 16, 16), lambda m, w: m(w, w.tanh())), TOKENS),
    "RReLU": (lambda: nn.Sequential(nn.Linear(16, 16), nn.RReLU(), nn.Linear(16, 16)), TOKENS),
    "Conv1d": (lambda: nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.InstanceNorm1d(16, affine=True), nn.GLU(1)), SIGNAL),
    "ConvTranspose2d": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.ConvTranspose2d(8, 8, 2, 2), nn.Dropout2d(0.3)), IMAGE),
    "weight_norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3, padding=1)), nn.GroupNorm(2, 8)),
        IMAGE,
    ),
    "PixelShuffle": (
        lambda: nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(32, 32, 1), nn.Hardswish(), nn.PixelShuffle(2)),
        IMAGE,
    ),
    # torchvision
    "torchvision.CNBlock": (lambda: CNBlock(8, 0.5, 0.2), IMAGE),
    "torchvision.BasicBlock": (lambda: VisionBasicBlock(8, 8), IMAGE),
    "torchvision.MBConv": (lambda: mbconv(MBConvConfig, MBConv), IMAGE),
    "torchvision.FusedMBConv": (lambda: mbconv(FusedMBConvConfig, FusedMBConv), IMAGE),
    "torchvision.InvertedResidual": (lambda: InvertedResidual(8, 8, 1, 2), IMAGE),
    "torchvision.ShuffleUnit": (lambda: ShuffleUnit(8, 8, 1), IMAGE),
    "torchvision.Fire": (lambda: Fire(8, 4, 4, 4), IMAGE),
    "torchvision.DenseLayer": (lambda: _DenseLayer(8, 8, 2, 0.2), IMAGE),
    "torchvision.EncoderBlock": (lambda: EncoderBlock(2, 16, 32, 0.1, 0.1), TOKENS),
    # timm
    "timm.Block": (lambda: Block(16, 2, qk_norm=True, init_values=0.5, drop_path=0.2, proj_drop=0.1), TOKENS),
    "timm.ResPostBlock": (lambda: ResPostBlock(16, 2), TOKENS),
    "timm.ParallelScalingBlock": (lambda: ParallelScalingBlock(16, 2), TOKENS),
    "timm.Mlp": (lambda: nn.Sequential(Mlp(16, 32, drop=0.1), LayerScale(16, 0.5)), TOKENS),
    "timm.SwiGLU": (lambda: SwiGLU(16, 32), TOKENS),
    "timm.GatedMlp": (lambda: GatedMlp(16, 32), TOKENS),
    "timm.MixerBlock": (lambda: MixerBlock(16, 9), TOKENS),
    "timm.ResBlock": (lambda: ResBlock(16, 9, init_values=0.5), TOKENS),
    "timm.SpatialGatingBlock": (lambda: SpatialGatingBlock(16, 9), TOKENS),
    "timm.ConvNeXtBlock": (lambda: ConvNeXtBlock(8, ls_init_value=0.5, drop_path=0.2), IMAGE),
    "timm.ConvNeXtBlock_v2": (lambda: ConvNeXtBlock(8, use_grn=True, conv_mlp=True), IMAGE),
    "timm.ConvMlp": (lambda: ConvMlp(8, 16), IMAGE),
    "timm.GlobalResponseNormMlp": (lambda: Calls(GlobalResponseNormMlp(8, 16), channels_first), IMAGE),
    "timm.SqueezeExcite": (lambda: SqueezeExcite(8), IMAGE),
    "timm.BasicBlock": (lambda: BasicBlock(8, 8), IMAGE),
    "timm.Bottleneck": (lambda: Bottleneck(8, 2), IMAGE),
    "timm.SwinTransformerBlock": (
        lambda: Calls(SwinTransformerBlock(8, (6, 6), 2, window_size=3, shift_size=1, dynamic_mask=True), channels_first),
        IMAGE,
    ),
    # Transformers
    "transformers.BertLayer": (lambda: Calls(BertLayer(configured(BertConfig, **BERT)), first), TOKENS),
    "transformers.ViTLayer": (lambda: Calls(ViTLayer(configured(ViTConfig, **BERT)), first), TOKENS),
    "transformers.GPT2Block": (lambda: Calls(GPT2Block(configured(GPT2Config, n_embd=16, n_head=2), 0), first), TOKENS),
    "transformers.LlamaMLP": (
        lambda: nn.Sequential(
            LlamaRMSNorm(16), LlamaMLP(configured(LlamaConfig, hidden_size=16, num_attention_heads=2, intermediate_size=32))
        ),
        TOKENS,
    ),
}
QUICK = ("MultiheadAttention_batch_first", "GRU", "timm.Block", "transformers.BertLayer")
FORMATS = {"contiguous": lambda x: x, "channels_last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1)}


def exact_cases() -> list[Any]:
    """Return every module in every memory format; the fast tests run images that are channels-last, and some of the others."""
    cases = []
    for name, (_, shape) in MODULES.items():
        for memory_format in FORMATS:
            is_slow = name not in QUICK if memory_format == "contiguous" else len(shape) < 4
            cases.append(pytest.param(name, memory_format, marks=[pytest.mark.slow] if is_slow else []))
    return cases


def run(chain: ReversibleChain, inputs: list[Tensor], mode: Any) -> list[Tensor]:
    """Return outputs and gradients of one run, with the same random numbers in every run."""
    torch.manual_seed(1)
    chain.schedule = mode
    y1, y2 = chain(*inputs)
    loss = (y1.sin() * torch.linspace(0, 1, y1.numel(), dtype=y1.dtype).view(y1.shape)).sum() + (y2 * y2).mean()
    wanted = [*inputs, *(p for p in chain.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [y1.detach(), y2.detach(), *(torch.zeros(()) if g is None else g for g in grads)]


def make(name: str, memory_format: str, dtype: torch.dtype, exact: bool) -> tuple[ReversibleChain, list[Tensor]]:
    build, shape = MODULES[name]
    chain = ReversibleChain([build() for _ in range(4)], exact=exact).to(dtype)
    if memory_format == "channels_last" and len(shape) == 4:
        chain = chain.to(memory_format=torch.channels_last)
    for p in chain.parameters():  # some are made as zeros or tiny numbers, which would hide what depends on them
        with torch.no_grad():
            p.add_(torch.randn_like(p), alpha=0.05)
    convert = FORMATS[memory_format]
    return chain, [convert(torch.randn(shape, dtype=dtype) / 2).requires_grad_() for _ in range(2)]


def test_modules_come_from_four_packages():
    sources = [name.split(".")[0] if "." in name else "torch" for name in MODULES]
    assert len(MODULES) == 43
    assert {source: sources.count(source) for source in sources} == {
        "torch": 13,
        "torchvision": 9,
        "timm": 17,
        "transformers": 4,
    }


@pytest.mark.parametrize(("name", "memory_format"), exact_cases())
def test_exact_modes_are_bit_identical(name, memory_format):
    chain, inputs = make(name, memory_format, torch.float32, exact=True)
    stored = run(chain, inputs, "store")
    assert all(torch.equal(a, b) for a, b in zip(run(chain, inputs, "store"), stored, strict=True)), "does not repeat itself"
    assert all(g.isfinite().all() for g in stored)
    assert sum(g.abs().sum() > 0 for g in stored) > 4
    for mode in MODES:
        assert all(torch.equal(a, b) for a, b in zip(run(chain, inputs, mode), stored, strict=True)), mode


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("memory_format", FORMATS)
def test_floating_point_modes_agree_within_rounding(name, memory_format):
    chain, inputs = make(name, memory_format, torch.float64, exact=False)
    stored = run(chain, inputs, "store")
    largest = max(g.norm() for g in stored)
    for mode in MODES:
        for grad, expected in zip(run(chain, inputs, mode), stored, strict=True):
            assert (grad - expected).norm() <= 1e-9 * expected.norm() + 1e-14 * largest, mode
