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
from revzoo.runtime.coupling import Coupling, RandomSign

_KEY = "revzoo"
_OF_GRID = ("fraction_bits", "states", "smallest_row")


def describe_setting(chain: BlockChain) -> dict[str, Any]:
    """Return what a chain computes besides its blocks, in types of JSON."""
    row, states = chain.smallest_row, None if chain.states is None else str(chain.states).removeprefix("torch.")
    grid = {"fraction_bits": chain.coupling.fraction_bits, "states": states, "smallest_row": row if row < math.inf else None}
    return _describe_coupling(chain.coupling) | grid


def find_saved_grid(model: nn.Module, path: str, coupling: Coupling) -> StateGrid | None:
    """Return the grid with which a network of Transformers was saved, if its blocks had this coupling."""
    settings = getattr(getattr(model, "config", None), _KEY, None) or {}
    for each, saved in settings.items():  # a wrapper, such as peft's, has longer paths
        if f".{each}".endswith(f".{path}") or f".{path}".endswith(f".{each}"):
            return _read_grid(saved, coupling, path)
    return None


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
    if saved is not None and (grid := _read_grid(saved, chain.coupling, chain.path)) is not None:
        chain.set_grid(grid)
        _note(chain, config)


def _read_grid(saved: dict[str, Any], coupling: Coupling, path: str) -> StateGrid | None:
    others = {key: value for key, value in saved.items() if key not in _OF_GRID}
    if others != _describe_coupling(coupling):
        warnings.warn(
            f"{path} was saved with {others}, and is reversible with {_describe_coupling(coupling)} now: training goes on with "
            "another function. Give reversible_ the coupling, kept_bits and sign with which it was trained.",
            stacklevel=2,
        )
        return None
    dtype, row = saved["states"], saved["smallest_row"]
    return StateGrid(None if dtype is None else getattr(torch, dtype), saved["fraction_bits"], math.inf if row is None else row)


def _describe_coupling(coupling: Coupling) -> dict[str, Any]:
    sign = "random" if isinstance(coupling, RandomSign) else "fixed"
    return {"a": coupling.a, "b": coupling.b, "c": coupling.c, "kept_bits": coupling.kept_bits, "sign": sign}
