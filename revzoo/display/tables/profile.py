"""A profile as tables for rich to print."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from revzoo.display.tables.base import DottedName, make_plain_table, make_table
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
    rows: dict[tuple[str, ...], list[str]] = {}  # by the start and the end of the names, and the cells
    for k, unit in enumerate(profile.problem.units):
        cells = _unit_cells(profile, profile.memory.units[k], k)
        name = parse_unit_name(unit.name)
        rows.setdefault((name.start, name.end, *cells), []).append(unit.name)
    lines = [(fold_names(names), str(len(names)), *cells) for (_, _, *cells), names in rows.items()]
    kept = ["count", *(["forward"] if profile.timing else []), *(f"keeps:\n{mode}" for mode in MODES[:3])]
    costs, split = f"Extra {'time' if profile.timing else 'FLOPs'} over storing", 1 + len(kept)
    what_is_kept = _tabulate_lines([line[:split] for line in lines], kept, "What units keep from forward to backward", _KEPT)
    return Group(what_is_kept, _tabulate_lines([(line[0], *line[split:]) for line in lines], MODES[1:], costs, _COSTS))


def _tabulate_lines(lines: Sequence[Sequence[str]], headings: Sequence[str], title: str, caption: str) -> Table:
    table = make_table(title=title, caption=caption)
    table.add_column("units")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, *cells in lines:
        table.add_row(DottedName(name), *cells)
    return table


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
    return units[0].start + _fold_numbers(numbers) + units[0].end


def _fold_numbers(numbers: Sequence[int]) -> str:
    """Return rising numbers as ranges; evenly spaced ones as first, second, ..., last."""
    gaps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 3 and len(gaps) == 1 and gaps != {1}:
        return f"{numbers[0]},{numbers[1]},...,{numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
