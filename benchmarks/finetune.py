"""Fine-tune small pretrained networks as they are and converted, and compare their test accuracy.

    python benchmarks/finetune.py                   all networks, about 20 minutes on 2 CPU cores
    python benchmarks/finetune.py --only ViT BERT   some of them
    python benchmarks/finetune.py --quick           toy sizes, which learn nothing, in half a minute

Each network is trained once on a first task. Then it gets a fresh head and is fine-tuned to a second task
(finetune_tasks.py): as it is, and converted with each of several couplings. Three seeds draw the head and the batches. Loop,
optimizer and the batches of a seed are the same for all. Converted networks rebuild their activations (schedule "invert"); in
floating point some steps keep their input. The result is the accuracy on the test set after the last update, when the learning
rate is 0; no earlier update is chosen. Momentum networks are then tested as the ordinary networks that their weights are for
("deployed"). Writes finetune.json and a figure of curves for each network.
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from finetune_tasks import Arch, Task, list_archs
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from runtime import describe_environment
from torch import Tensor, nn

import revzoo
from revzoo.conversion.choice import CouplingName
from revzoo.conversion.compare import zero_b
from revzoo.data.base import IGNORED
from revzoo.format import format_bytes
from revzoo.model.model import Model
from revzoo.training.coupling_schedule import CouplingSchedule
from revzoo.training.options import CouplingOptions

SEEDS = (10, 11, 12)  # not those with which the default was chosen
POINTS = 0.5  # how far the accuracy of a converted network may be below its original's [percentage points]
_COMPARED = 512  # number of test examples on which a conversion is compared with its original
_DECAY, _CLIP, _WARM_UP = 0.05, 1.0, 0.1  # weight decay; largest norm of the gradient; share of updates


@dataclass(frozen=True)
class Variant:
    """One way to fine-tune a network.

    Args:
        label: its name in the table and the figures.
        coupling: of the conversion; None: the original itself.
        start: further arguments of `revzoo.convert`.
        moves: how the coupling changes during fine-tuning; None: it does not.
        only: the only network that it is used for; None: all.
    """

    label: str
    coupling: CouplingName | None = None
    start: dict[str, Any] | None = None
    moves: CouplingOptions | None = None
    only: str | None = None


def _lower_bits(last: int, share: float = 0.5) -> Variant:
    return Variant(f"8 bits to {last}", "momentum", {"kept_bits": 8}, CouplingOptions(kept_bits=(8, last), share=share))


VARIANTS = {
    "original": Variant("original"),
    "stay": Variant("8 bits", "momentum", {"kept_bits": 8}),
    **{f"bits_{last}": _lower_bits(last) for last in (4, 2, 0)},
    "additive": Variant("additive", "additive", {}),
    "float_m": Variant("m 0.1 to 0.9", "momentum", {"m": 0.1}, CouplingOptions(m=(0.1, 0.9)), "ViT"),
    "float_dual": Variant(
        "alpha 1 to 0.5, beta 0.1 to 0.9",
        "dual_residual",
        {"beta": 0.1},
        CouplingOptions(alpha=(1.0, 0.5), beta=(0.1, 0.9)),
        "ViT",
    ),
}
DEFAULT = "stay"


def select_variants(name: str) -> dict[str, Variant]:
    """Return the variants of a network."""
    return {key: variant for key, variant in VARIANTS.items() if variant.only in (None, name)}


def pretrain(name: str, quick: bool, file: Path) -> dict[str, Any]:
    """Train a network on its first task and write its tensors; return its accuracy, and how its conversion compares with it."""
    torch.set_num_threads(1)  # of each process
    arch = list_archs(quick)[name]
    torch.manual_seed(0)
    network, task = arch.pretrained(), arch.first()
    curve = list(_train(network, task, arch.updates[0], arch.lr, 1, arch.every, torch.Generator().manual_seed(0), None))
    torch.save(network.state_dict(), file)
    x = task.test()[0][:: arch.every][:_COMPARED]
    start = revzoo.convert(network.eval(), batch=x).comparisons[-1]
    return {
        "accuracy": curve[-1][1],
        "seconds": curve[-1][3],
        "parameters": sum(p.numel() for p in network.parameters()),
        "start": {"examples": len(x), "cosine": start.cosine, "agreement": start.agreement},
    }


def finetune(name: str, variant: Variant, seed: int, quick: bool, file: Path) -> dict[str, Any]:
    """Fine-tune one network to its second task; return its curve, and the bytes of its activations at the start and the end."""
    torch.set_num_threads(1)
    arch = list_archs(quick)[name]
    network: Any = load_pretrained(arch, seed, file)
    task = arch.second()
    updates, moves = arch.updates[1], None
    if variant.coupling is not None:
        x, _ = task.batch(torch.Generator().manual_seed(seed))
        network = revzoo.convert(network, coupling=variant.coupling, **(variant.start or {}), batch=x).model
    if variant.moves is not None:
        moves = CouplingSchedule(variant.moves, updates, network.schedule)
    memory = [_measure_activations(network, task, moves, update) for update in (0, updates)]
    curve = list(
        _train(network, task, updates, arch.tuning_lr, arch.evaluations, arch.every, torch.Generator().manual_seed(seed), moves)
    )
    keys = ("update", "accuracy", "loss", "seconds")
    result = {"seed": seed, "curve": [dict(zip(keys, point, strict=True)) for point in curve], "activation_bytes": memory}
    if variant.coupling == "momentum":
        test = [t[:: arch.every] for t in task.test()]
        own = measure_loss(network, *test)
        with zero_b(network):  # what `revzoo export` makes of it
            result["deployed"] = {
                "points": measure_accuracy(network, *test) - result["curve"][-1]["accuracy"],
                "loss": measure_loss(network, *test) - own,
            }
    return result


def load_pretrained(arch: Arch, seed: int, file: Path) -> nn.Module:
    """Return the ordinary network with a head drawn with the seed, and all other tensors from the first task."""
    torch.manual_seed(seed)
    network = arch.fresh()
    own = network.state_dict()
    tensors = {key: tensor for key, tensor in torch.load(file, weights_only=True).items() if key in own}
    network.load_state_dict({key: tensor for key, tensor in tensors.items() if tensor.shape == own[key].shape}, strict=False)
    return network


def _train(
    network: Any,
    task: Task,
    updates: int,
    lr: float,
    evaluations: int,
    every: int,
    rng: torch.Generator,
    moves: CouplingSchedule | None,
) -> Iterator[tuple[int, float, float, float]]:
    """Train; at each evaluation yield updates so far, test accuracy [%], mean training loss since the last one, and seconds.

    Args:
        evaluations: their number, evenly spaced over the updates.
        every: n of "every n-th test example is used".
    """
    groups = [
        {"params": [p for p in network.parameters() if p.ndim > 1], "weight_decay": _DECAY},
        {"params": [p for p in network.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: _scale_rate(update / updates))
    evaluated_after = {updates * (i + 1) // evaluations for i in range(evaluations)}
    losses, spent, test = list[float](), 0.0, [t[::every] for t in task.test()]
    for update in range(updates):
        begin = time.perf_counter()
        network.train()
        if moves is not None:
            moves.apply(update, network)
        x, labels = task.batch(rng)
        loss = F.cross_entropy(_compute_logits(network, x).flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), _CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        spent += time.perf_counter() - begin
        if update + 1 in evaluated_after:
            yield update + 1, measure_accuracy(network, test[0], test[1]), mean(losses), spent
            losses = []


def _scale_rate(progress: float) -> float:
    """Return the learning rate as a share of the largest one: linear warm-up, then a cosine down to 0."""
    if progress < _WARM_UP:
        return progress / _WARM_UP
    return 0.5 + 0.5 * math.cos(math.pi * (progress - _WARM_UP) / (1 - _WARM_UP))


@torch.no_grad()
def measure_accuracy(network: nn.Module, x: Tensor, labels: Tensor) -> float:
    """Return the share of labels that a network predicts [%]."""
    network.eval()
    correct = total = 0
    for inputs, targets in zip(x.split(256), labels.split(256), strict=True):
        correct += int((_compute_logits(network, inputs).argmax(-1) == targets).sum())
        total += int((targets != IGNORED).sum())
    return 100 * correct / total


@torch.no_grad()
def measure_loss(network: nn.Module, x: Tensor, labels: Tensor) -> float:
    """Return the mean cross-entropy."""
    network.eval()
    logits = torch.cat([_compute_logits(network, inputs) for inputs in x.split(256)])
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED).item()


def _compute_logits(network: nn.Module, x: Tensor) -> Tensor:
    outputs = network(x)
    logits: Tensor = getattr(outputs, "logits", outputs)  # Transformers wraps them
    return logits


def _measure_activations(network: nn.Module, task: Task, moves: CouplingSchedule | None, update: int) -> int:
    if moves is not None and isinstance(network, Model):
        moves.apply(update, network)
    x, _ = task.batch(torch.Generator().manual_seed(0))
    return revzoo.measure_memory(network.train(), x).activation_bytes


def measure(names: list[str], quick: bool, folder: Path, pool: Executor) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and all results of one network after the other."""
    firsts = {name: pool.submit(pretrain, name, quick, folder / f"{name}.pt") for name in names}
    seeds = SEEDS[:1] if quick else SEEDS
    runs: dict[str, dict[str, list[Future[dict[str, Any]]]]] = {}
    for name in names:
        firsts[name].result()
        runs[name] = {
            key: [pool.submit(finetune, name, variant, seed, quick, folder / f"{name}.pt") for seed in seeds]
            for key, variant in select_variants(name).items()
        }
    for name in names:
        results = {key: [run.result() for run in each] for key, each in runs[name].items()}
        yield name, {"first_task": firsts[name].result(), **summarise(results)}


