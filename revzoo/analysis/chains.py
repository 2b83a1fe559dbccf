"""The chains in a model: all of it that has a schedule."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Protocol, cast, runtime_checkable

from torch import nn

from revzoo.runtime.layout import LayoutEntry
from revzoo.runtime.mode import Mode

if TYPE_CHECKING:
    from revzoo.in_place.chain import BlockChain


@runtime_checkable
class Chain(Protocol):
    """What a model of the zoo, a chain of steps or layers, and a list of reversible blocks have in common."""

    lookahead: Literal[0, 1]

    @property
    def schedule(self) -> list[Mode]:
        """The mode of every unit; a list, or one mode for all, can be assigned."""
        ...

    @schedule.setter
    def schedule(self, modes: Sequence[str] | str) -> None: ...

    def layout(self) -> list[LayoutEntry]:
        """Return the units in order."""
        ...


def find_chains(model: nn.Module) -> dict[str, Chain]:
    """Return all that has a schedule, by the prefix of its parameters' names ("" if it is the model itself).

    These are modules, and the lists of blocks that were made reversible where they stand.
    """
    chains: dict[str, Chain] = {}
    for name, module in model.named_modules():
        # A block that was made reversible where it stands has a step in place of its `forward`.
        chain = getattr(getattr(module.__dict__.get("forward"), "__self__", None), "chain", None)
        if isinstance(module, Chain):
            chains[name] = module
        elif isinstance(chain, Chain):
            chains.setdefault(name.rpartition(".")[0], chain)
    return {f"{name}." if name else "": chain for name, chain in chains.items()}


def find_block_chains(model: nn.Module) -> "dict[str, BlockChain]":
    """Return the chains that `reversible_` made of lists of blocks, by the path of the list."""
    chains = find_chains(model).items()
    return {prefix.removesuffix("."): cast("BlockChain", chain) for prefix, chain in chains if not isinstance(chain, nn.Module)}


def find_steps(model: nn.Module) -> Iterator[tuple[str, nn.Module, Mode]]:
    """Yield name, module and mode of every reversible step in the model, and of every layer that may be inverted."""
    for prefix, chain in find_chains(model).items():
        units = [entry for entry in chain.layout() if entry.is_unit]
        for unit, mode in zip(units, chain.schedule, strict=True):
            if unit.can_invert:
                yield f"{prefix}{unit.name}", unit.module, mode


@contextmanager
def preserve_schedules(model: nn.Module) -> Iterator[Callable[[Mode], None]]:
    """Yield a function that gives every step in the model one mode; restore schedules and look-ahead at the end."""
    schedules = {chain: (chain.schedule, chain.lookahead) for chain in find_chains(model).values()}

    def assign(mode: Mode) -> None:
        for chain in schedules:
            chain.schedule = mode

    try:
        yield assign
    finally:
        for chain, (schedule, lookahead) in schedules.items():
            chain.schedule = schedule
            if chain.lookahead != lookahead:
                chain.lookahead = lookahead
