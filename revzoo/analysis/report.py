"""What is counted of a model, as plain records: reading and printing them needs no torch."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from revzoo.format import format_bytes

PhaseName = Literal["forward", "backward"]


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one forward and backward.

    Args:
        peak_bytes: peak of all memory: weights, buffers, the gradients that exist by then, the optimizer's state if one was
            given, batch and activations; or at the optimizer's update, if that takes more.
        activation_bytes: peak of everything but weights, buffers, parameter gradients, optimizer state and batch. These are
            activations, their gradients and temporaries, the only memory that depends on the schedule.
        after_forward_bytes: activations that are kept from forward to backward, with the loss; the outputs are freed by then.
        weight_bytes: all parameters, shared ones once.
        buffer_bytes: all buffers.
        gradient_bytes: gradients of all parameters, as after backward.
        optimizer_bytes: the optimizer's state, as after a step; 0 without an optimizer.
        update_bytes: the most that an update of the optimizer takes besides its state, such as copies of weights.
        batch_bytes: the tensors of the batch.
        other_bytes: what else is alive during the whole step, such as averaged weights, labels, the next batch, and buckets in
            which processes exchange gradients. None: nothing.
        allocator_peak_bytes: the CUDA allocator's own peak. It includes workspaces of kernels, and all else that the process
            has on the GPU. None without CUDA.
        allocator_reserved_bytes: the most memory that the CUDA allocator has taken from the driver, which `nvidia-smi` shows.
            None without CUDA.
    """

    peak_bytes: int
    activation_bytes: int
    after_forward_bytes: int
    weight_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    update_bytes: int
    batch_bytes: int
    other_bytes: int | None = None
    allocator_peak_bytes: int | None = None
    allocator_reserved_bytes: int | None = None

    def to_dict(self) -> dict[str, int | None]:
        """Return the fields by name."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [(label, getattr(self, field)) for field, label in LABELS.items() if getattr(self, field) is not None]
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {format_bytes(size):>10}" for label, size in rows)


LABELS = {
    "weight_bytes": "weights",
    "buffer_bytes": "buffers",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "update_bytes": "optimizer update",
    "batch_bytes": "batch",
    "other_bytes": "next batch, labels, other",
    "after_forward_bytes": "activations after forward",
    "activation_bytes": "activations at the peak",
    "peak_bytes": "peak of everything",
    "allocator_peak_bytes": "CUDA peak allocated",
    "allocator_reserved_bytes": "CUDA peak reserved",
}


@dataclass(frozen=True)
class Peak:
    """The most bytes that are alive at once while a unit runs.

    Args:
        unit: name of the unit.
        phase: whether that is in its forward or in its backward.
        hidden_bytes: activations that backward has yet to use, z.
        gradient_bytes: gradients of activations, g.
        temporary_bytes: all else.
    """

    unit: str
    phase: PhaseName
    hidden_bytes: int
    gradient_bytes: int
    temporary_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum of the terms."""
        return self.hidden_bytes + self.gradient_bytes + self.temporary_bytes


