"""What steps keep from forward to backward beyond their modes.

A mode decides about tensors that autograd saves through its hooks. A step may keep tensors in other ways, so that they stay in
memory whatever its mode: on the `ctx` of an `autograd.Function`, in attributes, or with hooks of its own, as `save_on_cpu`
does. Gradients are right all the same.
"""

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from revzoo.analysis.chains import find_chains, find_steps
from revzoo.analysis.dry_run import call, isolated
from revzoo.runtime.compiling import is_compiled
from revzoo.runtime.layer_rules import is_made_of_layers
from revzoo.runtime.live_bytes import LiveBytes, Storages
from revzoo.runtime.nested import tensors_in


def measure_leftovers(model: nn.Module, batch: Any) -> dict[str, int]:
    """Return, by name, the bytes that each inverted or recomputed step keeps beyond its mode, without those that keep none.

    Counted is what the step's own forward created. For a step with inverted ones on both sides it is the input too, because
    only the first and last states of a run of inverted steps are needed. Layers with an inverse, and steps made of them, are
    left out: they keep the statistics of the batch.
    """
    enclosed = _find_enclosed(model)
    watchers = [
        _Watcher(name, step, drops_input=name in enclosed)
        for name, step, mode in find_steps(model)
        if not mode.keeps_products and not is_compiled(step) and not is_made_of_layers(step)
    ]
    with isolated(model, batch) as inputs, LiveBytes() as live:
        known = live.watch([*model.parameters(), *model.buffers(), *tensors_in(inputs)])
        hooks = [hook for watcher in watchers for hook in watcher.register(live)]
        try:
            outputs = call(model, inputs)
        finally:
            for hook in hooks:
                hook.remove()
        torch.clear_autocast_cache()
        known |= live.watch(outputs)
        leftovers: dict[str, int] = defaultdict(int)
        for watcher in watchers:
            leftovers[watcher.name] += watcher.count(live, known)
    return {name: size for name, size in leftovers.items() if size}


def _find_enclosed(model: nn.Module) -> set[str]:
    """Return the names of the inverted steps that have inverted steps on both sides."""
    names = set()
    for prefix, chain in find_chains(model).items():
        units = [entry for entry in chain.layout() if entry.is_unit]
        inverted = [unit.kind == "step" and mode.inverts for unit, mode in zip(units, chain.schedule, strict=True)]
        names |= {f"{prefix}{unit.name}" for i, unit in enumerate(units) if inverted[max(i - 1, 0) : i + 2] == [True] * 3}
    return names


class _Watcher:
    """Note in each call of a step when it begins and ends, and what it takes."""

    def __init__(self, name: str, step: nn.Module, drops_input: bool):
        self.name = name
        self._step = step
        self._drops_input = drops_input
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._taken: Storages = frozenset()

    def register(self, live: LiveBytes) -> list[Any]:
        return [
            self._step.register_forward_pre_hook(partial(self._begin, live)),
            self._step.register_forward_hook(partial(self._end, live)),
        ]

    def count(self, live: LiveBytes, known: Storages) -> int:
        """Return the bytes that are left of all calls."""
        created = sum(
            live.alive_by_birth([begin, end], known, at=live.now())[0]
            for begin, end in zip(self._begins, self._ends, strict=True)
        )
        return created + (live.size(self._taken - known) if self._drops_input else 0)

    def _begin(self, live: LiveBytes, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._taken |= live.watch(args[0])
        self._begins.append(live.now())

    def _end(self, live: LiveBytes, *_: object) -> None:
        self._ends.append(live.now())
