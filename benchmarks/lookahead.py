"""Look-ahead (PaReprop) against recovering step by step and against storing: time and memory.

    python benchmarks/lookahead.py --out lookahead.json     about 10 minutes on 2 idle CPU cores
    python benchmarks/lookahead.py --quick                  the same figures on tiny chains, in seconds

The chains of runtime.py, forward and backward, on the wall clock: the methods take turns, and the median ratio to `store` of
all rounds is taken. With one thread in each operation, the second core is free for the recovery; with two, it is not. Memory is
counted, in streams.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from runtime import Figure, Net, nets, report

import revzoo
from revzoo.runtime import ReversibleChain

THREADS = (1, 2)
# The largest allowed value of each figure, with one thread.
_TIMES = {"transformer": 1.10, "conv": 1.12}
_STREAMS = {"transformer": 22.5}


def ahead(net: Net, depth: int, lookahead: object, method: str = "invert") -> ReversibleChain:
    chain = net.chain(depth, method)
    chain.lookahead = lookahead
    return chain


def memory(net: Net, quick: bool) -> Iterator[Figure]:
    unit, depth = net.batch()[0].nbytes, net.depths[0]
    for lookahead in (0, 1):
        counted = revzoo.measure_memory(ahead(net, depth, lookahead), net.batch())
        most = _STREAMS.get(net.name) if lookahead and not quick else None
        yield Figure(
            "peak activation memory, in streams",
            net.name,
            f"lookahead={lookahead}",
            depth,
            counted.activation_bytes / unit,
            most,
        )


def seconds(net: Net, threads: int, rounds: int, quick: bool) -> Iterator[Figure]:
    depth = net.depths[1]
    chains = {
        "store": ahead(net, depth, 0, "store"),
        "lookahead=0": ahead(net, depth, 0),
        "lookahead=1": ahead(net, depth, 1),
        "recompute": ahead(net, depth, 0, "recompute"),
        "recompute, lookahead=1": ahead(net, depth, 1, "recompute"),
    }
    durations = take_turns(net, chains, threads, rounds)
    what = f"time over stored, {threads} thread{'s' * (threads > 1)} in each operation"
    for method, times in durations.items():
        ratio = statistics.median(t / base for t, base in zip(times, durations["store"], strict=True))
        target = _TIMES[net.name] if method == "lookahead=1" and threads == 1 and not quick else None
        yield Figure(what, net.name, method, depth, ratio, target)
    yield Figure(what, net.name, "store [s]", depth, statistics.median(durations["store"]))


def take_turns(
    net: Net, chains: dict[str, ReversibleChain], threads: int, rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Return the seconds of a forward and backward of each chain in every round, so that a busy machine slows all of them."""
    torch.set_num_threads(threads)
    batch, weights = net.batch(), net.batch()
    durations: dict[str, list[float]] = {name: [] for name in chains}
    for i, (name, chain) in itertools.product(range(warm_up + rounds), chains.items()):
        chain.zero_grad()
        start = time.perf_counter()
        torch.autograd.backward(chain(*batch), weights)
        if i >= warm_up:
            durations[name].append(time.perf_counter() - start)
    return durations


def measure(quick: bool) -> Iterator[Figure]:
    parts: list[Callable[[Net], Iterator[Figure]]] = [partial(memory, quick=quick)]
    parts += [partial(seconds, threads=threads, rounds=1 if quick else 11, quick=quick) for threads in THREADS]
    for part in parts:
        for net in nets(quick):
            yield from part(net)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("lookahead.json"), help="JSON file with all figures (default: lookahead.json)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny chains, few rounds, no targets")
    args = parser.parse_args()
    report(measure(args.quick), args.out)


if __name__ == "__main__":
    main()
