"""A plan for a module that is not the zoo's, as tables for rich to print."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from revzoo.display.tables.base import fill
from revzoo.format import format_bytes, format_flops, format_seconds
from revzoo.graph.counted_step import PlanDetails
from revzoo.graph.module_plan import ModulePlan

_MOST_PARTS = 24  # rows of the table


def tabulate_module_plan(plan: ModulePlan, details: PlanDetails) -> RenderableType:
    """Lay out a plan: its peak and work next to those of storing everything, what every part keeps, and its notes."""
    title = f"{plan.setting.model}, {plan.setting.describe()}"
    used = (
        f"Peak {format_bytes(plan.compiled_peak_bytes or plan.peak_bytes)} of the budget of {format_bytes(plan.budget_bytes)}."
    )
    comparison, notes = _tabulate_comparison(plan), map(escape, plan.notes)
    if not plan.drops_something:
        return Group(escape(title), used, comparison, *notes)
    kept, dropped = (sum(getattr(call, key) for call in details.calls) for key in ("kept_bytes", "dropped_bytes"))
    words = (
        f"Backward needs {format_bytes(kept + dropped)} of what forward makes. {format_bytes(kept)} are kept. The rest is "
        "dropped after its last use in forward, and made again from what is kept when backward comes to it."
    )
    return Group(escape(title), used, comparison, words, _tabulate_parts(details), *notes)


def _tabulate_comparison(plan: ModulePlan) -> Table:
    stored, is_timed, cells = format_flops(plan.total_flops), plan.seconds is not None, []
    rows = [
        ("this plan", plan.peak_bytes, f"{stored} +{plan.extra_flops / max(1, plan.total_flops):.1%}", plan.seconds),
        *([] if plan.compiled_peak_bytes is None else [("compiled", plan.compiled_peak_bytes, "", None)]),
        ("all stored", plan.no_recompute_peak_bytes, stored, plan.stored_seconds),
        *([] if plan.min_peak_bytes is None else [("smallest found", plan.min_peak_bytes, "", None)]),
    ]
    for name, peak, flops, seconds in rows:
        time = ["" if seconds is None else format_seconds(seconds)] if is_timed else []
        cells.append((name, format_bytes(peak), "yes" if peak <= plan.budget_bytes else "no", flops, *time))
    return fill(Table(), ("plan", "peak", "within\nthe budget", "FLOPs", *(["time of\na step"] if is_timed else [])), cells)


def _tabulate_parts(details: PlanDetails) -> Table:
    """Return what every part of the module keeps, and what of it runs again."""
    sums: dict[str, list[int]] = {}
    rows = []
    names = name_parts([call.path for call in details.calls], _MOST_PARTS)
    for name, call in zip(names, details.calls, strict=True):
        row = sums.setdefault(name, [0] * 5)
        again = call.num_reruns * call.flops
        for k, value in enumerate((call.kept_bytes, call.dropped_bytes, call.num_reruns > 0, 1, again)):
            row[k] += value
    for name, (kept, dropped, reruns, count, flops) in sums.items():
        cells = format_bytes(kept), format_bytes(dropped) if dropped else "", f"{reruns} of {count}" if reruns else ""
        rows.append((escape(name), *cells, format_flops(flops) if flops else ""))
    return fill(Table(), ("part of the module", "kept", "made again", "calls that\nrun again", "their\nFLOPs"), rows)


def name_parts(paths: Sequence[str], most: int) -> list[str]:
    """Return the name of every call's part: `layer1.0`, or `layer1` where there would be more than `most` parts.

    Args:
        paths: of the submodules, call by call, such as `layer1.0.conv2`. A call of the module itself, whose path is empty,
            belongs to the part before it.
        most: number of parts.
    """
    for with_number in (True, False):
        names = [_shorten(path, with_number) for path in paths]
        if len(set(names)) <= most:
            break
    first = next((name for name in names if name), "all")
    named: list[str] = []
    for name in names:
        named.append(name or (named[-1] if named else first))
    return named


def _shorten(path: str, with_number: bool) -> str:
    """Return a path up to its first number, which `with_number` includes. Of a path without a number return the first name."""
    parts = path.split(".")
    number = next((k for k, part in enumerate(parts) if part.isdigit()), None)
    if number is None:
        return parts[0]
    return ".".join(parts[: number + 1] if with_number else parts[:number])
