"""Pretrained networks made reversible in place, beside gradient checkpointing: memory, time, similarity and accuracy.

    python benchmarks/finetune_llm.py                         all parts, about 40 minutes on 2 idle CPU cores
    python benchmarks/finetune_llm.py --only memory time      some of them
    python benchmarks/finetune_llm.py --only accuracy         goes on with the runs that are not in the JSON yet
    python benchmarks/finetune_llm.py --quick                 tiny networks and few texts, in half a minute

    memory       Llama and GPT-2: bytes kept from forward to backward, and at the peak, counted (finetune_llm_memory.py)
    time         CPU time of a training step of the first two of them
    similarity   MiniLM, a real sentence encoder: its embeddings before and after (finetune_llm_minilm.py)
    accuracy     MiniLM, fine-tuned as it is, checkpointed, reversible and so with one or two bits of random signs, all of it
                 and with LoRA, 3 seeds; a reversible one is tested as it was trained, and as the ordinary network with its
                 weights

Parts and runs are written to finetune_llm.json one by one; parts that are not measured again stay in it.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from finetune_llm_figure import plot
from finetune_llm_memory import MOST_TIME, describe, list_settings, measure_memory, measure_time, one_thread
from finetune_llm_minilm import LEAST_AGREEMENT, LEAST_COSINE, REVERSIBLE, Task, describe_task, finetune, measure_similarity
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from runtime import describe_environment

from revzoo.format import format_bytes

PARTS = ("memory", "time", "similarity", "accuracy")
TRAININGS, SEEDS = ("full", "LoRA"), (10, 11, 12)
MODES = ("original", "checkpointed", *REVERSIBLE)
POINTS = 0.5  # how far a mean accuracy may be from the original's [percentage points]
_ORIGIN = ("commit", "hardware", "versions")  # of a run, in `describe_environment`

Key = tuple[str, str, int]


def measure_networks(part: str, quick: bool) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of `memory` or `time` so far, after each network."""
    rows = []
    settings = list_settings(quick)
    for setting in settings if part == "memory" else settings[:2]:
        if part == "memory":
            measured: dict[str, Any] = {"methods": list(measure_memory(setting))}
        else:
            measured = measure_time(setting, rounds=1 if quick else 15)
        rows.append(describe(setting) | measured)
        yield rows


