"""Schedule of the coupling coefficients during fine-tuning.

A converted network starts with a coupling that keeps its function near that of the original, and moves to one that takes less
memory. With kept bits, every step can be inverted exactly at every update; fewer bits only take less memory. In
floating point, inverting with a small |b| amplifies rounding errors so much that only short runs of steps can be inverted;
the steps between such runs recompute. The runs get longer as |b| grows.

Source: Dr2Net (Zhao et al. 2024) moves alpha and beta in floating point ("dynamic fine-tuning"); its schedule is not published.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from revzoo.errors import join_names
from revzoo.model.model import Model
from revzoo.registry import couplings
from revzoo.runtime.drift import count_invertible_steps
from revzoo.runtime.mode import Mode
from revzoo.runtime.schedule import limit_inverted_runs
from revzoo.training.options import CouplingOptions, Recipe

_MAX_ERROR = 1e-4  # relative, of a reconstructed state; gradients then differ from stored ones by at most 1e-3


class CouplingSchedule:
    """The arguments of the coupling at every update.

    Args:
        options: first and last values, and the share of the updates between them.
        updates: optimizer updates of the whole training.
        modes: the model's schedule as it would be if any number of steps could be inverted in a row.
    """

    def __init__(self, options: CouplingOptions, updates: int, modes: Sequence[Mode]):
        self._ranges = {key: value for key, value in asdict(options).items() if key != "share" and value is not None}
        self._last_update = max(1, round(updates * options.share))
        self._modes = modes
        self.is_exact = options.kept_bits is not None

    def at(self, update: int) -> dict[str, Any]:
        """Return the coupling's arguments for an update, counted from 0."""
        progress = min(1.0, update / self._last_update)
        if self.is_exact:
            first, last = self._ranges["kept_bits"]
            levels = abs(last - first) + 1
            level = min(int(progress * levels), levels - 1)
            return {"kept_bits": first + (level if last > first else -level)}
        return {key: first + (last - first) * progress for key, (first, last) in self._ranges.items()}

    def apply(self, update: int, *models: Model) -> None:
        """Set the coupling of models to that of an update; in floating point, limit their runs of inverted steps too."""
        arguments = self.at(update)
        for model in models:
            if any(model.spec.coupling.arguments.get(key) != value for key, value in arguments.items()):
                model.set_coupling(**arguments)
            if not self.is_exact:
                dtype = next(model.parameters()).dtype
                longest = count_invertible_steps([model.coupling] * len(model.steps), dtype, _MAX_ERROR)
                model.schedule = limit_inverted_runs(self._modes, longest)


def make_coupling_schedule(recipe: Recipe, model: Model, updates: int) -> CouplingSchedule | None:
    """Return the recipe's coupling schedule for a model; None where neither the coupling nor the modes have to change.

    Args:
        recipe: the recipe; without a `coupling` section the coupling stays, but runs of inverted steps may need a limit.
        model: the model, with the schedule that the recipe sets.
        updates: optimizer updates of the whole training.

    Raises:
        SpecError: the model's coupling does not have the arguments, or has kept bits where the recipe has none or vice versa.
    """
    if recipe.coupling is None:
        needs_limit = not model.coupling.is_exact and abs(model.coupling.b) < 1 and recipe.memory.budget is None
        return CouplingSchedule(CouplingOptions(), updates, model.schedule) if needs_limit else None
    schedule = CouplingSchedule(recipe.coupling, updates, model.schedule)
    part, known = model.spec.coupling, list(couplings.arguments(model.spec.coupling.type))
    for key in schedule.at(0):
        if key not in known:
            allowed = f"what the coupling of {model.spec.name} has ({part.type}: {join_names(known)}), or null"
            raise recipe.error(f"coupling.{key}", "a schedule", allowed)
    if schedule.is_exact != (model.coupling.kept_bits is not None):
        allowed = "m, alpha or beta for a network converted with m or beta, kept_bits for one converted with kept bits"
        raise recipe.error("coupling", str(sorted(schedule.at(0))), allowed)
    return schedule
