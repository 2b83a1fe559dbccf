"""The report of a model as text: its parts, what each keeps for backward, and the memory of a training step."""

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from revzoo.analysis.report import ModelReport, TwinReport
from revzoo.display.tables.base import DottedName, fill, make_plain_table, make_table
from revzoo.display.tables.memory import MemoryTable
from revzoo.errors import join_names
from revzoo.format import format_bytes, format_macs, format_shape

_CAPTION = (
    "With invert, any number of consecutive steps keeps one pair of streams; a bijection between them keeps nothing. Nodes "
    "(stem, transitions, fuse, head) keep their activations unless set to selective or recompute. A step cut into tiles "
    "(--tiles, model.tiles, revzoo.choose_tiles) keeps as much, and takes less while it runs again."
)

_ONE_TENSOR_CAPTION = (
    "With invert, a layer with an inverse of its own keeps only what the inverse needs besides the layer's output. All else "
    "keeps its activations unless set to selective or recompute."
)


def tabulate_model(report: ModelReport) -> RenderableType:
    """Return what rich is to print: sizes and costs, parts, memory in every mode, then where it is from."""
    memory, twin = dict(report.memory), report.twin
    if twin is not None and twin.memory is not None:
        memory[f"twin: {twin.name}"] = twin.memory
    parts = _tabulate_parts(report), _tabulate_kept(report)
    return Group(_tabulate_facts(report), *parts, MemoryTable(memory), _tabulate_sources(report))


def _tabulate_facts(report: ModelReport) -> Table:
    table = make_plain_table(escape(f"{report.name} ({report.family})"))
    table.add_row("input", ", ".join(f"{key} {value}" for key, value in report.input.items()))
    table.add_row("outputs", str(report.outputs))
    share = f", {report.step_parameters / report.parameters:.0%} of them in reversible steps" if report.steps else ""
    table.add_row("parameters", f"{report.parameters:,}{share}")
    tiles = f", cut into {join_names([str(each) for each in report.tiles])} tiles" if report.tiles else ""
    coupled = f"{report.steps}, coupling {report.coupling}{tiles}"
    table.add_row("reversible steps", coupled if report.steps else "none: one tensor instead of two streams")
    table.add_row("forward", f"{format_macs(report.macs)} (multiply-adds) per {report.example}")
    ratios = ", ".join(f"{ratio:.4f} with {schedule}" for schedule, ratio in report.flop_ratios.items() if schedule != "store")
    table.add_row("forward + backward", f"FLOPs relative to store: {ratios}")
    if report.twin is not None:
        table.add_row("ordinary twin", escape(describe_twin(report.twin, report.example)))
    return table


def describe_twin(twin: TwinReport, example: str) -> str:
    """Return a line about the twin: its name and size, or why it was not measured."""
    if twin.parameters is None or twin.macs is None:
        return f"{twin.library} {twin.name}: not measured, {twin.problem}"
    return f"{twin.library} {twin.name}: {twin.parameters:,} parameters, {format_macs(twin.macs)} per {example}"


def _tabulate_parts(report: ModelReport) -> Table:
    table = make_table(title="Parts")
    table.add_column("part")
    table.add_column("what")  # wraps at words where the terminal is narrow; numbers stay whole
    for heading in ("output", "parameters"):
        table.add_column(heading, justify="right", no_wrap=True)
    for part in report.parts:
        what = part.what if part.kind == "stage" else f"{part.kind}: {part.what}"
        table.add_row(DottedName(part.name), what, format_shape(part.shape), f"{part.parameters:,}")
    return table


def _tabulate_kept(report: ModelReport) -> Table:
    title = f"What is kept for backward, batch of {report.batch_size} {report.example}s"
    rows = [
        (
            DottedName(part.name),
            *("nothing" if part.kind == "bijection" else format_bytes(size) for size in part.kept_bytes.values()),
        )
        for part in report.parts
    ]
    return fill(
        make_table(title=title, caption=_CAPTION if report.steps else _ONE_TENSOR_CAPTION), ("part", *report.modes), rows
    )


def _tabulate_sources(report: ModelReport) -> Table:
    table = make_plain_table("Sources and weights")
    for source in report.sources:
        table.add_row("source", escape(f"{source['of']}: {source['cite']}"))
    for name, value in report.expect.items():
        if value is not None:
            table.add_row("expected", escape(f"{name}: {value}{_compare(name, value, report)}"))
    if (weights := report.weights) is not None:
        metric = ", ".join(f"{name} {value:.4g}" for name, value in weights["metric"].items())
        table.add_row("shipped weights", escape(f"{weights['file']} ({metric}; trained by: {weights['command']})"))
    return table


def _compare(name: str, expected: object, report: ModelReport) -> str:
    """Return what the model has instead of the expected number; nothing if they agree, or if it was not counted."""
    counted = {"parameters": report.parameters, "reversible_steps": report.steps}
    return f", but it has {counted[name]}" if name in counted and counted[name] != expected else ""
