"""The zoo as a table for rich to print."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from revzoo.display.tables.base import DottedName, fill, make_plain_table, make_table
from revzoo.format import format_bytes, format_macs
from revzoo.metric import CHOSEN
from revzoo.runtime.mode import Mode

_CAPTION = (
    "MACs: multiply-adds of a forward of one example, half of its FLOPs. Memory: peak of the activations of a training step in "
    "float32, for 32 images or 8 texts. A dash: not one of the models that ship; revzoo show NAME measures it."
)


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
    peaks = format_bytes(memory[Mode.STORE]), format_bytes(memory[Mode.INVERT])
    return [f"{row['parameters']:,}", format_macs(row["flops"]), *peaks, metric]
