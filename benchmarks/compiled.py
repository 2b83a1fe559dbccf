"""Peak memory, work and time of a training step under torch.compile: plans beside what PyTorch itself offers.

    python benchmarks/compiled.py --out compiled.json                               all networks, counted, half an hour
    python benchmarks/compiled.py --only gpt2 --backend inductor --layers 2         one network of 2 blocks, timed
    python benchmarks/compiled.py --quick                                           a toy, in half a minute

Each way to train has a process of its own, and all have the same module, batch and loss. A peak is the most bytes alive above
weights, buffers and batch, so that gradients count.

    stored                    nothing, or what the backend does by itself
    checkpoint                torch.utils.checkpoint around every block, compiled with it
    selective checkpoint      the same by the policies of torchtitan: products and attention are kept, or every second product
                              runs again, too
    activation_memory_budget  PyTorch's partitioner, with seven budgets
    plan                      revzoo's, with the peak of each of these as its budget, of .8 and .6 of the stored one, and the
                              smallest that can be planned

With the backends "eager" and "aot_eager" all bytes and FLOPs are counted and gradients are compared to the bit. Plans are
searched for the least of FLOPs and bytes made together, which are therefore counted, too; where a rival takes fewer FLOPs,
there is a plan for FLOPs alone as well. With "inductor", peaks are those of the allocator's events, for which plans are
measured (compiled=True), gradients are compared to a thousandth, and the kernels are the calls in the code that it has
written. The time is that of one CPU thread over the stored step: the ways take turns, and the median of all rounds is taken.
Times to compile are CPU seconds of the first step without those of the C++ compiler, over those with checkpoints.
"""

import argparse
import gc
import json
import multiprocessing
import re
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from compiled_cases import BUDGETS, Way, list_networks, list_rivals, put_checkpoints
from ordinary_networks import Network
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from runtime import describe_environment
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx  # noqa: F401  once here, not in every process
from torch._inductor.graph import GraphLowering
from torch.profiler import ProfilerActivity, profile

import revzoo
from revzoo.analysis.flops import FLOPS_PER_BYTE, FlopCounterOfReplacedCalls
from revzoo.errors import BudgetError
from revzoo.graph import compiler
from revzoo.graph.front import find_front
from revzoo.runtime.live_bytes import LiveBytesOfReplacedCalls

BACKENDS = ("eager", "aot_eager", "inductor")
SHARES = (0.8, 0.6)  # of the stored peak, as budgets of plans
_KERNEL = re.compile(r"^ +cpp_\w+\(", re.MULTILINE)  # a call of a fused kernel, in the code that Inductor writes
_LIBRARY = re.compile(r"^ +(?:\w+ = )?(?:extern_kernels|torch\.ops\.(?:aten|mkldnn))\.[\w.]+\(", re.MULTILINE)
Row = dict[str, Any]


def compute_loss(output: Any) -> Tensor:
    return (output if isinstance(output, Tensor) else output[0]).float().square().mean()


class Process:
    """One way to train, in a process of its own: forked, so that nothing is imported again.

    Args:
        what: what returns an object with `measure` and `step`, and its arguments.

    Attributes:
        result: what was measured; "error" where that failed.
    """

    def __init__(self, *what: Any):
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, *what), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.result: Row = self._connection.recv()
        except EOFError:
            self._process.join()
            self.result = {"error": f"the process ended with {self._process.exitcode}"}

    def time_step(self) -> float:
        """Return the CPU seconds of another step."""
        self._connection.send(True)
        return float(self._connection.recv())

    def end(self) -> None:
        if self._process.is_alive():
            self._connection.send(False)
        self._process.join()