def summarise(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return each variant's runs, mean accuracy and distance from the original, and whether the default is close enough."""
    rows: dict[str, dict[str, Any]] = {}
    for key, runs in results.items():
        last = [run["curve"][-1]["accuracy"] for run in runs]
        rows[key] = {
            "label": VARIANTS[key].label,
            "accuracy": mean(last),
            "deviation": stdev(last) if len(last) > 1 else 0.0,
            "activation_bytes": runs[0]["activation_bytes"],
            "seconds": mean(run["curve"][-1]["seconds"] for run in runs),
            "deployed": _average([run["deployed"] for run in runs if "deployed" in run]),
            "runs": runs,
        }
    for row in rows.values():
        row["difference"] = row["accuracy"] - rows["original"]["accuracy"]
    return {"variants": rows, "met": rows[DEFAULT]["difference"] >= -POINTS}


def _average(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each value over rows with the same keys."""
    return {key: mean(row[key] for row in rows) for row in rows[:1] for key in row}


def make_table(results: dict[str, dict[str, Any]]) -> Table:
    lines = Table(box=SIMPLE_HEAD)
    for head in ("network", "coupling", "accuracy", "+-", "points", "deployed", "activations", "share", "seconds"):
        lines.add_column(head, justify="left" if head in ("network", "coupling") else "right", no_wrap=head != "coupling")
    for name, net in results.items():
        stored = net["variants"]["original"]["activation_bytes"][0]
        for key, row in net["variants"].items():
            color = {True: "green", False: "red"}[net["met"]] if key == DEFAULT else "default"
            first, last = row["activation_bytes"]
            sizes = format_bytes(first) if first == last else f"{format_bytes(first)} to {format_bytes(last)}"
            lines.add_row(
                name if key == "original" else "",
                row["label"] + (" (default)" if key == DEFAULT else ""),
                f"{row['accuracy']:.2f} %",
                f"{row['deviation']:.2f}",
                f"[{color}]{row['difference']:+.2f}[/]",
                f"loss {row['deployed']['loss']:+.4f}" if row["deployed"] else "",
                sizes,
                f"{last / stored:.0%}",
                f"{row['seconds']:.1f}",
                end_section=key == list(net["variants"])[-1],
            )
    return lines


def draw(name: str, net: dict[str, Any], file: Path) -> None:
    """Draw the accuracy over the updates, averaged over the seeds, with one line for each variant."""
    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    axes = figure.subplots()
    for key, row in net["variants"].items():
        updates = [point["update"] for point in row["runs"][0]["curve"]]
        means = [mean(run["curve"][i]["accuracy"] for run in row["runs"]) for i in range(len(updates))]
        style = {"color": "black", "lw": 2.4} if key == "original" else {"lw": 2.4 if key == DEFAULT else 1.2}
        axes.plot(updates, means, label=f"{row['label']}: {row['accuracy']:.2f} %", **style)
    axes.set(xlabel="update", ylabel="test accuracy [%]", title=f"{name}, fine-tuned to the second task")
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    figure.savefig(file, format="png", dpi=120, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = Path(__file__).parent / "results" / "cpu"
    names = list(list_archs(quick=True))
    parser.add_argument("--only", nargs="+", choices=names, metavar="NET", default=names, help=f"of {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=home, help=f"folder for finetune.json and pictures (default: {home})")
    parser.add_argument("--quick", action="store_true", help="toy sizes and one seed: nothing is learned")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    console, results = Console(width=None if sys.stdout.isatty() else 140), dict[str, Any]()
    about = describe_environment()
    spawn = multiprocessing.get_context("spawn")
    pool: Executor = ThreadPoolExecutor(1) if args.quick else ProcessPoolExecutor(os.cpu_count(), spawn)
    with TemporaryDirectory() as folder, pool, console.status("fine-tuning"):
        for name, net in measure(args.only, args.quick, Path(folder), pool):
            results[name] = net
            draw(name, net, args.out / f"finetune_{name.lower()}.png")
            result = about | {"default": DEFAULT, "points": POINTS, "networks": results}
            (args.out / "finetune.json").write_text(json.dumps(result, indent=1) + "\n")
    console.print(make_table(results), f"Goal: the default is at most {POINTS} points below the original.")
    for name, net in results.items():
        start = net["first_task"]["start"]
        console.print(
            f"{name}, converted with 8 kept bits, on {start['examples']} test examples of the first task before any training: "
            f"cosine of logits {start['cosine']:.6f}, the same answer in {start['agreement']:.2%}"
        )
    console.print(about)


if __name__ == "__main__":
    main()
