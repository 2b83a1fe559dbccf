"""Count and time one forward and backward of the blocks by every method."""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from comparison.method import Method
from comparison.net import Net, Pair
from comparison.torch_only import Loop
from revzoo.analysis.dry_run import linear_loss
from revzoo.analysis.flops import count_flops
from revzoo.runtime.live_bytes import LiveBytes


@dataclass(frozen=True)
class Figure:
    """One number.

    Args:
        what: a key of `UNITS`.
        net: name of the net.
        method: name of the method.
        blocks: number of blocks.
        value: in the unit of `what`.
    """

    what: str
    net: str
    method: str
    blocks: int
    value: float


UNITS = {
    "peak": "bytes above weights, buffers, parameter gradients and inputs",
    "slope": "bytes of the peak for each block more",
    "flops": "floating-point operations of forward and backward, a multiply-add counted twice",
    "seconds": "seconds of forward and backward on one thread, median",
    "time": "seconds over those of plain autograd in the same round, median",
    "machinery": "microseconds of a step beyond those of a loop that calls its function as often, median",
}
SMALL_STEPS = Net("small steps", lambda dropout=0.0: [_make_small_step(), _make_small_step()], (1, 4, 8), features=-1)


def count_peak(module: nn.Module, inputs: Sequence[Tensor]) -> int:
    """Return the peak of what is alive beside weights, buffers and parameter gradients, less the size of the inputs [bytes].

    So a package that frees its inputs gets the credit for it, if nobody else holds them.
    """
    module.zero_grad()
    live = LiveBytes()
    lasting = live.watch(module.parameters()) | live.watch(module.buffers())
    live.watch(inputs)
    size = sum(t.nbytes for t in inputs)
    with live:
        loss = linear_loss(module(*inputs))
        loss.backward()
        lasting |= live.watch(p.grad for p in module.parameters())
    return live.peak(without=lasting) - size


def count(net: Net, method: Method, depths: Sequence[int]) -> Iterator[Figure]:
    """Yield the peak and the FLOPs of a method at every number of blocks, and the slope between the first and the last."""
    peaks: dict[int, int] = {}
    for blocks in depths:
        with _ignore_warnings_of(method):
            module = (method.make_counted or method.make)(net.make_steps(blocks), net)
            run(module, method.join(net, net.make_pair()), method, net)  # what is made at the first call is not counted
            peaks[blocks] = count_peak(module, method.join(net, net.make_pair()))
            yield Figure("peak", net.name, method.name, blocks, peaks[blocks])
            yield Figure("flops", net.name, method.name, blocks, count_flops(module, method.join(net, net.make_pair())))
    slope = (peaks[depths[-1]] - peaks[depths[0]]) / (depths[-1] - depths[0])
    yield Figure("slope", net.name, method.name, depths[-1], slope)


def time_methods(net: Net, methods: Sequence[Method], blocks: int, rounds: int) -> Iterator[Figure]:
    """Yield the time of every method: they take turns, so that a busy machine slows all of them. The first is the base."""
    runs: dict[str, Callable[..., object]] = {}
    for method in methods:
        module = (method.make_timed or method.make)(net.make_steps(blocks), net)
        runs[method.name] = partial(run, module, method=method, net=net)
    inputs = {method.name: partial(method.join, net, net.make_pair()) for method in methods}
    durations = take_turns(runs, inputs, rounds, time.perf_counter)
    base = durations[methods[0].name]
    for name, times in durations.items():
        yield Figure("seconds", net.name, name, blocks, statistics.median(times))
        ratio = statistics.median(t / b for t, b in zip(times, base, strict=True))
        yield Figure("time", net.name, name, blocks, ratio)


def time_machinery(methods: Sequence[Method], blocks: int, rounds: int) -> Iterator[Figure]:
    """Yield what each method costs beyond the arithmetic: the time of small steps, less that of as many calls in a loop."""
    net = SMALL_STEPS
    runs: dict[str, Callable[..., object]] = {}
    calls: dict[str, float] = {}
    for method in methods:
        counting = [_Counting(step) for step in net.make_steps(blocks)]
        with warnings.catch_warnings(action="ignore"):
            run(method.make(list(counting), net), method.join(net, net.make_pair()), method, net)
            runs[method.name] = partial(run, method.make(net.make_steps(blocks), net), method=method, net=net)
        calls[method.name] = statistics.mean(step.calls for step in counting)
    loops = {times: f"loop, {times} calls" for times in (1, 2)}
    runs |= {name: partial(run, _Repeating(net.make_steps(blocks), n), method=methods[0], net=net) for n, name in loops.items()}
    inputs = {method.name: partial(method.join, net, net.make_pair()) for method in methods}
    inputs |= dict.fromkeys(loops.values(), inputs[methods[0].name])
    durations = take_turns(runs, inputs, rounds, time.process_time)
    for method in methods:
        rows = zip(durations[method.name], *(durations[name] for name in loops.values()), strict=True)
        beyond = statistics.median(t - once - (calls[method.name] - 1) * (twice - once) for t, once, twice in rows)
        yield Figure("machinery", net.name, method.name, blocks, beyond / (2 * blocks) * 1e6)


def take_turns(
    runs: dict[str, Callable[..., object]], inputs: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return the seconds of each run in every round, on one thread; the first two rounds warm up."""
    durations: dict[str, list[float]] = {name: [] for name in runs}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(action="ignore"):
            for i, (name, call) in product(range(2 + rounds), runs.items()):
                given = inputs[name]()
                start = clock()
                call(given)
                if i >= 2:
                    durations[name].append(clock() - start)
    finally:
        torch.set_num_threads(threads)
    return durations


def run(module: nn.Module, inputs: Sequence[Tensor], method: Method, net: Net) -> Pair:
    """Run a forward and backward of a linear loss; return the outputs."""
    module.zero_grad()
    outputs = module(*inputs)
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(tensors, [torch.ones_like(y) for y in tensors])
    return method.split(net, outputs)


class _Counting(nn.Module):
    """A step that counts its calls."""

    def __init__(self, step: nn.Module):
        super().__init__()
        self.step = step
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.step(x)
        return out


class _Repeating(Loop):
    """The loop with every function called several times, the last time for the result."""

    def __init__(self, steps: Sequence[nn.Module], calls: int):
        super().__init__(steps)
        self.calls = calls

    def forward(self, x1: Tensor, x2: Tensor) -> Pair:
        for step in self.steps:
            for _ in range(self.calls - 1):
                step(x2.detach().requires_grad_())
            x1, x2 = x2, x1 + step(x2)
        return x1, x2


def _make_small_step() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


@contextmanager
def _ignore_warnings_of(method: Method) -> Iterator[None]:
    """Ignore the warnings of other packages."""
    with warnings.catch_warnings():
        if method.package is not None:
            warnings.simplefilter("ignore")
        yield
