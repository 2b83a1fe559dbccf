"""A profile and a plan as text, and the schedules beside which a plan is to be seen."""

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypedDict

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from torch import nn

from revzoo.format import format_bytes, format_flops, format_seconds
from revzoo.planning.batch import BatchPlan
from revzoo.planning.plan import Plan
from revzoo.planning.profiling.hooks import units
from revzoo.planning.profiling.inversion_limit import place_anchors
from revzoo.planning.profiling.profile import Profile
from revzoo.planning.solvers.problem import Unit, cost, peak
from revzoo.planning.solvers.timeline import minimize_peak, solve
from revzoo.runtime.schedule import MODES

_FRONT = 24  # budgets


class Point(TypedDict):
    """What a schedule takes: everything alive at its peak, one forward and backward, and FLOPs over storing everything."""

    peak_bytes: int
    seconds: float | None
    extra_flops: int


def point(profile: Profile, modes: Sequence[str]) -> Point:
    """Return what a schedule of the profiled model takes; seconds are None where nothing was run."""
    seconds = None if profile.timing is None else profile.timing.step_seconds + cost(profile.problem, modes) / 1e9
    return {"peak_bytes": peak(profile.problem, modes), "seconds": seconds, "extra_flops": cost(profile.memory, modes)}


def others(model: nn.Module, profile: Profile) -> dict[str, Point]:
    """Return what a plan is compared with: all stored, and all steps inverted (in runs as long as is safe)."""
    parts = units(model)
    found = {"all stored": point(profile, ["store"] * len(parts))}
    if any(part.kind == "step" for part in parts) and profile.memory.max_invert_run != 0:
        found["all inverted"] = point(profile, place_anchors(parts, profile.memory.max_invert_run))
    return found


