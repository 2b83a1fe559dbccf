"""The schedules with which a module that holds reversible chains is planned.

A chain whose units all store is captured with what stands around it, so that spans may lie in it; one that inverts or
recomputes runs between graphs as it would without a plan. Which is better depends on the budget, so both are planned, and one
between. A chain on a grid has the schedule that it has: captured, its rounding would keep more than it keeps by itself.
"""

from collections.abc import Iterator, Mapping

from torch import nn

from revzoo.analysis.chains import find_chains
from revzoo.runtime.mode import Mode

Schedules = Mapping[str, list[Mode]]

_PARTS = 2  # of a chain, of which the last ones may be stored


def list_schedules(module: nn.Module) -> Iterator[Schedules]:
    """Yield the schedules of the chains in a module that may change, by path: all stored, then ever fewer of the last units.

    Units that are not stored have the mode that they have now. Of nested chains, the outermost has the schedule.
    """
    own = _read_schedules(module)
    stored = {path: [Mode.STORE] * len(modes) for path, modes in own.items()}
    yield stored
    units = sum(map(len, own.values()))
    latest: Schedules = stored
    for part in range(1, _PARTS + 1):
        count = units * part // _PARTS  # of the first units, which are not stored
        schedules = {}
        for path, modes in own.items():
            schedules[path] = modes[:count] + stored[path][count:]
            count = max(0, count - len(modes))
        if schedules != latest:
            yield schedules
        latest = schedules


def set_schedules(module: nn.Module, schedules: Schedules) -> Schedules:
    """Give the chains of a module their schedules, and return those that they had."""
    chains = {prefix.removesuffix("."): chain for prefix, chain in find_chains(module).items()}
    before = {path: chains[path].schedule for path in schedules}
    for path, modes in schedules.items():
        chains[path].schedule = modes
    return before


def _read_schedules(module: nn.Module) -> dict[str, list[Mode]]:
    chains = {prefix: chain for prefix, chain in find_chains(module).items() if isinstance(chain, nn.Module)}
    outermost = (p for p in chains if not any(p != other and p.startswith(other) for other in chains))
    return {prefix.removesuffix("."): chains[prefix].schedule for prefix in outermost if not _is_on_grid(chains[prefix])}


def _is_on_grid(chain: nn.Module) -> bool:
    return any(getattr(m, "exact", False) or any(c.is_exact for c in getattr(m, "couplings", ())) for m in chain.modules())
