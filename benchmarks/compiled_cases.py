"""What is compiled, and how it is trained: small networks of several families, none with dropout, and PyTorch's ways."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from ordinary_networks import Network, UNet
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2)  # of activation_memory_budget
_PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "convolution")}
_KEPT = {*_PRODUCTS, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}


def list_networks(layers: int | None, quick: bool) -> dict[str, Network]:
    """Return small networks by name; `layers` is the number of blocks of those that have blocks of one width."""
    if quick:
        return {"gpt2": _make_gpt2(2, 32, 16)}
    depth, blocks = layers or 8, r"blocks\.\d+"
    vit = {"embed_dim": 192, "num_heads": 3, "img_size": 112, "depth": layers or 12}
    swin = {"embed_dim": 48, "img_size": 112, "drop_path_rate": 0.0}
    stages = {"depths": (2, 2, 4, 2)} if layers else {}
    return {
        "resnet50": _make_timm("resnet50", 96, r"layer\d\.\d+", channels=(16, 32, 64, 128), stem_width=16),
        "vit_s": _make_timm("vit_small_patch16_224", 112, blocks, 16, **vit),
        "convnext_t": _make_timm("convnext_tiny", 96, r"stages\.\d+\." + blocks, dims=(24, 48, 96, 192), **stages),
        "swin_t": _make_timm("swin_tiny_patch4_window7_224", 112, r"layers\.\d+\." + blocks, **swin),
        "bert": _make_bert(depth),
        "gpt2": _make_gpt2(depth, 192, 256),
        "llama": _make_llama(depth),
        "unet": Network(lambda: UNet(16), lambda: torch.randn(2, 3, 96, 96), r"(down|up)\.\d+"),
    }


def _make_timm(name: str, size: int, blocks: str, batch: int = 8, **options: Any) -> Network:
    import timm

    return Network(lambda: timm.create_model(name, **options), lambda: torch.randn(batch, 3, size, size), blocks)


def _make_tokens(length: int = 256) -> Tensor:
    return torch.randint(0, 256, (2, length))


def _make_bert(layers: int) -> Network:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": layers, "num_attention_heads": 4}
    config = BertConfig(vocab_size=256, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **sizes)
    return Network(lambda: BertModel(config, add_pooling_layer=False), _make_tokens, r"encoder\.layer\.\d+")


def _make_gpt2(layers: int, width: int, length: int) -> Network:
    from transformers import GPT2Config, GPT2Model

    none = {"use_cache": False, "resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=256, n_positions=length, n_embd=width, n_layer=layers, n_head=4, **none)
    return Network(lambda: GPT2Model(config), partial(_make_tokens, length), r"h\.\d+")


def _make_llama(layers: int) -> Network:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": layers, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, use_cache=False, **sizes)
    return Network(lambda: LlamaModel(config), _make_tokens, r"layers\.\d+")


@dataclass(frozen=True)
class Way:
    """One way to train.

    Args:
        name: of the row.
        checkpoint: options of a checkpoint around every block; None is without.
        memory_budget: PyTorch's.
        peak: what a plan may take above weights, buffers and batch, in bytes; 0 is as little as it can.
        by_flops: whether a plan is the one with the least FLOPs: norms and activations are free, as for PyTorch's partitioner.
    """

    name: str
    checkpoint: dict[str, Any] | None = None
    memory_budget: float = 1.0
    peak: int | None = None
    by_flops: bool = False


def list_rivals(backend: str, budgets: Sequence[float]) -> Iterator[Way]:
    yield Way("checkpoint", {})
    yield Way("selective checkpoint", {"context_fn": partial(_make_contexts, False)})
    yield Way("selective checkpoint, every second", {"context_fn": partial(_make_contexts, True)})
    if backend != "eager":
        yield from (Way(f"activation_memory_budget {budget}", memory_budget=budget) for budget in budgets)


def put_checkpoints(module: nn.Module, blocks: str, options: dict[str, Any]) -> None:
    """Put a checkpoint around every submodule whose name is of a pattern."""
    found = [each for name, each in module.named_modules() if re.fullmatch(blocks, name)]
    assert found, "the pattern names no block"
    for each in found:
        each.forward = partial(checkpoint, each.forward, use_reentrant=False, **options)  # type: ignore[method-assign]


def _make_contexts(every_second: bool) -> Any:
    """Return torchtitan's contexts: what is expensive is kept, and of the products all or every second one."""
    products: dict[bool, int] = defaultdict(int)

    def choose(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation in _PRODUCTS:
            products[context.is_recompute] += 1
            if every_second and products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)
