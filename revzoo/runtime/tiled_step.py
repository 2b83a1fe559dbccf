"""A step that is run tile by tile (`tiles.py`): each tile is a recorded call of its own, and an item of the segment.

    forward     w[k+1][t] = a w[k][t] + b w[k-1][t] + c f(w[k][t])         for every tile t, then on to step k + 1
    backward    f runs on w[k][t] once more, which gives w[k-1][t] in place of w[k+1][t], and what its gradient needs

So backward holds the pair of states, one of which is a mixture of two until the last tile is done, their two gradients, and
what autograd saves in one tile. The gradients of the tiles are added to that of w[k] in its own memory.

Where there are fewer places than tiles are wanted, as one text has no second example, f(x) - x may be a sum of terms, such as
the groups of an attention's heads. Then every term of a tile is such a call:

    w[k+1][t] = (a + c) w[k][t] + b w[k-1][t] + c first(w[k][t]), then  w[k+1][t] += c term(w[k][t])  for every other term
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from revzoo.device import is_sharded
from revzoo.errors import InputError
from revzoo.runtime import seams
from revzoo.runtime.chain_link import call_once
from revzoo.runtime.coupling import Coupling, Pair, RandomSign
from revzoo.runtime.forward import Forward
from revzoo.runtime.independence import can_tell, find_mixing
from revzoo.runtime.inventory import take_inventory
from revzoo.runtime.observation import begin_call, end_call
from revzoo.runtime.ownership import is_held_alone
from revzoo.runtime.pieces import Cut, Join, Sum, stand_in
from revzoo.runtime.recorded_call import RecordedCall
from revzoo.runtime.segment import InvertedSegment, KeptStates, SavedInputs
from revzoo.runtime.tiles import Tile, Tiles, cut_side, cut_terms, note_examples
from revzoo.runtime.update import States, Step, StepUpdate, Strides, Update, get_strides, restore_strides


class TileUpdate(Update):
    """One call of a step: a tile, or a term of one.

    Until the last one, the older state is w[k+1] in tiles that are done, part of a sum in the present one, w[k-1] in others.

    Args:
        tile: the tile.
        updates: of the step, on pieces of the tile: sums need no whole tile at once, so where f does there are several.
        is_last: whether it is the last call of the step: then the two states change places.
        strides: of w[k-1].
        will_be_undone: whether the step is. The tiles of others go back to nothing: nobody asks for w[k-1].
    """

    def __init__(
        self, tile: Tile, updates: Sequence[tuple[Tile, StepUpdate]], is_last: bool, strides: Strides, will_be_undone: bool
    ):
        self._tile, self._updates, self._is_last, self._strides = tile, updates, is_last, strides
        self.rebuilds = will_be_undone

    @property
    def lost_bits(self) -> Sequence[Tensor]:
        return [bits for _, update in self._updates for bits in update.lost_bits]

    def find_input(self, states: States, *, is_after: bool) -> Tensor:
        return self._tile.of(states[0 if is_after and self._is_last else 1])

    def find_rebuilt(self, states: States) -> Tensor:
        return self._tile.of(states[0])

    def fill(self, following: Tensor, previous: Tensor, current: Tensor, out: Tensor) -> None:
        """Write this tile of the state after it into `following`, which may be the one before it, `previous`."""
        into, *terms = (self._tile.of(x) for x in (following, previous, current))
        for piece, update in self._updates:
            older, newer = (piece.of(x) for x in terms)
            piece.of(into).copy_(update.advance((older, newer), piece.of(out))[1])

    def advance(self, states: Pair, out: Tensor) -> Pair:
        mixed, current = states
        if self.rebuilds:
            mixed = _make_writable(mixed, None)
            self.fill(mixed, mixed, current, out)
        return (current, mixed) if self._is_last else (mixed, current)

    def invert(self, states: Pair, out: Tensor) -> Pair:
        current, mixed = states if self._is_last else states[::-1]
        if self.rebuilds:
            mixed = _make_writable(mixed, self._strides)
            for piece, update in self._updates:
                newer, older = (piece.of(self._tile.of(x)) for x in (current, mixed))
                older.copy_(update.invert((newer, older), piece.of(out))[0])
        return mixed, current


def _make_writable(state: Tensor, strides: Strides) -> Tensor:
    """Return the state, copied if somebody else could see that it is changed in place, or it has other strides."""
    restored = restore_strides(state, strides)
    return restored if restored is not state or is_held_alone(state) else state.clone()


def run_tiles(
    step: Step, coupling: Coupling, pair: Pair, segment: InvertedSegment | None, forward: Forward, will_be_undone: bool
) -> Pair:
    """Run a step tile by tile, and record each; return the states after it.

    Args:
        step: the step.
        coupling: what `bind` returned for it.
        pair: the states before it.
        segment: the inverted steps that it goes on with; None in other modes.
        forward: what it shares with others.
        will_be_undone: whether backward rebuilds the state before it.
    Raises:
        InputError: f is seen to mix the places along the dimension, or its tiles cannot be run one by one.
    """
    tiles = _cut_states(step, coupling, pair, forward.side)
    previous, current = pair
    strides, inventory, total = get_strides(previous), take_inventory(step.f), Sum()
    pieces = cast(Tiles, step.tiles).count_pieces(current.shape[tiles[0].dim])
    terms = cut_terms(step.f, current, forward.side, pieces)
    coupling, of_others = (coupling.with_residual, Coupling(0.0, 1.0, coupling.c)) if terms else (coupling, coupling)
    calls = [(tile, i, side) for tile in tiles for i, side in enumerate(terms or [forward.side])]
    outs: list[Tensor] = []
    begin_call(step.f, pair[1:], pair)
    following = torch.empty_like(previous, requires_grad=False)
    for tile, i, side in calls:
        current, x = Cut.apply(current, tile, total, not outs)
        before, used = (following, of_others) if i else (previous, _cut_coupling(coupling, tile))
        older, is_last = tile.of(before.detach()), len(outs) + 1 == len(calls)
        updates = [
            (piece, StepUpdate(_cut_coupling(used, piece), forward.grid, piece.of(older), will_be_undone))
            for piece in _cut_further(older, x, pieces, tile.dim)
        ]
        update = TileUpdate(tile, updates, is_last, strides, will_be_undone)
        if is_last:
            update.b = coupling.b  # all calls together multiply errors once
        call, recoverer, of_tile = None, None, cut_side(side, tile, current, cast(Tiles, step.tiles).examples)
        if step.mode.drops:
            own = forward if of_tile is forward.side else forward.with_side(of_tile)
            selective, watched = step.mode.is_selective, not will_be_undone
            call = RecordedCall(step.f, step.name, own, selective=selective, watched=watched, inventory=inventory)
            recoverer = segment if segment is not None else SavedInputs(KeptStates((x,)), forward.round)
        out = call_once(step, (older, x), of_tile, call, recoverer)
        if segment is not None:
            segment.append(update, call, (older, x))  # it may remember what is written over next
        with torch.no_grad():
            update.fill(following, before, current, out)
        if forward.grid is not None and i + 1 < len(terms):  # the sum may be in its range though a part of it is not
            forward.grid.watch(tile.of(following), f"in {step.name}")
        outs.append(stand_in(out))
        del out
    end_call(step.f, outs)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (previous, current, *outs)):
        tiles = [tile for tile, *_ in calls]
        following = Join.apply(following, tiles, lambda: coupling.weights, *outs, previous, current)
    return current, following


def _cut_states(step: Step, coupling: Coupling, pair: Pair, side: Any) -> list[Tile]:
    """Return the tiles of both states, after tests that f and coupling allow them."""
    tiles, (older, newer) = cast(Tiles, step.tiles), pair
    if not -newer.dim() <= tiles.dim < newer.dim():
        raise InputError(
            f"{step.name} is cut into tiles along dimension {tiles.dim}, which its state does not have. Received: a shape of "
            f"{tuple(newer.shape)}."
        )
    dim = tiles.dim % newer.dim()
    if is_sharded(*take_inventory(step.f).fixed):
        raise InputError(
            f"{step.name} is cut into tiles, and its parameters are sharded: they would be gathered for each of them. Leave "
            "tiles out."
        )
    if any(is_sharded(x) or x.is_nested for x in pair) or older.dim() <= dim or older.shape[dim] != newer.shape[dim]:
        raise InputError(
            f"{step.name} is cut into tiles along dimension {dim}, so both states must be dense and of one length along it. "
            f"Received: {tuple(older.shape)} and {tuple(newer.shape)}."
        )
    if type(coupling) not in (Coupling, RandomSign):
        raise InputError(f"{step.name} is cut into tiles, and its coupling, a {type(coupling).__name__}, may not be.")
    cut = tiles.cut(newer)
    if len(cut) > 1:
        _require_independence(step, newer.detach(), side, cut[0])
    return cut


def _require_independence(step: Step, x: Tensor, side: Any, tile: Tile) -> None:
    """Raise InputError if f is seen to mix the places along the dimension, or nobody knows what of its side input is cut."""
    tiles, inventory = cast(Tiles, step.tiles), take_inventory(step.f)
    unclear = note_examples(side, x, tiles.examples)
    if tile.dim and not unclear and len(x) > 1:  # one example is enough
        example = Tile(0, 0, 1)
        x, side = example.of(x), cut_side(side, example, x, tiles.examples)
    unclear = unclear if not tile.dim and can_tell(x) else []
    reasons = dict[tuple[bool, ...], str | None]()
    for guess in itertools.product((True, False), repeat=len(unclear)):
        examples = tiles.examples | dict(zip(unclear, guess, strict=True))

        def run(part: Tensor, piece: Tile, examples: dict[str, bool] = examples) -> Tensor:
            of_piece = cut_side(side, piece, x, examples)
            return step.f(part) if of_piece is None else step.f(part, of_piece)

        reasons[guess] = find_mixing(run, inventory, x, tile.dim, tile.length, guess)
    right = [guess for guess, reason in reasons.items() if reason is None]
    if not right:
        raise InputError(
            f"{step.name} cannot be cut into tiles along dimension {tile.dim} of its state: {next(iter(reasons.values()))}. "
            "Cut it along another one (0 are examples), or not at all."
        )
    if len(right) > 1:
        raise InputError(
            f"{step.name} is cut into tiles of examples, and {unclear[0]} in its side input has a place for each of {len(x)} "
            "examples, or tokens or channels. Begin with a batch of another size, or say it: tiled(f, ..., dim=0, side=True), "
            "or False, or one of them in place of each tensor."
        )
    tiles.examples |= zip(unclear, right[0], strict=True)


def _cut_further(older: Tensor, newer: Tensor, count: int, dim: int) -> list[Tile]:
    """Return pieces of a tile, along another dimension than it was cut along: as many as are missing to all tiles."""
    others = [i for i in range(older.dim()) if i != dim]
    if older.shape != newer.shape or not others:
        return [Tile(dim, 0, older.shape[dim])]
    return Tiles(count, max(others, key=older.shape.__getitem__)).cut(older)


def _cut_coupling(coupling: Coupling, tile: Tile) -> Coupling:
    if isinstance(coupling, RandomSign) and coupling.sign is not None and tile.dim == 0:
        return replace(coupling, sign=tile.of(coupling.sign))
    return coupling


seams.run_tiles = run_tiles
