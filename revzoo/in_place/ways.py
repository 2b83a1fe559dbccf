"""Ways to train a network, to be counted side by side: each changes it inside a `with` block alone."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

from torch import nn

from revzoo.analysis.chains import preserve_schedules
from revzoo.analysis.dry_run import preserve
from revzoo.device import has_value
from revzoo.errors import ConversionError, UnknownNameError
from revzoo.graph.assumption import assuming
from revzoo.in_place.block_lists import choose_chains, find_lists
from revzoo.in_place.chunk_loss import chunk_loss_, get_chunked_head, is_head_of_tokens
from revzoo.in_place.peaks import checkpoint_block
from revzoo.in_place.reversible import ordinary_, reversible_
from revzoo.in_place.survey import watched_calls
from revzoo.planning.profiling.hooks import PlannableModel
from revzoo.runtime.mode import Mode

Way = Callable[[nn.Module], AbstractContextManager[Any]]

TILES = 8
CUT, CHUNKED = f", {TILES} tiles", ", chunked loss"  # the ends of names
# How timm, Transformers and older versions of Transformers call it.
SWITCHES = ("set_grad_checkpointing", "activation_checkpointing_enable", "gradient_checkpointing_enable")


def list_ways(model: nn.Module, batch: Any) -> dict[str, Way]:
    """Return the ways to train a network that are counted beside the one that stores everything, by their names.

    Args:
        model: the network.
        batch: one for it, to split its blocks on.
    """
    ways: dict[str, Way]
    if isinstance(model, PlannableModel):
        inverted = partial(in_mode, mode=Mode.INVERT)
        ways = {"checkpointed": partial(in_mode, mode=Mode.RECOMPUTE), "inverted": inverted}
        ways |= {"inverted" + CUT: partial(inverted, tiles=TILES)}
    else:
        signs = partial(make_blocks_reversible, kept_bits=1, sign="random")
        ways = {"checkpointed": checkpoint_blocks, "reversible": make_blocks_reversible, "random signs": signs}
        ways |= {"random signs" + CUT: partial(_cut_blocks, batch=batch, kept_bits=1, sign="random")}
    chunked = ("checkpointed", *[*ways][-2:]) if has_head_of_tokens(model) else ()
    return ways | {name + CHUNKED: partial(chunk_loss_of, change=ways[name]) for name in chunked}


@contextmanager
def in_mode(model: nn.Module, mode: Mode, tiles: int = 1) -> Iterator[None]:
    """Give every step of a network of the zoo this mode, and cut it into tiles."""
    with preserve_schedules(model) as assign:
        assign(mode)
        if tiles > 1:
            cast(PlannableModel, model).tiles = tiles
        yield


@contextmanager
def _cut_blocks(model: nn.Module, batch: Any, **options: Any) -> Iterator[None]:
    """Make the blocks reversible and cut them into tiles; without values they are split into branches first, if they can be."""
    has_values = any(map(has_value, model.parameters()))
    try:
        given = {} if has_values else {"batch": batch, "split": ("attention", "mlp")}
        with without_masks(batch):
            reversible_(model, tiles=TILES, **given, **options)
    except (ConversionError, UnknownNameError):
        reversible_(model, tiles=TILES, **options)
    try:
        yield
    finally:
        ordinary_(model)


def without_masks(batch: Any) -> AbstractContextManager[None]:
    """Let Transformers' networks make no masks that they would not make if they saw the values of this batch."""
    if isinstance(batch, Mapping):
        return assuming(batch.keys().isdisjoint(("attention_mask", "position_ids")))
    return assuming(not isinstance(batch, tuple | list) or len(batch) < 2)


@contextmanager
def checkpoint_blocks(model: nn.Module) -> Iterator[None]:
    """Checkpoint the blocks as the network's library does it; without that, the longest list of equal blocks, or all lists."""
    with preserve(model, fake=True):
        for name in SWITCHES:
            try:
                getattr(model, name)()
            except Exception:  # there is no switch, or it says that this network has no checkpoints
                continue
            yield
            return
    lists = find_lists(model, (), has_batch=False)
    try:
        lists = choose_chains(model, lists, None, is_named=False)[0]
    except ConversionError:
        if not lists:
            raise
    with watched_calls({name: block for blocks in lists.values() for name, block in blocks.items()}, checkpoint_block):
        yield


@contextmanager
def make_blocks_reversible(model: nn.Module, **options: Any) -> Iterator[None]:
    """Make the blocks reversible that seem to be residual ones, by their classes and weights; inside the block alone."""
    reversible_(model, **options)
    try:
        yield
    finally:
        ordinary_(model)


def has_head_of_tokens(model: nn.Module) -> bool:
    """Return whether a network of Transformers or of the zoo has a head that returns logits of tokens."""
    find = getattr(model, "get_output_embeddings", None)
    return isinstance(find(), nn.Module) if callable(find) else is_head_of_tokens(getattr(model, "head", None))


@contextmanager
def chunk_loss_of(model: nn.Module, change: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext) -> Iterator[None]:
    """Let a language model compute its loss in chunks, and change it otherwise, inside the block alone."""
    chunk_loss_(model)
    chunked = next(filter(None, map(get_chunked_head, model.modules())))
    try:
        with change(model):
            yield
    finally:
        chunked.remove()
