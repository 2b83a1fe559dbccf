"""Write the figures of the README and of pages in docs/ from the results: none is copied by hand.

    python benchmarks/readme.py

A test compares the pages with the results, so it fails after a measurement until this has run.
"""

import argparse
import itertools
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from comparison.net import NETS
from comparison.report import ComparisonReport
from comparison.table import format_passed, list_net_cells

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
BEGIN = "<!-- Written by `python benchmarks/readme.py` from the results. -->\n"
END = "<!-- End of what is written. -->\n"
PLAN = "revzoo plan timm:vit_base_patch16_224 --batch 256 --budget 21.6GB"
CHAINS = {"transformer": "transformer", "conv": "convolutions"}
METHODS = {"store": "`store`", "checkpoint": "`torch.utils.checkpoint` per block"}
METHODS |= {"recompute": "`recompute`", "invert": "`invert`"}


def write_section(page: str, lines: Iterable[str]) -> str:
    """Return a page with other lines between the two comments."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{''.join(line + chr(10) for line in lines)}{END}{after}"


def describe_headlines() -> Iterator[str]:
    """Yield the caption of the README's picture, and three numbers with the commands that repeat them."""
    plan, runtime = (json.loads(file.read_text()) for file in (ROOT / "docs/vit_base_plan.json", RESULTS / "runtime.json"))
    report = ComparisonReport.from_dict(json.loads((RESULTS / "peers.json").read_text()))
    stored, peak = (plan[f"{which}peak_bytes"] / 2**30 for which in ("no_recompute_", ""))
    yield from wrap(
        f"*A training step of timm's ViT-B on 256 images: {stored:.1f} GiB with everything stored, {peak:.1f} GiB as "
        "planned, which fits a card of 24 GB.*"
    )
    yield ""
    more, less = plan["extra_flops"] / plan["total_flops"], 1 - peak / stored
    depth, inverted = list(find(runtime, "peak activation memory, in streams", "transformer", "invert").items())[-1]
    kept = find(runtime, "peak activation memory, in streams", "transformer", "store")[depth]
    best = max(report.count_passed(name)[0] for name in ("memcnn", "RevTorch", "revlib", "reformer_pytorch"))
    for lead, text, command in (
        (
            f"{100 * less:.0f} % less memory for {100 * more:.1f} % more FLOPs",
            "in that step, with the same gradients to the bit",
            PLAN,
        ),
        (
            f"{inverted:.0f} activations instead of {kept:.0f}",
            f"at the peak of a reversible transformer of {depth} blocks, and as many of one twice as deep",
            "python benchmarks/runtime.py",
        ),
        (
            f"{format_passed(report, 'revzoo invert')} checks",
            f"that what training scripts do comes out right; the next best package that rebuilds activations passes {best}",
            "python benchmarks/peers.py",
        ),
    ):
        yield from textwrap.wrap(f"- **{lead}** {text} (`{command}`)", 127, subsequent_indent="  ", break_on_hyphens=False)


def describe_performance() -> Iterator[str]:
    """Yield the lines of the section of docs/benchmark.md."""
    yield from describe_modes(json.loads((RESULTS / "runtime.json").read_text()))
    yield ""
    yield from describe_lookahead(json.loads((RESULTS / "lookahead.json").read_text()))
    for name, describe in (("tiles", describe_tiles), ("peers", describe_peers)):
        if (file := RESULTS / f"{name}.json").exists():
            yield ""
            yield from describe(json.loads(file.read_text()))


def describe_modes(results: dict[str, Any]) -> Iterator[str]:
    """Yield the table of the modes and of checkpointing."""
    yield "Measured with `python benchmarks/runtime.py`:"
    yield ""
    yield "| chain | | peak activation memory [streams] | FLOPs | time on 2 CPU cores |"
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
    """Yield the table of look-ahead and of recovering step by step."""
    yield from wrap("Steps recovered one by one and during the gradient, measured with `python benchmarks/lookahead.py`:")
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
        "operation a core is free for the recovery, with two it is not. "
        "All figures: `benchmarks/results/cpu/lookahead.json`."
    )


def describe_tiles(results: dict[str, Any]) -> Iterator[str]:
    """Yield the table of steps in tiles and whole ones."""
    yield "Steps whole and cut into tiles, measured with `python benchmarks/tiles.py`:"
    yield ""
    methods = ("checkpointed", "whole", "2 tiles", "8 tiles", "32 tiles")
    yield f"| network | | {' | '.join(methods)} |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for what, net in dict.fromkeys((figure["what"], figure["net"]) for figure in results["figures"]):
        values = {method: find(results, what, net, method) for method in methods}
        depths: dict[str, list[int]] = {}
        for depth in values["whole"]:
            cells = " | ".join(format_value(values[method][depth]) if values[method] else "" for method in methods)
            depths.setdefault(cells, []).append(depth)
        for cells, (first, *more) in depths.items():
            yield f"| {net}, {f'{first} to {more[-1]}' if more else first} blocks | {what} | {cells} |"
    yield ""
    yield from wrap(
        f"Bytes and FLOPs are counted; times are medians of ratios, on {describe_machine(results)}. Convolutions and "
        "attention are cut along examples, MLPs along tokens. The partial sums of a step's parameter gradients are among the "
        "bytes: 1.5 streams of the transformer. All figures: `benchmarks/results/cpu/tiles.json`."
    )


