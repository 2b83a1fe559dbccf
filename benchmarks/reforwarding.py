"""Plans of ordinary networks: their fronts beside what rivals reach, and table 1 of the Re-forwarding paper.

    python benchmarks/reforwarding.py               eleven fronts and fifteen rows, about 20 minutes on a CPU core
    python benchmarks/reforwarding.py --quick       one network at toy size
    python benchmarks/reforwarding.py --only resnet50
    python benchmarks/reforwarding.py --only table  table 1 (`reforwarding_table.py`)

Bytes and FLOPs are counted in FakeTensors: the same everywhere, and nothing is computed. A point of a front is the peak of one
training step above weights, buffers and batch, as a fraction of that of the stored step, and its FLOPs over those of the stored
step. Parameter gradients that exist at the peak count.
Writes reforwarding.json and a picture for each network.

The rivals' points are constants: `torch.utils.checkpoint` around every block and `activation_memory_budget` of torch 2.15,
counted in the same way on the same networks while the planner was designed.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from planning_figure import plot_front
from reforwarding_table import ROWS, measure_row
from runtime import describe_environment
from torch import Tensor, nn

import revzoo
from revzoo.planning.reforwarding.capture import capture
from revzoo.planning.reforwarding.nesting import add_nests
from revzoo.planning.reforwarding.record import count_step, record
from revzoo.planning.reforwarding.search import Choices, Front

POINTS = 24  # counted of every front
Points = tuple[tuple[float, float], ...]  # fraction of the stored peak, FLOPs over stored


@dataclass(frozen=True)
class Network:
    """One network.

    Args:
        make: returns it, in training.
        batch: what it is called with.
        to_reach: points that a plan should reach.
        rivals: their points, by name.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    to_reach: Points = ()
    rivals: dict[str, Points] = field(default_factory=dict)


