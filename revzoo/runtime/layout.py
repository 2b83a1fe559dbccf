"""The order in which a model or a chain calls its modules."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from torch import nn

from revzoo.errors import ScheduleError, did_you_mean
from revzoo.runtime.independence import drops_examples
from revzoo.runtime.inventory import take_inventory
from revzoo.runtime.lookahead import LookaheadOption, check_lookahead
from revzoo.runtime.mode import MODES, Mode
from revzoo.runtime.schedule import STAGE_INPUTS, Applicable, check_schedule
from revzoo.runtime.tiles import MARK, Tiles, check_tiles, find_tiles


@dataclass(frozen=True)
class LayoutEntry:
    """One of the modules that a model or chain calls in its forward.

    A `step` is reversible, a `layer` of one tensor may have an inverse of its own, a `node` is an ordinary module
    between chains. All three are *units*, which have a mode in `schedule`; only steps and layers can have mode `invert`.
    The `split` and a `bijection` have no mode. The `rest` is what a network with reversible blocks computes before, between and
    after its lists of blocks: a unit, too, but always stored.

    Args:
        name: path in the model, such as "stages.0.blocks.1.f".
        module: the module itself.
        kind: its role.
        stage: index of the stage it belongs to, None outside of stages.
        is_exact: whether the model computes exactly. Then a layer is not inverted, because its inverse rounds.
    """

    name: str
    module: nn.Module
    kind: Literal["step", "layer", "node", "rest", "split", "bijection"]
    stage: int | None = None
    is_exact: bool = False

    @property
    def is_unit(self) -> bool:
        """Whether it has a mode in `schedule`."""
        return self.kind in ("step", "layer", "node", "rest")

    @property
    def can_drop(self) -> bool:
        """Whether its mode may be another than `store`."""
        return self.is_unit and self.kind != "rest"

    @property
    def can_invert(self) -> bool:
        """Whether its mode may be `invert`."""
        return self.kind == "step" or (self.kind == "layer" and not self.is_exact)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes that a unit may have; the last one keeps least."""
        return MODES if self.can_invert else MODES[:-1] if self.can_drop else MODES[:1]


class Scheduled:
    """What has a mode for each of its units, and looks ahead: a model, a chain of steps or of layers."""

    _schedule: list[Mode]
    _lookahead: LookaheadOption

    @property
    def lookahead(self) -> LookaheadOption:
        """How many units are recovered ahead of backward, during the gradient of the unit after: 0 or 1 (`lookahead.py`)."""
        return self._lookahead

    @lookahead.setter
    def lookahead(self, lookahead: LookaheadOption) -> None:
        self._lookahead = check_lookahead(lookahead)

    @property
    def schedule(self) -> list[Mode]:
        """The mode of every unit: what it keeps for backward. Bijections have none.

        Assign a list with one mode for each unit, one mode for all, or a `revzoo.Plan`. In mode `invert`, a layer without an
        inverse is stored. In a model, one mode is that of all steps and layers, and nodes are stored; with "stage_inputs" steps
        invert and nodes recompute, so that of each stage only its input is kept.

        Raises:
            ScheduleError: a wrong number of modes, an unknown mode, or `invert` for a node.
        """
        return list(self._schedule)

    @schedule.setter
    def schedule(self, modes: Sequence[str] | str | Applicable) -> None:
        if isinstance(modes, Applicable):
            return modes.apply(cast(nn.Module, self))
        self._schedule = self._read_schedule(modes)

    @property
    def tiles(self) -> list[int]:
        """Into how many tiles every unit is cut; 1 is run whole (`revzoo.runtime.tiled`).

        Assign a list with one number for each unit, or one number for all steps; what is no step stays whole. A step is cut
        along the dimension that it was given; else along tokens if its `acts_on` is "tokens", as an MLP's, and nothing in it
        drops whole examples, else along examples.

        Raises:
            ScheduleError: a wrong number of numbers, or tiles of what is no step.
        """
        return get_tiles(self.layout())

    @tiles.setter
    def tiles(self, tiles: int | Sequence[int]) -> None:
        set_tiles(self.layout(), tiles)

    def layout(self) -> list[LayoutEntry]:
        """Return the modules in order."""
        raise NotImplementedError

    def _read_schedule(self, modes: Sequence[str] | str) -> list[Mode]:
        return check_schedule(modes, self._names())

    def _names(self) -> list[str]:
        return [entry.name for entry in self.layout() if entry.is_unit]


def expand_schedule(schedule: Sequence[str] | str, units: Sequence[LayoutEntry]) -> list[Mode]:
    """Return one mode for each unit, from a list, one mode for everything that can be inverted, or "stage_inputs".

    One mode leaves nodes stored. "stage_inputs" inverts what can be inverted and recomputes every node, so that of each stage
    only its input is kept: RevNet's algorithm (Gomez et al. 2017, section 3.2), whose code stores the stem alone.

    Raises:
        ScheduleError: a wrong number of modes, an unknown mode, or `invert` for a node.
    """
    names = [unit.name for unit in units]
    if isinstance(schedule, str):
        if schedule not in (known := (*MODES, STAGE_INPUTS)):
            hint = did_you_mean(schedule, known)
            raise ScheduleError(f"Unknown schedule. Received: {schedule!r}.{hint} Allowed: {', '.join(known)}, or a list.")
        step, node = (Mode.INVERT, Mode.RECOMPUTE) if schedule == STAGE_INPUTS else (schedule, Mode.STORE)
        schedule = [step if unit.can_invert else node for unit in units]
    modes = check_schedule(schedule, names)
    for mode, unit in zip(modes, units, strict=True):
        check_schedule(mode, [unit.name], unit.modes)
    return modes


def get_tiles(layout: Sequence[LayoutEntry]) -> list[int]:
    """Return into how many tiles each unit is cut."""
    return [1 if (tiles := find_tiles(entry.module)) is None else tiles.count for entry in layout if entry.is_unit]


def set_tiles(layout: Sequence[LayoutEntry], tiles: int | Sequence[int]) -> None:
    """Cut units into tiles; see `Scheduled.tiles`."""
    units = [entry for entry in layout if entry.is_unit]
    if not isinstance(tiles, Sequence) or isinstance(tiles, str):
        tiles = [tiles if unit.kind == "step" else 1 for unit in units]
    if len(tiles) != len(units):
        raise ScheduleError(f"tiles are one number for each of {len(units)} units, or one for all. Received: {len(tiles)}.")
    for unit, count in zip(units, tiles, strict=True):
        check_tiles(count)
        if count != 1 and unit.kind != "step":
            raise ScheduleError(f"Only steps are cut into tiles. Received: {count!r} for {unit.name}, a {unit.kind}.")
    for unit, count in zip(units, tiles, strict=True):
        dim = find_dim(unit.module)
        examples = getattr(vars(unit.module).get(MARK), "examples", {})
        unit.module.__dict__[MARK] = Tiles(count, dim, examples)
        if count == 1 and dim == _find_usual_dim(unit.module) and not examples:  # there is nothing to remember
            del unit.module.__dict__[MARK]


def find_dim(step: nn.Module) -> int:
    """Return the dimension along which a step is cut: the one that it was given, or that of what it treats one by one."""
    mark: Tiles | None = vars(step).get(MARK)
    return _find_usual_dim(step) if mark is None else mark.dim


def _find_usual_dim(step: nn.Module) -> int:
    acts_on_tokens = getattr(step, "acts_on", "examples") == "tokens"
    return int(acts_on_tokens and not any(map(drops_examples, take_inventory(step).modules)))
