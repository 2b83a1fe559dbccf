"""What a conversion did to every tensor, and how far the converted network is from the original."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from revzoo.conversion.mapping import How
from revzoo.model.network import Model

Fate = How | Literal["interpolated", "initialised", "dropped"]


@dataclass(frozen=True)
class Row:
    """What happened to some tensors.

    Args:
        ours: keys in the converted network; none where the source's were dropped.
        theirs: keys in the source; none where ours begin fresh.
        how: copied, renamed, merged, reshaped, interpolated, initialised or dropped.
        way: how values get from theirs to ours, also where they begin fresh or are interpolated before.
        shapes: of ours.
        source_shapes: of theirs, behind an interpolation.
        source_dtypes: of theirs, such as "float16".
        note: why, where it was not asked for.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    how: Fate
    shapes: tuple[tuple[int, ...], ...] = ()
    source_shapes: tuple[tuple[int, ...], ...] = ()
    source_dtypes: tuple[str, ...] = ()
    way: How = "renamed"
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """Two networks on the same examples.

    Args:
        what: the two.
        examples: their number.
        largest_difference: of logits, over the original's largest magnitude.
        cosine: of the logits of an example, averaged.
        agreement: share of equal largest logits.
        note: what the difference is due to.
        points: some logits, of the original and of the converted network.
    """

    what: str
    examples: int
    largest_difference: float
    cosine: float
    agreement: float
    note: str
    points: tuple[tuple[float, float], ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.what}, {self.examples} examples: logits differ by at most {self.largest_difference:.1e} of the largest, "
            f"cosine {self.cosine:.6f}, the same answer in {self.agreement:.1%}. {self.note}"
        )


@dataclass(frozen=True)
class ConvertReport:
    """A conversion: what from, what to, what became of every tensor, and what to expect.

    Args:
        source: name of what was converted.
        kind: its family and library.
        coupling: as the spec has it.
        rows: one for each change.
        comparisons: of the original with the converted network, where the original could be run.
        notes: what was done without being asked, and why something was not.
        expect: what to expect before fine-tuning.
        model: the reversible network, in eval mode.
    """

    source: str
    kind: str
    coupling: dict[str, Any]
    rows: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]
    expect: str
    model: Model = field(repr=False, compare=False)

    @property
    def counts(self) -> Counter[str]:
        """Number of our tensors (of theirs, where dropped) by what happened to them."""
        found: Counter[str] = Counter()
        for row in self.rows:
            found[row.how] += len(row.ours or row.theirs)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        told = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}
        told |= {name: [asdict(each) for each in told[name]] for name in ("rows", "comparisons")}
        return {**told, "notes": list(self.notes), "counts": dict(self.counts)}

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def __str__(self) -> str:
        coupling = ", ".join(f"{key} {value}" for key, value in self.coupling.items() if key != "type")
        lines = [
            f"{self.source} ({self.kind}) -> {self.coupling['type']}{f' ({coupling})' if coupling else ''}",
            "tensors: " + ", ".join(f"{count} {how}" for how, count in sorted(self.counts.items())),
            *(f"  {line}" for line in _told(self.rows)),
            *map(str, self.comparisons),
            *(f"Note: {note}" for note in self.notes),
            self.expect,
        ]
        return "\n".join(lines)


def _told(rows: Sequence[Row]) -> list[str]:
    """Return a line for each tensor whose values are not simply the source's."""
    return [
        f"{row.how}: {', '.join(row.ours if row.how == 'initialised' else row.theirs)}{f' ({row.note})' if row.note else ''}"
        for row in rows
        if row.how in ("interpolated", "initialised", "dropped")
    ]