def format_value(value: float) -> str:
    """Return four digits, or all of those before the point."""
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def describe_peers(results: dict[str, Any]) -> Iterator[str]:
    """Yield the table of all methods."""
    report = ComparisonReport.from_dict(results)
    depths = [" and ".join(map(str, report.find("peak", net.name, report.methods[0]))) for net in NETS]
    yield "The same blocks by PyTorch alone and by other packages, measured with `python benchmarks/peers.py`:"
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
    yield "![Memory, FLOPs and checks of every method](../benchmarks/results/cpu/peers.png)"


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


def describe_reversible() -> Iterator[str]:
    """Yield the lines of the section of docs/reversible.md."""
    results = json.loads((RESULTS / "finetune_llm.json").read_text())
    for part, describe in REVERSIBLE.items():
        if part in results:
            yield from describe(results[part])
            yield ""
    yield from describe_random_signs(json.loads((RESULTS / "random_signs.json").read_text()))
    yield ""
    yield "![Networks made reversible in place, compared with checkpointing](../benchmarks/results/cpu/finetune_llm.png)"


def describe_reversible_memory(part: dict[str, Any]) -> Iterator[str]:
    """Yield the table of what blocks keep and of peaks, relative to checkpointing."""
    methods = ("8 bits", "4 bits", "random bit", "split, 4 bits", "split, random bit")
    yield f"| kept / peak, relative to checkpointing | {' | '.join(methods)} |"
    yield "|---" * (1 + len(methods)) + "|"
    for net in part["rows"]:
        rows = {row["method"]: row for row in net["methods"]}
        kept, peaks = (
            [rows[method][key] / rows["checkpointed"][key] for method in methods] for key in ("block_bytes", "peak_bytes")
        )
        yield f"| {' | '.join([describe_network(net), *map('{:.2f} / {:.2f}'.format, kept, peaks)])} |"
    yield ""
    yield from wrap(
        "Bytes that a training step keeps because of its blocks / its peak without weights and their gradients, relative to "
        "gradient checkpointing of every block. Split blocks keep the bits of twice as many steps, and in backward "
        'the inside of half a block at a time. A random bit is `kept_bits=1, sign="random"`. Bytes are counted, on any machine '
        "(`python benchmarks/finetune_llm.py --only memory`)."
    )


def describe_reversible_time(part: dict[str, Any]) -> Iterator[str]:
    """Yield the table of times, relative to checkpointing."""
    methods = [method for method in part["rows"][0]["of_checkpointed"] if method != "checkpointed"]
    yield f"| CPU time / FLOPs, relative to checkpointing | {' | '.join(methods)} |"
    yield "|---" * (1 + len(methods)) + "|"
    for net in part["rows"]:
        ratios = [f"{net['of_checkpointed'][method]:.2f} / {net['flops_of_checkpointed'][method]:.2f}" for method in methods]
        yield f"| {' | '.join([describe_network(net), *ratios])} |"
    yield ""
    yield from wrap(
        "CPU time and FLOPs of a step relative to checkpointing; times are the median of "
        f"{part['rows'][0]['rounds']} rounds on {describe_machine(part)} (`--only time`). Checkpointing ends the second run of "
        "a block at its last product, whose output backward does not need; inversion needs it to get the state before. The "
        "rest of the difference is arithmetic on the grid, and the comparison of rebuilt states with those of forward."
    )


def describe_reversible_similarity(part: dict[str, Any]) -> Iterator[str]:
    """Yield the table of cosines and nearest neighbours by length."""
    methods = list(dict.fromkeys(row["method"] for row in part["rows"]))
    yield f"| cosine: mean, least; same neighbour | {' | '.join(methods)} |"
    yield "|---" * (1 + len(methods)) + "|"
    for tokens, group in itertools.groupby(part["rows"], key=lambda row: row["tokens"]):
        rows = {row["method"]: row for row in group}
        cells = [f"{row['cosine']:.6f}, {row['least_cosine']:.6f}; {row['agreement']:.2%}" for row in rows.values()]
        yield f"| {' | '.join([f'{tokens} tokens', *(cell.replace('%', ' %') for cell in cells)])} |"
    yield ""
    eight = [row for row in part["rows"] if row["method"] == "8 bits"]
    yield from wrap(
        "Sentence embeddings of MiniLM (all-MiniLM-L6-v2, 6 blocks) before and after, without training, on "
        f"{' / '.join(str(row['passages']) for row in eight)} padded passages of English prose of at most that many tokens: "
        "their cosine, mean and least, and how many keep their nearest neighbour. The last column is the ordinary network in "
        "bfloat16 autocast. With 8 bits, passages with another neighbour were nearly as close to it before: the difference of "
        f"the cosines was at most {max(row['margin'] for row in eight):.4f} (`--only similarity`)."
    )


