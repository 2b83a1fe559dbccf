"""Networks of timm, torchvision and Transformers: a captured step is bit for bit a plain one."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

pytestmark = pytest.mark.slow

IMAGES = {
    "resnet26": {"drop_path_rate": 0.1},
    "resnest14d": {},
    "seresnet18": {},
    "densenet121": {"growth_rate": 8, "block_config": (2, 3, 2, 2)},
    "convnext_atto": {"drop_path_rate": 0.1},
    "mobilenetv3_small_050": {"drop_rate": 0.1},
    "efficientnet_b0": {"drop_path_rate": 0.1},
    "regnety_002": {},
    "mixer_s16_224": {"img_size": 64, "drop_path_rate": 0.1},
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 3, "drop_path_rate": 0.1, "proj_drop_rate": 0.1, "attn_drop_rate": 0.1},
    "swin_tiny_patch4_window7_224": {
        "img_size": 64,
        "window_size": 4,
        "depths": (2, 2),
        "embed_dim": 24,
        "num_heads": (1, 2),
        "drop_path_rate": 0.1,
    },
}


@pytest.fixture(autouse=True)
def _capture_anew() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("name", IMAGES)
def test_timm(name: str, check: Callable[..., None]):
    check(timm.create_model(name, num_classes=10, **IMAGES[name]).train(), [torch.randn(2, 3, 64, 64).requires_grad_()])


@pytest.mark.parametrize("name", ["googlenet", "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5"])
def test_torchvision(name: str, check: Callable[..., None]):
    options: dict[str, Any] = {"init_weights": False, "aux_logits": False} if name == "googlenet" else {}
    check(torchvision.models.get_model(name, num_classes=10, **options).train(), [torch.randn(2, 3, 64, 64)])


def test_segmentation(check: Callable[..., None]):
    network = torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None)
    check(network.train(), [torch.randn(2, 3, 64, 64)])


class Wrapped(nn.Module):
    """A network of Transformers, called with a batch of tokens as its Trainer calls it."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor) -> Any:
        return self.network(input_ids=tokens, labels=tokens, use_cache=False).loss


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    )


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    )


def make_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=50, decoder_start_token_id=0, **sizes))


@pytest.mark.parametrize("make", [make_bert, make_llama, make_t5])
def test_transformers(make: Callable[[], nn.Module], check: Callable[..., None]):
    check(Wrapped(make().train()), [torch.arange(24).reshape(2, 12) % 50])
