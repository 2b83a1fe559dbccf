"""Plans under DDP and FSDP2 with torch.compile: gradients, peaks and gathers of two gloo processes."""

import copy
import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from revzoo.runtime.live_bytes import LiveBytesOfReplacedCalls
from tests.graph.test_compiler import Net, compute_loss, plan_share

BATCH = torch.randn(8, 64, 16, generator=torch.Generator().manual_seed(0))


class Counted(LiveBytesOfReplacedCalls):
    """Live bytes, and collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            self.collectives[str(func).split(".")[1]] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def step(module: nn.Module, batch: Tensor) -> dict[str, Any]:
    """Return what a second step takes and does."""
    for _ in range(2):
        module.zero_grad()
        with Counted() as live:
            fixed = live.watch([*module.parameters(), batch])
            compute_loss(module(batch)).backward()
    gradients = [p.grad for p in module.parameters()]
    whole = [(g.full_tensor() if hasattr(g, "full_tensor") else g).flatten()[:4].tolist() for g in gradients]
    return {"peak": live.peak(without=fixed), "gradients": whole, "collectives": live.collectives}


def shard(module: nn.Module, compiles: bool) -> nn.Module:
    for block in module.blocks:
        fully_shard(block)
        if compiles:
            block.compile(backend="aot_eager")
    return fully_shard(module)


def run(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder / 'group'}")
    torch.manual_seed(0)
    net, batch = Net(dropout=0), BATCH[4 * rank : 4 * rank + 4]
    plan, budget = plan_share(copy.deepcopy(net), batch, 0.1)
    results: dict[str, Any] = {"budget": budget}
    for name, is_planned in (("alone", False), ("planned", True)):
        for wrapper in ("DDP", "FSDP2"):
            module = copy.deepcopy(net)
            if is_planned:
                plan.apply(module)
            if wrapper == "DDP":
                module = torch.compile(DistributedDataParallel(module, bucket_cap_mb=1), backend="aot_eager")
            else:
                module = shard(module, compiles=True)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "FSDP2-wrapped module")
                results[f"{wrapper} {name}"] = step(module, batch)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_what_is_compiled_under_wrappers_keeps_its_part_of_the_budget(tmp_path):
    torch.multiprocessing.spawn(run, (tmp_path,), 2)
    for rank in range(2):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        for wrapper in ("DDP", "FSDP2"):
            alone, planned = result[f"{wrapper} alone"], result[f"{wrapper} planned"]
            for expected, found in zip(alone["gradients"], planned["gradients"], strict=True):
                assert torch.allclose(torch.tensor(found), torch.tensor(expected), atol=1e-6)
            assert planned["collectives"] == alone["collectives"]
            assert planned["peak"] < 0.7 * alone["peak"]
        assert result["FSDP2 planned"]["peak"] <= result["budget"]
