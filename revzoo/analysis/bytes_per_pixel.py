"""Count the bytes that a training step needs for each pixel of its images, stage by stage and term by term."""

from collections.abc import Iterator

from torch import Tensor, nn

from revzoo.analysis.dry_run import LossFunction, isolated, require_module
from revzoo.analysis.memory_terms import PixelUnit
from revzoo.analysis.report import PixelReport
from revzoo.analysis.step_memory import run_and_measure
from revzoo.errors import InputError
from revzoo.model.create import create
from revzoo.model.model import Model

_BATCH_SIZE = 32


def bytes_per_pixel(model: nn.Module | str, batch: Tensor | None = None, *, loss: LossFunction | None = None) -> PixelReport:
    """Count what a training step needs for each pixel, under `FakeTensorMode`: nothing is allocated, and no image is needed.

    The model runs as it is now: its schedule, its training flag, and autocast if it is active. It is left as it was.

    Args:
        model: a name or YAML file as for `revzoo.create`, or any network for images.
        batch: images (B, C, H, W), also on the meta device; None is 32 images of the spec's size.
        loss: as for `revzoo.measure_memory`.
    Raises:
        InputError: a network for texts, a batch that is no batch of images, no batch for a network without a spec, nothing
            that requires a gradient, or a loss that is not one number.
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
        step = run_and_measure(model, inputs, stages=list(_list_stages(model)), loss=loss)
    count, _, height, width = batch.shape
    return PixelReport(count, (height, width), step.memory.weight_bytes, step.peaks, step.memory.activation_bytes)


def _list_stages(model: nn.Module) -> Iterator[PixelUnit]:
    """Yield the units of a model by stage; of another network itself, and its children, which are stages of their own."""
    if isinstance(model, Model):
        for entry in model.layout():
            stage = entry.name.partition(".")[0] if entry.stage is None else f"stages.{entry.stage}"
            yield PixelUnit(entry.name, entry.module, "stem" if stage == "split" else stage)
        return
    name = type(model).__name__
    yield PixelUnit(name, model, name)
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            for index, module in child.named_children():
                yield PixelUnit(f"{name}.{index}", module, name)
        else:
            yield PixelUnit(name, child, name)
