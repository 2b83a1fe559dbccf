"""Plans of real networks: predicted against counted bytes, seconds as measured, and the figures of the paper.

Source: figures 4 and 5 and table 2 of "An Efficient Training Framework for Reversible Neural Architectures" (Jiang et al.
2020): RevNet-104 and the 12-layer Reformer over batch sizes, at a budget with which storing everything fits up to about half
of the largest batch, and the mean of 100 iterations. There an iteration includes the optimizer, and for the Reformer four
batches; here it is a forward and a backward.
"""

import random
import statistics
from typing import Any

import torch
from comparison.net import make_transformer_block
from planning_bound import fractional_bound
from planning_front import SHALLOW
from torch import Tensor, nn

import revzoo
from revzoo.planning.batch import BatchRow, find_best_batch
from revzoo.planning.profiling.clock import make_clock
from revzoo.planning.profiling.count import count_peak
from revzoo.planning.solvers.schedule_totals import peak
from revzoo.planning.solvers.timeline import minimize_peak
from revzoo.runtime import ReversibleChain

FAMILIES = (
    ("revnet_38", 8),
    ("irevnet_cifar10", 4),
    ("rev_vit_ti", 4),
    ("rev_swin_t", 2),
    ("rev_mvit_t", 2),
    ("reformer_mini", 2),
    ("rev_roberta_mini", 4),
)
ITERATIONS = 100  # as in the paper


