"""The circumstances that a plan was made for; it holds for no others."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from revzoo.analysis.chains import find_block_chains, find_chains, read_tiles
from revzoo.analysis.dry_run import require_module
from revzoo.device import describe_device
from revzoo.errors import InputError, PlanError
from revzoo.format import count_noun, format_dtype
from revzoo.model.network import Network
from revzoo.runtime.layout import find_dim
from revzoo.runtime.nested import tensors_in


@dataclass(frozen=True)
class Setting:
    """Everything besides the schedule that bytes and seconds depend on.

    Args:
        model: name of the spec, or the class.
        digest: hash of the spec or modules, including which parameters are frozen and which modules are in eval mode.
        dtype: of the parameters; with autocast, also its dtype.
        device: kind and name; "meta" matches any.
        training: whether the model is in training mode.
        exact: whether the streams are kept on a grid, so that inversion is exact.
        batch: shape and dtype of every tensor in the batch; empty matches any.
        tiles: into how many tiles every unit of the chains in it is cut.
    """

    model: str
    digest: str
    dtype: str
    device: str
    training: bool
    exact: bool
    batch: tuple[str, ...] = ()
    tiles: tuple[int, ...] = ()

    def describe(self) -> str:
        """Return batch, weights, device and tiles in words."""
        cut = sorted(Counter(count for count in self.tiles if count > 1).items())
        tiles = "".join(f", {count_noun(steps, 'step')} in {count} tiles" for count, steps in cut)
        return f"batch of {', '.join(self.batch)}, weights in {self.dtype}, on {self.device}{tiles}"

    def differences(self, other: "Setting") -> Iterator[str]:
        """Yield what differs in `other`, in words; an unknown batch and the meta device match any."""
        for key in (f.name for f in fields(self)):
            mine, others = getattr(self, key), getattr(other, key)
            matches_any = (key == "batch" and not (mine and others)) or (key == "device" and "meta" in (mine, others))
            if mine != others and not matches_any and not (key == "digest" and self.model != other.model):
                yield f"{_WORDS.get(key, key)}: {_format_value(mine)} in the plan, {_format_value(others)} now"

    def require_same(self, other: "Setting") -> None:
        """Raise PlanError where a plan for these circumstances is applied in others; it names what differs."""
        if reasons := list(self.differences(other)):
            raise PlanError(
                f"This plan was made for other circumstances ({'; '.join(reasons)}). Apply it where they are the same, such as "
                "inside the same torch.autocast, or make a new one with revzoo.plan(model, batch, budget)."
            )


_WORDS = {"digest": "hash of the model's parts, sizes and frozen parameters", "training": "training mode"}


def read_setting(model: nn.Module, batch: Any = None) -> Setting:
    """Return the circumstances of the model as it is now, with the surrounding autocast.

    Args:
        model: any module with parameters.
        batch: None leaves the batch open, so that it matches any.
    Raises:
        InputError: not a module, or without parameters.
    """
    require_module(model)
    weight = next(model.parameters(), None)
    if weight is None:
        raise InputError(f"A plan is for a model with parameters. Received: {type(model).__name__} without any.")
    device = weight.device
    dtype = format_dtype(weight.dtype)
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        dtype += f", autocast {format_dtype(torch.get_autocast_dtype(device.type))}"
    return Setting(
        model=model.spec.name if isinstance(model, Network) else type(model).__name__,
        digest=_compute_digest(model),
        dtype=dtype,
        device=describe_device(device),
        training=model.training,
        exact=bool(getattr(model, "exact", False)),
        batch=tuple(list_shapes(batch)),
        tiles=read_tiles(model),
    )


def list_shapes(batch: Any) -> list[str]:
    """Return shape and dtype of every tensor in a batch."""
    return [f"{list(t.shape)} {format_dtype(t.dtype)}" for t in tensors_in(batch)]


def _compute_digest(model: nn.Module) -> str:
    """Hash everything in a model that memory or time depends on."""
    facts = (
        model.spec.digest if isinstance(model, Network) else repr(model),
        getattr(model, "couplings", ()),
        [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()],
        [module.training == model.training for module in model.modules()],  # False for a frozen BatchNorm, for example
    )
    lists = [(path, chain.names, chain.coupling) for path, chain in find_block_chains(model).items()]
    units = [unit for chain in find_chains(model).values() for unit in chain.layout() if unit.kind == "step"]
    dims = [find_dim(unit.module) for unit in units]  # along which tiles would be cut
    return hashlib.sha256(repr((*facts, *lists, *dims)).encode()).hexdigest()


def _format_value(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)  # the beginning of a digest is enough
