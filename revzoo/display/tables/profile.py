"""A profile as tables for rich to print."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from revzoo.display.tables.base import DottedName, fill, make_plain_table, make_table
from revzoo.display.unit_name import parse_unit_name
from revzoo.format import format_bytes, format_flops, format_seconds
from revzoo.planning.comparison import inversion_ratio
from revzoo.planning.profiling.profile import Profile
from revzoo.planning.solvers.problem import Unit
from revzoo.runtime.mode import MODES, Mode

_KEPT = "A state that two neighbours keep is counted with both, but is in memory once."
_COSTS = "The number after a slash is for the first step of an inverted run."


def tabulate_profile(profile: Profile) -> RenderableType:
    """Lay out a profile: what was profiled, one row for all units with equal numbers, and remarks about the measurement."""
    return Group(_tabulate_facts(profile), _tabulate_units(profile), *_list_remarks(profile))


def _tabulate_facts(profile: Profile) -> Table:
    setting, fixed = profile.setting, profile.memory.fixed_bytes
    table = make_plain_table(escape(setting.model))
    table.add_row("batch", escape(", ".join(setting.batch)))
    table.add_row("dtype", setting.dtype)
    table.add_row("device", escape(setting.device))
    batch = fixed - profile.model_bytes - profile.other_bytes
    sizes = {"weights and buffers": profile.model_bytes, "optimizer state": profile.other_bytes, "batch": batch}
    details = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
    table.add_row("fixed bytes", f"{format_bytes(fixed)}: {details}")
    return table


def _tabulate_units(profile: Profile) -> Group:
    """Lay out what units keep and what each mode costs, in a table each."""
    groups: dict[tuple[str, ...], list[str]] = {}  # by the start and the end of the names, and the cells
    for k, unit in enumerate(profile.problem.units):
        cells = _unit_cells(profile, profile.memory.units[k], k)
        name = parse_unit_name(unit.name)
        groups.setdefault((name.start, name.end, *cells), []).append(unit.name)
    rows = [(DottedName(fold_names(names)), str(len(names)), *cells) for (_, _, *cells), names in groups.items()]
    kept = ["units", "count", *(["forward"] if profile.timing else []), *(f"keeps:\n{mode}" for mode in MODES[:3])]
    costs, split = f"Extra {'time' if profile.timing else 'FLOPs'} over storing", len(kept)
    keeping = make_table(title="What units keep from forward to backward", caption=_KEPT)
    running = make_table(title=costs, caption=_COSTS)
    fill(keeping, kept, [row[:split] for row in rows])
    return Group(keeping, fill(running, ("units", *MODES[1:]), [(row[0], *row[split:]) for row in rows]))


def _unit_cells(profile: Profile, unit: Unit, k: int) -> list[str]:
    """Return the row of a unit: seconds of its forward if known, bytes kept, and extra costs; "-" is a mode it lacks."""
    problem, timing = profile.memory, profile.timing
    options = {option.mode: option for option in unit.options}

    def kept(mode: Mode) -> str:
        option = options.get(mode)
        return "-" if option is None else format_bytes(option.kept_bytes + problem.bytes_of(option.kept_states, frozenset()))

    def extra(mode: Mode) -> str:
        if mode not in options:
            return "-"
        costs = [timing.extra[k][mode] / 1e9 if timing else options[mode].cost]
        if mode.inverts and unit.first is not None:
            costs.append(timing.extra[k]["first"] / 1e9 if timing else unit.first.cost)
        return " / ".join(dict.fromkeys(format_seconds(c) if timing else format_flops(int(c)) for c in costs))

    forward = [format_seconds(timing.forward_seconds[k])] if timing else []
    return [*forward, *map(kept, MODES[:3]), *map(extra, MODES[1:])]


def _list_remarks(profile: Profile) -> Iterable[str]:
    if profile.timing is not None:
        timing = profile.timing
        yield f"A training step takes {format_seconds(timing.step_seconds)} with everything stored."
        yield f"Medians of {timing.runs} runs, which would differ by {timing.spread:.1%} if measured again (standard error)."
        ratio = inversion_ratio(profile)
        if ratio is not None:
            yield f"Inverting a step takes {ratio:.2f} times as long as its forward."
    yield from map(escape, profile.notes)


def fold_names(names: Sequence[str]) -> str:
    """Return names that differ in one number as one name, such as "stages.0.blocks.0-5.f"."""
    units = [parse_unit_name(name) for name in names]
    numbers = sorted(unit.number for unit in units if unit.number is not None)
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0])]
    folded = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return units[0].start + folded + units[0].end
