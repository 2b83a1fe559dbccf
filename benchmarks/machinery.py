"""What the runtime's own work costs: time beyond the arithmetic that a schedule asks for, beside PyTorch's checkpointing.

    python benchmarks/machinery.py --out machinery.json     about 7 minutes
    python benchmarks/machinery.py --quick                  the same figures in seconds, too few to mean anything

On a GPU the small kernels of a step compete with Python, and on small steps it is most of the time. So each row is measured on
the CPU clock of one thread: the cases take turns, and the median over all rounds is taken.

    overhead      time of a step beyond a plain loop that runs f once more, as `invert` and checkpointing must. `recompute` and
                  `selective` run less of f than that, so that theirs is understated. The steps are LayerNorm and an MLP of
                  width 8, and those of rev_vit_digits; batches are tiny.
    arithmetic    forward and backward of the chains of runtime.py with exact=True, or with the lost bits kept, over `invert`
    long chains   time of a step of a chain of 64 and of 6144 steps; what finds a step must not depend on their number
    tripwire      forward and backward of the transformer chain with the tripwire on, over off
    in-place ABN  forward and backward of timm's ResNet-50 by inplace_abn_ and of resnext_101_iabn, over the same network with
                  BatchNorm and leaky ReLU in place

`checkpoint` is `torch.utils.checkpoint` around each f, `torch selective` the same with PyTorch's selective contexts, which keep
the outputs of matrix products and attention.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path

import timm
import torch
from runtime import Figure, nets, report
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import revzoo
from revzoo.runtime import ReversibleChain
from revzoo.runtime.coupling import momentum

Run = Callable[[], object]
Call = Callable[[nn.Module, Tensor], Tensor]

_PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
# The largest allowed value of each figure.
_OVERHEADS = {
    "LayerNorm-MLP": {"invert": 100.0},
    "rev_vit_digits": {"invert": 130.0, "selective": 400.0},
}
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


def small_steps() -> list[nn.Module]:
    return [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(24)]


def overhead(rounds: int) -> Iterator[Figure]:
    vit = revzoo.create("rev_vit_digits")
    for net, steps, shape in (
        ("LayerNorm-MLP", small_steps(), (4, 8)),
        ("rev_vit_digits", [step.module for step in vit.layout() if step.kind == "step"], (1, 16, 64)),
    ):
        streams = [torch.randn(shape, requires_grad=True) for _ in range(2)]
        runs: dict[str, Run] = {"plain": partial(loop, steps, streams, run_twice)}
        for mode in ("invert", "recompute", "selective"):
            runs[mode] = partial(run_chain, ReversibleChain(steps), mode, streams)
        selective = partial(create_selective_checkpoint_contexts, _PRODUCTS)
        runs["checkpoint"] = partial(loop, steps, streams, checkpointed)
        runs["torch selective"] = partial(loop, steps, streams, partial(checkpointed, context_fn=selective))
        durations = take_turns(runs, rounds)
        base = durations.pop("plain")
        for method, times in durations.items():
            beyond = statistics.median(t - b for t, b in zip(times, base, strict=True)) / len(steps) * 1e6
            target = _OVERHEADS[net].get(method)
            yield Figure("overhead per step [us]", net, method, len(steps), beyond, target)
        yield Figure("overhead per step [us]", net, "loop", len(steps), statistics.median(base) / len(steps) * 1e6)


def arithmetic(rounds: int, quick: bool) -> Iterator[Figure]:
    for net in nets(quick):
        depth, batch, weights = net.depths[0], net.batch(), net.batch()
        chains = {method: net.chain(depth, "invert") for method in ("invert", "exact", "8 kept bits")}
        chains["exact"].exact = True
        kept = chains["8 kept bits"]
        kept.couplings = (momentum(kept_bits=8, gain=1.0),) * len(kept.couplings)
        runs = {method: partial(run_chain, chain, "invert", batch, weights) for method, chain in chains.items()}
        yield from ratios("time over invert", net.name, depth, take_turns(runs, rounds), "invert", _ARITHMETIC[net.name])


def long_chains(rounds: int, quick: bool) -> Iterator[Figure]:
    lengths = (8, 64) if quick else (64, 6144)
    streams = [torch.randn(4, requires_grad=True) for _ in range(2)]
    chains = {str(n): ReversibleChain([Scale() for _ in range(n)]) for n in lengths}
    durations = take_turns({n: partial(run_chain, chain, "invert", streams) for n, chain in chains.items()}, rounds, warm_up=1)
    for n, times in durations.items():
        yield Figure("time per step [us]", "product with a weight", "invert", int(n), statistics.median(times) / int(n) * 1e6)


def tripwire(rounds: int, quick: bool) -> Iterator[Figure]:
    net = nets(quick)[0]
    depth, batch, weights = net.depths[0], net.batch(), net.batch()
    chains = {"off": net.chain(depth, "invert"), "on": net.chain(depth, "invert")}

    def run(switch: str) -> None:
        revzoo.runtime.set_tripwire(switch == "on")
        run_chain(chains[switch], "invert", batch, weights)

    durations = take_turns({switch: partial(run, switch) for switch in chains}, rounds)
    revzoo.runtime.set_tripwire(True)
    yield from ratios("time with the tripwire over without", net.name, depth, durations, "off", {"on": _TRIPWIRE})


def in_place_abn(rounds: int, quick: bool) -> Iterator[Figure]:
    size, batch = (64, 4) if quick else (128, 8)
    twin = timm.create_model("resnet26" if quick else "resnet50", act_layer="leaky_relu", zero_init_last=False)
    abn = deepcopy(twin)
    images = torch.randn(batch, 3, size, size)
    revzoo.inplace_abn_(abn, images)
    yield from in_place_abn_ratios("timm ResNet", {"BatchNorm": twin, "in-place ABN": abn}, images, rounds)
    overrides = [f"input.size=[{size}, {size}]"] + [f"stages.{i}.depth=1" for i in range(4) if quick]
    nets = {"BatchNorm": "resnext_101_bn", "in-place ABN": "resnext_101_iabn"}
    models = {method: revzoo.create(name, overrides=overrides) for method, name in nets.items()}
    models["in-place ABN"].load_state_dict(models["BatchNorm"].state_dict())
    yield from in_place_abn_ratios("ResNeXt-101", models, images[: batch // 2], rounds)


def in_place_abn_ratios(net: str, models: Mapping[str, nn.Module], images: Tensor, rounds: int) -> Iterator[Figure]:
    def run(model: nn.Module) -> None:
        model.zero_grad()
        model(images).square().mean().backward()

    durations = take_turns({method: partial(run, model) for method, model in models.items()}, rounds, warm_up=1)
    depth = sum(isinstance(module, nn.Conv2d) for module in models["BatchNorm"].modules())
    targets = {"in-place ABN": _IN_PLACE_ABN}
    yield from ratios("time over BatchNorm", net, depth, durations, "BatchNorm", targets)


def loop(steps: Sequence[nn.Module], streams: Sequence[Tensor], call: Call) -> None:
    """Run the recurrence as a plain loop, and backward."""
    x1, x2 = streams
    for step in steps:
        x1, x2 = x2, x1 + call(step, x2)
    (x1.sum() + x2.sum()).backward()


def run_twice(step: nn.Module, x: Tensor) -> Tensor:
    step(x.detach().requires_grad_())
    out: Tensor = step(x)
    return out


def checkpointed(step: nn.Module, x: Tensor, **options: object) -> Tensor:
    out: Tensor = checkpoint(step, x, use_reentrant=False, **options)
    return out


def run_chain(chain: ReversibleChain, mode: str, streams: Sequence[Tensor], weights: Sequence[Tensor] = ()) -> None:
    chain.schedule = mode
    y1, y2 = chain(*streams)
    if weights:
        torch.autograd.backward([y1, y2], list(weights))
    else:
        (y1.sum() + y2.sum()).backward()


def take_turns(runs: dict[str, Run], rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Return the CPU seconds of each case in every round, so that a busy machine slows all of them."""
    durations: dict[str, list[float]] = {name: [] for name in runs}
    for i, (name, run) in itertools.product(range(warm_up + rounds), runs.items()):
        start = time.process_time()
        run()
        if i >= warm_up:
            durations[name].append(time.process_time() - start)
    return durations


def ratios(
    what: str, net: str, depth: int, durations: dict[str, list[float]], base: str, targets: dict[str, float]
) -> Iterator[Figure]:
    """Yield the median ratio of each case to the base over all rounds, and the seconds of the base."""
    for method, times in durations.items():
        if method != base:
            ratio = statistics.median(t / b for t, b in zip(times, durations[base], strict=True))
            yield Figure(what, net, method, depth, ratio, targets[method])
    yield Figure(what, net, f"{base} [s]", depth, statistics.median(durations[base]))


def measure(quick: bool) -> Iterator[Figure]:
    yield from overhead(rounds=2 if quick else 60)
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
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report(measure(args.quick), args.out)


if __name__ == "__main__":
    main()
