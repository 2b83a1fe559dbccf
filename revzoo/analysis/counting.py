"""Count everything that `revzoo show` prints, draws and writes as JSON."""

from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor, nn

from revzoo.analysis.chains import preserve_schedules
from revzoo.analysis.dry_run import isolated
from revzoo.analysis.flops import FlopCounter
from revzoo.analysis.report import ModelReport, PartReport, TwinReport
from revzoo.analysis.step_memory import CountedStep, run_and_measure
from revzoo.analysis.twin import build_twin
from revzoo.checkpoint import index
from revzoo.format import count_noun
from revzoo.model.model import Model
from revzoo.runtime.mode import MODES, Mode
from revzoo.runtime.schedule import STAGE_INPUTS
from revzoo.spec import ImageInput, Input, Spec, to_plain


def default_batch_size(input: Input) -> int:
    """Return the number of examples to measure a model with where none is given."""
    return 32 if isinstance(input, ImageInput) else 8


def report_model(model: Model, batch_size: int | None = None) -> ModelReport:
    """Measure a training step of the model in every mode, and of its twin.

    Everything runs under `FakeTensorMode`, so models on the meta device of any size can be measured.

    Args:
        model: the model, on any device.
        batch_size: number of examples in the training step; None is `default_batch_size`.
    """
    spec = model.spec
    batch = model.example_input(batch_size or default_batch_size(spec.input), device="meta")
    steps: dict[str, CountedStep] = {}
    flops: dict[str, FlopCounter] = {}
    with preserve_schedules(model) as assign:
        for mode in MODES:
            assign(mode)
            steps[mode], flops[mode] = _count_step(model, batch, model.units)
        if any(entry.kind == "node" and entry.stage is not None for entry in model.layout()):
            model.schedule = STAGE_INPUTS
            steps[STAGE_INPUTS], flops[STAGE_INPUTS] = _count_step(model, batch)
    totals = {mode: count.forward + count.backward for mode, count in flops.items()}
    return ModelReport(
        name=spec.name,
        family=spec.family,
        digest=spec.digest,
        input=to_plain(spec.input),
        outputs=model.num_outputs,
        coupling=spec.coupling.type,
        steps=len(model.steps),
        tiles=tuple(sorted({*model.tiles} - {1})),
        batch_size=len(batch),
        parameters=sum(p.numel() for p in model.parameters()),
        step_parameters=sum(p.numel() for step in model.steps for p in step.parameters()),
        macs=_count_macs(flops[Mode.STORE], batch),
        flop_ratios={mode: total / totals[Mode.STORE] for mode, total in totals.items()},
        parts=tuple(_report_parts(model, {mode: steps[mode].kept for mode in MODES})),
        memory={mode: step.memory for mode, step in steps.items()},
        twin=_measure_twin(model, batch),
        sources=tuple(to_plain(spec.sources)),
        expect=to_plain(spec.expect),
        weights=_describe_weights(spec),
    )


def _describe_weights(spec: Spec) -> dict[str, Any] | None:
    entry = index.read_index().get(spec.name)
    if entry is None or entry.digest != spec.digest:
        return None
    return {"file": entry.file, "metric": dict(entry.metric), "command": entry.command}


def _count_step(model: nn.Module, batch: Tensor, units: tuple[str, ...] = ()) -> tuple[CountedStep, FlopCounter]:
    """Return the memory of a training step and its FLOPs."""
    with isolated(model, batch, fake=True) as inputs, FlopCounter() as flops:
        return run_and_measure(model, inputs, units=units), flops


def _count_macs(flops: FlopCounter, batch: Tensor) -> int:
    """Return the multiply-adds of a forward of one example, each of which is two FLOPs."""
    return flops.forward // 2 // len(batch)


def _report_parts(model: Model, kept: dict[str, dict[str, int]]) -> Iterator[PartReport]:
    """Yield the parts in order.

    Args:
        kept: bytes that each unit keeps, by mode and name.
    """
    spec, known = model.spec, set[int]()

    def part(
        name: str, what: str, shape: tuple[int, ...] | None, units: list[str], kind: Literal["node", "stage"] = "node"
    ) -> PartReport:
        new = {id(p): p.numel() for unit in units for p in model.get_submodule(unit).parameters() if id(p) not in known}
        known.update(new)
        sizes = {mode: sum(bytes_of[unit] for unit in units) for mode, bytes_of in kept.items()}
        steps = len(units) if kind == "stage" and model.has_streams else 0
        return PartReport(name, kind, what, steps, shape, sum(new.values()), sizes)

    shape = _dims(model.split)
    stem = [entry.name for entry in model.layout() if f"{entry.name}.".startswith("stem.")]
    split = f", then {spec.split.type}" if model.has_streams else ""
    yield part("stem", f"{spec.stem.type}{split}", shape, stem)
    for i, stage in enumerate(spec.stages):
        entries = [entry for entry in model.layout() if entry.stage == i]
        if stage.transition is not None:
            transition = entries.pop(0)
            name, shape = transition.name, _dims(transition.module)
            if transition.kind == "bijection":
                yield PartReport(name, "bijection", stage.transition.type, 0, shape, 0, dict.fromkeys(MODES, 0))
            else:
                yield part(name, stage.transition.type, shape, [name])
        branches = " + ".join(branch.type for branch in (stage.f, stage.g) if branch is not None)
        steps = [entry.name for entry in entries]
        yield part(f"stages.{i}", f"{count_noun(stage.depth, 'block')}: {branches}", shape, steps, "stage")
    yield part("fuse", spec.fuse.type, _dims(model.fuse), ["fuse"])
    yield part("head", spec.head.type, None, ["head"])


def _measure_twin(model: Model, batch: Tensor) -> TwinReport | None:
    twin = model.spec.twin
    if twin is None:
        return None
    built = build_twin(model.spec)
    if isinstance(built, str):
        return TwinReport(twin["library"], twin["name"], problem=built)
    try:
        step, flops = _count_step(built, batch)
    except Exception as error:  # a library's network with the spec's arguments may raise anything
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return TwinReport(twin["library"], twin["name"], problem=f"it does not take the model's input ({reason})")
    parameters = sum(p.numel() for p in built.parameters())
    return TwinReport(twin["library"], twin["name"], parameters, _count_macs(flops, batch), step.memory)


def _dims(part: Any) -> tuple[int, ...]:
    return part.out_shape.dims
