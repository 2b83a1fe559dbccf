"""The runtime against storing everything and against `torch.utils.checkpoint`: memory, arithmetic, time, correctness.

    python benchmarks/runtime.py --out runtime.json     about 6 minutes on 2 CPU cores
    python benchmarks/runtime.py --quick                the same figures on tiny chains, in seconds

Two chains of additive blocks y1 = x1 + F(x2), y2 = x2 + G(y1):

    transformer   F = LayerNorm + attention (3 heads, SDPA), G = LayerNorm + MLP (4x, GELU); width 192, 197 tokens, batch 8
    conv          F and G = twice BatchNorm-ReLU-conv3x3; 32 channels per stream, 32 x 32, batch 32

Memory is counted (`revzoo.measure_memory`) in units of one stream, weights, parameter gradients and inputs left out. The
loss is linear and saves nothing; its gradient is a tensor of its own. No scheme that runs stock autograd on one F or G at a
time goes below 17.0 and 9.0 units: outputs (2), their gradients (2), and what F or G takes by itself (13 and 5).
"""

import argparse
import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from comparison.net import make_conv_block, make_transformer_block
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import revzoo
from revzoo.analysis.flops import count_flops
from revzoo.registry import couplings
from revzoo.runtime import ReversibleChain

METHODS = ("store", "checkpoint", "recompute", "invert")  # all but checkpoint are schedules of the chain


@dataclass(frozen=True)
class Figure:
    """One measured value. `target` is the largest allowed value, None where there is no limit."""

    what: str
    net: str
    method: str
    depth: int
    value: float
    target: float | None = None


@dataclass(frozen=True)
class Net:
    """A chain to measure.

    Args:
        name: name in the tables.
        make: function that returns the F and G of a new block.
        shape: shape of a stream.
        depths: numbers of blocks; times are measured for the second.
        most_units: largest allowed peak of `invert`, in streams.
        most_flops: largest allowed FLOPs of `invert`, relative to `store`.
        most_seconds: largest allowed time of `invert`, relative to `store`.
    """

    name: str
    make: Callable[[], list[nn.Module]]
    shape: tuple[int, ...]
    depths: tuple[int, ...]
    most_units: float | None = None
    most_flops: float | None = None
    most_seconds: float | None = None

    def chain(self, depth: int, method: str) -> ReversibleChain:
        torch.manual_seed(0)
        chain_type = Checkpointed if method == "checkpoint" else ReversibleChain
        chain = chain_type([step for _ in range(depth) for step in self.make()])
        chain.schedule = "store" if method == "checkpoint" else method
        return chain

    def batch(self) -> tuple[Tensor, ...]:
        return torch.randn(2, *self.shape, generator=torch.Generator().manual_seed(1)).unbind()


