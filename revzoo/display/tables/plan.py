"""Plans as tables for rich to print: of one batch size, and of every batch size."""

from collections import Counter
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from revzoo.display.tables.base import fill
from revzoo.display.unit_name import parse_unit_name
from revzoo.format import format_bytes, format_flops, format_seconds, format_spread
from revzoo.planning.batch import BatchPlan
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
    points = {"this plan": summarize_plan(plan), **beside}
    is_timed, stored, rows = any(point["seconds"] is not None for point in points.values()), beside.get("all stored"), []
    for name, point in points.items():
        seconds = "" if point["seconds"] is None else format_seconds(point["seconds"])
        seconds += format_spread(plan.spread) if seconds and name == "this plan" else ""
        times = [seconds] if is_timed else []
        rows.append((name, *_describe_peak(point["peak_bytes"], plan), *times, _describe_extra_work(point, stored)))
    rows.append(("smallest possible", *_describe_peak(plan.min_peak_bytes, plan)))
    times = ["training\nstep"] if is_timed else []
    return fill(Table(), ("schedule", "peak", "within\nthe budget", *times, "against\nall stored"), rows)


def _describe_peak(peak_bytes: int, plan: Plan) -> tuple[str, str]:
    return format_bytes(peak_bytes), "yes" if peak_bytes <= plan.budget_bytes else "no"


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
    rows = [(escape(stage), *(str(modes[mode] or "") for mode in used)) for stage, modes in counts.items()]
    table = fill(Table(), ("units", *used), rows)
    if len(counts) > 1:
        table.add_section()
        table.add_row("all", *(str(plan.schedule.count(mode)) for mode in used))
    return table


def tabulate_batches(best: BatchPlan) -> RenderableType:
    """Return tables of the batch-size search: every size's predicted speed, and the best plan."""
    table = Table(title="Samples per second of the sizes tried; a dash means that it does not fit the budget")
    rows = []
    for row in best.rows:
        rates = ("-" if time is None else f"{row.batch / time:.4g}" for time in (row.planned, row.stored, row.inverted))
        rows.append((str(row.batch), *rates, format_bytes(row.peak_bytes)))
    fill(table, ("batch", "planned", "all stored", "all inverted", "peak of the plan"), rows)
    result = f"Batch {best.batch} is best: {best.samples_per_second:.4g} samples a second, measured."
    return Group(table, tabulate_plan(best.plan), result)
