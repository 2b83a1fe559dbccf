"""What of the zoo fits on one, 8 and 64 cards, at which batch, and what share of a step communication would take.

    python benchmarks/distributed.py            # a quarter of an hour on two cores; then python benchmarks/readme.py

Nothing is run on a card. FSDP2 divides copies of the models without values, and a training step of the first rank is counted
in two batch sizes. Every allocation grows evenly with the batch, so that the peak of all others follows. What a step takes is
computed from the figures below.
"""

import argparse
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch
from timm.optim import create_optimizer_v2
from torch.nn.functional import cross_entropy

import revzoo
from revzoo.analysis.chains import preserve_schedules
from revzoo.analysis.dry_run import isolated
from revzoo.planning.profiling.hooks import list_units
from revzoo.planning.profiling.trace import Trace, trace
from revzoo.planning.ranks.division import Division, count_rank_bytes
from revzoo.planning.ranks.rank_copy import Collective, divide_copy
from revzoo.runtime.drift import ignore_error_growth

MODELS = ("rev_vit_b", "rev_vit_h", "rev_bert_large", "rev_mvit_h", "rev_swin_b", "rev_swin_g")
RANKS = (1, 8, 64)
CARDS = {"24 GB": 24e9, "80 GB": 80e9, "141 GB": 141e9}
SHARE = 0.9  # of a card's memory is planned with: the rest is for the driver, workspaces of kernels and fragments
SCHEDULES = ("store", "stage_inputs")
SIZES = (4, 8)  # batches that are counted
NODE = 8  # cards in a node

# NVIDIA H100 SXM, data sheet: 989 TFLOP/s in bfloat16 without sparsity, of which training reaches two fifths.
FLOPS = 0.4 * 989e12
# The same: NVLink moves 900 GB/s, half of that in each direction.
NVLINK = 450e9
# Every card of a node has a link of 400 Gb/s to other nodes (NVIDIA DGX H100, data sheet), and a ring uses all of them.
NETWORK = NODE * 400e9 / 8
# Latency of a hop of a ring, as NCCL assumes (src/graph/tuning.cc, protocol Simple).
NVLINK_SECONDS, NETWORK_SECONDS = 3.4e-6, 14e-6


def count_card(name: str, ranks: int) -> dict[str, Any]:
    """Return the largest batches of a card that trains a model together with others, and what the step with each takes."""
    model = revzoo.create(name, device="meta").train()
    division = Division(ranks, "full", max(ranks // NODE, 1))
    held = count_rank_bytes(model, division, create_optimizer_v2(model, "adamw"))
    rows = {}
    copies = divide_copy(model, division, precision="bf16") if ranks > 1 else nullcontext((model, None))
    with copies as (divided, mode):
        for schedule in SCHEDULES:
            with preserve_schedules(divided):
                traces = [count_step(divided, schedule, size) for size in SIZES]
            collectives = mode.steps[-1] if mode is not None else {}
            rows[schedule] = {card: describe(traces, size, held, collectives, division) for card, size in CARDS.items()}
    facts = {"model": name, "ranks": ranks, "parameter_bytes": sum(p.nbytes for p in model.parameters())}
    sent = sum(each.bytes for each in collectives.values())  # whatever the schedule and the batch are
    return facts | {"held": asdict(held), "sent_bytes": sent, "largest": rows}


def count_step(model: revzoo.Model, schedule: str, size: int) -> Trace:
    """Trace a training step in bfloat16 autocast, without running it."""

    def loss(logits: torch.Tensor) -> torch.Tensor:
        logits = logits.flatten(0, -2)
        return cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))

    model.schedule = schedule
    modes = model.schedule
    assert len(modes) == len(list_units(model))
    with (
        torch.autocast("cpu", torch.bfloat16),
        ignore_error_growth(),
        isolated(model, model.example_input(size), fake=True) as batch,
    ):
        return trace(model, batch, modes, loss)


def describe(
    traces: Sequence[Trace], card: float, held: Any, collectives: dict[str, Collective], division: Division
) -> dict[str, Any]:
    """Return the largest batch whose peak fits a card, or 0, its peak, and the seconds that a step is computed to take."""
    other, update = held.optimizer.state, held.optimizer.update
    changes = [numpy.array([change for _, change in traced.log], dtype=numpy.float64) for traced in traces]
    # Autocast frees its casts in any order, so the steps are compared where they have just allocated something.
    grown = changes[0] > 0
    assert numpy.array_equal(grown, changes[1] > 0), "the batch sizes allocate differently"
    alive = [each.cumsum()[grown] for each in changes]
    left = [each[: traced.marks[-1].position].sum() for each, traced in zip(changes, traces, strict=True)]

    def peak(size: int) -> int:
        part = (size - SIZES[0]) / (SIZES[1] - SIZES[0])
        step = (alive[0] + part * (alive[1] - alive[0])).max()
        return int(max(step, left[0] + part * (left[1] - left[0]) + update)) + other

    size = 0
    for bit in reversed(range(16)):
        size += 2**bit if peak(size + 2**bit) <= SHARE * card else 0
    flops = traces[0].marks[-1].flops / SIZES[0] * size
    sending = sum(seconds(each, division) for each in collectives.values())
    sizes = {"batch": size, "peak_bytes": peak(max(size, 1)), "flops": flops}
    return sizes | {"compute_seconds": flops / FLOPS, "send_seconds": sending}


def seconds(collective: Collective, division: Division) -> float:
    """Return how long collectives of one kind take: latency of the hops of a ring, and bytes over its slowest link."""
    hops, between = division.ranks - 1, division.nodes - 1
    rate = NVLINK if division.nodes == 1 else min(NVLINK, NETWORK)
    return collective.calls * (between * NETWORK_SECONDS + (hops - between) * NVLINK_SECONDS) + collective.bytes / rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu" / "distributed.json")
    parser.add_argument("--only", nargs="+", default=MODELS, metavar="MODEL")
    arguments = parser.parse_args()
    assumed = {"flops": FLOPS, "nvlink": NVLINK, "network": NETWORK, "share": SHARE, "node": NODE}
    assumed |= {"nvlink_seconds": NVLINK_SECONDS, "network_seconds": NETWORK_SECONDS}
    rows: list[dict[str, Any]] = []
    results = {"torch": torch.__version__, "assumed": assumed, "rows": rows}
    for name in arguments.only:
        rows += [count_card(name, ranks) for ranks in RANKS]
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name} is counted", flush=True)


if __name__ == "__main__":
    main()
