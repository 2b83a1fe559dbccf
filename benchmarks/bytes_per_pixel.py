"""Count what a training step needs for each pixel of its images: every model for images, and its ordinary twin.

    python benchmarks/bytes_per_pixel.py                 all models, about 10 minutes on one CPU core
    python benchmarks/bytes_per_pixel.py --whole-sets    the last table alone, in seconds; the file keeps the rest
    python benchmarks/bytes_per_pixel.py --quick         small RevNets for digits, in seconds

The terms are those of Hascoet et al. 2023 (RevNeXt), section 3: hidden activations z, their gradients g, and temporaries, at
the peak of a training step. Weights are apart; gradients of weights, buffers and images are left out, as in the paper
("Bytes per pixel" in docs/planning.md). The batch is 32 images: of 240 x 240, as in the paper; of the spec's own size where its
patches and windows do not divide 240, and for digits.

    inverted            as `revzoo.create` makes it: steps and layers are inverted, nodes (stem, transitions, head) stored
    nodes recomputed    the same with recomputed nodes
    stored              everything is stored
    twin                the ordinary network

A last table has the whole training set of CIFAR-10 or MNIST in one batch. Everything is counted to the byte in float32 without
a device. Writes bytes_per_pixel.json and bytes_per_pixel.png.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from bytes_per_pixel_figure import plot_pixels
from pixel_terms import bytes_per_pixel
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from runtime import describe_environment
from torch import Tensor

import revzoo
from revzoo.analysis.twin import build_twin
from revzoo.errors import RevzooError
from revzoo.model.model import Model
from revzoo.spec import ImageInput, Spec

_BATCH, _SIZE = 32, 240
_SMALL = 32  # pixels of a side: smaller images stay as they are
_WHOLE_SETS = ("revnext_cifar10", "layerwise_cifar10")
# Images, overrides, and published bytes: 18.02e9 are 352 bytes for each pixel of 50,000 images, stated as 18 GB.
_SETS: dict[str, tuple[int, tuple[str, ...], float]] = {
    "CIFAR-10": (50_000, (), 18.02e9),
    "MNIST": (60_000, ("input.channels=1", "input.size=[28,28]"), 14e9),
}
# Bytes per pixel that follow from the totals for 32 images of 240 x 240 in sections 3 and 4 of the paper, weights left out.
_PUBLISHED = {
    "revnext_cifar10": 352,
    "layerwise_cifar10": 320,
    "revnext_revnet_cifar10": 640,
    "revnext_irevnet_cifar10": 640,
    "revnext_resnet_cifar10": 2060,
}


def load_model(name: str) -> Model:
    """Return a model on the meta device, for images of the paper's size where it can take them."""
    spec = revzoo.load_spec(name)
    if min(spec.input.size) >= _SMALL:
        try:
            return revzoo.create(name, overrides=[f"input.size=[{_SIZE},{_SIZE}]"], device="meta")
        except RevzooError:
            pass
    return revzoo.create(name, device="meta")


def count_model(name: str) -> dict[str, Any]:
    """Return a row: the terms of the model in its usual schedule, and the peak in others and of its twin."""
    model = load_model(name)
    batch = model.example_input(_BATCH)
    report = bytes_per_pixel(model, batch)
    row = {"model": name, "family": model.spec.family, "inverted": report.to_dict(), "published": _PUBLISHED.get(name)}
    usual = model.schedule
    model.schedule = ["recompute" if mode == "store" else mode for mode in usual]
    row["nodes_recomputed"] = bytes_per_pixel(model, batch).bytes_per_pixel
    model.schedule = "store"
    row["stored"] = bytes_per_pixel(model, batch).bytes_per_pixel
    return row | {"twin": count_twin(model.spec, batch)}


def count_twin(spec: Spec, batch: Tensor) -> dict[str, Any]:
    """Return the report of a spec's twin, or why there is none."""
    twin = build_twin(spec)
    if isinstance(twin, str):
        return {"problem": twin}
    try:
        return bytes_per_pixel(twin, batch).to_dict()
    except Exception as error:  # a library's network may raise anything for images of another size
        return {"problem": f"{type(error).__name__}: {error}".partition("\n")[0]}


