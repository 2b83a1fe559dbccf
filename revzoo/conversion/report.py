"""What a conversion did to every tensor, and how far the converted network is from the original."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from revzoo.conversion.mapping import Transform
from revzoo.model.model import Model

Action = Transform | Literal["interpolated", "initialised", "dropped"]


@dataclass(frozen=True)
class TensorRow:
    """What was done with one tensor, or with several that belong together.

    Args:
        ours: keys in the converted network; empty if the original's tensor was dropped or is unused.
        theirs: keys in the original.
        action: copied, renamed, tied, merged, reshaped, shortened, interpolated, initialised, dropped, or unused (`export`
            gives it back).
        shapes: of the tensors in the converted network.
        original_shapes: of the original's tensors, after an interpolation.
        original_dtypes: of the original's tensors, such as "float16"; empty where they are missing or dropped.
        transform: how ours follow from theirs, whatever the action was; `export` inverts it.
        note: the reason for an interpolation, an initialisation at random or a drop.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    action: Action
    shapes: tuple[tuple[int, ...], ...] = ()
    original_shapes: tuple[tuple[int, ...], ...] = ()
    original_dtypes: tuple[str, ...] = ()
    transform: Transform = "renamed"
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """The outputs of two networks on the same examples.

    Args:
        what: names of the two networks.
        examples: number of examples.
        largest_difference: of two logits, as a share of the original's largest logit in magnitude.
        cosine: cosine similarity of the logits, averaged over the examples.
        agreement: share of examples for which both networks have the same largest logit.
        note: what causes the difference.
    """

    what: str
    examples: int
    largest_difference: float
    cosine: float
    agreement: float
    note: str

    def __str__(self) -> str:
        return (
            f"{self.what}, {self.examples} examples: logits differ by at most {self.largest_difference:.1e} of the largest, "
            f"cosine {self.cosine:.6f}, the same answer in {self.agreement:.1%}. {self.note}"
        )


@dataclass(frozen=True)
class ConvertReport:
    """The result of a conversion: the network, and what was done to get it.

    Args:
        original: its name.
        kind: the original's family and library.
        coupling: of the converted network, as its spec has it.
        rows: what was done with every tensor.
        comparisons: of the original with the converted network; empty if the original could not be run.
        notes: what was done besides, and what was not done and why.
        expect: what to expect of the network before fine-tuning.
        model: the reversible network, in eval mode.
    """

    original: str
    kind: str
    coupling: dict[str, Any]
    rows: tuple[TensorRow, ...]
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]
    expect: str
    model: Model = field(repr=False, compare=False)

    @property
    def counts(self) -> Counter[str]:
        """Number of tensors of the converted network by action; those of the original for "dropped" and "unused"."""
        counts: Counter[str] = Counter()
        for row in self.rows:
            counts[row.action] += len(row.ours or row.theirs)
        return counts

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the model as plain data."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}
        values |= {name: [asdict(each) for each in values[name]] for name in ("rows", "comparisons")}
        return {**values, "notes": list(self.notes), "counts": dict(self.counts)}

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        coupling = ", ".join(f"{key} {value}" for key, value in self.coupling.items() if key != "type")
        lines = [
            f"{self.original} ({self.kind}) -> {self.coupling['type']}{f' ({coupling})' if coupling else ''}",
            "tensors: " + ", ".join(f"{count} {action}" for action, count in sorted(self.counts.items())),
            *(f"  {line}" for line in _list_changes(self.rows)),
            *map(str, self.comparisons),
            *(f"Note: {note}" for note in self.notes),
            self.expect,
        ]
        return "\n".join(lines)


def _list_changes(rows: Sequence[TensorRow]) -> list[str]:
    """Return a line for each tensor whose values are not simply the original's."""
    return [
        f"{row.action}: {', '.join(row.ours if row.action == 'initialised' else row.theirs)} ({row.note})"
        for row in rows
        if row.action in ("interpolated", "initialised", "dropped", "unused")
    ]
