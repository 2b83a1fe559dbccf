"""Profiles, plans and the search for a batch size as tables for rich to print."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from revzoo.display.tables.base import make_plain_table
from revzoo.format import format_bytes, format_flops, format_seconds
from revzoo.planning.batch import BatchPlan
from revzoo.planning.comparison import SchedulePoint, inversion_ratio
from revzoo.planning.plan import Plan
from revzoo.planning.profiling.profile import Profile
from revzoo.planning.solvers.problem import Unit
from revzoo.runtime.schedule import MODES


def show_profile(profile: Profile) -> RenderableType:
    """Lay out a profile: what was profiled, one row for all units with equal numbers, and remarks about the measurement."""
    return Group(_facts_table(profile), _units_table(profile), *_remarks(profile))


def _facts_table(profile: Profile) -> Table:
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


def _units_table(profile: Profile) -> Table:
    timing = profile.timing
    extra = "extra time" if timing else "extra FLOPs"
    table = Table(
        title=f"What units keep from forward to backward, and their {extra} over storing",
        caption="A state that two neighbours keep is counted with both, but is in memory once. The number after a slash is for "
        "the first step of an inverted run.",
    )
    table.add_column("units", overflow="fold")
    for heading in ("count", *(["forward"] if timing else []), *(f"keeps:\n{mode}" for mode in MODES[:3])):
        table.add_column(heading, justify="right", no_wrap=True)
    for mode in MODES[1:]:
        table.add_column(f"{extra}:\n{mode}", justify="right", no_wrap=True)
    rows: dict[tuple[str, ...], list[str]] = {}
    for k, unit in enumerate(profile.problem.units):
        cells = _unit_cells(profile, profile.memory.units[k], k)
        rows.setdefault((_pattern(unit.name), *cells), []).append(unit.name)
    for (_, *cells), names in rows.items():
        table.add_row(escape(fold_names(names)), str(len(names)), *cells)
    return table


def _unit_cells(profile: Profile, unit: Unit, k: int) -> list[str]:
    """Return the row of a unit: seconds of its forward if known, bytes kept, and extra costs; "-" is a mode it lacks."""
    problem, timing = profile.memory, profile.timing
    options = {option.mode: option for option in unit.options}

    def kept(mode: str) -> str:
        option = options.get(mode)
        return "-" if option is None else format_bytes(option.kept_bytes + problem.bytes_of(option.holds, frozenset()))

    def extra(mode: str) -> str:
        if mode not in options:
            return "-"
        costs = [timing.extra[k][mode] / 1e9 if timing else options[mode].cost]
        if mode == "invert" and unit.first is not None:
            costs.append(timing.extra[k]["first"] / 1e9 if timing else unit.first.cost)
        return " / ".join(dict.fromkeys(format_seconds(c) if timing else format_flops(int(c)) for c in costs))

    forward = [format_seconds(timing.forward_seconds[k])] if timing else []
    return [*forward, *map(kept, MODES[:3]), *map(extra, MODES[1:])]


def _remarks(profile: Profile) -> Iterable[str]:
    if profile.timing is not None:
        timing = profile.timing
        yield f"A step takes {format_seconds(timing.step_seconds)} with everything stored."
        yield f"Median of {timing.runs} runs; half of the samples of a unit lie within {timing.spread:.0%} of their median."
        ratio = inversion_ratio(profile)
        if ratio is not None:
            yield f"Inverting takes {ratio:.2f} of the forward time (the paper assumes 1)."
    yield from map(escape, profile.notes)


def show_plan(plan: Plan, beside: Mapping[str, SchedulePoint] | None = None) -> RenderableType:
    """Lay out a plan: its peak and time beside those of other schedules, the modes of every stage, and its notes.

    Args:
        plan: to be shown.
        beside: the other schedules, by the name to show; None is none.
    """
    setting = plan.setting
    title = f"{setting.model}, batch of {', '.join(setting.batch)}, {setting.dtype} on {setting.device}"
    share = f"{plan.peak_bytes / plan.budget_bytes:.0%}"
    used = f"Peak {format_bytes(plan.peak_bytes)} of the budget of {format_bytes(plan.budget_bytes)} ({share})."
    return Group(escape(title), used, _comparison_table(plan, beside or {}), _modes_table(plan), *map(escape, plan.notes))


def _comparison_table(plan: Plan, beside: Mapping[str, SchedulePoint]) -> Table:
    planned: SchedulePoint = {"peak_bytes": plan.peak_bytes, "seconds": plan.seconds, "extra_flops": plan.extra_flops}
    table = Table()
    table.add_column("schedule")
    for heading in ("peak", "within the budget", "a step", "against all stored"):
        table.add_column(heading, justify="right")
    stored = beside.get("all stored")
    for name, point in {"this plan": planned, **beside}.items():
        fits = _yes_or_no(point["peak_bytes"] <= plan.budget_bytes)
        seconds = "" if point["seconds"] is None else format_seconds(point["seconds"])
        table.add_row(name, format_bytes(point["peak_bytes"]), fits, seconds, _describe_extra_work(point, stored))
    table.add_row("smallest possible", format_bytes(plan.min_peak_bytes), _yes_or_no(plan.min_peak_bytes <= plan.budget_bytes))
    return table


def _yes_or_no(answer: bool) -> str:
    return "yes" if answer else "no"


def _describe_extra_work(point: SchedulePoint, stored: SchedulePoint | None) -> str:
    """Return how much more work a schedule is than storing everything: time if known, else FLOPs."""
    if stored is None or point["seconds"] is None or not stored["seconds"]:
        return f"+{format_flops(point['extra_flops'])}"
    return f"{point['seconds'] / stored['seconds'] - 1:+.1%} time"


def _modes_table(plan: Plan) -> Table:
    counts: dict[str, Counter[str]] = {}
    for name, mode in zip(plan.units, plan.schedule, strict=True):
        counts.setdefault(name.partition(".blocks.")[0], Counter())[mode] += 1
    used = [mode for mode in MODES if mode in plan.schedule]
    table = Table()
    table.add_column("units")
    for mode in used:
        table.add_column(mode, justify="right")
    for stage, modes in counts.items():
        table.add_row(escape(stage), *(str(modes[mode] or "") for mode in used))
    if len(counts) > 1:
        table.add_section()
        table.add_row("all", *(str(plan.schedule.count(mode)) for mode in used))
    return table


def show_batches(best: BatchPlan) -> RenderableType:
    """Lay out the search for a batch size: every size with its predicted speed, and the plan of the best."""
    table = Table(title="Predicted samples per second; a dash means that it does not fit the budget")
    for heading in ("batch", "planned", "all stored", "all inverted", "peak of the plan"):
        table.add_column(heading, justify="right")
    for row in best.rows:
        rates = ("-" if time is None else f"{row.batch / time:.4g}" for time in (row.planned, row.stored, row.inverted))
        table.add_row(str(row.batch), *rates, format_bytes(row.peak_bytes), style="bold" if row.batch == best.batch else None)
    result = f"Batch {best.batch} is best: {best.samples_per_second:.4g} samples a second, measured."
    return Group(table, show_plan(best.plan), result)


def fold_names(names: Sequence[str]) -> str:
    """Return names that differ in one number as one name, such as "stages.0.blocks.0-5.f"."""
    pattern = _pattern(names[0])
    if "*" not in pattern:
        return names[0]
    start, end = pattern.split("*")
    numbers = sorted(int(name.removeprefix(start).removesuffix(end)) for name in names)
    return start + _fold_numbers(numbers) + end


def _pattern(name: str) -> str:
    """Return a name with a star in place of the number of the block or step."""
    return re.sub(r"(blocks|steps)\.\d+", r"\1.*", name)


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