def predicted_peaks(quick: bool) -> dict[str, Any]:
    """Plan for random budgets, and count the planned steps one by one: predicted against counted peak.

    Costs are FLOPs plus weighted bytes, as `revzoo.profile` takes them where nothing is run. With FLOPs alone some modes
    would be free, and plans could not use a larger budget.
    """
    rng, families = random.Random(0), [("revnet_digits", 4)] if quick else FAMILIES
    each = 6 if quick else -(-200 // len(families))
    rows: list[dict[str, Any]] = []
    for name, size in families:
        model = revzoo.create(name, overrides=SHALLOW if quick else None, device="meta")
        batch = model.example_input(size)
        profile = revzoo.profile(model, batch, run=False)
        smallest, _ = minimize_peak(profile.problem)
        stored = peak(profile.problem, ["store"] * len(model.units))
        counted: dict[tuple[str, ...], int] = {}
        for _ in range(each):
            plan = revzoo.solve(profile, rng.randint(smallest, stored))
            if plan.schedule not in counted:
                model.schedule = plan
                counted[plan.schedule] = revzoo.measure_memory(model, batch).peak_bytes
            fixed = profile.problem.fixed_bytes
            rows.append(
                {
                    "model": name,
                    "batch": size,
                    "budget_bytes": plan.budget_bytes,
                    "predicted_bytes": plan.peak_bytes,
                    "counted_bytes": counted[plan.schedule],
                    "used": counted[plan.schedule] / plan.budget_bytes,
                    "used_above_fixed": (counted[plan.schedule] - fixed) / (plan.budget_bytes - fixed),
                }
            )
    errors = [abs(row["counted_bytes"] - row["predicted_bytes"]) for row in rows]
    relative = [error / row["counted_bytes"] for error, row in zip(errors, rows, strict=True)]
    over = sum(row["counted_bytes"] > row["budget_bytes"] for row in rows)
    used = statistics.mean(row["used"] for row in rows)
    above = statistics.mean(row["used_above_fixed"] for row in rows)
    return {
        "costs": "FLOPs, and bytes at 16 FLOPs each",
        "plans": rows,
        "worst_bytes": max(errors),
        "worst_relative": max(relative),
        "over_budget": over,
        "used": used,
        "used_above_fixed": above,
        "found": f"{len(rows)} budgets, {len(families)} families: at most {max(errors)} bytes or {max(relative):.1e} away, "
        f"{over} over budget; {used:.1%} of the budget used, {above:.1%} of what it leaves beside weights and batch",
        "met": all(e <= 2**20 or r <= 0.02 for e, r in zip(errors, relative, strict=True)) and over == 0 and used >= 0.93,
    }


def planned_time(quick: bool) -> dict[str, Any]:
    """Time planned steps in turn with stored ones, and compare with the stored time and the fractional bound on the rest."""
    depth, width, heads, tokens, size = (2, 32, 2, 16, 2) if quick else (12, 192, 3, 197, 8)
    torch.manual_seed(0)
    chain = ReversibleChain([step for _ in range(depth) for step in make_transformer_block(width, heads)]).to(_device())
    batch = torch.randn(2, size, tokens, width, device=_device()).unbind()
    profile = revzoo.profile(chain, batch)
    smallest, _ = minimize_peak(profile.problem)
    stored = peak(profile.problem, ["store"] * len(chain.schedule))
    parts = {part: smallest + int((stored - smallest) * part) for part in (0.3, 0.5, 0.7)}
    schedules: dict[Any, list[str]] = {"stored": ["store"] * len(chain.schedule)}
    schedules |= {part: list(revzoo.solve(profile, budget).schedule) for part, budget in parts.items()}
    taken: dict[Any, list[float]] = {key: [] for key in schedules}
    for _ in range(2 if quick else 16):  # the first round warms up
        for key, modes in schedules.items():
            chain.schedule = modes
            taken[key].append(step_seconds(chain, batch))
    base = statistics.median(taken["stored"][1:])
    rows = []
    for part, budget in parts.items():
        bound = fractional_bound(profile.problem, budget) / 1e9
        ratios = [t / (s + bound) for t, s in zip(taken[part][1:], taken["stored"][1:], strict=True)]
        rows.append(
            {
                "part": part,
                "seconds": statistics.median(taken[part][1:]),
                "stored_seconds": base,
                "bound_seconds": bound,
                "ratio": statistics.median(ratios),
            }
        )
    return {
        "rows": rows,
        "found": ", ".join(f"{row['ratio']:.3f} at {row['part']:.0%}" for row in rows) + " of the range",
        "met": max(row["ratio"] for row in rows) <= 1.05,
    }


def step_seconds(model: nn.Module, batch: Any) -> float:
    """Run one forward and backward; return the seconds of the clock that plans are made with."""
    clock = make_clock(torch.device(_device()))
    model.zero_grad()
    begin = clock.mark()
    results = model(*batch)
    outputs = [results] if isinstance(results, Tensor) else results
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    return clock.measure(begin, clock.mark())


def sweep(network: str, quick: bool) -> dict[str, Any]:
    """Plan "revnet" or "reformer" for every batch size at one budget, and run the best plan many times."""
    label, spec, overrides, stored, low, high = _paper_networks(quick)[network]
    torch.manual_seed(0)
    model = revzoo.create(spec, overrides=overrides, device=_device())
    budget = count_peak(model, model.example_input(stored), ["store"] * len(model.units))
    best = find_best_batch(model, budget, low, high)
    model.schedule = best.plan
    batch = (model.example_input(best.batch),)
    step_seconds(model, batch)  # a warm-up
    taken = [step_seconds(model, batch) for _ in range(5 if quick else ITERATIONS)]
    mean, error = statistics.mean(taken), statistics.stdev(taken) / len(taken) ** 0.5
    rows = [_row(row) for row in best.rows]
    largest = max((row["batch"] for row in rows if row["stored"] is not None), default=None)
    return {
        "network": label,
        "budget_bytes": budget,
        "units": list(model.units),
        "rows": rows,
        "largest_stored": largest,
        "best": best.batch,
        "predicted_seconds": best.plan.seconds,
        "seconds": best.seconds,
        "iterations": len(taken),
        "mean_seconds": mean,
        "standard_error": error,
        "found": f"{label}: stored up to batch {largest}, planned up to {rows[-1]['batch']}, at most "
        f"{max(row['speedup'] or 0 for row in rows):.2f} x as fast as all inverted, best batch {best.batch} "
        f"({best.plan.seconds:.3g} s predicted, {best.seconds:.3g} s measured, {mean:.3g} +- {error:.1g} s the mean of "
        f"{len(taken)} training steps)",
        "met": None,
    }


def _paper_networks(quick: bool) -> dict[str, tuple[str, str, list[str], int, int, int]]:
    """Return label, spec, overrides, the largest batch to be stored, and the range of batches."""
    if quick:
        return {"revnet": ("RevNet", "revnet_digits", SHALLOW, 3, 2, 4), "reformer": ("Reformer", "reformer_mini", [], 3, 2, 4)}
    if torch.cuda.is_available():  # the paper's sizes
        return {
            "revnet": ("RevNet-104, 224 x 224", "revnet_104", [], 64, 16, 117),
            "reformer": ("Reformer, 4096 tokens", "reformer_enwik8", [], 2, 1, 10),
        }
    return {
        "revnet": ("RevNet-104, 64 x 64", "revnet_104", ["input.size=[64,64]"], 8, 2, 15),
        "reformer": ("Reformer, 512 tokens", "reformer_enwik8", ["input.length=512"], 2, 1, 10),
    }


def _row(row: BatchRow) -> dict[str, Any]:
    """Return a row of table 2: seconds per iteration and sample, and the plan's speed over that of inverting everything."""
    seconds = {"stored": row.stored, "inverted": row.inverted, "planned": row.planned}
    return {
        "batch": row.batch,
        **seconds,
        **{f"{key}_per_sample": None if each is None else each / row.batch for key, each in seconds.items()},
        "speedup": None if row.inverted is None else row.inverted / row.planned,
        "peak_bytes": row.peak_bytes,
        "schedule": list(row.schedule),
    }


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