def _serve(connection: Connection, make: Callable[..., Any], *what: Any) -> None:
    """Measure, then run a step whenever asked to."""
    torch.set_num_threads(1)  # not before: threads do not survive a fork
    try:
        trained = make(*what)
        result = trained.measure()
    except Exception as error:
        traceback.print_exc()
        connection.send({"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
        return
    connection.send(result)
    while connection.recv():
        begin = time.process_time()
        trained.step()
        connection.send(time.process_time() - begin)


class _Trained:
    """A module that is trained in one way."""

    def __init__(self, network: Network, backend: str, way: Way):
        torch.manual_seed(0)
        self._module, self._backend, self._way = network.make().train(), backend, way
        self._batch = network.batch()
        for each in self._module.modules():
            if isinstance(each, nn.Dropout):
                each.eval()  # none has a probability, and the compiler makes masks for those that train
        self._fixed = [*self._module.parameters(), *self._module.buffers(), self._batch]
        self._facts: Row = {}
        if way.checkpoint is not None:
            put_checkpoints(self._module, network.blocks, way.checkpoint)
        self._call = self._module if backend == "eager" else torch.compile(self._module, backend=backend, fullgraph=True)
        if way.by_flops:
            compiler.find_front = partial(find_front, count_flops_only=True)
        if way.peak is not None:
            self._apply_plan(way.peak)

    def _apply_plan(self, peak: int) -> None:
        """Plan for a peak, or for the smallest one that can be planned; what Inductor makes is measured for it."""
        fixed = sum(t.nbytes for t in set(self._fixed))
        is_measured = self._backend == "inductor"
        make_plan = partial(revzoo.plan, self._call, self._batch, loss=compute_loss, compiled=is_measured)
        begin = time.process_time()
        budget = fixed + peak if peak else make_plan(make_plan("1TiB").no_recompute_peak_bytes - 1).min_peak_bytes
        assert budget is not None, "less than everything fits"
        try:
            plan = make_plan(budget)
        except BudgetError as error:
            if peak:
                raise
            plan = make_plan(int(str(error).partition("(")[2].split()[0]))  # the least that was measured
        self._facts = {"budget_bytes": plan.budget_bytes - fixed, "planning_seconds": time.process_time() - begin}
        plan.apply(self._module)

    def step(self) -> None:
        self._module.zero_grad()
        torch.manual_seed(0)
        compute_loss(self._call(self._batch)).backward()

    def measure(self) -> Row:
        """Return what a step takes, and its gradients."""
        budget = functorch_config.patch(activation_memory_budget=self._way.memory_budget)
        with budget, warnings.catch_warnings(record=True, action="always") as caught:
            measured = self._measure_events() if self._backend == "inductor" else self._count()
        told = {str(each.message) for each in caught if "planned" in str(each.message)}
        gradients = [p.grad.numpy() for p in self._module.parameters() if p.grad is not None]
        return self._facts | measured | {"gradients": gradients, "warnings": sorted(told)}

    def _count(self) -> Row:
        begin, seconds = time.process_time(), 0.0
        for _ in range(2):
            gc.collect()
            with FlopCounterOfReplacedCalls() as flops, LiveBytesOfReplacedCalls() as live:
                fixed = live.watch(self._fixed)
                self.step()
            seconds = seconds or time.process_time() - begin
            made = sum(change for storage, change in live.log if change > 0 and storage not in fixed)
        work = flops.forward + flops.backward
        priced = work + FLOPS_PER_BYTE * made
        return {"peak_bytes": live.peak(without=fixed), "flops": work, "priced_flops": priced, "compile_seconds": seconds}

    def _measure_events(self) -> Row:
        codes: list[str] = []
        GraphLowering.save_output_code = staticmethod(codes.append)
        begin = time.process_time()
        self.step()
        seconds = time.process_time() - begin
        self.step()
        self._module.zero_grad()
        gc.collect()
        peak = find_peak(profile_step(self.step))
        kernels, library = (sum(len(pattern.findall(code)) for code in codes) for pattern in (_KERNEL, _LIBRARY))
        return {"peak_bytes": peak, "kernels": kernels, "library_calls": library, "compile_seconds": seconds}


def profile_step(step: Callable[[], object]) -> list[Any]:
    """Return the profiler's events of a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    return list(profiled.profiler.kineto_results.events())


def find_peak(events: Sequence[Any]) -> int:
    """Return the most bytes that were alive, of those that the events of the allocator tell of."""
    alive = peak = 0
    for event in events:
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def measure_network(network: Network, backend: str, budgets: Sequence[float], rounds: int) -> list[Row]:
    """Return the rows of all ways; each rival's names that of the plan with its peak."""
    processes: dict[str, Process] = {}
    rows: list[Row] = []

    def measure(way: Way) -> Row:
        process = processes[way.name] = Process(_Trained, network, backend, way)
        rows.append({"way": way.name} | process.result)
        note = {key: value for key, value in rows[-1].items() if key != "gradients"}
        print(f"{time.strftime('%X')} {backend} {note}", file=sys.stderr, flush=True)
        if "error" in process.result or backend != "inductor":
            processes.pop(way.name).end()
        return rows[-1]

    stored = measure(Way("stored"))
    rivals = [stored, *map(measure, list_rivals(backend, budgets))]
    least = measure(Way("plan, least", peak=0))
    plans = {int(share * stored["peak_bytes"]): f"plan {share}" for share in SHARES}
    plans |= {row["peak_bytes"]: f"plan for {row['way']}" for row in rivals[1:] if "error" not in row}
    larger = {peak: name for peak, name in sorted(plans.items()) if peak > least.get("budget_bytes", 0)}
    for peak, name in larger.items():
        measure(Way(name, peak=peak))
    by_way = {row["way"]: row for row in rows}
    for row in rivals[1:]:
        if "error" in row:
            continue
        name = row["plan"] = larger.get(row["peak_bytes"], least["way"])
        if by_way[name].get("flops", 0) > row.get("flops", 0):
            row["plan_by_flops"] = f"{name}, by FLOPs"
            if row["plan_by_flops"] not in by_way:
                peak = row["peak_bytes"] if name != least["way"] else 0
                by_way[row["plan_by_flops"]] = measure(Way(row["plan_by_flops"], peak=peak, by_flops=True))
    times = [{name: process.time_step() for name, process in processes.items()} for _ in range(rounds)]
    for row in rows:
        if row["way"] in processes:
            row["time"] = statistics.median(each[row["way"]] / each["stored"] for each in times[1:])  # the first is cold
            processes[row["way"]].end()
    _compare(rows, backend)
    return rows


def _compare(rows: list[Row], backend: str) -> None:
    """Put ratios in the place of bytes, FLOPs, seconds and gradients."""
    stored = rows[0]
    checkpointed = next(row for row in rows if row["way"] == "checkpoint")
    expected = stored["gradients"]
    for row in rows:
        if "error" in row:
            continue
        row["peak"] = row["peak_bytes"] / stored["peak_bytes"]
        row["compile"] = row["compile_seconds"] / checkpointed.get("compile_seconds", float("nan"))
        pairs = [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in zip(row["gradients"], expected, strict=True)]
        is_equal = partial(torch.allclose, rtol=1e-3, atol=1e-5) if backend == "inductor" else torch.equal
        row["equal"] = all(is_equal(a, b) for a, b in pairs)
        row["largest_error"] = max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs)
        if "flops" in row:
            row["work"], row["priced"] = row["flops"] / stored["flops"], row["priced_flops"] / stored["priced_flops"]
        if "budget_bytes" in row:
            row["over_budget"] = row["peak_bytes"] / row["budget_bytes"]
    for row in rows:
        row.pop("gradients", None)


def judge(rows: list[Row]) -> Row:
    """Return at how many points of rivals the plan with that peak is as good, and by how much it is not at the others."""
    by_way = {row["way"]: row for row in rows}
    pairs = [(row, by_way[row["plan"]]) for row in rows if "plan" in row and "error" not in by_way[row["plan"]]]
    result: Row = {"points": len(pairs)}
    by_flops = [(row, by_way[row.get("plan_by_flops", row["plan"])]) for row, _ in pairs]
    for key, what, compared in (
        ("work", "FLOPs by plans for FLOPs alone", by_flops),
        ("work", "FLOPs", pairs),
        ("priced", "FLOPs and bytes made", pairs),
        ("time", "time", pairs),
    ):
        if key in rows[0]:
            more = {rival["way"]: plan[key] - rival[key] for rival, plan in compared if plan[key] > rival[key]}
            result |= {f"as good in {what}": len(pairs) - len(more), f"more {what}": more}
            for rival, plan in compared if key != "priced" else ():
                rival["planned"] = plan[key]
    result["peaks above the rival's"] = {rival["way"]: plan["peak"] for rival, plan in pairs if plan["peak"] > rival["peak"]}
    result["peaks over budget"] = {row["way"]: row["over_budget"] for row in rows if row.get("over_budget", 0) > 1}
    result["warnings"] = {row["way"]: row["warnings"] for row in rows if row.get("warnings")}
    result["other gradients"] = {row["way"]: row["largest_error"] for row in rows if not row.get("equal", True)}
    return result


_COLUMNS = {  # of ratios to the stored step, and to the checkpoint's seconds
    "peak": ("peak", ".4f"),
    "work": ("FLOPs", ".4f"),
    "priced": ("and bytes", ".4f"),
    "time": ("CPU time", ".3f"),
    "planned": ("planned", ".4f"),
    "equal": ("equal gradients", ""),
    "largest_error": ("error", ".0e"),
    "kernels": ("kernels", "d"),
    "library_calls": ("library", "d"),
    "compile": ("compile", ".2f"),
    "over_budget": ("of budget", ".4f"),
}


def make_table(title: str, rows: list[Row], columns: Mapping[str, tuple[str, str]] = _COLUMNS) -> Table:
    """Return the table of a network; "planned" are FLOPs or time of the plan with a rival's peak."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("way", no_wrap=True)
    columns = {key: column for key, column in columns.items() if any(key in row for row in rows)}
    for head, _ in columns.values():
        table.add_column(head, justify="right")
    for row in rows:
        cells = (format(row[key], form) if key in row else "" for key, (_, form) in columns.items())
        table.add_row(row["way"], *([row["error"]] if "error" in row else cells))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(list_networks(None, False))
    parser.add_argument("--only", nargs="+", choices=names, metavar="NETWORK", default=names, help=f"of {', '.join(names)}")
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=["aot_eager"], help="default: aot_eager")
    parser.add_argument("--layers", type=int, help="blocks of networks whose blocks are alike (default: 8, of vit_s 12)")
    parser.add_argument("--rounds", type=int, default=11, help="steps of each way that are timed, with Inductor (default: 11)")
    parser.add_argument("--out", type=Path, help="JSON file (default: none)")
    parser.add_argument("--quick", action="store_true", help="one toy")
    args = parser.parse_args()
    # Graphs are compiled anew in each process, and by it alone; what gcc has compiled is found again.
    inductor_config.fx_graph_cache, inductor_config.compile_threads = False, 1
    functorch_config.enable_autograd_cache = False
    warnings.filterwarnings("ignore", module="torch")
    networks = list_networks(args.layers, args.quick)
    console = Console(width=None if sys.stdout.isatty() else 170)
    about, results = describe_environment(args.out), {}
    for name, network in networks.items():
        for backend in args.backend:
            if not args.quick and name not in args.only:
                continue
            rows = measure_network(network, backend, (0.5,) if args.quick else BUDGETS, args.rounds)
            results[f"{name}, {backend}"] = verdict = {"rows": rows} | judge(rows)
            console.print(make_table(f"{name}, {backend}", rows))
            console.print({key: value for key, value in verdict.items() if key != "rows"})
            if args.out:
                args.out.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")
    console.print(about)


if __name__ == "__main__":
    main()
