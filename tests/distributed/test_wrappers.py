"""DDP and FSDP2 around reversible models: two gloo processes, every gradient equal to that of one stored process.

This file is also the program of the two processes. They run either a few cases or all the others, in one process group, and
write their results as JSON, which the tests read.
"""

import json
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import revzoo
from revzoo.errors import RecoveryError

OVERRIDES = {"rev_vit_digits": ["stages.0.depth=2"], "revnet_digits": ["stages.1.depth=1", "stages.2.depth=1"]}
DDP = {"DDP": {}, "DDP static": {"static_graph": True}, "DDP unused": {"find_unused_parameters": True}}
DDP |= {"DDP compiled": {}}
HALVES = (slice(0, 2), slice(2, 4))
SECONDS = 300  # two processes wait for each other no longer than this


class Case(NamedTuple):
    """One model under one wrapper; `pattern` says how its two batches are used."""

    name: str
    schedule: str
    wrapper: str
    pattern: str = "one by one"

    def __str__(self) -> str:
        return ", ".join(self)


# Every model, schedule and pattern, under DDP and FSDP.
QUICK = [
    Case("rev_vit_digits", "invert", "DDP"),
    Case("revnet_digits", "mixed", "FSDP steps + root"),
    Case("revnet_digits", "mixed", "DDP", "accumulated"),
    Case("rev_vit_digits", "mixed", "FSDP steps + root", "partly frozen"),
    Case("revnet_digits", "invert", "FSDP steps + root", "two forwards"),
]
REFUSED = Case("rev_vit_digits", "invert", "FSDP blocks")
# Other settings of the wrappers, and other parts that are wrapped.
SLOW = [
    Case("revnet_digits", "mixed", "DDP static"),
    Case("revnet_digits", "mixed", "DDP unused"),
    Case("revnet_digits", "mixed", "DDP compiled"),
    Case("rev_vit_digits", "invert", "FSDP steps"),
    Case("revnet_digits", "invert", "FSDP root"),
    Case("rev_vit_digits", "mixed", "FSDP steps + root compiled"),
]
SHARDED = {QUICK[1]: 89, SLOW[3]: 24, SLOW[4]: 89}  # parameters of networks of which all, or the steps alone, are divided


def model_of(case: Case, schedule: str) -> revzoo.Model:
    """Return the same model in every process."""
    torch.manual_seed(0)
    model = revzoo.create(case.name, overrides=OVERRIDES[case.name], dtype=torch.float64)
    if schedule == "mixed":
        steps, modes = {step.name for step in model.steps}, iter(["invert", "invert", "recompute", "store", "selective"] * 9)
        model.schedule = [next(modes) if unit in steps else "recompute" for unit in model.units]
    else:
        model.schedule = schedule
    if case.pattern == "partly frozen":
        for module in (model.stem, model.steps[1], model.steps[2]):
            module.requires_grad_(False)
    return model


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return two batches of four images and labels; rank r has half r of each."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, 4, 1, 8, 8, generator=generator, dtype=torch.float64)
    return list(zip(images, torch.randint(10, (2, 4), generator=generator), strict=True))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor], half: slice) -> Tensor:
    return cross_entropy(model(batch[0][half]), batch[1][half])


# --- one of the two processes


def train(model: nn.Module, case: Case, half: slice) -> None:
    """Use both batches and leave gradients on the parameters."""
    first, second = batches()
    if case.pattern == "two forwards":
        (loss(model, first, half) + loss(model, second, half)).backward()
        return
    accumulated = case.pattern == "accumulated"
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not accumulated)
    with model.no_sync() if accumulated and isinstance(model, DistributedDataParallel) else nullcontext():
        loss(model, first, half).backward()
    if not accumulated:
        model.zero_grad()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(True)
    loss(model, second, half).backward()


@cache
def expected(case: Case) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return what one process gets with everything stored: mean gradients, and gradients and buffers of each half.

    BatchNorm sees a half at a time; a network without it must give the same for the whole batch at once.
    """
    models = [model_of(case, "store") for _ in HALVES]
    for model, half in zip(models, HALVES, strict=True):
        train(model, case, half)
    gradients = [{name: p.grad for name, p in model.named_parameters() if p.grad is not None} for model in models]
    mean = {name: (gradients[0][name] + gradients[1][name]) / 2 for name in gradients[0]}
    if case.name == "rev_vit_digits":
        whole = model_of(case, "store")
        train(whole, case, slice(0, 4))
        mean = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    return mean, gradients, [dict(model.named_buffers()) for model in models]


def wrapped(model: revzoo.Model, wrapper: str) -> nn.Module:
    if "compiled" in wrapper:
        for step in model.steps:
            step.compile(backend="aot_eager")
    if wrapper in DDP:
        if wrapper == "DDP unused":
            model.spare = nn.Linear(2, 2, dtype=torch.float64)
        return DistributedDataParallel(model, **DDP[wrapper])
    parts = [*model.steps] if "steps" in wrapper else []
    parts += [block for stage in model.stages for block in stage.blocks] if "blocks" in wrapper else []
    for part in [*parts, model] if "root" in wrapper else parts:
        fully_shard(part, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    return model


def worst(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    errors = [0.0, *((grads[key] - value).double().norm() / value.double().norm() for key, value in expected.items())]
    return float(torch.tensor(errors).max())  # unlike Python's max, it does not pass over a NaN


def run(case: Case, rank: int) -> dict[str, Any]:
    mean, halves, buffers = expected(case._replace(schedule="", wrapper=""))
    model = model_of(case, case.schedule)
    train(wrapped(model, case.wrapper), case, HALVES[rank])
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and not name.startswith("spare")}
    unsharded = {name for name, grad in grads.items() if case.wrapper not in DDP and not isinstance(grad, DTensor)}
    grads = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
    buffer_rank = 0 if case.wrapper in DDP else rank  # DDP broadcasts the buffers of rank 0
    return {
        "gradients": sorted(grads) == sorted(mean),
        "error": worst(grads, {name: grad for name, grad in mean.items() if name not in unsharded}),
        "error of unsharded": worst(grads, {name: halves[rank][name] for name in unsharded}),
        "sharded": len(grads) - len(unsharded),
        "statistics": worst(dict(model.named_buffers()), buffers[rank]) if rank == buffer_rank else 0.0,
    }


def work(rank: int, folder: Path, quick: bool) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {str(case): run(case, rank) for case in (QUICK if quick else SLOW)}
    if quick:
        with pytest.raises(RecoveryError) as refusal:
            run(REFUSED, rank)
        results["refusal"] = str(refusal.value)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    from conftest import fork

    sys.exit(fork(2, lambda rank: work(rank, Path(sys.argv[1]), quick=sys.argv[2] == "quick")))


# --- the tests


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return what each of the two processes reported."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_gradients_equal_those_of_one_stored_process(case, run_all):
    for results in read_results(run_all(case in QUICK)):
        result = results[str(case)]
        assert result["gradients"], "a gradient is missing or was not expected"
        assert result["error"] < 1e-12
        assert result["error of unsharded"] < 1e-12
        assert result["statistics"] < 1e-12
        assert result["sharded"] == SHARDED.get(case, result["sharded"])


def test_sharded_blocks_are_refused_with_what_to_shard_instead(run_all):
    for results in read_results(run_all(True)):
        assert results["refusal"].startswith("stages.0.blocks.0.f has sharded parameters that are not gathered")
        assert "for step in model.steps: fully_shard(step)" in results["refusal"]