def front(profile: Profile, budgets: int = _FRONT) -> list[Point]:
    """Return what the fastest schedules take at budgets evenly spaced from the least that is possible to storing everything."""
    problem = profile.problem
    least, modes = minimize_peak(problem)
    stored = peak(problem, ["store"] * len(problem.units))
    found = [modes, *(solve(problem, least + (stored - least) * i // (budgets - 1)) for i in range(1, budgets))]
    points = {tuple(modes): point(profile, modes) for modes in found if modes is not None}  # each once
    return list(points.values())


def show_profile(profile: Profile) -> RenderableType:
    """Lay a profile out for rich to print: what it is of, its units with equal ones folded, and how it was measured."""
    return Group(_facts(profile), _units(profile), *_remarks(profile))


def _facts(profile: Profile) -> Table:
    where, fixed = profile.setting, profile.memory.fixed_bytes
    table = _plain(escape(where.model))
    table.add_row("batch", escape(", ".join(where.batch)))
    table.add_row("dtype", where.dtype)
    table.add_row("device", escape(where.device))
    batch = fixed - profile.model_bytes - profile.other_bytes
    parts = {"weights and buffers": profile.model_bytes, "optimizer state": profile.other_bytes, "batch": batch}
    said = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    table.add_row("fixed bytes", f"{format_bytes(fixed)}: {said}")
    return table


def _units(profile: Profile) -> Table:
    times = profile.timing
    extra = "extra time" if times else "extra FLOPs"
    table = Table(
        title=f"What units keep from forward to backward, and their {extra} over storing",
        caption="A state that two neighbours keep is counted with both, but is there once. The first step of an inverted run "
        "costs what stands behind the slash.",
    )
    table.add_column("units", overflow="fold")
    for heading in ("count", *(["forward"] if times else []), *(f"keeps:\n{mode}" for mode in MODES[:3])):
        table.add_column(heading, justify="right", no_wrap=True)
    for mode in MODES[1:]:
        table.add_column(f"{extra}:\n{mode}", justify="right", no_wrap=True)
    rows: dict[tuple[str, ...], list[str]] = {}
    for k, unit in enumerate(profile.problem.units):
        numbers = _numbers(profile, profile.memory.units[k], k)
        rows.setdefault((_pattern(unit.name), *numbers), []).append(unit.name)
    for (_, *numbers), names in rows.items():
        table.add_row(escape(folded(names)), str(len(names)), *numbers)
    return table


def _numbers(profile: Profile, unit: Unit, k: int) -> list[str]:
    """Return the row of a unit: seconds of its forward if known, bytes kept, and extra costs; "-" is a mode it lacks."""
    problem, times = profile.memory, profile.timing
    options = {option.mode: option for option in unit.options}

    def kept(mode: str) -> str:
        option = options.get(mode)
        return "-" if option is None else format_bytes(option.kept_bytes + problem.bytes_of(option.holds, frozenset()))

    def extra(mode: str) -> str:
        if mode not in options:
            return "-"
        costs = [times.extra[k][mode] / 1e9 if times else options[mode].cost]
        if mode == "invert" and unit.first is not None:
            costs.append(times.extra[k]["first"] / 1e9 if times else unit.first.cost)
        return " / ".join(dict.fromkeys(format_seconds(c) if times else format_flops(int(c)) for c in costs))

    forward = [format_seconds(times.forward_seconds[k])] if times else []
    return [*forward, *map(kept, MODES[:3]), *map(extra, MODES[1:])]


def _remarks(profile: Profile) -> Iterable[str]:
    if profile.timing is not None:
        times = profile.timing
        yield f"A step takes {format_seconds(times.step_seconds)} with everything stored."
        yield f"Median of {times.runs} runs; half of the samples of a unit lie within {times.spread:.0%} of their median."
        ratio = inversion_ratio(profile)
        if ratio is not None:
            yield f"Inverting takes {ratio:.2f} of the forward time (the paper assumes 1)."
    yield from map(escape, profile.notes)


def inversion_ratio(profile: Profile) -> float | None:
    """Return the extra time of inverting over the time of forward, a median over the steps; None: nothing was timed.

    Source: "An Efficient Training Framework for Reversible Neural Architectures" (Jiang et al. 2020) takes it for 1.
    """
    if profile.timing is None:
        return None
    timed = zip(profile.timing.extra, profile.timing.forward_seconds, strict=True)
    ratios = [extra["invert"] / 1e9 / forward for extra, forward in timed if "invert" in extra and forward]
    return statistics.median(ratios) if ratios else None


def show_plan(plan: Plan, beside: Mapping[str, Point] | None = None) -> RenderableType:
    """Lay a plan out for rich to print: what it takes beside other schedules, the modes of every stage, and its notes."""
    where = plan.setting
    title = f"{where.model}, batch of {', '.join(where.batch)}, {where.dtype} on {where.device}"
    share = f"{plan.peak_bytes / plan.budget_bytes:.0%}"
    used = f"Peak {format_bytes(plan.peak_bytes)} of the budget of {format_bytes(plan.budget_bytes)} ({share})."
    return Group(escape(title), used, _comparison(plan, beside or {}), _schedule(plan), *map(escape, plan.notes))


def _comparison(plan: Plan, beside: Mapping[str, Point]) -> Table:
    this: Point = {"peak_bytes": plan.peak_bytes, "seconds": plan.seconds, "extra_flops": plan.extra_flops}
    table = Table()
    table.add_column("schedule")
    for heading in ("peak", "within the budget", "a step", "against all stored"):
        table.add_column(heading, justify="right")
    stored = beside.get("all stored")
    for name, found in {"this plan": this, **beside}.items():
        fits = "yes" if found["peak_bytes"] <= plan.budget_bytes else "no"
        seconds = "" if found["seconds"] is None else format_seconds(found["seconds"])
        table.add_row(name, format_bytes(found["peak_bytes"]), fits, seconds, against(found, stored))
    table.add_row("leanest possible", format_bytes(plan.min_peak_bytes), "yes" if plan.min_peak_bytes <= plan.budget_bytes else "no")
    return table


def against(found: Point, stored: Point | None) -> str:
    """Return how much more work a schedule is than storing everything, in words: time if known, else FLOPs."""
    if stored is None or found["seconds"] is None or not stored["seconds"]:
        return f"+{format_flops(found['extra_flops'])}"
    return f"{found['seconds'] / stored['seconds'] - 1:+.1%} time"


def _schedule(plan: Plan) -> Table:
    counts: dict[str, Counter[str]] = {}
    for name, mode in zip(plan.units, plan.schedule, strict=True):
        counts.setdefault(name.partition(".blocks.")[0], Counter())[mode] += 1
    used = [mode for mode in MODES if mode in plan.schedule]
    table = Table()
    table.add_column("units")
    for mode in used:
        table.add_column(mode, justify="right")
    for part, modes in counts.items():
        table.add_row(escape(part), *(str(modes[mode] or "") for mode in used))
    if len(counts) > 1:
        table.add_section()
        table.add_row("all", *(str(plan.schedule.count(mode)) for mode in used))
    return table


def show_batches(found: BatchPlan) -> RenderableType:
    """Lay the best batch out for rich to print: every size with its foreseen times, and the plan of the best."""
    table = Table(title="Samples per second, as foreseen; what does not fit the budget has none")
    for heading in ("batch", "planned", "all stored", "all inverted", "peak of the plan"):
        table.add_column(heading, justify="right")
    for row in found.rows:
        rates = ("-" if time is None else f"{row.batch / time:.4g}" for time in (row.planned, row.stored, row.inverted))
        table.add_row(str(row.batch), *rates, format_bytes(row.peak_bytes), style="bold" if row.batch == found.batch else None)
    best = f"Batch {found.batch} is best: {found.samples_per_second:.4g} samples a second, as run."
    return Group(table, show_plan(found.plan), best)


def folded(names: Sequence[str]) -> str:
    """Return names that differ in one number as one, such as "stages.0.blocks.0-5.f"."""
    pattern = _pattern(names[0])
    if "*" not in pattern:
        return names[0]
    start, end = pattern.split("*")
    numbers = sorted(int(name.removeprefix(start).removesuffix(end)) for name in names)
    return start + _ranges(numbers) + end


def _pattern(name: str) -> str:
    """Return a name with a star for the number that counts blocks or steps."""
    return re.sub(r"(blocks|steps)\.\d+", r"\1.*", name)


def _ranges(numbers: Sequence[int]) -> str:
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


def _plain(title: str) -> Table:
    table = Table(title=title, show_header=False, box=None, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    return table
