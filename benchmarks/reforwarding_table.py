"""Table 1 of the Re-forwarding paper: the memory of training fifteen networks, as published, as measured again, and planned.

Peaks are measured as the paper does, as what a batch of twice the size takes more: r(2b) - r(b). Weights, their gradients and
what else does not depend on the batch fall out. Networks are torchvision's, without dropout.

The published columns are table 1 of Feng and Huang 2021, "Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs".
The column "best cuts" is the smallest true peak of one more forward over the authors' own cuts of these networks, found by
dynamic programming and measured in FakeTensors while the planner was designed.

The floor is what autograd's functions have at once, so that no plan takes less (`Record.floor_bytes`). Where a network begins
with its largest tensor, that is the activation behind it: the gradient that reaches it, the result that it saves and the
gradient that it makes are of the same size, and the batch is there too. AlexNet, VGG and ResNet-18 stand on it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from revzoo.graph.capture import capture
from revzoo.graph.front import find_front
from revzoo.graph.step_record import count_step, record

MOST_FLOPS = 1.34  # over stored


@dataclass(frozen=True)
class Row:
    """A row of the table. Memory is in MB.

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
    Row("alexnet", 1024, 3550, 2620, 2996),
    Row("vgg11", 64, 2976, 1802, 2505),
    Row("vgg13", 64, 4152, 2586, 3327),
    Row("vgg16", 64, 4470, 2586, 3327),
    Row("vgg19", 64, 4788, 2502, 3327),
    Row("resnet18", 256, 5402, 2898, 3442),
    Row("resnet34", 128, 3900, 1544, 1721),
    Row("resnet50", 64, 5206, 1798, 2042),
    Row("resnet101", 32, 3812, 970, 1021),
    Row("resnet152", 16, 2810, 564, 485),
    Row("inception_v3", 32, 2976, 910, 920),
    Row("densenet121", 32, 3984, 776, 803),
    Row("densenet161", 16, 3658, 616, 597),
    Row("densenet169", 32, 4826, 848, 803),
    Row("densenet201", 16, 3164, 582, 407),
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
        "stored": (large[0] - small[0]) / 1e6,
        "planned": (large[1] - small[1]) / 1e6,
        "floor": (large[2] - small[2]) / 1e6,
        "flops": large[3],
    }


def _measure_peaks(name: str, batch: int) -> tuple[int, int, int, float]:
    """Return the stored peak, that of the smallest plan at `MOST_FLOPS`, the floor, and the FLOPs of the plan over stored."""
    side = 299 if name == "inception_v3" else 224
    with capture(_make_network(name), torch.empty(batch, 3, side, side, device="meta")) as captured:
        step = record(captured)
        front = find_front(step, count_flops_only=True)
        spans = front.make_spans(front.choose_least(int((MOST_FLOPS - 1) * step.total_flops)))
        peak, flops = count_step(captured, spans)
    return step.peak_bytes, peak, step.floor_bytes, flops / step.total_flops


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
