"""Count the memory that four papers publish: RevNet's, Rev-ViT's, PaReprop's over the batch size, and that of in-place ABN.

    python benchmarks/published_memory.py                   all tables, about 20 minutes on one CPU core
    python benchmarks/published_memory.py --only revnet     one table; what the file has of others stays
    python benchmarks/published_memory.py --quick           the same tables of toy networks, in seconds

    revnet      RevNet (Gomez et al. 2017), table 5: parameters and activations of ResNet-101 and RevNet-104. The published
                schedule keeps the input of each stage, computes its first unit again, and inverts the others; the stem is
                stored. revzoo's schedule "stage_inputs" computes stem and head again, too. The table does not say for how many
                images it is; here it is for 32, which the authors' GPUs had of ResNet-101.
    rev_vit     Rev-ViT (Mangalam et al. 2022), table 1: memory per image, and the largest batch on a GPU of 16 GB. Here the
                batch is the largest that is counted to fit 16 GiB with AdamW, and memory per image is what one more adds.
                "stage inputs" computes stem, transitions and head again, which the authors' code stores.
    pareprop    PaReprop (Zhu and Mangalam 2023), figure 7: peak over batch sizes up to 1024, AdamW included. Beside it are the
                peaks in the logs of tyleryzhu/RevSwin (branch thrput), of whose fusion the networks here are.
    resnext     Jiang et al. 2020, figure 5c and 5d: ResNeXt-101 on a GPU of 12,196 MiB, SGD with momentum. All norms stored,
                all in place, and plans of the stored network for batches between: their FLOPs are over those of storing.

Bytes are counted to the byte in float32 without a device, so the networks need not fit anything, and the result is the same on
every machine. Fused attention is counted as on a CPU, and what the update itself takes is not counted. The papers' figures come
from allocators. MB are 10^6 bytes, GiB 2^30. Writes published_memory.json and published_memory.png (figure 7).
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pareprop_figure import plot_memory
from pareprop_timing import VARIANTS, Variant, build_network
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from runtime import describe_environment
from torch import nn

import revzoo
from revzoo.analysis.flops import count_flops
from revzoo.model.model import Model

_GPU_BYTES, _TITAN_BYTES = 16 * 2**30, 12_196 * 2**20
_SGD = partial(torch.optim.SGD, momentum=0.9)
_TINY_RESNEXT = ("input.size=[32,32]", "stages.2.depth=1")
_TINY_VIT = ("stages.0.depth=1", "input.size=[32,32]", "twin.arguments={depth: 1}")

# Published: [MB] parameters and activations
_REVNET = {"ordinary twin": (178, 5250), "published schedule": (180, 1440)}
# [MB an image] ordinary and reversible, [images] largest batch of both
_REV_VIT = {
    "rev_vit_s": (66.5, 8.8, 207, 1232),
    "rev_vit_b": (129.7, 17.0, 95, 602),
    "rev_vit_l": (349.3, 22.6, 26, 341),
    "rev_mvit_b": (153.6, 66.8, 89, 157),
}
# [GiB] by batch size: ordinary, reversible, with look-ahead
_SWIN: dict[str, dict[int, tuple[float | None, float, float]]] = {
    "rev_swin_t_mlp": {
        8: (1.42, 0.86, 0.90),
        16: (2.28, 1.12, 1.23),
        32: (4.02, 1.67, 1.89),
        64: (7.49, 2.77, 3.21),
        128: (14.43, 4.97, 5.84),
        256: (28.27, 9.36, 11.09),
        512: (55.98, 18.15, 21.60),
        1024: (None, 35.72, 42.64),
    },
    "rev_swin_b_mlp": {
        8: (3.53, 2.10, 2.15),
        16: (5.35, 2.44, 2.59),
        32: (9.06, 3.17, 3.47),
        64: (16.39, 4.62, 5.19),
        128: (31.19, 7.54, 8.69),
        256: (60.44, 13.37, 15.67),
        512: (None, 25.03, 29.64),
    },
    "rev_swin_g_mlp": {8: (61.56, 50.56, 50.84), 16: (74.34, 51.98, 52.56), 32: (None, 54.91, 56.06), 64: (None, 60.65, 62.94)},
}


def count_revnet(quick: bool) -> dict[str, Any]:
    """Return parameter and activation bytes of the twin, and of the RevNet in four schedules."""
    source, batch = ("revnet_38", 2) if quick else ("revnet_104", 32)
    published = None if quick else _REVNET
    model = revzoo.create(source, device="meta")
    networks: dict[str, nn.Module] = {"ordinary twin": build_network(source, (), VARIANTS[0], "meta")}
    rows = []
    schedules = {
        "stored": "store",
        "published schedule": _find_published_schedule(model),
        "stage inputs": "stage_inputs",
        "inverted": "invert",
    }
    for label, schedule in schedules.items():
        networks[label] = revzoo.create(source, schedule=schedule, device="meta")
    for label, network in networks.items():
        memory = revzoo.measure_memory(network, model.example_input(batch))
        row = {"variant": label, "parameter_bytes": memory.weight_bytes, "activation_bytes": memory.activation_bytes}
        rows.append(row | {"published_megabytes": published.get(label) if published else None})
    return {"model": source, "batch": batch, "rows": rows}


def _find_published_schedule(model: Model) -> list[str]:
    """Return the schedule of revnet-public: stage inputs are kept, each first unit runs again, the others are inverted."""
    modes = {"step": "invert", "node": "store"}
    units = [unit for unit in model.layout() if unit.is_unit]
    return ["recompute" if unit.name.endswith("transition") else modes[unit.kind] for unit in units]


def make_counter(
    source: str, overrides: Sequence[str], variant: Variant, optimize: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
) -> Callable[[int], int]:
    """Return a function that counts the peak of a training step with an optimizer for a batch size.

    Raises:
        LookupError: the twin cannot be built; the text says why.
    """
    network = build_network(source, overrides, variant, "meta")
    model = revzoo.create(source, overrides=overrides, device="meta")  # makes the batches
    optimizer = optimize(network.parameters())
    return lambda batch: revzoo.measure_memory(network, model.example_input(batch), optimizer).peak_bytes


def count_rev_vit(quick: bool) -> dict[str, Any]:
    """Return memory per image and the largest batch of each network, in every variant and with stage inputs alone kept."""
    networks = {"rev_vit_ti": _TINY_VIT} if quick else dict.fromkeys(_REV_VIT, ())
    budget = 2**25 if quick else _GPU_BYTES
    rows, missing = [], {}
    for source, overrides in networks.items():
        for variant in (*VARIANTS, Variant("stage inputs", "stage_inputs")):
            try:
                batch, per_image = find_largest_batch(make_counter(source, overrides, variant), budget)
            except LookupError as error:
                missing[f"{source}, {variant.label}"] = str(error)
                continue
            row = {"model": source, "variant": variant.label, "largest_batch": batch, "bytes_per_image": per_image}
            rows.append(row | {"published": None if quick else _published_rev_vit(source, variant.label)})
    return {"budget_bytes": budget, "rows": rows, "missing": missing}


def find_largest_batch(count_peak: Callable[[int], int], budget: int) -> tuple[int, int]:
    """Return the largest batch whose peak is within the budget, and the bytes that one more image adds to that peak.

    The peak is the largest of several sums that are linear in the batch size, so Newton's method ends at the answer. One image
    must fit.
    """
    batch = 64
    while True:
        peak = count_peak(batch)
        per_image = count_peak(batch + 1) - peak
        if peak <= budget < peak + per_image:
            return batch, per_image
        batch = max(batch + (budget - peak) // per_image, 1)


def _published_rev_vit(source: str, variant: str) -> tuple[float, int] | None:
    column = {"ordinary twin": 0, "inverted": 1}.get(variant)
    return None if column is None else (_REV_VIT[source][column], int(_REV_VIT[source][column + 2]))


def count_pareprop(quick: bool) -> dict[str, Any]:
    """Return the peaks over the batch size, and those in the authors' logs."""
    sources = ["rev_swin_digits"] if quick else list(_SWIN)
    rows, missing = [], {}
    variants = [variant for variant in VARIANTS if variant.schedule != "store"]
    for source, variant in itertools.product(sources, variants):
        try:
            count_peak = make_counter(source, (), variant)
        except LookupError as error:
            missing[f"{source}, {variant.label}"] = str(error)
            continue
        for batch in (2**i for i in range(2 if quick else 11)):
            rows.append({"model": source, "variant": variant.label, "batch": batch, "peak_bytes": count_peak(batch)})
    published = [] if quick else list(_list_logged_peaks())
    return {"rows": rows, "missing": missing, "published": published}


