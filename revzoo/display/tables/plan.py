"""A plan as tables for rich to print."""

from collections import Counter
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from revzoo.display.unit_name import parse_unit_name
from revzoo.format import format_bytes, format_flops, format_seconds, format_spread
from revzoo.planning.comparison import SchedulePoint, summarize_plan
from revzoo.planning.plan import Plan
from revzoo.runtime.mode import MODES


def tabulate_plan(plan: Plan, beside: Mapping[str, SchedulePoint] | None = None) -> RenderableType:
    """Lay out a plan: its peak and time next to those of other schedules, the modes of every stage, and its notes.

    Args:
        plan: to be shown.
        beside: the other schedules, by the name to show; None is none.
    """
    title = f"{plan.setting.model}, {plan.setting.describe()}"
    share = f"{plan.peak_bytes / plan.budget_bytes:.0%}"
    used = f"Peak {format_bytes(plan.peak_bytes)} of the budget of {format_bytes(plan.budget_bytes)} ({share})."
    if plan.lookahead:
        used += " This plan looks ahead; the other schedules do not."
    return Group(escape(title), used, _tabulate_comparison(plan, beside or {}), _tabulate_modes(plan), *map(escape, plan.notes))


def _tabulate_comparison(plan: Plan, beside: Mapping[str, SchedulePoint]) -> Table:
    table = Table()
    table.add_column("schedule")
    points = {"this plan": summarize_plan(plan), **beside}
    times = ["training\nstep"] if any(point["seconds"] is not None for point in points.values()) else []
    for heading in ("peak", "within\nthe budget", *times, "against\nall stored"):
        table.add_column(heading, justify="right", no_wrap=True)
    stored = beside.get("all stored")
    for name, point in points.items():
        fits = _yes_or_no(point["peak_bytes"] <= plan.budget_bytes)
        seconds = "" if point["seconds"] is None else format_seconds(point["seconds"])
        seconds += format_spread(plan.spread) if seconds and name == "this plan" else ""
        cells = (format_bytes(point["peak_bytes"]), fits, *([seconds] if times else []), _describe_extra_work(point, stored))
        table.add_row(name, *cells)
    table.add_row("smallest possible", format_bytes(plan.min_peak_bytes), _yes_or_no(plan.min_peak_bytes <= plan.budget_bytes))
    return table


def _yes_or_no(answer: bool) -> str:
    return "yes" if answer else "no"


def _describe_extra_work(point: SchedulePoint, stored: SchedulePoint | None) -> str:
    """Return how much more work a schedule is than storing everything: time if known, else FLOPs."""
    if stored is None or point["seconds"] is None or not stored["seconds"]:
        return f"+{format_flops(point['extra_flops'])}"
    return f"{point['seconds'] / stored['seconds'] - 1:+.1%} time"


def _tabulate_modes(plan: Plan) -> Table:
    counts: dict[str, Counter[str]] = {}
    for name, mode in zip(plan.units, plan.schedule, strict=True):
        unit = parse_unit_name(name)
        stage = name if unit.stage is None or unit.number is None else f"stages.{unit.stage}"
        counts.setdefault(stage, Counter())[mode] += 1
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
