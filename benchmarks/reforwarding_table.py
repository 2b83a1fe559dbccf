"""Table 1 of the Re-forwarding paper: the memory of training fifteen networks, as published, as measured again, and planned.

Peaks are measured as the paper does, as what a batch of twice the size takes more: r(2b) - r(b). Weights, their gradients and
what else does not depend on the batch fall out. Networks are torchvision's, without dropout.

The published columns are table 1 of Feng and Huang 2018, "Cutting Down Training Memory by Re-forwarding"; theirs of 2021 on the
method, "Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs", prints others. What it calls MB are MiB: its
code divides by 1024 twice. The column "best cuts" is the smallest true peak of one more forward over the authors' own cuts of
these networks, found by dynamic programming and measured in FakeTensors while the planner was designed. "By equation 1" is the
true peak of the plan that the published algorithm chooses (`published_reforwarding.py`).

The floor is what autograd's functions have at once, so that no plan takes less. Where a network begins
with its largest tensor, that is the activation behind it: the gradient that reaches it, the result that it saves and the
gradient that it makes are of the same size, and the batch is there too. AlexNet, VGG and ResNet-18 stand on it.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from published_reforwarding import choose_as_published
from torch import nn

from revzoo.graph.capture import capture
from revzoo.graph.counted_step import count_step
from revzoo.graph.front import find_front
from revzoo.graph.step_record import Record, record

MOST_FLOPS = 1.34  # over stored


@dataclass(frozen=True)
class Row:
    """A row of the table. Memory is in MiB here, and in bytes in what is measured.

    Args:
        name: of the network.
        batch: b.
        regular: published, everything stored.
        published: with the paper's plan.
        best_cuts: with the best cuts, measured.
    """

    name: str
    batch: int
    regular: int
    published: int
    best_cuts: int


ROWS = (
    Row("alexnet", 1024, 3550, 2620, 2857),
    Row("vgg11", 64, 2976, 1802, 2389),
    Row("vgg13", 64, 4152, 2586, 3173),
    Row("vgg16", 64, 4470, 2586, 3173),
    Row("vgg19", 64, 4788, 2502, 3173),
    Row("resnet18", 256, 5402, 2898, 3283),
    Row("resnet34", 128, 3900, 1544, 1641),
    Row("resnet50", 64, 5206, 1798, 1947),
    Row("resnet101", 32, 3812, 970, 974),
    Row("resnet152", 16, 2810, 564, 463),
    Row("inception_v3", 32, 2976, 910, 877),
    Row("densenet121", 32, 3984, 776, 766),
    Row("densenet161", 16, 3658, 616, 569),
    Row("densenet169", 32, 4826, 848, 766),
    Row("densenet201", 16, 3164, 582, 388),
)


def measure_row(row: Row) -> dict[str, Any]:
    """Return the stored and the planned memory of a network, the floor of every plan, and the FLOPs of the plan over stored."""
    small, large = (_measure_peaks(row.name, batch) for batch in (row.batch, 2 * row.batch))
    return {
        "name": row.name,
        "batch": row.batch,
        "published_regular": row.regular,
        "published": row.published,
        "best_cuts": row.best_cuts,
        "stored_bytes": large.stored - small.stored,
        "by_equation_1_bytes": large.published - small.published,
        "planned_bytes": large.planned - small.planned,
        "floor_bytes": large.floor - small.floor,
        "flops": large.flops,
    }


class _Peaks(NamedTuple):
    """Peaks of a step: stored, with the published plan, with the smallest plan at `MOST_FLOPS`; and its FLOPs over stored."""

    stored: int
    published: int
    planned: int
    floor: int
    flops: float


def _measure_peaks(name: str, batch: int) -> _Peaks:
    side = 299 if name == "inception_v3" else 224
    with capture(_make_network(name), torch.empty(batch, 3, side, side, device="meta")) as captured:
        step = record(captured)
        front = find_front(step, count_flops_only=True)
        spans = front.make_spans(front.choose_least(int((MOST_FLOPS - 1) * step.total_flops)))
        planned = count_step(captured, spans)
        published = count_step(captured, choose_as_published(step)[0])
    flops = planned.flops / step.total_flops
    return _Peaks(step.peak_bytes, published.peak_bytes, planned.peak_bytes, find_floor(step), flops)


def find_floor(step: Record) -> int:
    """Return a peak that no plan is below: every plan needs a saved tensor from the first time that backward asks for it.

    Until it is freed, that is; and gradients are the same under every plan. Autograd's functions set this peak.
    """
    changes = [0] * (len(step.gradient_bytes) + 1)
    for storage in step.storages:
        if storage.unpacked >= 0:
            changes[max(0, storage.unpacked - 1)] += storage.bytes
            changes[storage.released] -= storage.bytes
    needed = accumulate(changes[:-1])
    return step.fixed_bytes + max(a + b for a, b in zip(needed, step.gradient_bytes, strict=True))


def _make_network(name: str) -> nn.Module:
    import torchvision

    options = {"aux_logits": False, "init_weights": False} if name == "inception_v3" else {}
    with torch.device("meta"):
        network: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif hasattr(module, "drop_rate"):
            module.drop_rate = 0.0
    return network.train()
