"""Modules from PyTorch, torchvision, timm and Transformers as f of a chain, in every mode: gradients are those of `store`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models.convnext import ConvNeXtBlock
from timm.models.mlp_mixer import SpatialGatingBlock
from timm.models.resnet import Bottleneck
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.vision_transformer import Block, ParallelScalingBlock
from torch import Tensor, nn
from torchvision.models.densenet import _DenseLayer
from torchvision.models.efficientnet import MBConv, MBConvConfig
from torchvision.models.shufflenetv2 import InvertedResidual as ShuffleUnit
from transformers import BertConfig, GPT2Config, LlamaConfig
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

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


def configured(kind: type, **kwargs: Any) -> Any:
    config = kind(**kwargs)
    config._attn_implementation = "sdpa"
    return config


BERT = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    # PyTorch
    "MultiheadAttention": (lambda: Calls(nn.MultiheadAttention(16, 2, dropout=0.1), attend), TOKENS),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True), TOKENS),
    "GRU": (lambda: Calls(nn.GRU(16, 16, num_layers=2, dropout=0.2, batch_first=True), first), TOKENS),
    "Bilinear": (lambda: Calls(nn.Bilinear(16, 16, 16), lambda m, w: m(w, w.tanh())), TOKENS),
    "Conv1d": (lambda: nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.InstanceNorm1d(16, affine=True), nn.GLU(1)), SIGNAL),
    "ConvTranspose2d": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.ConvTranspose2d(8, 8, 2, 2), nn.Dropout2d(0.3)), IMAGE),
    "weight_norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3, padding=1)), nn.GroupNorm(2, 8)),
        IMAGE,
    ),
    # torchvision
    "torchvision.MBConv": (lambda: MBConv(MBConvConfig(2.0, 3, 1, 8, 8, 1), 0.2, nn.BatchNorm2d), IMAGE),
    "torchvision.ShuffleUnit": (lambda: ShuffleUnit(8, 8, 1), IMAGE),
    "torchvision.DenseLayer": (lambda: _DenseLayer(8, 8, 2, 0.2), IMAGE),
    # timm
    "timm.Block": (lambda: Block(16, 2, qk_norm=True, init_values=0.5, drop_path=0.2, proj_drop=0.1), TOKENS),
    "timm.ParallelScalingBlock": (lambda: ParallelScalingBlock(16, 2), TOKENS),
    "timm.SpatialGatingBlock": (lambda: SpatialGatingBlock(16, 9), TOKENS),
    "timm.ConvNeXtBlock": (lambda: ConvNeXtBlock(8, use_grn=True, conv_mlp=True, drop_path=0.2), IMAGE),
    "timm.Bottleneck": (lambda: Bottleneck(8, 2), IMAGE),
    "timm.SwinTransformerBlock": (
        lambda: Calls(SwinTransformerBlock(8, (6, 6), 2, window_size=3, shift_size=1, dynamic_mask=True), channels_first),
        IMAGE,
    ),
    # Transformers
    "transformers.BertLayer": (lambda: Calls(BertLayer(configured(BertConfig, **BERT)), first), TOKENS),
    "transformers.GPT2Block": (lambda: Calls(GPT2Block(configured(GPT2Config, n_embd=16, n_head=2), 0), first), TOKENS),
    "transformers.LlamaMLP": (lambda: nn.Sequential(LlamaRMSNorm(16), LlamaMLP(configured(LlamaConfig, **BERT))), TOKENS),
}


def run(chain: ReversibleChain, inputs: list[Tensor], mode: Any) -> list[Tensor]:
    """Return outputs and gradients of one run, with the same random numbers in every run."""
    torch.manual_seed(1)
    chain.schedule = mode
    y1, y2 = chain(*inputs)
    loss = (y1.sin() * torch.linspace(0, 1, y1.numel(), dtype=y1.dtype).view(y1.shape)).sum() + (y2 * y2).mean()
    wanted = [*inputs, *(p for p in chain.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [y1.detach(), y2.detach(), *(torch.zeros(()) if g is None else g for g in grads)]


@pytest.mark.parametrize("name", MODULES)
def test_exact_modes_are_bit_identical(name):
    build, shape = MODULES[name]
    chain = ReversibleChain([build() for _ in range(4)], exact=True)
    inputs = [(torch.randn(shape) / 2).requires_grad_() for _ in range(2)]
    if len(shape) == 4:
        chain = chain.to(memory_format=torch.channels_last)
        inputs = [x.detach().to(memory_format=torch.channels_last).requires_grad_() for x in inputs]
    for p in chain.parameters():  # some are made as zeros or tiny numbers, which would hide what depends on them
        with torch.no_grad():
            p.add_(torch.randn_like(p), alpha=0.05)
    stored = run(chain, inputs, "store")
    assert all(torch.equal(a, b) for a, b in zip(run(chain, inputs, "store"), stored, strict=True)), "does not repeat itself"
    assert all(g.isfinite().all() for g in stored)
    assert sum(g.abs().sum() > 0 for g in stored) > 4
    for mode in MODES:
        assert all(torch.equal(a, b) for a, b in zip(run(chain, inputs, mode), stored, strict=True)), mode
