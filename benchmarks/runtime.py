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
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import revzoo
from revzoo.analysis.flops import count_flops
from revzoo.runtime import ReversibleChain

METHODS = ("store", "checkpoint", "recompute", "invert")  # all but checkpoint are schedules of the chain


@dataclass(frozen=True)
class Figure:
    """One measured value; `target` is the most it may be, None where nothing is asked."""

    what: str
    net: str
    method: str
    depth: int
    value: float
    target: float | None = None


@dataclass(frozen=True)
class Net:
    """A chain to measure: how to make a block's F and G, the shape of a stream, and what to reach."""

    name: str
    make: Callable[[], list[nn.Module]]
    shape: tuple[int, ...]
    depths: tuple[int, ...]
    timed_depth: int
    most_units: float | None = None
    most_flops: float | None = None
    most_seconds: float | None = None

    def chain(self, depth: int, method: str = "invert") -> nn.Module:
        torch.manual_seed(0)
        steps = [step for _ in range(depth) for step in self.make()]
        chain = ReversibleChain(steps)
        if method == "checkpoint":
            return Checkpointed(chain)
        chain.schedule = method
        return chain

    def batch(self) -> list[Tensor]:
        dice = torch.Generator().manual_seed(1)
        return [torch.randn(self.shape, generator=dice) for _ in range(2)]


