"""Write the README's performance section and the accuracies of docs/numerics.md from the results: no figure is copied by hand.

    python benchmarks/readme.py

A test compares both pages with the results, so it fails after a measurement until this has run.
"""

import argparse
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from revzoo.bench.net import NETS
from revzoo.bench.report import BenchReport
from revzoo.display.tables.bench import format_passed, list_net_cells

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
BEGIN = "<!-- Written by `python benchmarks/readme.py` from the results. -->\n"
END = "<!-- End of what is written. -->\n"
CHAINS = {"transformer": "transformer", "conv": "convolutions"}
METHODS = {"store": "`store`", "checkpoint": "`torch.utils.checkpoint` per block"}
METHODS |= {"recompute": "`recompute`", "invert": "`invert`"}


def write_section(page: str, lines: Iterable[str]) -> str:
    """Return a page with other lines between the two comments."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{''.join(line + chr(10) for line in lines)}{END}{after}"


def describe_performance() -> Iterator[str]:
    """Yield the lines of the README's section."""
    yield from describe_modes(json.loads((RESULTS / "runtime.json").read_text()))
    yield ""
    yield from describe_lookahead(json.loads((RESULTS / "lookahead.json").read_text()))
    peers = RESULTS / "peers.json"
    if peers.exists():
        yield ""
        yield from describe_peers(json.loads(peers.read_text()))


def describe_modes(results: dict[str, Any]) -> Iterator[str]:
    """Yield the table of the modes beside checkpointing."""
    yield "Measured with `python benchmarks/runtime.py`:"
    yield ""
    yield "| chain | | peak activation memory [streams] | FLOPs | time |"
    yield "|---|---|---|---|---|"
    for net, name in CHAINS.items():
        for method, label in METHODS.items():
            peaks = find(results, "peak activation memory, in streams", net, method)
            depths, sizes = " / ".join(map(str, peaks)), " / ".join(f"{size:.2f}" for size in peaks.values())
            flops = list(find(results, "FLOPs over stored", net, method).values())[-1]
            (time,) = find(results, "time over stored", net, method).values()
            yield f"| {name}, {depths} blocks | {label} | {sizes} | {flops:.4f} | {time:.2f} |"
    yield ""
    timed = [next(iter(find(results, "time over stored", net, "store"))) for net in CHAINS]
    yield from wrap(
        "A stream is one of the two tensors of the chain (1.15 MiB and 4 MiB here); memory is counted to the byte and does not "
        f"depend on the machine. FLOPs (of the deepest chain, a multiply-add counted twice) and time ({timed[0]} and "
        f"{timed[1]} blocks, median ratio to `store` in the same run) are those of a forward and backward on "
        f"{describe_machine(results)}, float32, batch 8 and 32. All figures: `benchmarks/results/cpu/runtime.json`."
    )


def describe_lookahead(results: dict[str, Any]) -> Iterator[str]:
    """Yield the table of look-ahead beside recovering step by step."""
    yield from wrap("Steps recovered one by one and beside the gradient, measured with `python benchmarks/lookahead.py`:")
    yield ""
    yield "| chain | | peak activation memory [streams] | time, 1 thread in each operation | 2 threads |"
    yield "|---|---|---|---|---|"
    for net, name in CHAINS.items():
        for method in ("lookahead=0", "lookahead=1"):
            (size,) = find(results, "peak activation memory, in streams", net, method).values()
            whats = [f"time over stored, {count} in each operation" for count in ("1 thread", "2 threads")]
            times = [time for what in whats for time in find(results, what, net, method).values()]
            yield f"| {name} | `invert`, `{method}` | {size:.2f} | {' | '.join(f'{time:.2f}' for time in times)} |"
    yield ""
    yield from wrap(
        f"Times are over those of `store` in the same run, on {results['hardware']['cores']} cores: with one thread in each "
        'operation a core is free for the recovery, with two it is not. `lookahead = "auto"` times both and keeps the faster. '
        "All figures: `benchmarks/results/cpu/lookahead.json`."
    )


