"""Networks on a CUDA device, one of each kind, with their inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import revzoo
from revzoo.runtime import CoupledConv2d, InvertibleBatchNorm2d, InvertibleLeakyReLU, LayerChain, ReversibleChain
from revzoo.runtime.coupling import momentum

DEVICE = "cuda"
WIDTH = 192
Made = tuple[nn.Module, tuple[Tensor, ...]]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(B, N, 3, 3, D // 3).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, D))


def make_steps(blocks: int) -> list[nn.Module]:
    def make_mlp() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    return [step for _ in range(blocks) for step in (Attention(), make_mlp())]


def make_transformer(blocks: int, *args: Any, **options: Any) -> ReversibleChain:
    return ReversibleChain(make_steps(blocks), *args, **options).to(DEVICE)


def make_chain(mode: str = "invert", tiles: int = 1, **options: Any) -> Made:
    steps = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.Dropout(0.1), nn.GELU()) for _ in range(4)]
    chain = ReversibleChain(steps, **options).to(DEVICE)
    chain.schedule, chain.tiles = mode, tiles
    return chain, tuple(torch.randn(2, 32, 64, device=DEVICE))


def make_layers() -> Made:
    layers = [m for _ in range(3) for m in (CoupledConv2d(16), InvertibleBatchNorm2d(16), InvertibleLeakyReLU(slope=0.2))]
    return LayerChain(*layers).to(DEVICE), (torch.randn(4, 16, 8, 8, device=DEVICE),)


def make_llama(**options: Any) -> Made:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=256, use_cache=False
    )
    model, ids = transformers.LlamaForCausalLM(config), torch.zeros(2, 16, dtype=torch.long)
    revzoo.reversible_(model, batch={"input_ids": ids} if options else None, **options)
    return Logits(model.to(DEVICE)), (ids.to(DEVICE),)


class Logits(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits


def make_of_zoo(name: str) -> Callable[[], Made]:
    def make() -> Made:
        model = revzoo.create(name).to(DEVICE).train()
        return model, (model.example_input(2),)

    return make


FAMILIES = [name for name in revzoo.list_models("*_digits") if not name.startswith("resnext")]
CASES: dict[str, Callable[[], Made]] = {
    "invert": make_chain,
    "recompute": lambda: make_chain("recompute"),
    "selective": lambda: make_chain("selective"),
    "exact": lambda: make_chain(exact=True),
    "8 kept bits": lambda: make_chain(coupling=momentum(kept_bits=8, gain=1.0)),
    "look-ahead": lambda: make_chain(lookahead=1),
    "tiles": lambda: make_chain(tiles=2),
    "layers": make_layers,
    "reversible Llama": make_llama,
    "reversible Llama in tiles": lambda: make_llama(split=("attention", "mlp"), tiles=4, kept_bits=1, sign="random"),
    "in-place ABN": make_of_zoo("resnext_digits"),
    **{name: make_of_zoo(name) for name in [*FAMILIES, "rev_bert_mini"]},
}
