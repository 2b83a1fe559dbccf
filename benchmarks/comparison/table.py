"""The comparison of methods as tables for rich to print."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from comparison.measure import SMALL_STEPS
from comparison.net import NETS, Net
from comparison.report import ComparisonReport

_TITLE = "A forward and backward of the same blocks by every method"
_CAPTION = (
    "Peak: most streams alive at once, besides weights, their gradients and inputs, and streams more for each block. FLOPs and "
    "time are ratios to plain autograd. Machinery: microseconds of a step beyond its arithmetic."
)


def tabulate_comparison(report: ComparisonReport) -> RenderableType:
    """Return the figures of every method, the matrix of checks, and why a method was not run."""
    return Group(_tabulate_figures(report), _tabulate_checks(report), *_describe_left_out(report))


def _tabulate_figures(report: ComparisonReport) -> Table:
    table = Table(title=_TITLE, caption=_CAPTION)
    table.add_column("", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for net in NETS:
        depths = " / ".join(map(str, report.find("peak", net.name, report.methods[0])))
        for heading in (f"{net.name}:\npeak at {depths}", "a block", "FLOPs", "time"):
            table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("machinery", "checks"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, name in enumerate(report.methods, 1):
        if name not in report.left_out:
            cells = [cell for net in NETS for cell in list_net_cells(report, net, name)]
            table.add_row(str(number), name, *cells, format_machinery(report, name), format_passed(report, name))
    return table


def list_net_cells(report: ComparisonReport, net: Net, name: str) -> list[str]:
    """Return the cells of a method for a net: peaks and slope in streams, FLOPs and time over plain autograd."""
    streams = [f"{peak / net.stream_bytes:.1f}" for peak in report.find("peak", net.name, name).values()]
    (slope,) = report.find("slope", net.name, name).values()
    flops = list(report.find("flops", net.name, name).values())[-1]
    base = list(report.find("flops", net.name, report.methods[0]).values())[-1]
    time = [f"{ratio:.2f}" for ratio in report.find("time", net.name, name).values()]
    return [" / ".join(streams), f"{slope / net.stream_bytes + 0.0:.2f}", f"{flops / base:.3f}", *time]


def format_machinery(report: ComparisonReport, name: str) -> str:
    """Return microseconds of a step, or nothing if they were not measured."""
    return "".join(f"{value:.0f}" for value in report.find("machinery", SMALL_STEPS.name, name).values())


def format_passed(report: ComparisonReport, name: str) -> str:
    """Return how many checks a method passes, such as "29 of 35"."""
    passed, rows = report.count_passed(name)
    return f"{passed} of {rows}"


def _tabulate_checks(report: ComparisonReport) -> Table:
    table = Table(title="Checks, by the number of the method: - is a check that fails on one of the nets or both")
    table.add_column("")
    shown = [(str(number), name) for number, name in enumerate(report.methods, 1) if name not in report.left_out]
    for number, _ in shown:
        table.add_column(number, justify="right", no_wrap=True)
    for check, row in report.checks.items():
        table.add_row(check, *("-" if any(row[name].values()) else "+" for _, name in shown))
    return table


def _describe_left_out(report: ComparisonReport) -> Iterable[str]:
    for name, reason in report.left_out.items():
        yield escape(f"{name}: {reason}")
