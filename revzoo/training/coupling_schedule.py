"""The coupling's way during fine-tuning, from a faithful start to a lean or robust end.

With kept bits every step of the way is exactly invertible, and the way only makes the network leaner. In floating point a
small b rounds nearly everything away, so few steps in a row can be inverted; the others keep their input, fewer as b grows.

Source: Dr2Net (Zhao et al. 2024) moves alpha and beta in floating point ("dynamic fine-tuning"); its schedule is not published.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from revzoo.errors import SpecError, SpecProblem, listing
from revzoo.model.network import Model
from revzoo.registry import couplings
from revzoo.runtime.drift import count_invertible_steps
from revzoo.runtime.schedule import Mode, limit_inverted_runs
from revzoo.training.recipe import CouplingOptions, Recipe

_ERROR = 1e-4  # of a rebuilt state, relative, at most: gradients are then within 1e-3 of stored ones


class CouplingSchedule:
    """What the coupling's arguments are at every update.

    Args:
        options: of the recipe.
        updates: of the whole training.
        modes: of the units, where no inversion rounds too much away.
    """

    def __init__(self, options: CouplingOptions, updates: int, modes: Sequence[Mode]):
        self._moving = {key: value for key, value in asdict(options).items() if key != "share" and value is not None}
        self._last = max(1, round(updates * options.share))
        self._modes = modes
        self.exact = options.kept_bits is not None

    def at(self, update: int) -> dict[str, Any]:
        """Return the arguments for an update, counted from 0."""
        way = min(1.0, update / self._last)
        if self.exact:
            first, last = self._moving["kept_bits"]
            levels = abs(last - first) + 1
            level = min(int(way * levels), levels - 1)
            return {"kept_bits": first + (level if last > first else -level)}
        return {key: first + (last - first) * way for key, (first, last) in self._moving.items()}

    def set(self, update: int, *models: Model) -> None:
        """Give models the coupling of an update; in floating point, invert only as many steps in a row as it allows."""
        arguments = self.at(update)
        for model in models:
            if any(model.spec.coupling.arguments.get(key) != value for key, value in arguments.items()):
                model.set_coupling(**arguments)
            if not self.exact:
                run = count_invertible_steps([model.coupling] * len(model.steps), next(model.parameters()).dtype, _ERROR)
                model.schedule = limit_inverted_runs(self._modes, run)


def coupling_schedule(recipe: Recipe, model: Model, updates: int) -> CouplingSchedule | None:
    """Return the recipe's schedule for a model, or None where nothing moves and nothing has to be anchored.

    Raises:
        SpecError: the model's coupling has no such arguments, or is of the other arithmetic.
    """
    if recipe.coupling is None:
        anchors = not model.coupling.is_exact and abs(model.coupling.b) < 1 and recipe.memory.budget is None
        return CouplingSchedule(CouplingOptions(), updates, model.schedule) if anchors else None
    schedule = CouplingSchedule(recipe.coupling, updates, model.schedule)
    part, known = model.spec.coupling, list(couplings.arguments(model.spec.coupling.type))
    for key in schedule.at(0):
        if key not in known:
            allowed = f"what the coupling of {model.spec.name} has ({part.type}: {listing(known)}), or null"
            raise SpecError([SpecProblem(recipe.file, f"coupling.{key}", "a schedule", allowed)])
    if schedule.exact != (model.coupling.kept_bits is not None):
        allowed = "m, alpha or beta for a network converted with a strength, kept_bits for one with kept bits"
        raise SpecError([SpecProblem(recipe.file, "coupling", str(sorted(schedule.at(0))), allowed)])
    return schedule
