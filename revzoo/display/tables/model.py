"""The report of a model as text: its parts, what each keeps for backward, and the memory of a training step."""

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from revzoo.analysis.bytes_per_pixel import PixelReport
from revzoo.analysis.report import ModelReport, PartReport, TwinReport
from revzoo.display.tables.base import make_plain_table
from revzoo.display.tables.memory import MemoryTable
from revzoo.format import format_bytes, format_flops, format_shape
from revzoo.runtime.schedule import MODES


def tabulate_model(report: ModelReport) -> RenderableType:
    """Return what rich is to print: sizes and costs, parts, memory in every mode and per pixel, then where it is from."""
    pixels = [_tabulate_pixels(report.pixels, report.twin)] if report.pixels is not None else []
    memory = _tabulate_memory(report)
    return Group(_tabulate_facts(report), _tabulate_parts(report), memory, *pixels, _tabulate_sources(report))


def _tabulate_facts(report: ModelReport) -> Table:
    table = make_plain_table(escape(f"{report.name} ({report.family})"))
    table.add_row("input", ", ".join(f"{key} {value}" for key, value in report.input.items()))
    table.add_row("outputs", str(report.outputs))
    share = report.step_parameters / report.parameters
    table.add_row("parameters", f"{report.parameters:,}, {share:.0%} of them in reversible steps")
    table.add_row("reversible steps", f"{report.steps}, coupling {report.coupling}")
    table.add_row("forward", f"{format_flops(report.flops)} per {report.example}, a multiply-add counted once")
    ratios = ", ".join(f"{ratio:.4f} with {schedule}" for schedule, ratio in report.flop_ratios.items() if schedule != "store")
    table.add_row("forward + backward", f"FLOPs relative to store: {ratios}")
    if report.twin is not None:
        table.add_row("ordinary twin", escape(describe_twin(report.twin, report.example)))
    return table


def describe_twin(twin: TwinReport, example: str) -> str:
    """Return a line about the twin: its name and size, or why it was not measured."""
    if twin.parameters is None or twin.flops is None:
        return f"{twin.library} {twin.name}: not measured, {twin.problem}"
    return f"{twin.library} {twin.name}: {twin.parameters:,} parameters, {format_flops(twin.flops)} per {example}"


def _tabulate_parts(report: ModelReport) -> Table:
    table = Table(
        title=f"What is kept for backward, batch of {report.batch_size} {report.example}s",
        caption="With invert, any number of consecutive steps keeps one pair of streams; a bijection between them keeps "
        "nothing. Nodes (stem, transitions, fuse, head) keep their activations unless set to selective or recompute.",
    )
    for heading in ("part", "what", "output", "parameters", *MODES):
        is_text = heading in ("part", "what")  # folded if the terminal is narrow; numbers stay whole
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for part in report.parts:
        kept = ["nothing"] * len(MODES) if part.kind == "bijection" else [format_bytes(part.kept_bytes[m]) for m in MODES]
        table.add_row(part.name, _describe_part(part), format_shape(part.shape), f"{part.parameters:,}", *kept)
    return table


def _describe_part(part: PartReport) -> str:
    return part.what if part.kind == "stage" else f"{part.kind}: {part.what}"


def _tabulate_memory(report: ModelReport) -> MemoryTable:
    columns = dict(report.memory)
    if report.twin is not None and report.twin.memory is not None:
        columns[f"twin: {report.twin.name}"] = report.twin.memory
    return MemoryTable(columns)


def _tabulate_pixels(pixels: PixelReport, twin: TwinReport | None) -> Table:
    caption = f"Peak: {pixels.describe()}. z: activations that backward has yet to use; g: gradients of activations."
    if twin is not None and twin.pixels is not None:
        caption += f" Of the twin: {twin.pixels.bytes_per_pixel:.1f} bytes."
    table = Table(title="Bytes per pixel at the peak of each stage, with invert", caption=caption)
    heads, *rows = pixels.list_rows()
    for head in heads:
        table.add_column(head, justify="left" if head in (heads[0], heads[-1]) else "right")
    for row, name in zip(rows, pixels.stages, strict=True):
        table.add_row(*row, style="bold" if name == pixels.peak_stage else None)
    return table


def _tabulate_sources(report: ModelReport) -> Table:
    table = make_plain_table("Sources and weights")
    for source in report.sources:
        table.add_row("source", escape(f"{source['of']}: {source['cite']}"))
    for name, value in report.expect.items():
        if value is not None:
            table.add_row("expected", escape(f"{name}: {value}"))
    table.add_row("weights", escape(describe_weights(report)))
    return table


def describe_weights(report: ModelReport) -> str:
    """Return a line about the weights that ship for the model, or "none"."""
    if report.weights is None:
        return "none"
    metric = ", ".join(f"{name} {value:g}" for name, value in report.weights["metric"].items())
    return f"{report.weights['file']} ({metric}; trained by: {report.weights['command']})"
