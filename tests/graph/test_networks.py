"""Plans of fifteen networks, small: for eight budgets each, the counted peak is at most the predicted one, and close to it."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

from revzoo.graph.capture import capture
from revzoo.graph.counted_step import count_step
from revzoo.graph.front import find_front
from revzoo.graph.step_record import record

BUDGETS = 3


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, **options)


def _torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, weights=None, **options)


def _begin(parts: list[nn.Module]) -> nn.Module:
    """Return the first parts of a network: all kinds of its layers are among them."""
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _begin_timm(name: str, blocks: int) -> nn.Module:
    net = timm.create_model(name)
    return _begin([net.conv_stem, net.bn1, *net.blocks[:blocks]])


def _make_bert() -> nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 128}
    return BertModel(BertConfig(**sizes), add_pooling_layer=False)


def _make_llama() -> nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 128}
    return LlamaModel(LlamaConfig(**sizes))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "alexnet": _torchvision("alexnet"),
    "vgg11": _torchvision("vgg11"),
    "squeezenet": _torchvision("squeezenet1_1"),
    "inception": lambda: _begin([*torchvision.models.googlenet(aux_logits=False, init_weights=False).children()][:7]),
    "resnet18": _timm("resnet18"),
    "resnet26": _timm("resnet26"),
    "densenet": _timm("densenet121", growth_rate=8, block_config=(2, 3, 3, 2)),
    "mobilenet": lambda: _begin_timm("mobilenetv3_small_050", 3),
    "efficientnet": lambda: _begin_timm("efficientnet_lite0", 4),
    "regnet": _timm("regnetx_002"),
    "convnext": _timm("convnext_atto", depths=(1, 1, 3, 1)),
    "vit": _timm("vit_tiny_patch16_224", img_size=64, depth=4, drop_path_rate=0.1),
    "swin": _timm("swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=24, depths=(1, 2), num_heads=(1, 2)),
    "bert": _make_bert,
    "llama": _make_llama,
}


def test_these_are_fifteen() -> None:
    assert len(NETWORKS) == 15


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_peaks_are_counted_as_predicted(name: str) -> None:
    images = torch.zeros(4096 if name == "alexnet" else 32, 3, 64, 64)  # so many that gradients of its weights set no peak
    batch = torch.zeros(8, 32, dtype=torch.long) if name in ("bert", "llama") else images
    with capture(NETWORKS[name]().train(), batch) as captured:
        step = record(captured)
        front = find_front(step)
        least, _ = front.list_points()[0]
        assert step.fixed_bytes < least < step.peak_bytes
        for i in range(BUDGETS):
            budget = least + i * (step.peak_bytes - least) // BUDGETS
            chosen = front.choose(budget)
            assert chosen is not None
            predicted = max(need for need, _ in front.list_points() if need <= budget)
            counted = count_step(captured, front.make_spans(chosen))
            flops = counted.flops
            assert (
                0.98 * predicted <= counted.peak_bytes <= predicted <= budget
            )  # what a nest holds is counted a little longer than it lives
            most = step.total_flops + sum(option.flops for option in chosen)
            if any(option.inside is not None for option in chosen):
                assert flops <= most  # not all that could be handed to the spans of a nest is needed by them
            else:
                assert flops == most
