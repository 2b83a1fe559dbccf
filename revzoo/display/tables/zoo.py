"""The zoo as a table for rich to print."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from revzoo.display.tables.base import DottedName, fill, make_plain_table, make_table
from revzoo.format import format_bytes, format_count, format_macs
from revzoo.metric import CHOSEN

_CAPTION = (
    "MACs: multiply-adds of a forward of one example. Memory: peak of the activations of a training step in float32, for 32 "
    "images or 8 texts. A dash: not one of the models that ship; revzoo show NAME measures it."
)


def tabulate_models(meanings: Mapping[str, str], rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Lay out models by family, small ones first, with what each is.

    Args:
        meanings: a few words about each model to show; own ones, which have no row, are the last family.
        rows: what was measured, by name, as in docs/zoo.json.
    """
    caption = "*: with weights. revzoo show NAME says more. --long: MACs, memory, metrics. revzoo convert adds timm's networks."
    table = fill(make_table(caption=caption), ("model", "input", "params"), ())
    table.add_column("what it is")
    known = {name: rows.get(name, {"family": "~", "input": "-", "parameters": 0, "weights": None}) for name in meanings}
    family = ""
    for name, row in sorted(known.items(), key=lambda item: (item[1]["family"], item[1]["parameters"], item[0])):
        if row["family"] != family:
            table.add_section()
        family, parameters = row["family"], row["parameters"]
        size = row["input"].removeprefix("3 x ").removeprefix("1 x ")
        cells = size, format_count(parameters) if parameters else "-", escape(meanings[name].removesuffix("."))
        table.add_row(DottedName(name + "*" * bool(row["weights"])), *cells)
    return table


def tabulate_zoo(names: Iterable[str], rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Lay out models with their size, memory and weights.

    Args:
        names: of the models to show.
        rows: what was measured, by name, as in docs/zoo.json.
    """
    cells = [(DottedName(name), *(_list_cells(rows[name]) if name in rows else ["-"] * 5)) for name in names]
    return fill(
        make_table(caption=_CAPTION), ("model", "parameters", "MACs", "stored", "inverted", f"weights\n{CHOSEN.label}"), cells
    )


def tabulate_recipes(meanings: Mapping[str, str]) -> Table:
    """Lay out recipes with what each does."""
    table = make_plain_table("")
    for name, meaning in meanings.items():
        table.add_row(name, escape(meaning))
    return table


def _list_cells(row: Mapping[str, Any]) -> list[str]:
    memory, weights = row["activation_bytes"], row["weights"]
    metric = CHOSEN.format(weights[CHOSEN.key]) if weights else ""
    peaks = format_bytes(memory["store"]), format_bytes(memory["invert"])
    return [f"{row['parameters']:,}", format_macs(row["macs"]), *peaks, metric]
