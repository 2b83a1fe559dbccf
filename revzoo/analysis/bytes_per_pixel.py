"""Count the bytes that a training step needs for each pixel of its images, stage by stage and term by term."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from revzoo.analysis.dry_run import isolated, require_module
from revzoo.analysis.memory_report import CountedStep, run_and_measure
from revzoo.analysis.memory_terms import Peak, Unit
from revzoo.errors import InputError
from revzoo.format import format_bytes
from revzoo.model.create import create
from revzoo.model.network import Model

_BATCH_SIZE = 32


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

    def list_rows(self) -> list[tuple[str, ...]]:
        """Return the headings of a table of bytes per pixel, then a row for each stage; a star marks the peak."""
        rows: list[tuple[str, ...]] = [("stage", "z", "g", "temporaries", "sum", "at its peak in")]
        for name, peak in self.stages.items():
            terms = (peak.hidden_bytes, peak.gradient_bytes, peak.temporary_bytes, peak.total_bytes)
            mark = " *" if name == self.peak_stage else ""
            rows.append((f"{name}{mark}", *(f"{each / self.pixels:.1f}" for each in terms), f"{peak.phase} of {peak.unit}"))
        return rows

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.list_rows(), strict=True)]
        lines = [self.describe()]
        for stage, *numbers, place in self.list_rows():
            cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=False)]
            lines.append("  ".join([stage.ljust(widths[0]), *cells, place]))
        return "\n".join(lines)

    def describe(self) -> str:
        """Return a line with the peak and the weights."""
        height, width = self.size
        return (
            f"{self.bytes_per_pixel:.1f} bytes per pixel of {self.images} images of {height} x {width} "
            f"({format_bytes(self.counted_bytes)}), and {format_bytes(self.weight_bytes)} of weights"
        )


def bytes_per_pixel(model: nn.Module | str, batch: Tensor | None = None) -> PixelReport:
    """Count what a training step needs for each pixel, under `FakeTensorMode`: nothing is allocated, and no image is needed.

    The model runs as it is now: its schedule, its training flag, and autocast if it is active. It is left as it was.

    Args:
        model: a name or YAML file as for `revzoo.create`, or any network for images.
        batch: images (B, C, H, W), also on the meta device; None is 32 images of the spec's size.
    Raises:
        InputError: a network for texts, a batch that is no batch of images, no batch for a network without a spec, or nothing
            that requires a gradient.
    """
    if isinstance(model, str):
        model = create(model, device="meta")
    require_module(model)
    if batch is None:
        if not isinstance(model, Model):
            raise InputError(
                f"A {type(model).__name__} has no spec that says the size of its images. Give a batch of them, for example "
                "torch.empty(32, 3, 240, 240, device='meta')."
            )
        batch = model.example_input(_BATCH_SIZE, device="meta")
    if not (isinstance(batch, Tensor) and batch.dim() == 4 and batch.is_floating_point()):
        received = f"{tuple(batch.shape)}, {batch.dtype}" if isinstance(batch, Tensor) else type(batch).__name__
        raise InputError(
            f"Pixels are those of images (B, C, H, W) in floating point. Received: {received}. For other networks there is "
            "revzoo.measure_memory(model, batch)."
        )
    with isolated(model, batch, fake=True) as inputs:
        return report_pixels(run_and_measure(model, inputs, stages=list(list_stages(model))), batch)


def report_pixels(step: CountedStep, images: Tensor) -> PixelReport:
    """Return the report of a training step on some images, which was counted by the stages of `list_stages`."""
    memory, (count, _, *size) = step.memory, images.shape
    return PixelReport(count, (size[0], size[1]), memory.weight_bytes, step.peaks, memory.activation_bytes)


def list_stages(model: nn.Module) -> Iterator[Unit]:
    """Yield the units of a model by stage; of another network itself, and its children, which are stages of their own."""
    if isinstance(model, Model):
        for entry in model.layout():
            stage = entry.name.partition(".")[0] if entry.stage is None else f"stages.{entry.stage}"
            yield Unit(entry.name, entry.module, "stem" if stage == "split" else stage)
        return
    name = type(model).__name__
    yield Unit(name, model, name)
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            for index, module in child.named_children():
                yield Unit(f"{name}.{index}", module, name)
        else:
            yield Unit(name, child, name)
