"""The facts about a model, measured once: what `revzoo show` prints, plots and hands out as JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor, nn

from revzoo.analysis.dry_run import isolated, scheduled
from revzoo.analysis.flops import FlopCounter
from revzoo.analysis.memory_report import MemoryReport, measured
from revzoo.analysis.twin import build_twin
from revzoo.bijection import Bijection
from revzoo.checkpoint import index
from revzoo.model.network import Model
from revzoo.runtime.schedule import MODES
from revzoo.spec import ImageInput, Input, to_plain


@dataclass(frozen=True)
class PartReport:
    """One node, the blocks of one stage, or a bijection between two stages.

    Args:
        steps: reversible steps in it.
        shape: what it hands on of one example: up to the last stage one of the two streams; None behind the head.
        parameters: those of an earlier part that it shares (a tied embedding) are not counted again.
        kept_bytes: what it leaves waiting for backward, by mode of the steps; nodes store.
    """

    name: str
    kind: Literal["node", "stage", "bijection"]
    what: str
    steps: int
    shape: tuple[int, ...] | None
    parameters: int
    kept_bytes: dict[str, int]


@dataclass(frozen=True)
class TwinReport:
    """The ordinary network beside the model, on the same batch.

    Args:
        problem: why it could not be built, and so not be measured; else None.
    """

    library: str
    name: str
    parameters: int | None = None
    flops: int | None = None
    memory: MemoryReport | None = None
    problem: str | None = None


@dataclass(frozen=True)
class ModelReport:
    """What a model is and costs.

    Args:
        digest: of the spec.
        batch_size: examples for which bytes are given.
        step_parameters: how many of the parameters are in reversible steps.
        flops: of a forward of one example, a multiply-add counted once, as papers do; norms and activations are left out.
        flop_ratios: of a forward and backward, to that of `store`, by mode.
        memory: of a training step, by mode.
        weights: file, metric and command of the shipped weights, None without.
    """

    name: str
    family: str
    digest: str
    input: dict[str, Any]
    outputs: int
    coupling: str
    steps: int
    batch_size: int
    parameters: int
    step_parameters: int
    flops: int
    flop_ratios: dict[str, float]
    parts: tuple[PartReport, ...]
    memory: dict[str, MemoryReport]
    twin: TwinReport | None
    sources: tuple[dict[str, str], ...]
    expect: dict[str, Any]
    weights: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as mappings, lists and scalars, ready for JSON."""
        return asdict(self)

    @property
    def example(self) -> str:
        """What one example is called."""
        return "image" if self.input["kind"] == "image" else "text"


def usual_batch(input: Input) -> int:
    """Return the batch size that bytes are given for unless another is asked for."""
    return 32 if isinstance(input, ImageInput) else 8


def report(model: Model, batch_size: int | None = None) -> ModelReport:
    """Measure a model in every mode, and its twin.

    Everything runs under `FakeTensorMode`, one forward and backward a mode: make the model on the meta device, and no size
    is too large.

    Args:
        batch_size: of the training step; None is `usual_batch`.
    """
    spec = model.spec
    batch = model.example_input(batch_size or usual_batch(spec.input), device="meta")
    memory: dict[str, MemoryReport] = {}
    kept: dict[str, dict[str, int]] = {}
    flops: dict[str, FlopCounter] = {}
    with scheduled(model) as assign:
        for mode in MODES:
            assign(mode)
            memory[mode], kept[mode], flops[mode] = _trial(model, batch, model.units)
    totals = {mode: count.forward + count.backward for mode, count in flops.items()}
    entry = index.read_index().get(spec.name)
    return ModelReport(
        name=spec.name,
        family=spec.family,
        digest=spec.digest,
        input=to_plain(spec.input),
        outputs=model.num_outputs,
        coupling=spec.coupling.type,
        steps=len(model.steps),
        batch_size=len(batch),
        parameters=sum(p.numel() for p in model.parameters()),
        step_parameters=sum(p.numel() for step in model.steps for p in step.parameters()),
        flops=_per_example(flops["store"], batch),
        flop_ratios={mode: total / totals["store"] for mode, total in totals.items()},
        parts=tuple(_parts(model, kept)),
        memory=memory,
        twin=_twin(model, batch),
        sources=to_plain(spec.sources),
        expect=to_plain(spec.expect),
        weights=None if entry is None else {"file": entry.file, "metric": dict(entry.metric), "command": entry.command},
    )


def _trial(model: nn.Module, batch: Tensor, units: tuple[str, ...] = ()) -> tuple[MemoryReport, dict[str, int], FlopCounter]:
    flops = FlopCounter()
    with isolated(model, batch, fake=True) as inputs, flops:
        memory, kept = measured(model, inputs, units=units)
    return memory, kept, flops


def _per_example(flops: FlopCounter, batch: Tensor) -> int:
    return flops.forward // 2 // len(batch)


def _parts(model: Model, kept: dict[str, dict[str, int]]) -> Iterator[PartReport]:
    """Yield the parts in order; what a unit keeps is summed over the units of a part."""
    spec, known = model.spec, set[int]()

    def part(
        name: str, what: str, shape: tuple[int, ...] | None, units: list[str], kind: Literal["node", "stage"] = "node"
    ) -> PartReport:
        found = {id(p): p.numel() for unit in units for p in model.get_submodule(unit).parameters() if id(p) not in known}
        known.update(found)
        sizes = {mode: sum(bytes_of[unit] for unit in units) for mode, bytes_of in kept.items()}
        return PartReport(name, kind, what, len(units) if kind == "stage" else 0, shape, sum(found.values()), sizes)

    shape = _dims(model.split)
    yield part("stem", f"{spec.stem.type}, then {spec.split.type}", shape, ["stem"])
    for i, stage in enumerate(spec.stages):
        if stage.transition is not None:
            name = f"stages.{i}.transition"
            transition = model.get_submodule(name)
            shape = _dims(transition)
            if isinstance(transition, Bijection):
                yield PartReport(name, "bijection", stage.transition.type, 0, shape, 0, dict.fromkeys(MODES, 0))
            else:
                yield part(name, stage.transition.type, shape, [name])
        branches = " + ".join(branch.type for branch in (stage.f, stage.g) if branch is not None)
        units = [entry.name for entry in model.layout() if entry.kind == "step" and entry.stage == i]
        yield part(f"stages.{i}", f"{_counted(stage.depth, 'block')}: {branches}", shape, units, "stage")
    yield part("fuse", spec.fuse.type, _dims(model.fuse), ["fuse"])
    yield part("head", spec.head.type, None, ["head"])


def _twin(model: Model, batch: Tensor) -> TwinReport | None:
    twin = model.spec.twin
    if twin is None:
        return None
    built = build_twin(model.spec)
    if isinstance(built, str):
        return TwinReport(twin["library"], twin["name"], problem=built)
    try:
        memory, _, flops = _trial(built, batch)
    except Exception as error:  # somebody else's network, with somebody's arguments
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return TwinReport(twin["library"], twin["name"], problem=f"it does not take the model's input ({reason})")
    return TwinReport(
        twin["library"], twin["name"], sum(p.numel() for p in built.parameters()), _per_example(flops, batch), memory
    )


def _dims(part: Any) -> tuple[int, ...]:
    dims: tuple[int, ...] = part.out_shape.dims
    return dims


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
