"""What is counted of a model, as plain records: reading and printing them needs no torch."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from revzoo.format import format_bytes


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
