"""The table of all models in the documentation: docs/zoo.json holds what is measured, docs/zoo.md is made from it.

    python benchmarks/zoo.py 'rev_vit*'

A model is measured if its row belongs to another spec or twin. It then also gets a new card (zoo_card.py).
"""

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zoo_card import count_card

import revzoo
from revzoo.analysis.counting import report_model
from revzoo.checkpoint import index
from revzoo.format import format_bytes, format_macs, format_shape
from revzoo.model.create import create
from revzoo.runtime.mode import Mode
from revzoo.spec import ImageInput, Input, Spec, load_spec
from revzoo.spec.names import shipped_model_files

Row = dict[str, Any]

_MODES = (Mode.STORE, Mode.RECOMPUTE, Mode.INVERT)  # columns of the page
_PAGE = """\
# The zoo

`python benchmarks/zoo.py` writes this page. It measures a model if the row in `docs/zoo.json` belongs to another spec or twin;
delete that file to measure all models again. `revzoo show NAME` says more about one model.

MACs are the multiply-adds of a forward of one example, half of its FLOPs; norms and activation functions are left out.
Memory is the peak of all activations in a training step in float32, without weights, gradients and batch, for 32 images or 8
texts. It is counted on the meta device. In the columns `recompute` and `invert` the stem, transitions, fuse and head still
store their activations, a large share in a network with few blocks per stage. With these set to `recompute` too (schedule
`stage_inputs`), RevNet-104 needs 0.21 of the memory of `store` instead of 0.46. Attention with dropout keeps its attention
weights, as PyTorch does on CPUs; fused GPU kernels do not. The twin is the ordinary network of which the model is the
reversible version, with the memory that it needs for the same batch.

| model | input | parameters | MACs | store | recompute | invert | twin | source | weights |
|---|---|---:|---:|---:|---:|---:|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="*", help="models to measure if they have changed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs", help="folder of zoo.json and zoo.md")
    args = parser.parse_args()
    update(args.out, revzoo.list_models(args.pattern))


def update(folder: Path, names: Iterable[str]) -> None:
    """Update zoo.json and zoo.md in a folder. Each row is written as soon as it is measured."""
    file, specs = folder / "zoo.json", {name: load_spec(name) for name in shipped_model_files()}
    table = {name: row for name, row in read_table(file).items() if name in specs}
    for name in names:
        if is_outdated(table.get(name), specs[name]):
            print(name, flush=True)
            table[name] = measure(name)
            write_table(file, table)
        if "card" not in table[name]:
            print(f"{name}: what it takes on a card", flush=True)
            table[name]["card"] = count_card(name)
            write_table(file, table)
    table = {name: row | describe_spec(specs[name]) for name, row in table.items()}
    write_table(file, table)
    (folder / "zoo.md").write_text(format_page(table), encoding="utf-8")


def read_table(file: Path) -> dict[str, Row]:
    """Return the rows of a zoo.json by model; none if there is no such file."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def describe_spec(spec: Spec) -> Row:
    """Return the columns that come from the spec and the index of weights, without a measurement."""
    entry = index.read_index().get(spec.name)
    return {
        "family": spec.family,
        "input": _describe_input(spec.input),
        "source": spec.sources[0]["cite"] if spec.sources else "none",
        "weights": None if entry is None else dict(entry.metric),
    }


def _describe_input(input: Input) -> str:
    return format_shape((input.channels, *input.size)) if isinstance(input, ImageInput) else f"{input.length} ids"


def is_outdated(row: Row | None, spec: Spec) -> bool:
    """Return whether a model has no row, or one of another spec or twin."""
    return row is None or (row["digest"], row["twin"]) != (spec.digest, _describe_twin(spec))


def measure(name: str) -> Row:
    model = create(name, device="meta")
    report = report_model(model)
    twin = report.twin
    return {
        **describe_spec(model.spec),
        "digest": report.digest,
        "batch_size": report.batch_size,
        "parameters": report.parameters,
        "flops": report.flops,
        "activation_bytes": {mode: report.memory[mode].activation_bytes for mode in _MODES},
        "twin": _describe_twin(model.spec),
        "twin_parameters": None if twin is None else twin.parameters,
        "twin_activation_bytes": None if twin is None or twin.memory is None else twin.memory.activation_bytes,
    }


def format_page(table: Mapping[str, Row]) -> str:
    """Return the page in Markdown: the models by family, small ones first."""
    names = sorted(table, key=lambda name: (table[name]["family"], table[name]["parameters"], name))
    return _PAGE + "".join(f"| {' | '.join(_format_cells(name, table[name]))} |\n" for name in names)


def _format_cells(name: str, row: Row) -> list[str]:
    return [
        f"[{name}](../specs/models/{row['family']}/{name}.yaml)",
        row["input"],
        f"{row['parameters']:,}",
        format_macs(row["flops"]),
        *(format_bytes(row["activation_bytes"][mode]) for mode in _MODES),
        _format_twin(row),
        row["source"].replace("|", "\\|"),
        "none" if row["weights"] is None else ", ".join(f"{metric} {value:g}" for metric, value in row["weights"].items()),
    ]


def _format_twin(row: Row) -> str:
    if row["twin"] is None:
        return "none"
    name = f"{row['twin']['library']} {row['twin']['name']}"
    size = row["twin_activation_bytes"]
    return f"{name}: not measured" if size is None else f"{name}: {row['twin_parameters']:,}, {format_bytes(size)}"


def _describe_twin(spec: Spec) -> Row | None:
    return None if spec.twin is None else {key: value for key, value in spec.twin.items() if key != "parameters"}


def write_table(file: Path, table: Mapping[str, Row]) -> None:
    """Write the rows of a zoo.json, each list of numbers in a line; strings in JSON have no line breaks."""
    text = json.dumps(dict(sorted(table.items())), indent=1)
    file.write_text(re.sub(r"\[\n[-\d,\s]+\]", lambda found: "".join(found[0].split()), text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