def describe_peers(results: dict[str, Any]) -> Iterator[str]:
    """Yield the table of all methods."""
    report = BenchReport.from_dict(results)
    depths = [" and ".join(map(str, report.find("peak", net.name, report.methods[0]))) for net in NETS]
    yield from wrap(
        "The same blocks by PyTorch alone and by other packages, measured with `python benchmarks/peers.py`, which is "
        "`revzoo bench --full` ([what it does](docs/benchmark.md)):"
    )
    yield ""
    yield "| method | transformer: peak [streams] | FLOPs | time | convolutions: peak [streams] | FLOPs | time | checks |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in report.methods:
        if name not in report.left_out:
            cells = [cell for net in NETS for i, cell in enumerate(list_net_cells(report, net, name)) if i != 1]
            yield f"| {' | '.join([name, *cells, format_passed(report, name)])} |"
    for name, reason in report.left_out.items():
        yield f"| {name} | {reason} | | | | | | |"
    yield ""
    versions = ", ".join(f"{name} {version}" for name, version in report.packages.items())
    yield from wrap(
        f"Peaks at {depths[0]} and at {depths[1]} blocks; FLOPs and time over those of plain autograd; checks that it passes. "
        f"On {describe_machine(results)} ({versions}). All figures: `benchmarks/results/cpu/peers.json`."
    )
    yield ""
    yield "![Memory, FLOPs and checks of every method](benchmarks/results/cpu/peers.png)"


def describe_numerics() -> Iterator[str]:
    """Yield the lines of the section of docs/numerics.md."""
    files = [path for name in ("numerics", "numerics_mnist") if (path := RESULTS / f"{name}.json").exists()]
    yield from describe_accuracies([json.loads(path.read_text()) for path in files])
    for path in files:
        yield ""
        yield f"![Test accuracy over depth and slope](../benchmarks/results/cpu/{path.stem}_accuracy.png)"


def describe_accuracies(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of accuracies with stored and with rebuilt activations, two columns for each data set."""
    heads = [head for each in results for head in (f"{each['data']}: stored [%]", "rebuilt [%]")]
    yield f"| {' | '.join(['network', 'depth', *heads])} |"
    yield "|---" * (2 + len(heads)) + "|"
    for rows in zip(*(each["summary"] for each in results), strict=True):
        (place,) = {(row["network"], row["depth"]) for row in rows}
        cells = [f"{row[schedule]:.1f}" for row in rows for schedule in ("store", "invert")]
        yield f"| {' | '.join([*map(str, place), *cells])} |"
    yield ""
    trainings = ", ".join(f"{len(each['size']['seeds'])} on {each['data']}" for each in results)
    yield from wrap(
        f"Test accuracy, mean over trainings ({trainings}) on {describe_machine(results[0])}, float32, slope 0.2, measured "
        "with `python benchmarks/numerics.py`."
    )


def wrap(text: str) -> list[str]:
    """Return the lines of a paragraph; code and links stay whole."""
    return textwrap.wrap(text, 127, break_long_words=False, break_on_hyphens=False)


def find(results: dict[str, Any], what: str, net: str, method: str) -> dict[int, float]:
    """Return the values of a figure by number of blocks."""
    wanted = (what, net, method)
    return {f["depth"]: f["value"] for f in results["figures"] if (f["what"], f["net"], f["method"]) == wanted}


def describe_machine(results: dict[str, Any]) -> str:
    """Return the hardware and the version of torch."""
    hardware = results["hardware"]
    threads = "one thread" if hardware["threads"] == 1 else f"{hardware['threads']} cores"
    return f"{threads} of an {hardware['cpu']}, torch {results['versions']['torch'].partition('+')[0]}"


PAGES = {"README.md": describe_performance, "docs/numerics.md": describe_numerics}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, describe in PAGES.items():
        page = ROOT / name
        page.write_text(write_section(page.read_text(), describe()))


if __name__ == "__main__":
    main()