def measure_accuracy(before: dict[str, Any], quick: bool, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the part `accuracy` after every run, and go on where an earlier one of the same task ended.

    Each run says on which machine it was. The commit is that of the code when it was loaded: the results, once written, would
    make it look changed.
    """
    task = replace(Task(), updates=4, size=4) if quick else Task()
    setting = describe_task(task, quick)
    same = before.get("setting") == setting
    runs = [{key: before[key] for key in _ORIGIN} | run for run in before["runs"]] if same else []
    done = {_get_key(run) for run in runs}
    wanted = list(itertools.product(TRAININGS, MODES, SEEDS[:1] if quick else SEEDS))
    wanted.sort(key=lambda key: key[2])  # whole seeds first
    spawn = multiprocessing.get_context("spawn")
    pool: Executor = ThreadPoolExecutor(1) if quick else ProcessPoolExecutor(os.cpu_count(), spawn)
    with pool:
        try:
            started = [pool.submit(finetune, *key, task, quick) for key in wanted if key not in done]
            for run in as_completed(started):
                runs.append(run.result() | {key: about[key] for key in _ORIGIN})
                runs.sort(key=lambda run: wanted.index(_get_key(run)))
                yield {"setting": setting, "runs": runs, "summary": summarise(runs)}
        finally:
            pool.shutdown(cancel_futures=True)
    if not started:
        yield {"setting": setting, "runs": runs, "summary": summarise(runs)}


def _get_key(run: dict[str, Any]) -> Key:
    return run["training"], run["method"], run["seed"]


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean accuracy of every variant, and how far it is from the original's, seed by seed."""
    rows = []
    for training in TRAININGS:
        accuracies = {
            method: {run["seed"]: run["accuracy"] for run in runs if (run["training"], run["method"]) == (training, method)}
            for method in MODES
        }
        reversible = [run for run in runs if (run["training"], run["method"]) == (training, "reversible")]
        accuracies["deployed"] = {run["seed"]: run["deployed"] for run in reversible}
        for method, each in accuracies.items():
            if each:
                rows.append({"training": training, "method": method, **compare(each, accuracies["original"])})
                difference = rows[-1]["difference"]
                rows[-1]["met"] = difference is not None and abs(difference) <= POINTS
    return rows


def compare(accuracies: dict[int, float], original: dict[int, float]) -> dict[str, Any]:
    """Return mean and deviation of accuracies by seed, and their mean difference from the original's with its error."""
    differences = [accuracy - original[seed] for seed, accuracy in accuracies.items() if seed in original]
    return {
        "accuracies": list(accuracies.values()),
        "mean": mean(accuracies.values()),
        "deviation": _deviate(list(accuracies.values())),
        "difference": mean(differences) if differences else None,
        "difference_error": _deviate(differences) / max(1, len(differences)) ** 0.5,
    }


def _deviate(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def make_tables(parts: dict[str, Any]) -> Iterator[Table]:
    """Yield a table of each part that was measured."""
    if "memory" in parts:
        yield _make_table(
            "bytes of a training step, weights and their gradients aside",
            ("network", "dtype", "layers", "method", "kept", "peak", "kept by blocks", "of checkpointed", "missed"),
            _list_memory(parts["memory"]["rows"]),
        )
    if "time" in parts:
        yield _make_table(
            f"CPU time of a step; goal: at most {MOST_TIME} of checkpointed",
            ("network", "method", "seconds", "of checkpointed", "FLOPs of checkpointed", "missed"),
            (
                (
                    row["network"],
                    method,
                    f"{seconds:.3f}",
                    f"{row['of_checkpointed'][method]:.3f}",
                    f"{row['flops_of_checkpointed'][method]:.3f}",
                    _mark(row["missed"], method),
                )
                for row in parts["time"]["rows"]
                for method, seconds in row["seconds"].items()
            ),
        )
    if "similarity" in parts:
        yield _make_table(
            f"embeddings before and after; goal: cosine at least {LEAST_COSINE}, same neighbour at least {LEAST_AGREEMENT}",
            ("tokens", "passages", "method", "cosine", "least", "same neighbour", "else margin", "met"),
            (
                (str(row["tokens"]), str(row["passages"]), row["method"], f"{row['cosine']:.6f}",
                 f"{row['least_cosine']:.6f}", f"{row['agreement']:.4f}", f"{row['margin']:.1e}",
                 _color(row["met"]) if "met" in row else "")
                for row in parts["similarity"]["rows"]
            ),
        )  # fmt: skip
    if "accuracy" in parts:
        yield _make_table(
            f"test accuracy; goal: within {POINTS} points of the original",
            ("training", "method", "seeds", "accuracy", "+-", "points", "+-", "met"),
            (
                (row["training"], row["method"], str(len(row["accuracies"])), f"{row['mean']:.2f} %", f"{row['deviation']:.2f}",
                 "" if row["difference"] is None else f"{row['difference']:+.2f}", f"{row['difference_error']:.2f}",
                 _color(row["met"]))
                for row in parts["accuracy"]["summary"]
            ),
        )  # fmt: skip


def _list_memory(nets: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for net in nets:
        for row in net["methods"]:
            first = row is net["methods"][0]
            sizes = [format_bytes(row[f"{what}_bytes"]) for what in ("kept", "peak", "block")]
            share = row.get("blocks_of_checkpointed")
            names = (net["network"], net["dtype"], str(net["layers"])) if first else ("", "", "")
            missed = f"[red]{'; '.join(row['missed'])}[/]"
            yield (*names, row["method"], *sizes, "" if share is None else f"{share:.3f}", missed)


def _make_table(title: str, heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for head in heads:
        words = head in ("network", "dtype", "method", "training", "missed", "met")
        table.add_column(head, justify="left" if words else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _color(met: bool) -> str:
    return "[green]yes[/]" if met else "[red]no[/]"


def _mark(missed: list[str], method: str) -> str:
    return "[red]missed[/]" if any(goal.startswith(method) for goal in missed) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = Path(__file__).parent / "results" / "cpu"
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=home, help=f"folder for finetune_llm.json and .png (default: {home})")
    parser.add_argument(
        "--quick", action="store_true", help="tiny networks, few texts, one seed, no limits: nothing is learned"
    )
    args = parser.parse_args()
    if args.quick and args.out == home:
        parser.error("the results of --quick are no results: give them another folder, --out DIR")
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "finetune_llm.json"
    parts: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    console = Console(width=None if sys.stdout.isatty() else 140)
    with one_thread():
        about = describe_environment(args.out)
    for part in (name for name in PARTS if name in args.only):
        with console.status(part), one_thread():
            if part == "similarity":
                steps: Iterator[dict[str, Any]] = iter([{"rows": list(measure_similarity(args.quick))}])
            elif part == "accuracy":
                steps = measure_accuracy(parts.get(part, {}), args.quick, about)
            else:
                steps = ({"rows": rows} for rows in measure_networks(part, args.quick))
            for measured in steps:
                parts[part] = about | measured
                file.write_text(json.dumps({name: parts[name] for name in PARTS if name in parts}, indent=1) + "\n")
        plot(parts, file.with_suffix(".png"))
    console.print(*make_tables({name: parts[name] for name in args.only}))


if __name__ == "__main__":
    main()
