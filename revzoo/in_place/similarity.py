"""Run a network on a batch before and after it is made reversible: its states, and how alike its outputs are."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from revzoo.analysis.dry_run import call, in_mode, preserve
from revzoo.analysis.likeness import measure_cosines
from revzoo.block_steps.conventions import find_state, get_state
from revzoo.errors import ConversionError, InputError
from revzoo.in_place.block_lists import BlockLists
from revzoo.runtime.nested import tensors_in

_DIGITS = 24  # of a float32
USUAL_FRACTION_BITS = 16
FRACTION_BITS = (4, 40)  # the fewest and the most
_ROOM = 4  # binary digits that states may grow by in training
_LEAST_FACTOR = 0.1  # of its input in what a residual block returns; norms make it smaller than 1
_RESOLUTION = 13  # binary digits of the smallest row of a state


@dataclass(frozen=True)
class Similarity:
    """How alike the outputs of a network are before and after, on one batch, in eval mode.

    Args:
        cosine: of the outputs, the mean over rows (tokens or examples).
        least_cosine: the smallest.
        examples: number of examples.
    """

    cosine: float
    least_cosine: float
    examples: int

    def __str__(self) -> str:
        return f"outputs before and after, {self.examples} examples: cosine {self.cosine:.6f}, at least {self.least_cosine:.6f}"


@dataclass
class BlockSurvey:
    """The states of one list of blocks, on a batch.

    Args:
        largest: magnitude of an element.
        smallest: root mean square of a row that is not zero.
        is_used: whether a block was called.
    """

    largest: float = 0.0
    smallest: float = math.inf
    is_used: bool = False

    @property
    def fraction_bits(self) -> int:
        """Binary digits after the point with which a grid resolves the smallest row and holds the largest element."""
        if not (self.largest and math.isfinite(self.largest) and math.isfinite(self.smallest)):
            return USUAL_FRACTION_BITS
        wanted = max(USUAL_FRACTION_BITS, _RESOLUTION - math.floor(math.log2(self.smallest)))
        bits = min(wanted, _DIGITS - _ROOM - math.ceil(math.log2(self.largest)))
        return max(FRACTION_BITS[0], min(bits, FRACTION_BITS[1]))

    def add_state(self, state: Tensor) -> None:
        """Consider a state."""
        rows = state.detach().float()
        sizes = rows.square().mean(-1).sqrt()
        if (sizes > 0).any():
            self.smallest = min(self.smallest, float(sizes[sizes > 0].min()))
        self.largest = max(self.largest, float(rows.abs().max()))


def survey_blocks(model: nn.Module, lists: BlockLists, batch: Any) -> tuple[dict[str, BlockSurvey], Tensor]:
    """Return what the states of lists of blocks are like, on a batch, and the main output of the network.

    Raises:
        ConversionError: a block changes the shape or dtype of its state, writes into it, or is no residual map.
        InputError: a block is given no floating-point tensor first.
    """
    surveys = {path: BlockSurvey() for path in lists}
    with ExitStack() as stack:
        for path, blocks in lists.items():
            for name, block in blocks.items():
                for handle in _watch(block, name, surveys[path]):
                    stack.callback(handle.remove)
        output = run_network(model, batch)
    if unused := [path for path, survey in surveys.items() if not survey.is_used]:
        raise ConversionError(f"The blocks of {unused[0]} are not called with this batch. Give one that uses them.")
    return surveys, output


def _watch(block: nn.Module, name: str, survey: BlockSurvey) -> Sequence[Any]:
    given: list[tuple[Tensor, Tensor]] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = find_state(block, name, args, kwargs)[0]
        given.append((x, x.clone()))

    def after(_: nn.Module, args: tuple[Any, ...], value: Any) -> None:
        (x, state), out = given.pop(), get_state(value)
        if not isinstance(out, Tensor):
            raise ConversionError(f"{name} returns {type(value).__name__}, not a new state alone or first among its results.")
        if out.shape != state.shape or out.dtype != state.dtype:
            raise ConversionError(
                f"{name} changes its state from {tuple(state.shape)}, {state.dtype} to {tuple(out.shape)}, {out.dtype}; a step "
                "returns what fits the state. Name lists of blocks that do, such as the stages one by one."
            )
        if not torch.equal(x, state):
            raise ConversionError(
                f"{name} writes into what it is given, and a step must leave its state as it is. Replace the in-place "
                "operation at its beginning (x += y, ReLU(inplace=True)) by one that returns a new tensor."
            )
        survey.add_state(state)
        survey.add_state(out)
        survey.is_used = True
        _require_residual_map(name, state, out)

    return block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)


def _require_residual_map(name: str, state: Tensor, out: Tensor) -> None:
    """Raise ConversionError if nothing of a state is in what a block returned, and not for want of elements to see it in."""
    x, y = state.double().flatten(), out.double().flatten()
    size = float(x.norm()) or 1.0
    factor = float(x @ y) / size**2  # by least squares; 1 in x + g(x) where g(x) has nothing to do with x
    noise = float(y.norm()) / size / len(x) ** 0.5  # the factor's standard deviation if y had nothing to do with x
    if factor < _LEAST_FACTOR and factor + 3 * noise < 0.5:
        raise ConversionError(
            f"{name} is no residual map: it returns {factor:.2f} times its input, and a rest unrelated to it. A chain adds "
            "2^-kept_bits of the input to what the block returns, and the next block would not understand the sum. Name "
            "another list."
        )


@torch.no_grad()
def run_network(model: nn.Module, batch: Any) -> Tensor:
    """Return the main output of a network in eval mode; no trace of the run remains.

    Raises:
        InputError: it returns no floating-point tensor.
    """
    with preserve(model), in_mode(model, training=False):
        outputs = call(model, batch)
    main = next((t for t in tensors_in(outputs) if t.is_floating_point() and t.dim() > 1), None)
    if main is None:
        raise InputError(f"The network returns no rows that could be compared. Received: {type(outputs).__name__}.")
    return main.float()


def measure_similarity(before: Tensor, after: Tensor, batch: Any) -> Similarity:
    """Compare two outputs on one batch; padded tokens, as `attention_mask` in the batch says, do not count."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    mask = torch.ones(before.shape[:-1]) if mask is None or mask.shape != before.shape[:-1] else mask
    counts = mask.to(before.device).bool()
    cosines = measure_cosines(before[counts], after[counts])
    return Similarity(float(cosines.mean()), float(cosines.min()), len(before))
