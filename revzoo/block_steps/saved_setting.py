"""The grid, bits and sign of reversible blocks go with the weights, so that a resumed run is the uninterrupted one.

    model.save_pretrained(folder)      entry "revzoo" of config.json: `reversible_` of what `from_pretrained` returns takes it
    torch.save(model.state_dict())     the metadata of the state dict: load it into a network that is reversible already

No key of a state dict comes or goes, so the weights still fit the ordinary network. Files of safetensors have no metadata.
"""

import math
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from revzoo.block_steps.block_chain import BlockChain
from revzoo.block_steps.state_grid import StateGrid
from revzoo.runtime.coupling import RandomSign

_KEY = "revzoo"
_OF_GRID = ("fraction_bits", "states", "smallest_row")


def describe_setting(chain: BlockChain) -> dict[str, Any]:
    """Return what a chain computes besides its blocks, in types of JSON."""
    row, states = chain.smallest_row, None if chain.states is None else str(chain.states).removeprefix("torch.")
    grid = {"fraction_bits": chain.coupling.fraction_bits, "states": states, "smallest_row": row if row < math.inf else None}
    return _describe_steps(chain) | grid


def take_saved_grid(model: nn.Module, chain: BlockChain) -> bool:
    """Give a chain the grid with which a network of Transformers was saved, if it had these steps; return whether it had."""
    settings = getattr(getattr(model, "config", None), _KEY, None) or {}
    for path, saved in settings.items():  # a wrapper, such as peft's, has longer paths
        if f".{path}".endswith(f".{chain.path}") or f".{chain.path}".endswith(f".{path}"):
            return _take(saved, chain)
    return False


def keep_setting(model: nn.Module, chains: Iterable[BlockChain]) -> None:
    """Let the settings of chains be saved with the network, and those in a state dict be taken from it."""
    config = getattr(model, "config", None)
    for chain in chains:
        owner: Any = chain.owner
        owner._register_state_dict_hook(partial(_save, chain))
        owner._register_load_state_dict_pre_hook(partial(_load, chain, config))
        _note(chain, config)


def _note(chain: BlockChain, config: Any) -> None:
    if hasattr(config, "to_json_string"):
        setattr(config, _KEY, (getattr(config, _KEY, None) or {}) | {chain.path: describe_setting(chain)})


def drop_setting(model: nn.Module, chains: Iterable[BlockChain]) -> None:
    """Undo `keep_setting`."""
    for chain in chains:
        owner: Any = chain.owner
        for hooks in (owner._state_dict_hooks, owner._load_state_dict_pre_hooks):
            for key, hook in list(hooks.items()):
                if getattr(getattr(hook, "hook", hook), "args", ())[:1] == (chain,):
                    del hooks[key]
    config: Any = getattr(model, "config", None)
    if (settings := getattr(config, _KEY, None)) is not None:
        for chain in chains:
            settings.pop(chain.path, None)
        if not settings:
            delattr(config, _KEY)


def _save(chain: BlockChain, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
    name = chain.path.rpartition(".")[2]  # in its owner, which a wrapper does not change
    metadata[_KEY] = metadata.get(_KEY, {}) | {name: describe_setting(chain)}


def _load(chain: BlockChain, config: Any, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    saved = metadata.get(_KEY, {}).get(chain.path.rpartition(".")[2])
    if saved is not None and _take(saved, chain):
        _note(chain, config)


def _take(saved: dict[str, Any], chain: BlockChain) -> bool:
    others, own = {key: value for key, value in saved.items() if key not in _OF_GRID}, _describe_steps(chain)
    if others != own:
        warnings.warn(
            f"{chain.path} was saved with {others}, and is reversible with {own} now: training goes on with another function. "
            "Give reversible_ the coupling, kept_bits and sign, the blocks and split with which it was trained.",
            stacklevel=2,
        )
        return False
    dtype, row = saved["states"], math.inf if saved["smallest_row"] is None else saved["smallest_row"]
    chain.set_grid(StateGrid(None if dtype is None else getattr(torch, dtype), saved["fraction_bits"], row))
    return True


def _describe_steps(chain: BlockChain) -> dict[str, Any]:
    coupling, names = chain.coupling, [name.removeprefix(f"{chain.path}.") for name in chain.names]
    steps, sign = f"{len(names)} from {names[0]} to {names[-1]}", "random" if isinstance(coupling, RandomSign) else "fixed"
    described = {"steps": steps, "sign": sign, "kept_bits": coupling.kept_bits}
    return described | {"a": coupling.a, "b": coupling.b, "c": coupling.c}
