"""Networks that `reversible_` has changed under torch.compile: kernels, memory and time beside checkpoints.

    python benchmarks/compiled_reversible.py --out compiled_reversible.json        Llama, GPT-2 and a ViT, a quarter of an hour
    python benchmarks/compiled_reversible.py --quick                               a toy, in a minute

Each way to train has a process of its own, and compiles with Inductor, without dropout.

    checkpoint         torch.utils.checkpoint around every block of the network as it was, compiled with it
    8 bits, random bit     `reversible_`, compiled; the same with every step stored; and uncompiled

Kernels are the calls of fused kernels and of products that the profiler sees in a step, of a block: the difference between two
depths. A peak is the most bytes alive above weights, buffers and batch, by the allocator's events. The time is that of one CPU
thread; the ways take turns, and the median of all rounds is taken. Gradients are compared with those of the stored steps. Times
to compile are CPU seconds of the first step without those of the C++ compiler.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from compiled import Process, Row, compute_loss, find_peak, make_table, profile_step
from compiled_cases import list_networks, put_checkpoints
from ordinary_networks import Network
from rich.console import Console
from runtime import describe_environment

import revzoo

DEPTHS = (4, 6)  # blocks
BITS: dict[str, dict[str, Any]] = {"8 bits": {"kept_bits": 8}, "random bit": {"kept_bits": 1, "sign": "random"}}
_LIBRARY = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise", "aten::convolution")
_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


@dataclass(frozen=True)
class Way:
    """One way to train.

    Args:
        name: of the row.
        options: of `reversible_`; None is a checkpoint around every block.
        schedule: the mode of its steps.
        is_compiled: whether it is compiled.
    """

    name: str
    options: dict[str, Any] | None = None
    schedule: str = "invert"
    is_compiled: bool = True


def list_ways(quick: bool) -> list[Way]:
    ways = [Way("checkpoint")]
    for name, options in list(BITS.items())[: 1 if quick else None]:
        ways += [Way(name, options), Way(f"{name}, uncompiled", options, is_compiled=False)]
        ways += [] if quick else [Way(f"{name}, stored", options, "store")]
    return ways


class _Trained:
    """A network that is trained in one way."""

    def __init__(self, network: Network, way: Way):
        torch.manual_seed(0)
        self._module, self._batch = network.make().train(), network.batch()
        if way.options is None:
            put_checkpoints(self._module, network.blocks, {})
        else:
            for chain in revzoo.reversible_(self._module, **way.options).chains:
                chain.schedule = way.schedule
        self._call = torch.compile(self._module, fullgraph=True) if way.is_compiled else self._module

    def step(self) -> None:
        self._module.zero_grad()
        torch.manual_seed(0)
        compute_loss(self._call(self._batch)).backward()

    def measure(self) -> Row:
        begin = time.process_time()
        self.step()
        seconds = time.process_time() - begin
        self.step()
        self._module.zero_grad()
        gc.collect()
        events = profile_step(self.step)
        names = [event.name() for event in events]
        kernels = sum("cpp_fused" in name or name in _LIBRARY or name == _ATTENTION for name in names)
        gradients = [p.grad.numpy() for p in self._module.parameters() if p.grad is not None]
        return {"peak_bytes": find_peak(events), "kernels": kernels, "compile_seconds": seconds, "gradients": gradients}


def measure_network(networks: list[Network], ways: list[Way], rounds: int) -> list[Row]:
    """Return the rows of all ways for the last network; the one before has two blocks fewer."""
    of_depths: list[dict[str, Row]] = [{}]
    for network in networks:
        processes = {way.name: Process(_Trained, network, way) for way in ways}
        times = [{each: process.time_step() for each, process in processes.items()} for _ in range(rounds)]
        rows = [{"way": each} | process.result for each, process in processes.items()]
        for row in rows:
            row["seconds"] = statistics.median([each[row["way"]] for each in times[1:]] or [0.0])
            processes[row["way"]].end()
        of_depths.append({row["way"]: row for row in rows})
    few, many = of_depths[-2:]
    for way, row in many.items():
        row["kernels_of_a_block"] = (row["kernels"] - few[way]["kernels"]) / 2 if few else row["kernels"]
        base = way.partition(",")[0]
        for key, of, what in (
            ("kernels_of_a_block", "checkpoint", "kernel_ratio"),
            ("compile_seconds", "checkpoint", "compile"),
            ("peak_bytes", f"{base}, uncompiled", "peak"),
            ("seconds", f"{base}, uncompiled", "time"),
        ):
            if of in many and many[of][key]:
                row[what] = row[key] / many[of][key]
        if (stored := many.get(f"{base}, stored")) is not None:
            pairs = list(zip(row["gradients"], stored["gradients"], strict=True))
            row["equal"] = all(np.array_equal(a, b) for a, b in pairs)
            row["largest_error"] = float(max(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30) for a, b in pairs))
    for row in many.values():
        row.pop("gradients")
    return list(many.values())


_COLUMNS = {
    "kernels_of_a_block": ("kernels of a block", ".1f"),
    "kernel_ratio": ("over checkpoint", ".2f"),
    "peak_bytes": ("peak bytes", ",d"),
    "peak": ("over uncompiled", ".3f"),
    "time": ("time over uncompiled", ".2f"),
    "compile": ("compile over checkpoint", ".2f"),
    "equal": ("equal gradients", ""),
    "largest_error": ("error", ".0e"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["llama", "gpt2", "vit_s"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help=f"of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=11, help="steps of each way that are timed (default: 11)")
    parser.add_argument("--out", type=Path, help="JSON file (default: none)")
    parser.add_argument("--quick", action="store_true", help="one toy")
    args = parser.parse_args()
    inductor_config.fx_graph_cache, inductor_config.compile_threads = False, 1
    inductor_config.cpp.enable_kernel_profile = True  # so that the profiler sees fused kernels
    functorch_config.enable_autograd_cache = False
    console = Console(width=None if sys.stdout.isatty() else 150)
    about, results = describe_environment(args.out), {}
    for name in ["gpt2"] if args.quick else args.only:
        networks = [list_networks(None, True)[name]] if args.quick else [list_networks(depth, False)[name] for depth in DEPTHS]
        results[name] = measure_network(networks, list_ways(args.quick), 2 if args.quick else args.rounds)
        console.print(make_table(name, results[name], _COLUMNS))
        if args.out:
            args.out.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")
    console.print(about)


if __name__ == "__main__":
    main()
