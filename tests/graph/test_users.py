"""Planned modules in other people's hands: torchvision's networks, Transformers' Trainer, `generate` and files, FSDP."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import nn

import revzoo
from revzoo.graph import plan_module

pytestmark = pytest.mark.slow
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _capture_anew() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def apply_least(module: nn.Module, batch: Any, **options: Any) -> revzoo.ModulePlan:
    """Apply the plan of the smallest peak, which drops something."""
    plan = plan_module(module, batch, None, **options)[0]
    assert plan.drops_something
    assert plan.peak_bytes <= plan.no_recompute_peak_bytes  # with few images, it may be of parameters' gradients
    plan.apply(module, batch)
    return plan


def make_densenet() -> nn.Module:
    return torchvision.models.DenseNet(8, (2, 3, 2, 2), 16, num_classes=10, drop_rate=0.1, memory_efficient=True)


def make_resnet() -> nn.Module:
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)


def test_a_network_that_has_checkpoints(same_step: Callable[..., None]) -> None:
    module = make_densenet().train()
    plain = copy.deepcopy(module)
    for each in plain.modules():  # PyTorch's checkpoint moves BatchNorm's statistics twice
        each.memory_efficient = False
    with torch.autocast("cpu", torch.bfloat16):
        apply_least(module, IMAGES)
        same_step(module, plain, IMAGES)


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes))


def test_the_trainer_of_transformers(tmp_path: Any) -> None:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": torch.randint(50, (12,)), "labels": torch.tensor(i % 3)} for i in range(8)]
    batch = {key: torch.stack([row[key] for row in rows[:4]]) for key in ("input_ids", "labels")}
    batch["num_items_in_batch"] = torch.tensor(4.0)  # what the Trainer adds
    planned, plain = make_bert(), None
    plain = copy.deepcopy(planned)
    apply_least(planned.train(), batch, loss=lambda out: out.loss)
    for module, folder in ((planned, "planned"), (plain, "plain")):
        arguments = TrainingArguments(
            output_dir=str(tmp_path / folder),
            per_device_train_batch_size=4,
            max_steps=2,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            Trainer(module, arguments, train_dataset=rows).train()
    before = make_bert().state_dict()
    assert list(planned.state_dict()) == list(before)
    assert all(torch.equal(a, b) for a, b in zip(planned.parameters(), plain.parameters(), strict=True))


@pytest.fixture
def _one_process(tmp_path: Any) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
def test_fully_sharded_parameters() -> None:
    """Their graph is another one than that which was planned: it is stored, which is said."""
    from torch.distributed.fsdp import fully_shard

    planned = make_resnet().train()
    plain = copy.deepcopy(planned)
    plan = apply_least(planned, IMAGES)
    for module in (planned, plain):
        fully_shard(module)  # which changes the class, so that the plan comes first
    assert plan.drops_something
    results = []
    for module in (planned, plain):
        torch.manual_seed(1)
        with pytest.warns(UserWarning, match="stores what is not in the plan") if module is planned else nullcontext():
            loss = module(IMAGES).square().sum()
        loss.backward()
        results.append([loss.detach(), *(p.grad.full_tensor() for p in module.parameters())])
    assert all(map(torch.equal, *results))