@dataclass(frozen=True)
class PixelReport:
    """The memory of a training step, in the terms of Hascoet et al. 2023, section 3.

    Weights are apart, since they do not grow with the images. What grows is hidden activations z that backward has yet to use,
    their gradients g, and temporaries: a stage has the three at its own peak, and the peak of the training step is that of one
    stage. Buffers, gradients of weights, and the images themselves are left out, as in the paper.

    Args:
        images: number of images in the batch.
        size: height and width of an image.
        weight_bytes: all parameters, shared ones once.
        stages: the peak of every stage by its name, in order.
        counted_bytes: the peak as `revzoo.measure_memory` counts it, `activation_bytes`. The terms of the highest stage add up
            to it.
    """

    images: int
    size: tuple[int, int]
    weight_bytes: int
    stages: dict[str, Peak]
    counted_bytes: int

    @property
    def pixels(self) -> int:
        """The number of pixels in the batch."""
        return self.images * self.size[0] * self.size[1]

    @property
    def bytes_per_pixel(self) -> float:
        """The counted peak over the pixels."""
        return self.counted_bytes / self.pixels

    @property
    def peak_stage(self) -> str:
        """The name of the stage that has the peak."""
        return max(self.stages, key=lambda name: self.stages[name].total_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as mappings, lists and scalars, ready for JSON."""
        return asdict(self) | {"bytes_per_pixel": self.bytes_per_pixel, "peak_stage": self.peak_stage}

    def __str__(self) -> str:
        height, width = self.size
        longest = max(map(len, self.stages)) + 2  # with a mark
        lines = [
            f"{self.bytes_per_pixel:.1f} bytes per pixel of {self.images} images of {height} x {width} "
            f"({format_bytes(self.counted_bytes)}), and {format_bytes(self.weight_bytes)} of weights",
            f"{'stage':<{longest}}        z        g  temporaries      sum  at its peak in",
        ]
        for name, peak in self.stages.items():
            z, g, rest, total = (
                each / self.pixels for each in (peak.hidden_bytes, peak.gradient_bytes, peak.temporary_bytes, peak.total_bytes)
            )
            stage = f"{name}{' *' * (name == self.peak_stage)}"
            lines.append(f"{stage:<{longest}}  {z:>7.1f}  {g:>7.1f}  {rest:>11.1f}  {total:>7.1f}  {peak.phase} of {peak.unit}")
        return "\n".join(lines)


@dataclass(frozen=True)
class PartReport:
    """One node, the blocks of one stage, or a bijection between two stages.

    Args:
        name: path in the model, such as "stages.0".
        kind: which of the three it is.
        what: the registered names of its parts, such as "3 blocks: attention + mlp".
        steps: number of reversible steps in it.
        shape: shape of its output for one example, without the batch dimension; up to the last stage, of one of the two
            streams. None for the head.
        parameters: number of parameters; those that it shares with an earlier part (a tied embedding) are not counted again.
        kept_bytes: bytes that it keeps from forward to backward, by mode.
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
    """The ordinary network of which the model is the reversible version, measured with the same batch.

    Args:
        library: where it is defined, such as "timm".
        name: its name there.
        parameters: number of parameters; this and the next two are None if it could not be built or run.
        macs: of a forward of one example, as in `ModelReport`.
        memory: of a training step.
        problem: why it could not be built or run, else None.
    """

    library: str
    name: str
    parameters: int | None = None
    macs: int | None = None
    memory: MemoryReport | None = None
    problem: str | None = None


@dataclass(frozen=True)
class ModelReport:
    """What a model consists of, and the memory and FLOPs of a training step.

    Args:
        name: of the model.
        family: of the model.
        digest: of the spec.
        input: kind and sizes of an example.
        outputs: number of outputs of the head.
        coupling: registered name of the coupling.
        steps: number of reversible steps.
        tiles: into how many pieces they are cut, each number once; none where all are whole.
        batch_size: number of examples for which bytes are given.
        parameters: number of parameters.
        step_parameters: number of parameters in reversible steps.
        macs: multiply-adds of a forward of one example, which papers call FLOPs; norms and activations are left out.
        flop_ratios: FLOPs of a forward and backward relative to those of `store`, by mode.
        parts: the parts in the order of forward.
        memory: memory of a training step, by mode.
        twin: the ordinary network, None if the spec names none.
        sources: of the spec.
        expect: of the spec.
        weights: file and metric of the weights that ship for this very spec, and the command that trained them; else None.
    """

    name: str
    family: str
    digest: str
    input: dict[str, Any]
    outputs: int
    coupling: str
    steps: int
    tiles: tuple[int, ...]
    batch_size: int
    parameters: int
    step_parameters: int
    macs: int
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
    def modes(self) -> tuple[str, ...]:
        """The modes that set all steps and nodes alike; `memory` may also have the schedule `stage_inputs`."""
        return tuple(self.parts[0].kept_bytes)

    @property
    def example(self) -> str:
        """The noun for one example: image or text."""
        return "image" if self.input["kind"] == "image" else "text"