class Checkpointed(ReversibleChain):
    """The same blocks, each under `torch.utils.checkpoint`; nothing is inverted."""

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        for i in range(0, len(self.steps), 2):
            x1, x2 = checkpoint(self.block, i, x1, x2, use_reentrant=False)
        return x1, x2

    def block(self, i: int, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        y1 = x1 + self.steps[i](x2)
        return y1, x2 + self.steps[i + 1](y1)


def nets(quick: bool) -> list[Net]:
    if quick:  # no targets: they belong to the sizes below
        small = Net("transformer", lambda: make_transformer_block(16, 2), (2, 9, 16), (2, 3))
        return [small, Net("conv", lambda: make_conv_block(4), (2, 4, 8, 8), (2, 3))]
    return [
        Net("transformer", lambda: make_transformer_block(192, 3), (8, 197, 192), (6, 12, 24, 48), 17.5, 1.3255, 1.35),
        Net("conv", lambda: make_conv_block(32), (32, 32, 32, 32), (4, 8, 16, 32), 10.0, 1.3334),
    ]


def memory(net: Net) -> Iterator[Figure]:
    unit = net.batch()[0].nbytes
    for depth, method in itertools.product(net.depths, METHODS):
        report = revzoo.measure_memory(net.chain(depth, method), net.batch())
        most = net.most_units if method == "invert" else None
        yield Figure("peak activation memory, in streams", net.name, method, depth, report.activation_bytes / unit, most)


def flops(net: Net) -> Iterator[Figure]:
    for depth in net.depths:
        counts = {method: count_flops(net.chain(depth, method), net.batch()) for method in METHODS}
        ratios = {method: count / counts["store"] for method, count in counts.items()}
        targets = {"invert": net.most_flops, "recompute": ratios["checkpoint"]}
        for method, ratio in ratios.items():
            yield Figure("FLOPs over stored", net.name, method, depth, ratio, targets.get(method))


def seconds(net: Net, rounds: int) -> Iterator[Figure]:
    """Time the methods in turn, so that a busy machine slows all of them, and take the median ratio of all rounds."""
    depth, batch, weights = net.depths[1], net.batch(), net.batch()
    chains = {method: net.chain(depth, method) for method in METHODS}
    durations: dict[str, list[float]] = {method: [] for method in METHODS}
    for _, (method, chain) in itertools.product(range(rounds + 1), chains.items()):
        chain.zero_grad()
        start = time.perf_counter()
        torch.autograd.backward(chain(*batch), weights)
        durations[method].append(time.perf_counter() - start)
    stored = durations["store"][1:]  # the first round warms up
    for method in METHODS:
        ratio = statistics.median(t / base for t, base in zip(durations[method][1:], stored, strict=True))
        target = net.most_seconds if method == "invert" else None
        yield Figure("time over stored", net.name, method, depth, ratio, target)
    yield Figure("time over stored", net.name, "stored [s]", depth, statistics.median(stored))


def gradients() -> Iterator[Figure]:
    """Compare gradients with those of `store` in float64; the largest error over couplings and depths of 1 to 5 steps."""
    for mode in ("invert", "recompute"):
        worst = 0.0
        for coupling, steps in itertools.product([name for name in couplings if name != "none"], range(1, 6)):
            chain, x = small_chain(steps, torch.float64, coupling=coupling)
            chain.schedule = mode
            worst = max(worst, *revzoo.verify(chain, x).gradient_errors.values())
        yield Figure(
            "gradient error, float64, all couplings (against at least 1 % of a typical one)",
            "small transformer",
            mode,
            3,
            worst,
            1e-10,
        )


def exactness(blocks: int) -> Iterator[Figure]:
    """Count the gradients that differ from those of `store` in any bit, with exact=True, mixed modes and float32."""
    chain, x = small_chain(2 * blocks, torch.float32, exact=True)
    chain.schedule = [("invert", "invert", "recompute", "store", "invert")[i % 5] for i in range(2 * blocks)]
    errors = revzoo.verify(chain, x).gradient_errors.values()
    yield Figure("gradients not bit-identical, exact", "small transformer", "mixed", blocks, sum(e != 0 for e in errors), 0)


def small_chain(steps: int, dtype: torch.dtype, **options: object) -> tuple[ReversibleChain, tuple[Tensor, ...]]:
    torch.manual_seed(steps)
    blocks = [make_transformer_block(16, 2) for _ in range((steps + 1) // 2)]
    chain = ReversibleChain(list(itertools.chain(*blocks))[:steps], **options)
    return chain.to(dtype), torch.randn(2, 2, 9, 16, dtype=dtype).unbind()


def measure(quick: bool) -> Iterator[Figure]:
    for figures in (memory, flops, partial(seconds, rounds=1 if quick else 9)):
        for net in nets(quick):
            yield from figures(net)
    yield from gradients()
    yield from exactness(blocks=10 if quick else 100)


def tables(figures: list[Figure]) -> Iterator[Table]:
    for what, group in itertools.groupby(figures, key=lambda figure: figure.what):
        rows: dict[tuple[str, int], dict[str, str]] = {}
        for figure in group:
            rows.setdefault((figure.net, figure.depth), {})[figure.method] = format_figure(figure)
        methods = list(max(rows.values(), key=len))
        table = Table(title=escape(what), title_justify="left", box=SIMPLE_HEAD)
        for name in ("chain", "blocks", *methods):
            table.add_column(escape(name), justify="left" if name == "chain" else "right")
        for (net, depth), row in rows.items():
            table.add_row(net, str(depth), *(row.get(method, "") for method in methods))
        yield table


def format_figure(figure: Figure) -> str:
    if figure.target is None:
        return f"{figure.value:.5g}"
    return f"[{'green' if figure.value <= figure.target else 'red'}]{figure.value:.5g} ({figure.target:.5g})[/]"


def describe_environment(*folders: Path | None) -> dict[str, object]:
    """Return command, commit, hardware and versions; given folders stand as DIR in the command."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    cpu = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    hardware = {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        hardware["gpu"] = torch.cuda.get_device_name()
    return {
        "command": shlex.join(["python", *("DIR" if argument in map(str, folders) else argument for argument in sys.argv)]),
        "commit": commit or None,
        "hardware": hardware,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "revzoo": revzoo.__version__},
    }


def report(figures: Iterator[Figure], out: Path) -> None:
    """Measure, print the tables, and write all figures with hardware and versions as JSON."""
    console, measured = Console(), []
    with console.status("measuring") as status:
        for figure in figures:
            measured.append(figure)
            status.update(f"{figure.what}: {figure.net}, depth {figure.depth}, {figure.method}")
    about = describe_environment()
    console.print(*tables(measured), "In brackets: the largest allowed value.", about)
    out.write_text(json.dumps(about | {"figures": list(map(asdict, measured))}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("runtime.json"), help="JSON file with all figures (default: runtime.json)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny chains, one round, no targets")
    args = parser.parse_args()
    torch.set_num_threads(1 if args.quick else 2)
    report(measure(args.quick), args.out)


if __name__ == "__main__":
    main()
