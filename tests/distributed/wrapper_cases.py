"""What `test_wrappers.py` runs on each of two processes: RANK WORLD_SIZE FOLDER, no pytest here.

Every case trains on two batches (a static graph is only used from the second on) and writes what one step left: this
rank's gradients, whole, and its buffers; or the error it met.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import barrier, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import revzoo
from revzoo.errors import RevzooError

NAMES = ("rev_vit_digits", "revnet_digits")
OVERRIDES = {"rev_vit_digits": ["stages.0.depth=3"], "revnet_digits": ["block.drop_path.max=0.0"]}
SCHEDULES = ("invert", "mixed")
DDP = {"defaults": {}, "static_graph": {"static_graph": True}, "find_unused_parameters": {"find_unused_parameters": True}}
SHARDED = ("steps", "root", "steps and root", "blocks", "blocks and root")


def make(name: str, schedule: str) -> revzoo.Model:
    """Return the same model on every rank and in the test."""
    torch.manual_seed(0)
    model = revzoo.create(name, overrides=OVERRIDES[name], dtype=torch.float64)
    if schedule == "mixed":
        steps = {step.name for step in model.steps}
        modes = ["invert", "invert", "recompute", "store"] * len(model.units)
        model.schedule = [modes[i] if name in steps else "recompute" for i, name in enumerate(model.units)]
    else:
        model.schedule = schedule
    return model


def batches(model: revzoo.Model) -> list[tuple[Tensor, Tensor]]:
    """Return two batches of images and labels."""
    generator = torch.Generator().manual_seed(1)
    shape = (4, model.spec.input.channels, *model.spec.input.size)
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64), torch.randint(10, (4,), generator=generator))
        for _ in range(2)
    ]


def step(model: nn.Module, images: Tensor, labels: Tensor, rank: int | None = None) -> None:
    """Run forward and backward on a batch, or on a rank's half of it."""
    half = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
    cross_entropy(model(images[half]), labels[half]).backward()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    whole = {}
    for name, p in model.named_parameters():
        whole[name.removeprefix("module.")] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return whole


def shard(model: revzoo.Model, what: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    if "steps" in what:
        for each in model.steps:
            fully_shard(each, mesh=mesh)
    if "blocks" in what:
        for stage in model.stages:
            for block in stage.blocks:
                fully_shard(block, mesh=mesh)
    if "root" in what:
        fully_shard(model, mesh=mesh)


def ddp_case(name: str, schedule: str, option: str, rank: int) -> dict[str, object]:
    model = make(name, schedule)
    if option == "find_unused_parameters":
        model.spare = nn.Linear(2, 2, dtype=torch.float64)
    wrapped = DistributedDataParallel(model, **DDP[option])
    for batch in batches(model):
        wrapped.zero_grad()
        step(wrapped, *batch, rank)
    return {"gradients": gradients(wrapped), "buffers": dict(model.named_buffers())}


def accumulation_case(name: str, schedule: str, wrapper: str, rank: int) -> dict[str, object]:
    model = make(name, schedule)
    first, second = batches(model)
    if wrapper == "DDP":
        wrapped = DistributedDataParallel(model)
        with wrapped.no_sync():
            step(wrapped, *first, rank)
        step(wrapped, *second, rank)
        return {"gradients": gradients(wrapped)}
    shard(model, "steps and root")
    model.set_requires_gradient_sync(False)
    step(model, *first, rank)
    model.set_requires_gradient_sync(True)
    step(model, *second, rank)
    return {"gradients": gradients(model)}


def fsdp_case(name: str, schedule: str, what: str, rank: int) -> dict[str, object]:
    model = make(name, schedule)
    shard(model, what)
    for batch in batches(model):
        model.zero_grad()
        step(model, *batch, rank)
    return {"gradients": gradients(model), "buffers": dict(model.named_buffers())}


def cases() -> dict[str, tuple[Callable[..., dict[str, object]], str, str, str]]:
    found = {}
    for name in NAMES:
        for schedule in SCHEDULES:
            for option in DDP:
                found[f"{name} {schedule} DDP {option}"] = (ddp_case, name, schedule, option)
            for what in SHARDED:
                found[f"{name} {schedule} FSDP {what}"] = (fsdp_case, name, schedule, what)
            for wrapper in ("DDP", "FSDP"):
                found[f"{name} {schedule} accumulation {wrapper}"] = (accumulation_case, name, schedule, wrapper)
    return found


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results: dict[str, object] = {}
    for key, (run, *arguments) in cases().items():
        try:
            results[key] = run(*arguments, rank)
        except RevzooError as error:
            results[key] = {"error": f"{type(error).__name__}: {error}"}
        except Exception as error:
            import traceback
            results[key] = {"error": f"{type(error).__name__}: {error}"}
            if rank==0: print(key); traceback.print_exc(limit=-6)
        barrier()
    torch.save(results, folder / f"{rank}.pt")
    destroy_process_group()
