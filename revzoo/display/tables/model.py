"""The report of a model as text: what it is, what it stores and what it rebuilds."""

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from revzoo.analysis.report import ModelReport, PartReport, TwinReport
from revzoo.display.tables.memory import MemoryTable
from revzoo.format import format_bytes, format_flops, format_shape
from revzoo.runtime.schedule import MODES


def show(report: ModelReport) -> RenderableType:
    """Lay a report out for rich to print: parts, where activations are kept, costs, sources, expectations, weights."""
    return Group(_facts(report), _parts(report), _memory(report), _statements(report))


def _facts(report: ModelReport) -> Table:
    table = _plain(escape(f"{report.name} ({report.family})"))
    table.add_row("input", ", ".join(f"{key} {value}" for key, value in report.input.items()))
    table.add_row("outputs", str(report.outputs))
    share = report.step_parameters / report.parameters
    table.add_row("parameters", f"{report.parameters:,}, of them {share:.0%} in reversible steps")
    table.add_row("reversible steps", f"{report.steps}, coupling {report.coupling}")
    table.add_row("forward", f"{format_flops(report.flops)} per {report.example}, a multiply-add counted once")
    ratios = ", ".join(f"{report.flop_ratios[mode]:.4f} with {mode}" for mode in MODES if mode != "store")
    table.add_row("forward + backward", f"FLOPs relative to store: {ratios}")
    if report.twin is not None:
        table.add_row("ordinary twin", escape(describe_twin(report.twin, report.example)))
    return table


def describe_twin(twin: TwinReport, example: str) -> str:
    """Return a line about the twin: what it is, and its size or why it is not known."""
    if twin.parameters is None or twin.flops is None:
        return f"{twin.library} {twin.name}: not measured, {twin.problem}"
    return f"{twin.library} {twin.name}: {twin.parameters:,} parameters, {format_flops(twin.flops)} per {example}"


def _parts(report: ModelReport) -> Table:
    table = Table(
        title=f"What is kept for backward, batch of {report.batch_size} {report.example}s",
        caption="Invert keeps one pair of streams for consecutive steps, however many; a bijection between them stores "
        "nothing. Nodes (stem, transitions, fuse, head) keep their activations unless set to selective or recompute.",
    )
    for heading in ("part", "what", "output", "parameters", *MODES):
        words = heading in ("part", "what")  # which are folded where the terminal is narrow; numbers are not cut
        table.add_column(heading, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for part in report.parts:
        kept = ["nothing"] * len(MODES) if part.kind == "bijection" else [format_bytes(part.kept_bytes[m]) for m in MODES]
        table.add_row(part.name, _what(part), format_shape(part.shape), f"{part.parameters:,}", *kept)
    return table


def _what(part: PartReport) -> str:
    return part.what if part.kind == "stage" else f"{part.kind}: {part.what}"


def _memory(report: ModelReport) -> MemoryTable:
    columns = dict(report.memory)
    if report.twin is not None and report.twin.memory is not None:
        columns[f"twin: {report.twin.name}"] = report.twin.memory
    return MemoryTable(columns)


def _statements(report: ModelReport) -> Table:
    table = _plain("Statements")
    for source in report.sources:
        table.add_row("source", escape(f"{source['of']}: {source['cite']}"))
    for what, value in report.expect.items():
        if value is not None:
            table.add_row("expected", escape(f"{what}: {value}"))
    table.add_row("weights", escape(describe_weights(report)))
    return table


def describe_weights(report: ModelReport) -> str:
    """Return a line about the shipped weights, "none" where there are none."""
    if report.weights is None:
        return "none"
    metric = ", ".join(f"{name} {value:g}" for name, value in report.weights["metric"].items())
    return f"{report.weights['file']} ({metric}; trained by: {report.weights['command']})"


def _plain(title: str) -> Table:
    table = Table(title=title, show_header=False, box=None, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    return table