def count_whole_sets(quick: bool) -> Iterator[dict[str, Any]]:
    """Yield the memory of a training step with all images of a set in one batch."""
    for data, (images, overrides, published) in _SETS.items():
        for name in _WHOLE_SETS:
            model = revzoo.create(name, overrides=overrides, device="meta")
            count = 50 if quick else images
            memory = revzoo.measure_memory(model, model.example_input(count)).to_dict()
            yield {"data": data, "model": name, "images": count, "published_bytes": published, **memory}


def read_terms(report: dict[str, Any]) -> dict[str, float]:
    """Return z, g and temporaries at the peak [bytes per pixel]."""
    height, width = report["size"]
    peak, pixels = report["stages"][report["peak_stage"]], report["images"] * height * width
    fields = {"z": "hidden_bytes", "g": "gradient_bytes", "temporaries": "temporary_bytes"}
    return {term: peak[field] / pixels for term, field in fields.items()}


def list_plot_rows(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield for each model what the picture shows of it."""
    for row in rows:
        report = row["inverted"]
        sums = {"inverted": report["bytes_per_pixel"], "twin": row["twin"].get("bytes_per_pixel")}
        size = f"{report['size'][0]} x {report['size'][1]}"
        kept = {key: row[key] for key in ("nodes_recomputed", "stored", "published")}
        yield {"model": f"{row['model']}, {size}", "terms": read_terms(report)} | sums | kept


def make_tables(rows: Sequence[dict[str, Any]], whole_sets: Sequence[dict[str, Any]]) -> Iterator[Table]:
    heads = ["model", "images", "weights [MB]", "z", "g", "temporaries", "inverted", "at the peak in", "nodes recomputed"]
    cells = []
    for row in rows:
        report = row["inverted"]
        peak = report["stages"][report["peak_stage"]]
        place = f"{peak['phase']} of {peak['unit']}"
        terms = map(_format, (*read_terms(report).values(), report["bytes_per_pixel"]))
        others = map(_format, (row["nodes_recomputed"], row["stored"], row["twin"].get("bytes_per_pixel"), row["published"]))
        images = "{} of {} x {}".format(report["images"], *report["size"])
        cells.append((row["model"], images, _format(report["weight_bytes"] / 1e6), *terms, place, *others))
    yield _fill_table("bytes per pixel", (*heads, "stored", "twin", "published"), cells)
    cells = []
    for row in whole_sets:
        sizes = (row["activation_bytes"], row["weight_bytes"], row["published_bytes"])
        cells.append((row["data"], row["model"], row["images"], *(f"{size / 1e9:.2f}" for size in sizes)))
    heads = ["data", "model", "images", "activations [GB]", "weights [GB]", "published [GB]"]
    yield _fill_table("a whole training set in one batch", heads, cells)


def _format(number: float | None) -> str:
    return "" if number is None else f"{number:.1f}"


def _fill_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for head in heads:
        table.add_column(head, justify="left" if head in ("model", "data", "at the peak in") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(str, row))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = Path(__file__).parent / "results" / "cpu"
    parser.add_argument("--out", type=Path, default=home, help=f"folder for what is written (default: {home})")
    parser.add_argument("--whole-sets", action="store_true", help="count the last table alone")
    parser.add_argument("--quick", action="store_true", help="small RevNets for digits, and 50 images of each set")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 220)
    about, file = describe_environment(), args.out / "bytes_per_pixel.json"
    whole_sets = list(count_whole_sets(args.quick))
    if args.whole_sets:
        known = json.loads(file.read_text()) if file.exists() else about
        result = known | {"whole_sets": whole_sets, "whole_sets_commit": about["commit"]}
        file.write_text(json.dumps(result, indent=1) + "\n")
        console.print(*itertools.islice(make_tables([], whole_sets), 1, None))
        return
    names = [name for name in revzoo.list_models("revn*_digits" if args.quick else "*") if is_for_images(name)]
    rows = []
    for name in names:
        with console.status(name):
            rows.append(count_model(name))
    result = about | {"rows": rows, "whole_sets": whole_sets, "whole_sets_commit": about["commit"]}
    file.write_text(json.dumps(result, indent=1) + "\n")
    plot_pixels(list(list_plot_rows(rows)), args.out / "bytes_per_pixel.png")
    console.print(*make_tables(rows, whole_sets))


def is_for_images(name: str) -> bool:
    return isinstance(revzoo.load_spec(name).input, ImageInput)


if __name__ == "__main__":
    main()
