"""What the runtime's own work costs: time beyond the arithmetic that a schedule asks for, beside PyTorch's checkpointing.

    python benchmarks/machinery.py --out machinery.json             about 8 minutes
    python benchmarks/machinery.py --stub --out host_time.json      a minute: the host's work for a GPU, on tests/cuda_stub
    python benchmarks/machinery.py --quick                          the same figures in seconds, too few to mean anything

On a GPU the small kernels of a step compete with Python, and on small steps it is most of the time. So each row is measured on
the CPU clock of one thread: the cases take turns, and the median over all rounds is taken.

    overhead      time of a step beyond a plain loop that runs f once more, as `invert` and checkpointing must. `recompute` and
                  `selective` run less of f than that, so that theirs is understated. The steps are LayerNorm and an MLP of
                  width 8, those of rev_vit_digits, and attention and MLPs of width 32; batches are tiny.
    ratios        time beyond a loop that runs each f once, over that of checkpointing; and the overhead over the forward and
                  backward of a step that is stored
    calls         functions of revzoo, or of PyTorch's checkpoint, that Python calls in a step whose second run is not compared
    arithmetic    forward and backward of the chains of runtime.py with exact=True, or with the lost bits kept, over `invert`
    long chains   time of a step of a chain of 64 and of 6144 steps; what finds a step must not depend on their number
    tripwire      forward and backward of the transformer chain with the tripwire on, over off
    in-place ABN  forward and backward of resnext_101_iabn, over the same network with BatchNorm and leaky ReLU in place

With `--stub` the device takes no time, so that what is measured is all that the host does. The steps are attention and MLPs of
width 384 on 4 x 16 tokens, under autocast to bfloat16 and in float32.

    host time     beyond a plain loop: `invert` and `recompute` over checkpointing, `selective` over PyTorch's selective
                  contexts; look-ahead, exact=True and kept bits over `invert`
    kernels       what a step has the device do beyond a plain loop, with and without comparing the second runs; here attention
                  is fused

In the rows of overhead, ratios and host time each case runs three times in a row, of which the last two count: code is then as
warm as in a training loop.

`checkpoint` is `torch.utils.checkpoint` around each f, `torch selective` the same with PyTorch's selective contexts, which keep
the outputs of matrix products and attention.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from comparison import net as blocks
from runtime import Figure, nets, report
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import revzoo
from revzoo.runtime import ReversibleChain, set_tripwire
from revzoo.runtime.coupling import momentum

Run = Callable[[], object]
Call = Callable[[nn.Module, Tensor], Tensor]
Net = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Steps = Sequence[nn.Module]
Streams = Sequence[Tensor]
Context = Callable[[], AbstractContextManager[object]]
Values = dict[str, float]
Durations = dict[str, list[float]]

_STUB = Path(__file__).parents[1] / "tests" / "cuda_stub" / "stub.py"

_PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
# The largest allowed value of each figure.
_OVERHEADS = {"LayerNorm-MLP": {"invert": 100.0}, "rev_vit_digits": {"invert": 130.0, "selective": 400.0}}
_OVER_CHECKPOINT, _OVER_STORED = 0.5, 0.65
_CALLS = {"invert, forward": 60.0, "invert, backward": 90.0}
_HOST_TIME = {
    "checkpoint": {"invert": 0.45, "recompute": 0.8},
    "torch selective": {"selective": 1.0},
    "invert": {"look-ahead": 1.1, "exact": 1.1, "8 kept bits": 1.1},
}
_KERNELS = {"checkpoint": None, "invert": 10.0}
_ARITHMETIC = {"transformer": {"exact": 1.03, "8 kept bits": 1.06}, "conv": {"exact": 1.03, "8 kept bits": 1.12}}
_TRIPWIRE = 1.02
_IN_PLACE_ABN = 1.05


class Scale(nn.Module):
    """The cheapest step: a product with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1e-3))

    def forward(self, w: Tensor) -> Tensor:
        return w * self.weight


