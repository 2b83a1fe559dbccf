"""Into how many tiles the steps of a network are cut: as few as bring the peak of a training step down to something else."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from revzoo.analysis.chains import Chain, assign_tiles, find_chains, read_tiles
from revzoo.analysis.dry_run import LossFunction, call, isolated
from revzoo.analysis.flops import FEW_FLOPS, FlopCounter
from revzoo.analysis.step_memory import count_memory
from revzoo.errors import InputError
from revzoo.runtime.drift import ignore_error_growth

_WORTH = 0.05  # of the activations of whole steps: less is no gain that anybody would notice
_MOST = 64
_Kind = list[tuple[Chain, int]]  # alike steps: each by its chain, and its place among the units there


def choose_tiles(model: nn.Module, batch: Any, *, loss: LossFunction | None = None) -> None:
    """Cut the steps of a network into as few tiles as bring the peak of a training step down to that of something else.

    The model is counted as it is now: its schedule, its training flag, and autocast if it is active. All steps are cut in two,
    four, eight, while that lowers the peak by a twentieth of the activations of whole steps; then each kind of step gets the
    smallest number that leaves it there. What may not be cut stays whole. The numbers are `model.tiles`, or those of the chains
    in the report of `reversible_`.

    Args:
        model: one with reversible chains.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        loss: as for `revzoo.measure_memory`.
    Raises:
        InputError: the model has no reversible steps, or cannot be measured on this batch.
    Cost: a forward for each kind of step, and about five counted training steps, more for networks of many kinds.
    """
    kinds = list(_group_steps(model).values())
    if not kinds:
        raise InputError(f"Reversible steps are cut into tiles, and this {type(model).__name__} has none.")
    before = read_tiles(model)
    try:
        _cut(kinds, 1)
        with FlopCounter() as flops:
            lowest = count_memory(model, batch, loss)
        # A small step on a CPU takes less time with values.
        fake = flops.forward * 4 > FEW_FLOPS or any(p.device.type != "cpu" for p in model.parameters())
        count = partial(count_memory, model, batch, loss, fake=fake)
        least, tiles = _WORTH * lowest.activation_bytes, 1
        kinds = [kind for kind in kinds if _may_be_cut(model, batch, kind)]
        while kinds and tiles < _MOST:
            _cut(kinds, 2 * tiles)
            counted = count()
            if counted.peak_bytes > lowest.peak_bytes - least:
                break
            lowest, tiles = counted, 2 * tiles
        _cut(kinds, tiles)
        for kind in kinds:
            fewer = tiles
            while fewer > 1:
                _cut([kind], fewer // 2)
                if count().peak_bytes > lowest.peak_bytes + least:
                    break
                fewer //= 2
            _cut([kind], fewer)
    except BaseException:
        assign_tiles(model, before)
        raise


def _group_steps(model: nn.Module) -> dict[Any, _Kind]:
    """Return the steps of a model by kind: their class, what they act on, and the shapes of their parameters."""
    kinds: dict[Any, _Kind] = {}
    for chain in find_chains(model).values():
        for place, unit in enumerate(unit for unit in chain.layout() if unit.is_unit):
            if unit.kind == "step":
                step = unit.module
                key = type(step), getattr(step, "acts_on", None), tuple(p.shape for p in step.parameters())
                kinds.setdefault(key, []).append((chain, place))
    return kinds


def _cut(kinds: Sequence[_Kind], tiles: int) -> None:
    for kind in kinds:
        for chain in {id(chain): chain for chain, _ in kind}.values():
            places = {place for other, place in kind if other is chain}
            chain.tiles = [tiles if place in places else count for place, count in enumerate(chain.tiles)]


def _may_be_cut(model: nn.Module, batch: Any, kind: _Kind) -> bool:
    """Return whether a forward with these steps in small tiles ends; where there are no values, it does not show all."""
    _cut([kind], _MOST)
    try:
        with ignore_error_growth(), isolated(model, batch) as inputs:
            call(model, inputs)
    except InputError:
        return False
    finally:
        _cut([kind], 1)
    return True