def _list_logged_peaks() -> Iterator[dict[str, Any]]:
    for source, batches in _SWIN.items():
        for batch, peaks in batches.items():
            for variant, peak in zip(("ordinary twin", "inverted", "look-ahead"), peaks, strict=True):
                if peak is not None:
                    yield {"model": source, "variant": variant, "batch": batch, "peak_gibibytes": peak}


def count_resnext(quick: bool) -> dict[str, Any]:
    """Return the largest batches with stored norms and in-place ABN, and the FLOPs of plans for batches between."""
    overrides, budget = (_TINY_RESNEXT, 2**30) if quick else ((), _TITAN_BYTES)
    stored = Variant("stored", "store")
    rows: list[dict[str, Any]] = []
    for label, source in {"stored": "resnext_101_bn", "in-place ABN": "resnext_101_iabn"}.items():
        batch, per_image = find_largest_batch(make_counter(source, overrides, stored, _SGD), budget)
        rows.append({"variant": label, "batch": batch, "bytes_per_image": per_image, "flops": 1.0})
    model = revzoo.create("resnext_101_bn", overrides=overrides, schedule="store", device="meta").train()
    least, most = (row["batch"] for row in rows)
    for batch in torch.linspace(least + 1, most, 4).int().tolist():
        images = model.example_input(batch)
        plan = revzoo.plan(model, images, budget, optimizer=_SGD(model.parameters()))
        flops = 1 + plan.extra_flops / count_flops(model, images)
        rows.append({"variant": "planned", "batch": batch, "bytes_per_image": None, "flops": flops})
        rows[-1] |= {"peak_bytes": plan.peak_bytes, "least_peak_bytes": plan.min_peak_bytes}
    return {"budget_bytes": budget, "rows": rows}