def describe_reversible_accuracy(part: dict[str, Any]) -> Iterator[str]:
    """Yield the table of test accuracies."""
    yield "| trained | method | test accuracy [%] | difference [points] |"
    yield "|---|---|---|---|"
    for row in part["summary"]:
        cells = [row["training"], row["method"], f"{row['mean']:.2f} ± {row['deviation']:.2f}"]
        cells.append("" if row["method"] == "original" else f"{row['difference']:+.2f} ± {row['difference_error']:.2f}")
        yield f"| {' | '.join(cells)} |"
    yield ""
    setting, seeds = part["setting"], {run["seed"] for run in part["runs"]}
    train, test = setting["texts"]
    agreement = min(run["agreement"] for run in part["runs"] if "agreement" in run)
    machines = " and ".join(sorted({describe_machine(part | run) for run in part["runs"]}))
    yield from wrap(
        f"MiniLM learns in which of {len(setting['sections'])} sections of Debian a package is, by its description ({train} "
        f"for training, {test} for testing, {setting['updates']} updates of {setting['batch']}): all weights, or LoRA matrices "
        f"and the head. Mean over {len(seeds)} seeds, the deviation of one, and the difference from the original of the same "
        'seed with its standard error. "deployed" is the reversible network after `ordinary_`; it gave at least '
        f"{agreement:.2f} % of the reversible one's answers. Float32, on {machines} (`--only accuracy`)."
    )


def describe_random_signs(tasks: dict[str, Any]) -> Iterator[str]:
    """Yield the table of what random signs cost from scratch and on IgLM."""
    methods = [row["method"] for row in tasks["digits"]["summary"]]
    yield f"| task | {' | '.join(methods)} |"
    yield "|---" * (1 + len(methods)) + "|"
    for name, task in tasks.items():
        unit, digits = ("test top-1 [%]", 2) if task["score"] == "top1" else ("test loss", 3)
        original, *others = task["summary"]
        cells = [f"{name}, {unit}, {len(original['accuracies'])} seeds"]
        cells += [f"{original['mean']:.{digits}f} ± {original['deviation']:.{digits}f}"]
        cells += [f"{row['difference']:+.{digits}f} ± {row['difference_error']:.{digits}f}" for row in others]
        yield f"| {' | '.join(cells)} |"
    yield ""
    antibodies = tasks["antibodies"]
    updates = {name: task["runs"][0]["updates"] for name, task in tasks.items()}
    (train, test), size = (antibodies["setting"][key] for key in ("sequences", "batch"))
    yield from wrap(
        "Random signs from scratch and in fine-tuning: mean and deviation of the ordinary network over seeds, and the "
        "others' mean difference from it with its standard error; losses in nats of a byte or token, less is better. Digits: "
        f"`rev_vit_digits`, 12 steps, {updates['digits']} updates by its recipe. Text: `rev_gpt_mini`, 8 steps, windows of 128 "
        f"bytes, {updates['text']} updates by the recipe `lm`. Antibodies: IgLM-S, a GPT-2 of 3 blocks from the package iglm, "
        f"on {train} camel sequences that the larger IgLM wrote, {test} more for testing, {updates['antibodies']} updates of "
        f"{size}: a loss of {antibodies['runs'][0]['before']:.3f} before. Float32, on {describe_machine(antibodies)} (`python "
        "benchmarks/random_signs.py`)."
    )


def describe_network(net: dict[str, Any]) -> str:
    """Return name, depth and dtype of a network."""
    return f"{net['network']}, {net['layers']} blocks, {net['dtype']}"


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


REVERSIBLE = {
    "memory": describe_reversible_memory,
    "time": describe_reversible_time,
    "similarity": describe_reversible_similarity,
    "accuracy": describe_reversible_accuracy,
}
PAGES = {
    "README.md": describe_headlines,
    "docs/benchmark.md": describe_performance,
    "docs/numerics.md": describe_numerics,
    "docs/reversible.md": describe_reversible,
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, describe in PAGES.items():
        page = ROOT / name
        page.write_text(write_section(page.read_text(), describe()))


if __name__ == "__main__":
    main()