class UNet(nn.Module):
    """A U-Net of four levels with skips."""

    def __init__(self, width: int = 32, levels: int = 4):
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(_make_pair(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(_make_pair(a + b, a) for a, b in reversed(list(pairwise(widths))))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level in self.down[:-1]:
            x = level(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.down[-1](x)
        for level in self.up:
            x = level(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return self.head(x)


class PlainRevNet(nn.Module):
    """RevNet-104 as a plain module: the same functions, called without the chain."""

    def __init__(self) -> None:
        super().__init__()
        model = revzoo.create("revnet_104")
        self.stem, self.split, self.stages, self.fuse, self.head = model.stem, model.split, model.stages, model.fuse, model.head

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = self.split(self.stem(x))
        for stage in self.stages:
            x1, x2 = stage.transition(x1, x2)
            for block in stage.blocks:
                x1 = x1 + block.f(x2)
                x2 = x2 + block.g(x1)
        return self.head(self.fuse(x1, x2))


def _make_pair(width: int, out: int) -> nn.Module:
    convs = (nn.Conv2d(width, out, 3, padding=1, bias=False), nn.Conv2d(out, out, 3, padding=1, bias=False))
    return nn.Sequential(convs[0], nn.BatchNorm2d(out), nn.ReLU(True), convs[1], nn.BatchNorm2d(out), nn.ReLU(True))


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    import timm

    return lambda: timm.create_model(name, **options)


def _make_bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(), add_pooling_layer=False)


def _make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(
        LlamaConfig(hidden_size=512, intermediate_size=1376, num_hidden_layers=24, num_attention_heads=8, vocab_size=8192)
    )


def list_networks(quick: bool) -> dict[str, Network]:
    """Return the networks by name."""
    if quick:
        return {"resnet18": Network(_timm("resnet18"), lambda: torch.zeros(2, 3, 64, 64), rivals={"none": ((1.0, 1.0),)})}

    def images() -> Tensor:
        return torch.zeros(64, 3, 224, 224)

    def tokens() -> Tensor:
        return torch.zeros(16, 512, dtype=torch.long)

    budget, checkpoint = "activation_memory_budget", "checkpoint per block"
    return {
        "resnet50": Network(
            _timm("resnet50"),
            images,
            ((0.5, 1.0127), (0.4, 1.0307), (0.3, 1.0837), (0.238, 1.179)),
            {budget: ((0.6, 1.0),), checkpoint: ((0.294, 1.336),)},
        ),
        "vit_small": Network(
            _timm("vit_small_patch16_224"),
            images,
            ((0.6, 1.0), (0.5, 1.0459), (0.4, 1.0917), (0.3, 1.1376), (0.13, 1.243)),
            {budget: ((0.4, 1.11), (0.3, 1.181)), checkpoint: ((0.171, 1.22),)},
        ),
        "densenet121": Network(
            _timm("densenet121"),
            images,
            ((0.3, 1.0), (0.2, 1.0214), (0.1427, 1.0605)),
            {budget: ((0.3, 1.0077),), checkpoint: ((0.332, 1.19),)},
        ),
        "convnext_tiny": Network(
            _timm("convnext_tiny"), images, ((0.4, 1.0169), (0.3, 1.043)), {budget: ((0.4, 1.0322), (0.3, 1.0652))}
        ),
        "bert_base": Network(
            _make_bert, tokens, ((0.4, 1.0833), (0.3, 1.1366), (0.2, 1.1991)), {checkpoint: ((0.149, 1.333),)}
        ),
        "unet": Network(UNet, lambda: torch.zeros(8, 3, 256, 256), ((0.6, 1.0016), (0.4, 1.0999)), {budget: ((0.6, 1.0016),)}),
        "llama": Network(
            _make_llama, tokens, ((0.4, 1.0683), (0.3, 1.1256), (0.2, 1.183)), {budget: ((0.4, 1.1433), (0.3, 1.1433))}
        ),
        "resnet152": Network(_timm("resnet152"), images, ((0.3, 1.0546), (0.15, 1.1814))),
        "vgg16": Network(_timm("vgg16"), images, ((0.7, 1.0019), (0.6, 1.0218))),
        "vit_small_24_blocks": Network(
            _timm("vit_small_patch16_224", depth=24),
            images,
            ((0.6, 1.0292), (0.5, 1.071), (0.4, 1.1106), (0.3, 1.1524), (0.2, 1.1945), (0.15, 1.2345), (0.125, 1.3538)),
        ),
        "revnet_104": Network(
            PlainRevNet,
            images,
            ((0.5457, 1.0), (0.5297, 1.0), (0.4843, 1.0065), (0.4786, 1.0071), (0.36, 1.0726)),
            {budget: ((0.5457, 1.0), (0.5297, 1.0), (0.4843, 1.0223), (0.4786, 1.0103))},
        ),
    }


def measure(network: Network) -> dict[str, Any]:
    """Return the front of a network: points as predicted, and a number of them as counted."""
    begin = time.process_time()
    with capture(network.make().train(), network.batch()) as captured:
        step = record(captured)
        choices = Choices(step, count_flops_only=True)
        add_nests(choices)
        front = Front(choices)
        seconds = time.process_time() - begin
        stored, points = step.peak_bytes - step.fixed_bytes, front.list_points()
        counted = []
        for need, _ in points[:: max(1, len(points) // POINTS)]:
            chosen = front.choose(need)
            assert chosen is not None
            peak, flops = count_step(captured, front.make_spans(chosen))
            counted.append({"predicted_bytes": need, "counted_bytes": peak, "flops": flops})
    fractions = [((need - step.fixed_bytes) / stored, 1 + work / step.total_flops) for need, work in points]
    return {
        "stored_bytes": stored,
        "fixed_bytes": step.fixed_bytes,
        "stored_flops": step.total_flops,
        "search_seconds": seconds,
        "points": fractions,
        "counted": counted,
        "to_reach": [
            {"fraction": at, "flops": flops, "plan": min((f for p, f in fractions if p <= at), default=None)}
            for at, flops in network.to_reach
        ],
        "rivals": {name: list(each) for name, each in network.rivals.items()},
    }


def draw(name: str, data: dict[str, Any], folder: Path) -> None:
    """Draw the front of a network beside its rivals."""
    stored = data["stored_bytes"]
    series = {"planned": data["points"], **data["rivals"], "all stored": [(1.0, 1.0)]}
    scaled = {label: [(int(at * stored), flops) for at, flops in points] for label, points in series.items()}
    plot_front(scaled, folder / f"reforwarding_{name}.png", "FLOPs", f"{name}: peak of activations against FLOPs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", help="one network, or table")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "reforwarding.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    results = known.get("networks", {})
    for name, network in list_networks(args.quick).items():
        if args.only in (None, name):
            data = results[name] = measure(network)
            draw(name, data, args.out)
            ratios = [each["counted_bytes"] / each["predicted_bytes"] for each in data["counted"]]
            least, flops = data["points"][0]
            seconds = data["search_seconds"]
            print(
                f"{name}: least {least:.4f} @ {flops:.4f}, counted / predicted {min(ratios):.5f} to {max(ratios):.5f}, "
                f"{seconds:.1f} s",
                flush=True,
            )
            for each in data["to_reach"]:
                print(f"  {each['fraction']}: {each['plan']} (to reach {each['flops']})")
    rows = list(known.get("table", ()))
    if args.only in (None, "table") and not args.quick:
        rows = []
        for row in ROWS:
            rows.append(measured := measure_row(row))
            print(
                f"{row.name}, batch {row.batch}: published {row.regular} -> {row.published} MB, best cuts {row.best_cuts}, "
                f"stored {measured['stored']:.0f} -> planned {measured['planned']:.0f} MB @ {measured['flops']:.3f}, "
                f"floor {measured['floor']:.0f} MB",
                flush=True,
            )
    path.write_text(json.dumps({"environment": describe_environment(), "networks": results, "table": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