TABLES: dict[str, Callable[[bool], dict[str, Any]]] = {
    "revnet": count_revnet,
    "rev_vit": count_rev_vit,
    "pareprop": count_pareprop,
    "resnext": count_resnext,
}


def make_tables(results: dict[str, dict[str, Any]]) -> Iterator[Table]:
    if "revnet" in results:
        result = results["revnet"]
        rows = []
        for row in result["rows"]:
            counted = f"{row['parameter_bytes'] / 1e6:.0f}", f"{row['activation_bytes'] / 1e6:.0f}"
            rows.append((row["variant"], *counted, *(row["published_megabytes"] or ("", ""))))
        heads = ("variant", "parameters [MB]", "activations [MB]", "published parameters", "activations")
        yield _fill_table(f"{result['model']}, {result['batch']} images", heads, rows)
    if "rev_vit" in results:
        rows = []
        for row in results["rev_vit"]["rows"]:
            counted = f"{row['bytes_per_image'] / 1e6:.1f}", row["largest_batch"]
            rows.append((row["model"], row["variant"], *counted, *(row["published"] or ("", ""))))
        heads = ("model", "variant", "an image [MB]", "largest batch", "published an image", "batch")
        yield _fill_table(f"within {results['rev_vit']['budget_bytes'] / 2**30:.3g} GiB", heads, rows)
    if "pareprop" in results:
        logged = {_key(row): f"{row['peak_gibibytes']:.2f}" for row in results["pareprop"]["published"]}
        rows = [
            (*_key(row), f"{row['peak_bytes'] / 2**30:.2f}", logged.get(_key(row), "")) for row in results["pareprop"]["rows"]
        ]
        yield _fill_table("peak with AdamW", ("model", "variant", "batch", "counted [GiB]", "published"), rows)
    if "resnext" in results:
        rows = [(row["variant"], row["batch"], f"{row['flops']:.4f}") for row in results["resnext"]["rows"]]
        title = f"ResNeXt-101 within {results['resnext']['budget_bytes'] / 2**20:,.0f} MiB"
        yield _fill_table(title, ("variant", "batch", "FLOPs over stored"), rows)
    for result in results.values():
        if missing := result.get("missing"):
            yield _fill_table("not counted", ("what", "why"), list(missing.items()))


def _key(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["model"], row["variant"], row["batch"]


def _fill_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for head in heads:
        table.add_column(head, justify="left" if head in ("model", "variant", "what", "why") else "right")
    for row in rows:
        table.add_row(*map(str, row))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = Path(__file__).parent / "results" / "cpu"
    parser.add_argument(
        "--only", nargs="+", choices=TABLES, metavar="TABLE", default=list(TABLES), help=f"of {', '.join(TABLES)}"
    )
    parser.add_argument("--out", type=Path, default=home, help=f"folder for published_memory.json and .png (default: {home})")
    parser.add_argument("--quick", action="store_true", help="toy networks, of which nothing is published")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    about, file = describe_environment(), args.out / "published_memory.json"
    tables = json.loads(file.read_text())["tables"] if file.is_file() else {}
    console = Console(width=None if sys.stdout.isatty() else 140)
    for name in args.only:
        with console.status(name):
            tables[name] = TABLES[name](args.quick) | {"commit": about["commit"]}
        ordered = {key: tables[key] for key in TABLES if key in tables}
        file.write_text(json.dumps(about | {"tables": ordered}, indent=1) + "\n")
    if "pareprop" in args.only:
        plot_memory(tables["pareprop"]["rows"], tables["pareprop"]["published"], args.out / "published_memory.png")
    console.print(*make_tables({name: tables[name] for name in args.only}), about)


if __name__ == "__main__":
    main()