class Attention(blocks.Attention):
    """Attention whose products are calls of their own: fused kernels differ from device to device."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out: Tensor = self.proj((torch.softmax(q @ k.transpose(-2, -1) * 0.1, -1) @ v).transpose(1, 2).flatten(2))
        return out


def small_steps() -> list[nn.Module]:
    return [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(24)]


def transformer_steps(width: int) -> list[nn.Module]:
    return [step for _ in range(6) for step in (Attention(width, 4), blocks.make_transformer_block(width, 4)[1])]


def make_streams(*shape: int, device: str = "cpu") -> list[Tensor]:
    return [torch.randn(shape, device=device, requires_grad=True) for _ in range(2)]


def overhead(rounds: int) -> Iterator[Figure]:
    digits = [step.module for step in revzoo.create("rev_vit_digits").layout() if step.kind == "step"]
    steps = {"LayerNorm-MLP": small_steps(), "rev_vit_digits": digits, "tiny transformer": transformer_steps(32)}
    shapes = {"LayerNorm-MLP": (4, 8), "rev_vit_digits": (1, 16, 64), "tiny transformer": (4, 16, 32)}
    methods = ("plain", "run twice", "invert", "recompute", "selective", "checkpoint", "torch selective")
    times = {net: time_steps(methods, steps[net], make_streams(*shape), rounds) for net, shape in shapes.items()}
    for net, time_of in times.items():
        for method in methods[2:]:
            beyond = time_of[method] - time_of["run twice"]
            yield Figure("overhead per step [us]", net, method, len(steps[net]), beyond, _OVERHEADS.get(net, {}).get(method))
        yield Figure("overhead per step [us]", net, "loop", len(steps[net]), time_of["run twice"])
    targets = {"invert": _OVER_CHECKPOINT}
    yield from ratios_beyond_plain("time", "LayerNorm-MLP", 24, times["LayerNorm-MLP"], "checkpoint", targets)
    invert, twice, plain = (times["tiny transformer"][method] for method in ("invert", "run twice", "plain"))
    what = "time beyond one forward over a stored step"
    yield Figure(what, "tiny transformer", "invert", 12, (invert - twice) / plain, _OVER_STORED)
    yield Figure(what, "tiny transformer", "stored [us]", 12, plain)


def calls() -> Iterator[Figure]:
    steps, streams = small_steps()[:12], make_streams(4, 8)
    for method in ("checkpoint", "invert"):
        net = make_net(method, steps)
        for _ in range(3):  # the second runs of the first two are compared
            train(net, streams)
        (y1, y2), forward = count_calls(partial(net, *streams))
        _, backward = count_calls((y1.sum() + y2.sum()).backward)
        for name, count in ((f"{method}, forward", forward), (f"{method}, backward", backward)):
            yield Figure("Python calls per step", "LayerNorm-MLP", name, len(steps), count / len(steps), _CALLS.get(name))


def count_calls(run: Callable[[], Any]) -> tuple[Any, int]:
    """Return what a function returns, and how many functions of revzoo and of PyTorch's checkpoint it calls."""
    files, count = (revzoo.__file__.removesuffix("__init__.py"), torch.utils.checkpoint.__file__), 0

    def note(frame: Any, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(files)

    sys.setprofile(note)
    result = run()
    sys.setprofile(None)
    return result, count


def arithmetic(rounds: int, quick: bool) -> Iterator[Figure]:
    for net in nets(quick):
        depth, batch, weights = net.depths[0], net.batch(), net.batch()
        steps = list(net.chain(depth, "invert").steps)
        chains = {method: make_net(method, steps) for method in ("invert", "exact", "8 kept bits")}
        runs = {method: partial(train, chain, batch, weights) for method, chain in chains.items()}
        yield from ratios("time over invert", net.name, depth, take_turns(runs, rounds), "invert", _ARITHMETIC[net.name])


def long_chains(rounds: int, quick: bool) -> Iterator[Figure]:
    lengths = (8, 64) if quick else (64, 6144)
    streams = make_streams(4)
    runs = {str(n): make_run("invert", [Scale() for _ in range(n)], streams) for n in lengths}
    durations = take_turns(runs, rounds, warm_up=1)
    for n, times in durations.items():
        yield Figure("time per step [us]", "product with a weight", "invert", int(n), statistics.median(times) / int(n) * 1e6)


def tripwire(rounds: int, quick: bool) -> Iterator[Figure]:
    net = nets(quick)[0]
    depth, batch, weights = net.depths[0], net.batch(), net.batch()
    chains = {"off": net.chain(depth, "invert"), "on": net.chain(depth, "invert")}

    def run(switch: str) -> None:
        set_tripwire(switch == "on")
        train(chains[switch], batch, weights)

    durations = take_turns({switch: partial(run, switch) for switch in chains}, rounds)
    set_tripwire(True)
    yield from ratios("time with the tripwire over without", net.name, depth, durations, "off", {"on": _TRIPWIRE})


def in_place_abn(rounds: int, quick: bool) -> Iterator[Figure]:
    size, batch = (64, 2) if quick else (128, 4)
    images = torch.randn(batch, 3, size, size)
    overrides = [f"input.size=[{size}, {size}]"] + [f"stages.{i}.depth=1" for i in range(4) if quick]
    nets = {"BatchNorm": "resnext_101_bn", "in-place ABN": "resnext_101_iabn"}
    models = {method: revzoo.create(name, overrides=overrides) for method, name in nets.items()}
    models["in-place ABN"].load_state_dict(models["BatchNorm"].state_dict())

    def run(model: nn.Module) -> None:
        model.zero_grad()
        model(images).square().mean().backward()

    durations = take_turns({method: partial(run, model) for method, model in models.items()}, rounds, warm_up=1)
    depth = sum(isinstance(module, nn.Conv2d) for module in models["BatchNorm"].modules())
    targets = {"in-place ABN": _IN_PLACE_ABN}
    yield from ratios("time over BatchNorm", "ResNeXt-101", depth, durations, "BatchNorm", targets)


def host_work(rounds: int) -> Iterator[Figure]:
    steps = [step.cuda() for step in transformer_steps(384)]
    streams = make_streams(4, 16, 384, device="cuda")
    autocast = partial(torch.autocast, "cuda", torch.bfloat16)
    contexts: dict[str, Context] = {"bf16 autocast": autocast, "float32": nullcontext}
    cases = ("plain", *dict.fromkeys(itertools.chain(_HOST_TIME, *_HOST_TIME.values())))
    times = {net: time_steps(cases, steps, streams, rounds, context) for net, context in contexts.items()}
    for (base, targets), (net, time_of) in itertools.product(_HOST_TIME.items(), times.items()):
        yield from ratios_beyond_plain("host time", net, len(steps), time_of, base, targets)
    sys.path.insert(0, str(_STUB.parent))
    import stub

    stub.prepare_torch()  # for fused attention
    steps = [step.cuda() for _ in range(6) for step in blocks.make_transformer_block(384, 4)]
    for (what, setting), (net, context) in itertools.product((("", False), (", compared", "always")), contexts.items()):
        with set_tripwire(setting):
            plain, *kernels = (count_kernels(stub.Counts, method, steps, streams, context) for method in ("plain", *_KERNELS))
        for (method, target), count in zip(_KERNELS.items(), kernels, strict=True):
            yield Figure(f"kernels beyond plain per step{what}", net, method, len(steps), count - plain, target)


def count_kernels(count: Callable[[], Any], method: str, steps: Steps, streams: Streams, context: Context) -> float:
    """Return the kernels of a step, without those that a chain takes whatever its length."""
    kernels = []
    for part in (steps[: len(steps) // 2], steps):
        run = make_run(method, part, streams, context)
        for _ in range(3):
            nn.ModuleList(part).zero_grad()
            counts = count()
            run()
        kernels.append(counts.kernels)
    return 2 * (kernels[1] - kernels[0]) / len(steps)


def make_net(method: str, steps: Steps) -> Net:
    """Return a chain in a mode or with an option, or a plain loop."""
    loops: dict[str, Call] = {"plain": nn.Module.__call__, "run twice": run_twice, "checkpoint": checkpointed}
    loops["torch selective"] = partial(checkpointed, context_fn=partial(create_selective_checkpoint_contexts, _PRODUCTS))
    kept = {"coupling": momentum(kept_bits=8, gain=1.0)}
    options: dict[str, dict[str, Any]] = {"look-ahead": {"lookahead": 1}, "exact": {"exact": True}, "8 kept bits": kept}
    if method in loops:
        return partial(loop, steps, loops[method])
    chain = ReversibleChain(steps, **options.get(method, {}))
    chain.schedule = "invert" if method in options else method
    return chain


def make_run(method: str, steps: Steps, streams: Streams, context: Context = nullcontext) -> Run:
    return partial(train, make_net(method, steps), streams, context=context)


def loop(steps: Steps, call: Call, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    """Run the recurrence as a plain loop."""
    for step in steps:
        x1, x2 = x2, x1 + call(step, x2)
    return x1, x2


def run_twice(step: nn.Module, x: Tensor) -> Tensor:
    step(x.detach().requires_grad_())
    out: Tensor = step(x)
    return out


def checkpointed(step: nn.Module, x: Tensor, **options: object) -> Tensor:
    out: Tensor = checkpoint(step, x, use_reentrant=False, **options)
    return out


def train(net: Net, streams: Streams, weights: Streams = (), context: Context = nullcontext) -> None:
    """Run forward and backward."""
    with context():
        y1, y2 = net(*streams)
    torch.autograd.backward([y1, y2] if weights else [y1.sum() + y2.sum()], list(weights) or None)


def take_turns(runs: dict[str, Run], rounds: int, warm_up: int = 3, in_a_row: int = 1, before: Run = int) -> Durations:
    """Return the CPU seconds of each case in every round, so that a busy machine slows all of them.

    Of several runs in a row the first does not count. What is done before each run is not timed.
    """
    durations: Durations = {name: [] for name in runs}
    for i, (name, run), j in itertools.product(range(warm_up + rounds), runs.items(), range(in_a_row)):
        before()
        start = time.process_time()
        run()
        if i >= warm_up and (j or in_a_row == 1):
            durations[name].append(time.process_time() - start)
    return durations


def time_steps(methods: Sequence[str], steps: Steps, streams: Streams, rounds: int, context: Context = nullcontext) -> Values:
    """Return the microseconds of a step by each method, of warm code that has no gradients to add to."""
    runs = {method: make_run(method, steps, streams, context) for method in methods}
    durations = take_turns(runs, rounds, in_a_row=3, before=nn.ModuleList(steps).zero_grad)
    return {method: statistics.median(seconds) / len(steps) * 1e6 for method, seconds in durations.items()}


def ratios_beyond_plain(what: str, net: str, depth: int, times: Values, base: str, targets: Values) -> Iterator[Figure]:
    """Yield the time of each method beyond plain over that of the base, and that of the base."""
    what, beyond = f"{what} beyond plain over {base}", times[base] - times["plain"]
    for method, target in targets.items():
        yield Figure(what, net, method, depth, (times[method] - times["plain"]) / beyond, target)
    yield Figure(what, net, f"{base} [us]", depth, beyond)


def ratios(what: str, net: str, depth: int, durations: Durations, base: str, targets: Values) -> Iterator[Figure]:
    """Yield the median ratio of each case to the base over all rounds, and the seconds of the base."""
    for method, times in durations.items():
        if method != base:
            ratio = statistics.median(t / b for t, b in zip(times, durations[base], strict=True))
            yield Figure(what, net, method, depth, ratio, targets[method])
    yield Figure(what, net, f"{base} [s]", depth, statistics.median(durations[base]))


def measure(quick: bool) -> Iterator[Figure]:
    yield from overhead(rounds=2 if quick else 30)
    yield from calls()
    yield from arithmetic(rounds=1 if quick else 15, quick=quick)
    yield from long_chains(rounds=1 if quick else 5, quick=quick)
    yield from tripwire(rounds=1 if quick else 21, quick=quick)
    yield from in_place_abn(rounds=1 if quick else 21, quick=quick)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("machinery.json"), help="JSON file with all figures (default: machinery.json)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny chains, few rounds")
    parser.add_argument("--stub", action="store_true", help="the work of the host for a GPU, on a stub in the place of one")
    args = parser.parse_args()
    if args.stub and "CUDA_STUB" not in os.environ:
        os.execv(sys.executable, [sys.executable, str(_STUB), *sys.orig_argv[1:]])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report(host_work(rounds=2 if args.quick else 30) if args.stub else measure(args.quick), args.out)


if __name__ == "__main__":
    main()
