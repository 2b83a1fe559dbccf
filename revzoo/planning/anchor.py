"""How many steps in a row may be inverted: all of them, unless the dtype or the coupling loses too much on the way.

What inversion rounds away adds up along a run. Anchors, steps that keep their input, begin anew. Where `revzoo.verify` says
that inverting everything is not safe in this dtype, the longest run that is safe is looked for by halving.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from revzoo.analysis.verify import verify
from revzoo.errors import RecoveryError
from revzoo.model.network import Model
from revzoo.planning.hooks import PlannableModel, units
from revzoo.runtime.chain import Mode
from revzoo.runtime.drift import longest_run as growth_run
from revzoo.runtime.layout import LayoutEntry

_EXAMPLES = 4  # whether a step can be inverted does not depend on the size of the batch


def longest_run(model: PlannableModel, batch: Any) -> int | None:
    """Return how many consecutive steps can be inverted safely; None is any number, 0 is none.

    Gradients of a few examples are compared with those of the stored run.

    Raises:
        RecoveryError: not even recomputing everything gives the stored run's gradients: some step does not repeat itself.
    """
    parts, found = units(model), model.schedule
    examples = _few(batch, _EXAMPLES) if isinstance(model, Model) else batch  # a chain's streams may have no batch in front
    run = growth_limit(model)
    try:
        while True:
            model.schedule = anchored(parts, run)
            report = verify(model, examples)
            if report.ok:
                return run
            if run == 0:
                raise RecoveryError(f"No plan can be made. {' '.join(report.problems)}")
            run = (sum(part.kind == "step" for part in parts) if run is None else run) // 2
    finally:
        model.schedule = found


def growth_limit(model: PlannableModel) -> int | None:
    """Return how many steps in a row the runtime would invert at all, by what their couplings make of rounding errors."""
    couplings = [model.coupling] * len(model.steps) if isinstance(model, Model) else model.couplings
    return growth_run(couplings, next(model.parameters()).dtype)


def anchored(parts: list[LayoutEntry], run: int | None) -> list[Mode]:
    """Return the schedule that inverts at most `run` steps in a row, recomputes one, and so on; nodes store."""
    modes: list[Mode] = []
    length = 0
    for part in parts:
        inverted = part.kind == "step" and (run is None or length < run)
        modes.append("invert" if inverted else "recompute" if part.kind == "step" else "store")
        length = length + 1 if inverted else 0
    return modes


def _few(batch: Any, most: int) -> Any:
    """Return the first examples of a batch."""
    if isinstance(batch, Tensor):
        return batch[:most] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {key: _few(value, most) for key, value in batch.items()}
    return type(batch)(_few(item, most) for item in batch) if isinstance(batch, tuple | list) else batch
