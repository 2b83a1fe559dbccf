"""Count what a training step would keep and peak at, for each choice of `reversible_`'s arguments, beside the network as it is.

Counted under FakeTensors: nothing is allocated or computed, except to test whether blocks can be split, and where a forward
reads values of its tensors. The network is left as it was.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from revzoo.analysis.dry_run import isolated
from revzoo.analysis.fake_tensors import has_values
from revzoo.analysis.report import MemoryReport
from revzoo.analysis.step_memory import run_and_measure
from revzoo.conversion.block_lists import BlockLists, choose_lists
from revzoo.conversion.reversible import ordinary_, reversible_
from revzoo.errors import ConversionError, InputError, MissingValueError
from revzoo.format import format_bytes
from revzoo.in_place.conventions import leave_out_caches


@dataclass(frozen=True)
class Choice:
    """One way to train a network, and what a training step takes with it.

    Args:
        name: of the choice, in words.
        arguments: for `reversible_`; None for the network as it is, or checkpointed.
        memory: as `revzoo.measure_memory` counts it.
    """

    name: str
    arguments: dict[str, Any] | None
    memory: MemoryReport


@dataclass(frozen=True)
class ReversiblePreview:
    """A network as it is, checkpointed, and reversible with a block, or one branch of a block, a step.

    Args:
        model: class of the network.
        paths: of its lists of blocks.
        choices: each with its memory.
    """

    model: str
    paths: tuple[str, ...]
    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        width = max(len(choice.name) for choice in self.choices)
        lines = [f"{self.model}, {', '.join(self.paths)}: activations that a training step keeps for backward, and at the peak"]
        for choice in self.choices:
            kept, peak = choice.memory.after_forward_bytes, choice.memory.activation_bytes
            lines.append(f"{choice.name:<{width}}  {format_bytes(kept):>10}  {format_bytes(peak):>10}")
        return "\n".join(lines)


def preview_reversible(model: nn.Module, *paths: str, batch: Any, kept_bits: int = 8) -> ReversiblePreview:
    """Count what a training step keeps and peaks at, with a block a step, or one branch of a block.

    Beside these are the network as it is, and with gradient checkpointing of each of these blocks. The choice of one branch a
    step is left out where blocks cannot be split, and for weights without values (meta), with which this cannot be tested.

    Args:
        model: an ordinary network, in the state in which it will be trained.
        paths: of lists of blocks, as for `reversible_`.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        kept_bits: as for `reversible_`.
    Raises:
        UnknownNameError: no list of blocks of this path.
        InputError: a network that cannot be made reversible, or that reads values of tensors while its parameters have none.
    """
    lists, _ = choose_lists(model, paths)

    def count(name: str, arguments: dict[str, Any] | None, change: AbstractContextManager[object]) -> Choice:
        with change:
            return Choice(name, arguments, _count_memory(model, batch))

    def count_reversible(name: str, **arguments: Any) -> Choice:
        return count(f"reversible, {name} a step", arguments, _make_reversible(model, tuple(lists), arguments))

    choices = [
        count("as it is", None, nullcontext()),
        count("gradient checkpointing", None, _replace_forwards(_list_checkpointed(lists))),
        count_reversible("a block", kept_bits=kept_bits),
    ]
    if all(map(has_values, model.parameters())):
        with suppress(ConversionError):  # blocks that are not the sum of these two
            choices.append(count_reversible("a branch", kept_bits=kept_bits, split=("attention", "mlp"), batch=batch))
    return ReversiblePreview(type(model).__name__, tuple(lists), tuple(choices))


def _count_memory(model: nn.Module, batch: Any) -> MemoryReport:
    try:
        return _run_and_measure(model, batch, fake=True)
    except MissingValueError as error:
        reason = str(error.__cause__)
    # Only now the frames of that run are freed, and with them the hooks of its checkpoints.
    if all(map(has_values, model.parameters())):
        return _run_and_measure(model, batch, fake=False)  # a mixture of experts, for example
    raise InputError(
        f"Memory is counted without values, and the forward of {type(model).__name__} asks for one ({reason}). Give its "
        "parameters values."
    )


def _run_and_measure(model: nn.Module, batch: Any, fake: bool) -> MemoryReport:
    with isolated(model, batch, fake=fake) as inputs:
        return run_and_measure(model, inputs).memory


@contextmanager
def _make_reversible(model: nn.Module, paths: Sequence[str], arguments: dict[str, Any]) -> Iterator[None]:
    reversible_(model, *paths, **arguments)
    try:
        yield
    finally:
        ordinary_(model)


def _list_checkpointed(lists: BlockLists) -> list[tuple[nn.Module, Callable[..., Any]]]:
    return [(block, partial(_checkpoint, block.forward)) for blocks in lists.values() for block in blocks]


def _checkpoint(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a block's forward as gradient checkpointing does. It must not fill a cache of keys and values twice."""
    args, kwargs = leave_out_caches(args, kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


@contextmanager
def _replace_forwards(replacements: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Let modules have another forward inside the block."""
    before = [(module, module.__dict__.get("forward")) for module, _ in replacements]
    for module, forward in replacements:
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, own in before:
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own
