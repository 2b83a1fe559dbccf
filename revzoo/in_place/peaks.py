"""Whether reversible blocks are worth it: the peak of a training step, next to storing everything and to checkpointing."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from revzoo.analysis.dry_run import in_mode
from revzoo.analysis.report import MemoryReport
from revzoo.analysis.step_memory import count_memory
from revzoo.block_steps.block_chain import BlockStep
from revzoo.block_steps.checkpointing import without_checkpoints
from revzoo.block_steps.conventions import leave_out_caches
from revzoo.errors import ConversionError, RecoveryError
from revzoo.format import format_bytes
from revzoo.in_place.survey import watched_calls

_WORTH = 0.95  # of checkpointing's peak: more is no gain that anybody would notice


@dataclass(frozen=True)
class Peaks:
    """What a training step on one batch takes, counted: weights, their gradients, batch and activations.

    Args:
        stored: of the network as it was.
        checkpointed: of that network with gradient checkpointing of the blocks that are steps now.
        reversible: of the network as it is now.
    """

    stored: MemoryReport
    checkpointed: MemoryReport
    reversible: MemoryReport

    @property
    def is_worth_it(self) -> bool:
        """Whether the peak is clearly below that of checkpointing."""
        return self.reversible.peak_bytes <= _WORTH * self.checkpointed.peak_bytes

    def __str__(self) -> str:
        stored, checkpointed, reversible = (
            format_bytes(memory.peak_bytes) for memory in (self.stored, self.checkpointed, self.reversible)
        )
        figures = (
            f"peak of a training step on this batch: {stored} stored, {checkpointed} with gradient checkpointing of the "
            f"blocks, {reversible} reversible"
        )
        return figures if self.is_worth_it else f"{figures}\nNot worth it on this batch: {self._advise()}"

    def _advise(self) -> str:
        is_less = self.reversible.activation_bytes <= _WORTH * self.checkpointed.activation_bytes
        if is_less and 2 * self.reversible.activation_bytes < self.reversible.peak_bytes:
            return (
                "weights and their gradients are most of the peak. A larger batch gains more, and LoRA or an optimizer that "
                "updates in backward has fewer gradients."
            )
        return (
            "most of the peak is outside of the blocks, or in one of them while it runs again in backward. revzoo.plan of the "
            "ordinary network reaches checkpointing's peak in less time; split= holds half a block at a time, tiles=8 an "
            "eighth."
        )


def count_peaks(model: nn.Module, batch: Any, steps: Sequence[BlockStep], fake: bool) -> Peaks | str:
    """Count a training step of a reversible network in three ways. A text says why it cannot be counted.

    Args:
        steps: what stands for its blocks.
        fake: run it without values, unless it asks for some, as mixtures of experts do. A small step on a CPU takes less time
            with them.
    Raises:
        ConversionError: the step cannot be ended, since a block does not run again as it ran first.
    """
    fake = fake or any(p.device.type != "cpu" for p in model.parameters())
    try:
        with ExitStack() as stack:
            stack.enter_context(in_mode(model, training=True))
            reversible = count_memory(model, batch, fake=fake)
            for step in steps:
                step.remove()
                stack.callback(step.install)
            stack.enter_context(without_checkpoints(model))
            stored = count_memory(model, batch, fake=fake)
            stack.enter_context(watched_calls({step.name: step.block for step in steps}, checkpoint_block))
            return Peaks(stored, count_memory(model, batch, fake=fake), reversible)
    except RecoveryError as error:
        raise ConversionError(
            f"A training step of the reversible {type(model).__name__} fails on this batch, so the network is as it was: "
            f"{error} Without batch= nothing is tried, and schedules may be set in report.chains. Or use revzoo.plan(model, "
            "batch, budget), which needs no reversible blocks."
        ) from error
    except Exception as error:  # a network may raise anything where its tensors have no values
        return f"the peak of a training step was not counted: {type(error).__name__}: {error}".partition("\n")[0]


def checkpoint_block(_: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a block with gradient checkpointing; to be given to `watched_calls`."""
    # Without caches of keys and values, as Transformers does it: a second run would add to them.
    args, kwargs = leave_out_caches(args, kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
