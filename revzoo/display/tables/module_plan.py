"""A plan for a module that is not the zoo's, as tables for rich to print."""

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from revzoo.format import format_bytes, format_flops
from revzoo.planning.reforwarding.module_plan import ModulePlan


def tabulate_module_plan(plan: ModulePlan) -> RenderableType:
    """Lay out a plan: its peak and work beside those of storing everything, what is kept, and its notes."""
    setting = plan.setting
    title = f"{setting.model}, batch of {', '.join(setting.batch)}, {setting.dtype} on {setting.device}"
    table = Table()
    table.add_column("plan")
    for heading in ("peak", "within the budget", "FLOPs"):
        table.add_column(heading, justify="right")
    stored = format_flops(plan.total_flops)
    rows = (
        ("this plan", plan.peak_bytes, f"{stored} +{plan.extra_flops / max(1, plan.total_flops):.1%}"),
        ("all stored", plan.no_recompute_peak_bytes, stored),
        ("smallest found", plan.min_peak_bytes, ""),
    )
    for name, peak, flops in rows:
        table.add_row(name, format_bytes(peak), "yes" if peak <= plan.budget_bytes else "no", flops)
    spans = f"{plan.describe_spans()}; the spans are recovered in turn."
    used = f"Peak {format_bytes(plan.peak_bytes)} of the budget of {format_bytes(plan.budget_bytes)}."
    return Group(escape(title), used, table, *([spans] if plan.drops_something else []), *map(escape, plan.notes))
