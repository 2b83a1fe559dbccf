"""The table of all models in the documentation: measured rows as JSON, and the page that is made from them."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from revzoo.analysis.report import report
from revzoo.checkpoint import index
from revzoo.errors import InputError
from revzoo.format import format_bytes, format_flops, format_shape
from revzoo.model.create import create
from revzoo.spec import ImageInput, Input, Spec, list_models, load_spec

Row = dict[str, Any]

_MODES = ("store", "recompute", "invert")  # of the page
_PAGE = """\
# The zoo

Written by `revzoo list --table docs`, which measures the models whose spec or twin is not that of the row in `docs/zoo.json`.
Delete that file to measure all again. `revzoo show NAME` says more about one model.

FLOPs are of a forward of one example, a multiply-add counted once; norms and activations are left out. Bytes are the peak of
activations in a training step in float32, above weights, gradients and batch, for 32 images or 8 texts: counted, on no device.
With `recompute` and `invert` stem, transitions, fuse and head still store theirs, which is much of a network with few blocks a
stage: set them to `recompute` as well, and RevNet-104 goes from 0.46 of what it stores to 0.21. Attention with dropout keeps
its weights, as PyTorch does on CPUs; fused GPU kernels do not. The twin is the ordinary network that the
model is the reversible version of, with the activations it stores for the same batch.

| model | input | parameters | FLOPs | store | recompute | invert | twin | source | weights |
|---|---|---:|---:|---:|---:|---:|---|---|---|
"""


def update(folder: Path, names: Iterable[str] | None = None, announce: Callable[[str], object] = print) -> None:
    """Bring zoo.json and zoo.md in a folder up to date.

    Each row is written as soon as it is measured, so that what was done is kept when the run is stopped.

    Args:
        names: the models that may be measured; None is all.
        announce: told the name of each model that is being measured.
    """
    file, specs = folder / "zoo.json", shipped_specs()
    table = {name: row for name, row in read(file).items() if name in specs}
    _write(file, table)  # fails at once where it cannot be written
    for name in specs if names is None else names:
        if _misses(table.get(name), specs[name]):
            announce(name)
            table[name] = _measured(name)
            _write(file, table)
    table = {name: row | statements(specs[name]) for name, row in table.items()}
    _write(file, table)
    (folder / "zoo.md").write_text(page(table), encoding="utf-8")


def read(file: Path) -> dict[str, Row]:
    """Return the rows of a zoo.json by model; none where there is no such file.

    Raises:
        InputError: it is not what `update` writes.
    """
    try:
        rows: dict[str, Row] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if all({"digest", "twin"} <= row.keys() for row in rows.values()):
            return rows
    except (AttributeError, ValueError):
        pass
    raise InputError(f"{file} is damaged: it holds no table of models. Delete it, and all models are measured again.")


def shipped_specs() -> dict[str, Spec]:
    """Return the spec of every model by name."""
    return {name: load_spec(name) for name in list_models()}


def outdated(table: Mapping[str, Row], specs: Mapping[str, Spec]) -> dict[str, str]:
    """Return the models whose row is missing, wrong or of no model at all, each with what is the matter."""
    problems = {name: "has a row, but is no model" for name in table if name not in specs}
    for name, spec in specs.items():
        row = table.get(name)
        if problem := _misses(row, spec):
            problems[name] = problem
        elif row is not None and row | statements(spec) != row:
            problems[name] = "states something else now"
    return problems


def statements(spec: Spec) -> Row:
    """Return what a row says without measuring anything."""
    entry = index.read_index().get(spec.name)
    return {
        "family": spec.family,
        "input": _input(spec.input),
        "source": spec.sources[0]["cite"] if spec.sources else "none",
        "weights": None if entry is None else dict(entry.metric),
    }


def _input(input: Input) -> str:
    return format_shape((input.channels, *input.size)) if isinstance(input, ImageInput) else f"{input.length} ids"


def _misses(row: Row | None, spec: Spec) -> str | None:
    """Return why a model has to be measured, None where its row is of this spec and twin."""
    if row is None:
        return "has no row"
    if row["digest"] != spec.digest:
        return "was measured with another spec"
    return "was measured beside another twin" if row["twin"] != _twin(spec) else None


def _measured(name: str) -> Row:
    model = create(name, device="meta")
    found = report(model)
    twin = found.twin
    return {
        **statements(model.spec),
        "digest": found.digest,
        "batch_size": found.batch_size,
        "parameters": found.parameters,
        "flops": found.flops,
        "activation_bytes": {mode: found.memory[mode].activation_bytes for mode in _MODES},
        "twin": _twin(model.spec),
        "twin_parameters": None if twin is None else twin.parameters,
        "twin_activation_bytes": None if twin is None or twin.memory is None else twin.memory.activation_bytes,
    }


def page(table: Mapping[str, Row]) -> str:
    """Return the page in Markdown: the models by family, small ones first."""
    names = sorted(table, key=lambda name: (table[name]["family"], table[name]["parameters"], name))
    return _PAGE + "".join(f"| {' | '.join(_cells(name, table[name]))} |\n" for name in names)


def _cells(name: str, row: Row) -> list[str]:
    return [
        f"[{name}](../specs/models/{row['family']}/{name}.yaml)",
        row["input"],
        f"{row['parameters']:,}",
        format_flops(row["flops"]),
        *(format_bytes(row["activation_bytes"][mode]) for mode in _MODES),
        _twin_cell(row),
        row["source"].replace("|", "\\|"),
        "none" if row["weights"] is None else ", ".join(f"{metric} {value:g}" for metric, value in row["weights"].items()),
    ]


def _twin_cell(row: Row) -> str:
    if row["twin"] is None:
        return "none"
    name = f"{row['twin']['library']} {row['twin']['name']}"
    size = row["twin_activation_bytes"]
    return f"{name}: not measured" if size is None else f"{name}: {row['twin_parameters']:,}, {format_bytes(size)}"


def _twin(spec: Spec) -> Row | None:
    return None if spec.twin is None else {key: value for key, value in spec.twin.items() if key != "parameters"}


def _write(file: Path, table: Mapping[str, Row]) -> None:
    file.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n", encoding="utf-8")
