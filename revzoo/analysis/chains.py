"""The chains in a model: all of it that has a schedule."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from revzoo.analysis.dry_run import require_module
from revzoo.block_steps.block_chain import BlockChain, get_step
from revzoo.device import has_value
from revzoo.errors import InputError
from revzoo.model.network import Network
from revzoo.runtime.chain import ReversibleChain
from revzoo.runtime.layer_chain import LayerChain
from revzoo.runtime.mode import Mode

Chain = Network | ReversibleChain | LayerChain | BlockChain


def find_chains(model: nn.Module) -> dict[str, Chain]:
    """Return all that has a schedule, by the prefix of its parameters' names ("" if it is the model itself).

    These are modules, and the lists of blocks that were made reversible where they stand.
    """
    chains: dict[str, Chain] = {}
    for name, module in model.named_modules():
        if isinstance(module, Network | ReversibleChain | LayerChain):
            chains[name] = module
        elif (step := get_step(module)) is not None:
            span = step.chain.path.removeprefix(step.chain.list_path)  # the list may have moved in the network since
            chains.setdefault(name.rpartition(".")[0] + span, step.chain)
    return {f"{name}." if name else "": chain for name, chain in chains.items()}


def require_chains(model: nn.Module) -> None:
    """Raise InputError unless the model has chains, and parameters with values: else nothing can be rebuilt and compared."""
    require_module(model)
    if not find_chains(model):
        raise InputError(f"There is no revzoo.Model, ReversibleChain or LayerChain in this {type(model).__name__}.")
    if not all(map(has_value, model.parameters())):
        raise InputError("What is rebuilt can be compared where parameters have values. Received: meta or fake parameters.")


def find_block_chains(model: nn.Module) -> dict[str, BlockChain]:
    """Return the chains that `reversible_` made of lists of blocks, by the path of the list."""
    chains = find_chains(model).items()
    return {prefix.removesuffix("."): chain for prefix, chain in chains if isinstance(chain, BlockChain)}


def find_steps(model: nn.Module) -> Iterator[tuple[str, nn.Module, Mode]]:
    """Yield name, module and mode of every reversible step in the model, and of every layer that may be inverted."""
    for prefix, chain in find_chains(model).items():
        units = [entry for entry in chain.layout() if entry.is_unit]
        for unit, mode in zip(units, chain.schedule, strict=True):
            if unit.can_invert:
                yield f"{prefix}{unit.name}", unit.module, mode


def read_tiles(model: nn.Module) -> tuple[int, ...]:
    """Return into how many tiles every unit of the chains in the model is cut."""
    return tuple(count for chain in find_chains(model).values() for count in chain.tiles)


def assign_tiles(model: nn.Module, tiles: Sequence[int]) -> None:
    """Cut the units of the chains in the model into as many tiles as `read_tiles` has returned; who has them keeps them."""
    numbers = iter(tiles)
    for chain in find_chains(model).values():
        before = chain.tiles
        if (own := [next(numbers) for _ in before]) != before:
            chain.tiles = own


@contextmanager
def preserve_schedules(model: nn.Module) -> Iterator[Callable[[Mode], None]]:
    """Yield a function that gives every step in the model one mode; restore schedules, look-ahead and tiles at the end."""
    schedules = {chain: (chain.schedule, chain.lookahead) for chain in find_chains(model).values()}
    tiles = read_tiles(model)

    def assign(mode: Mode) -> None:
        for chain in schedules:
            chain.schedule = mode

    try:
        yield assign
    finally:
        for chain, (schedule, lookahead) in schedules.items():
            chain.schedule = schedule
            if not isinstance(chain, BlockChain) and chain.lookahead != lookahead:
                chain.lookahead = lookahead
        assign_tiles(model, tiles)