class Attention(nn.Module):
    """LayerNorm and self-attention."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Checkpointed(nn.Module):
    """The same blocks under `torch.utils.checkpoint`, one by one, without inversion."""

    def __init__(self, chain: ReversibleChain):
        super().__init__()
        self.steps = chain.steps

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        for f, g in zip(self.steps[::2], self.steps[1::2], strict=True):
            x1, x2 = checkpoint(self.block, f, g, x1, x2, use_reentrant=False)
        return x1, x2

    @staticmethod
    def block(f: nn.Module, g: nn.Module, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        y1 = x1 + f(x2)
        return y1, x2 + g(y1)


def transformer_block(width: int, heads: int) -> list[nn.Module]:
    mlp = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    return [Attention(width, heads), nn.Sequential(*mlp)]


def conv_block(width: int) -> list[nn.Module]:
    def unit() -> list[nn.Module]:
        return [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False)]

    return [nn.Sequential(*unit(), *unit()) for _ in range(2)]


def nets(quick: bool) -> list[Net]:
    if quick:  # no targets: they belong to the sizes below
        transformer = Net("transformer", lambda: transformer_block(16, 2), (2, 9, 16), (2, 3), 2)
        return [transformer, Net("conv", lambda: conv_block(4), (2, 4, 8, 8), (2, 3), 2)]
    return [
        Net("transformer", lambda: transformer_block(192, 3), (8, 197, 192), (6, 12, 24, 48), 12, 17.5, 1.3255, 1.35),
        Net("conv", lambda: conv_block(32), (32, 32, 32, 32), (4, 8, 16, 32), 8, 10.0, 1.3334),
    ]


def memory(net: Net) -> Iterator[Figure]:
    unit = net.batch()[0].nbytes
    for depth, method in itertools.product(net.depths, METHODS):
        report = revzoo.measure_memory(net.chain(depth, method), net.batch())
        target = net.most_units if method == "invert" else None
        yield Figure("peak activation memory, in streams", net.name, method, depth, report.activation_bytes / unit, target)


def flops(net: Net) -> Iterator[Figure]:
    for depth in net.depths:
        counted = {method: count_flops(net.chain(depth, method), net.batch()) for method in METHODS}
        ratios = {method: count / counted["store"] for method, count in counted.items()}
        targets = {"invert": net.most_flops, "recompute": ratios["checkpoint"]}
        for method, ratio in ratios.items():
            yield Figure("FLOPs over stored", net.name, method, depth, ratio, targets.get(method))


def seconds(net: Net, rounds: int) -> Iterator[Figure]:
    """Time the methods in turn, so that a busy machine slows all of them, and take medians of the ratios per round."""
    chains = {method: net.chain(net.timed_depth, method) for method in METHODS}
    taken: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(rounds + 1):
        for method, chain in chains.items():
            taken[method].append(step_seconds(chain, net.batch()))
    stored = taken["store"][1:]  # the first round warms up
    for method in METHODS:
        ratio = statistics.median(t / base for t, base in zip(taken[method][1:], stored, strict=True))
        target = net.most_seconds if method == "invert" else None
        yield Figure("time over stored", net.name, method, net.timed_depth, ratio, target)
    yield Figure("time over stored", net.name, "stored, seconds", net.timed_depth, statistics.median(stored))


def step_seconds(chain: nn.Module, batch: list[Tensor]) -> float:
    weights = [torch.ones_like(x) for x in batch]
    begin = time.perf_counter()
    torch.autograd.backward(chain(*batch), weights)
    return time.perf_counter() - begin


def gradients() -> Iterator[Figure]:
    """Compare gradients with stored ones in float64: the worst over couplings and depths of 1 to 5 steps."""
    x = torch.randn(2, 2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).unbind()
    for mode in ("invert", "recompute"):
        worst = 0.0
        for coupling, depth in itertools.product(("additive", "momentum", "dual_residual", "midpoint", "leapfrog"), range(1, 6)):
            torch.manual_seed(depth)
            steps = [step for _ in range(3) for step in transformer_block(16, 2)][:depth]
            chain = ReversibleChain(steps, coupling=coupling).double()
            chain.schedule = mode
            worst = max(worst, *revzoo.verify(chain, x).gradient_errors.values())
        yield Figure("gradient error, float64, all couplings", "small transformer", mode, 5, worst, 1e-10)


def exactness(depth: int) -> Iterator[Figure]:
    """Count gradients that are not bit-identical to stored ones with exact=True, modes mixed, float32."""
    torch.manual_seed(3)
    x = torch.randn(2, 2, 9, 16).unbind()
    chain = ReversibleChain([step for _ in range(depth) for step in transformer_block(16, 2)], exact=True)
    chain.schedule = [("invert", "invert", "recompute", "store", "invert")[i % 5] for i in range(2 * depth)]
    errors = revzoo.verify(chain, x).gradient_errors.values()
    yield Figure("gradients not bit-identical, exact", "small transformer", "mixed", depth, sum(e != 0 for e in errors), 0)


def measure(quick: bool) -> Iterator[Figure]:
    chains = nets(quick)
    yield from itertools.chain.from_iterable(map(memory, chains))
    yield from itertools.chain.from_iterable(map(flops, chains))
    yield from itertools.chain.from_iterable(seconds(net, rounds=1 if quick else 9) for net in chains)
    yield from gradients()
    yield from exactness(depth=10 if quick else 100)


def tables(figures: list[Figure]) -> Iterator[Table]:
    for what, group in itertools.groupby(figures, key=lambda figure: figure.what):
        rows: dict[tuple[str, int], dict[str, str]] = {}
        for figure in group:
            rows.setdefault((figure.net, figure.depth), {})[figure.method] = shown(figure)
        methods = list(dict.fromkeys(method for row in rows.values() for method in row))
        table = Table(title=what, title_justify="left")
        for name in ("chain", "blocks", *methods):
            table.add_column(name, justify="left" if name == "chain" else "right")
        for (net, depth), row in rows.items():
            table.add_row(net, str(depth), *(row.get(method, "") for method in methods))
        yield table


def shown(figure: Figure) -> str:
    if figure.target is None:
        return f"{figure.value:.5g}"
    met = figure.value <= figure.target
    return f"[{'green' if met else 'red'}]{figure.value:.5g} {'<=' if met else '>'} {figure.target:.5g}[/]"


def surroundings(threads: int) -> dict[str, object]:
    cpus = Path("/proc/cpuinfo")
    names = [line.split(": ")[1] for line in cpus.read_text().splitlines() if line.startswith("model name")] if cpus.exists() else []
    return {
        "command": shlex.join(["python", *sys.argv]),
        "hardware": {"cpu": names[0] if names else platform.machine(), "cores": os.cpu_count(), "threads": threads},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "revzoo": revzoo.__version__},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    parser.add_argument("--quick", action="store_true", help="tiny chains, one round, no targets")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console, figures = Console(), []
    with console.status("measuring") as status:
        for figure in measure(args.quick):
            figures.append(figure)
            status.update(f"{figure.what}: {figure.net}, {figure.depth} blocks, {figure.method}")
    about = surroundings(args.threads)
    console.print(*tables(figures), about)
    if args.out:
        args.out.write_text(json.dumps({**about, "figures": [asdict(figure) for figure in figures]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
