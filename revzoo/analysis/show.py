"""What a model is, what it stores and what it rebuilds: the answers of `revzoo show`."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from revzoo import weights
from revzoo.analysis.flops import count_flops
from revzoo.analysis.memory import format_bytes, memory_table
from revzoo.analysis.trial import borrowed, call, linear_loss, scheduled
from revzoo.model import Model
from revzoo.runtime.chain import Mode
from revzoo.runtime.memory import LiveBytes
from revzoo.spec import plain


def show(model: Model, batch_size: int = 32) -> RenderableType:
    """Describe a model for rich to print: its parts, where activations are kept, costs, sources, expectations, weights.

    Everything is measured under `FakeTensorMode`: make the model on the meta device, and no size is too large.

    Args:
        batch_size: images for which bytes are given.
    """
    batch = model.example_input(batch_size, device="meta")
    return Group(_facts(model, batch), _parts(model, batch), memory_table(model, batch), _statements(model))


def kept_bytes(model: Model, batch: Any, mode: Mode) -> dict[str, int]:
    """Return, for each of the model's units, the bytes that its part of forward leaves waiting for backward.

    Additions that follow a unit count to it, as do the streams that a chain of inverted steps ends with.

    Args:
        mode: of every step; nodes store.
    """
    begins: dict[str, int] = {}
    with borrowed(model, batch, fake=True) as inputs, scheduled(model) as assign, LiveBytes() as live:
        assign(mode)
        lasting = live.watch([model.parameters(), model.buffers(), inputs])

        def note(unit: str, *_: Any) -> None:
            begins[unit] = live.moment()

        hooks = [model.get_submodule(unit).register_forward_pre_hook(partial(note, unit)) for unit in model.units]
        try:
            outputs = call(model, inputs)
        finally:
            for hook in hooks:
                hook.remove()
        end = live.moment()
        loss = linear_loss(outputs)
        del outputs
        total = live.alive(without=lasting)
        ends = [*list(begins.values())[1:], end]
        parts = {unit: live.born(begins[unit], stop) for unit, stop in zip(begins, ends, strict=True)}
        kept = {unit: total - live.alive(without=lasting | born) for unit, born in parts.items()}
        del loss
    return kept


def _facts(model: Model, batch: Tensor) -> Table:
    spec = model.spec
    everything = _parameters(model)
    rebuilt = sum(_parameters(step) for step in model.steps)
    with scheduled(model) as assign:
        flops = {}
        for mode in ("store", "invert"):
            assign(mode)
            flops[mode] = count_flops(model, batch[:1])
    table = _plain(escape(f"{spec.name} ({spec.family})"))
    table.add_row("input", ", ".join(f"{key} {value}" for key, value in plain(spec.input).items()))
    table.add_row("outputs", str(model.num_outputs))
    table.add_row("parameters", f"{everything:,}, of them {rebuilt / everything:.0%} in reversible steps")
    table.add_row("reversible steps", f"{len(model.steps)}, coupling {spec.coupling.type}")
    table.add_row(
        "forward + backward",
        f"{flops['store'] / 1e9:.3g} GFLOP per image; {flops['invert'] / flops['store']:.4f} times that with invert",
    )
    return table


def _parts(model: Model, batch: Tensor) -> Table:
    table = Table(
        title=f"What is kept for backward, batch of {len(batch)}",
        caption="Invert keeps one pair of streams for consecutive steps, however many. Nodes (stem, transitions, fuse, head) "
        "keep their activations unless set to recompute.",
    )
    for heading in ("part", "what", "parameters", "kept, store", "kept, invert"):
        table.add_column(heading, justify="left" if heading in ("part", "what") else "right")
    kept = {mode: kept_bytes(model, batch, mode) for mode in ("store", "invert")}
    for part, what, units in _rows(model):
        count = sum(_parameters(model.get_submodule(unit)) for unit in units)
        sizes = [format_bytes(sum(sizes[unit] for unit in units)) for sizes in kept.values()]
        table.add_row(part, what, f"{count:,}", *sizes)
    return table


def _rows(model: Model) -> Iterator[tuple[str, str, list[str]]]:
    """Yield name, description and units of every node and of every stage's blocks."""
    spec = model.spec
    yield "stem", f"node: {spec.stem.type}, then {spec.split.type}", ["stem"]
    for i, stage in enumerate(spec.stages):
        if stage.transition is not None:
            yield f"stages.{i}.transition", f"node: {stage.transition.type}", [f"stages.{i}.transition"]
        steps = " + ".join(part.type for part in (stage.f, stage.g) if part is not None)
        units = [unit for unit in model.units if unit.startswith(f"stages.{i}.blocks.")]
        yield f"stages.{i}", f"{stage.depth} blocks, width {stage.width}: {steps}", units
    yield "fuse", f"node: {spec.fuse.type}", ["fuse"]
    yield "head", f"node: {spec.head.type}", ["head"]


def _statements(model: Model) -> Table:
    spec = model.spec
    table = _plain("Statements")
    for source in spec.sources:
        table.add_row("source", escape(f"{source['of']}: {source['cite']}"))
    for what, value in spec.expect.items():
        table.add_row("expected", escape(f"{what}: {value}"))
    if spec.twin is not None:
        table.add_row("ordinary twin", escape(f"{spec.twin['library']} {spec.twin['name']}"))
    entry = weights.index().get(spec.name)
    metric = "" if entry is None else ", ".join(f"{name} {value:g}" for name, value in entry.metric.items())
    table.add_row("weights", "none" if entry is None else escape(f"{entry.file} ({metric}; trained by: {entry.command})"))
    return table


def _plain(title: str) -> Table:
    table = Table(title=title, show_header=False, box=None, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    return table


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
