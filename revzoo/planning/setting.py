"""What a plan was made for: it holds for nothing else."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from revzoo.analysis.dry_run import require_module
from revzoo.errors import InputError
from revzoo.model.network import Model
from revzoo.runtime.nested import tensors_in


@dataclass(frozen=True)
class Setting:
    """The circumstances that bytes and seconds depend on.

    Args:
        model: name of the spec, or the class.
        digest: of the spec or modules, and of which parameters and modules are frozen or in eval mode.
        dtype: of the parameters; with autocast, that of the autocast beside it.
        device: kind and name; "meta" fits any.
        training: whether the model is in training mode.
        exact: whether the streams are kept on a grid.
        batch: shape and dtype of every tensor in the batch.
    """

    model: str
    digest: str
    dtype: str
    device: str
    training: bool
    exact: bool
    batch: tuple[str, ...] = ()

    def differences(self, other: "Setting") -> Iterator[str]:
        """Yield, in words, what is otherwise in `other`; a batch that is not known, or a meta device, fits any."""
        for key in (f.name for f in fields(self)):
            ours, theirs = getattr(self, key), getattr(other, key)
            open_ = (key == "batch" and not (ours and theirs)) or (key == "device" and "meta" in (ours, theirs))
            if ours != theirs and not open_ and not (key == "digest" and self.model != other.model):
                yield f"{_WORDS[key]} {_said(ours)} and not {_said(theirs)}"


_WORDS = {
    "model": "the model",
    "digest": "a model of the same name but other parts, sizes or frozen parameters:",
    "dtype": "the dtype",
    "device": "the device",
    "training": "training mode",
    "exact": "exact =",
    "batch": "a batch of",
}


def setting(model: nn.Module, batch: Any = None) -> Setting:
    """Return the circumstances as they are now."""
    require_module(model)
    weight = next(model.parameters(), None)
    if weight is None:
        raise InputError(f"A plan is for a model with parameters. Received: {type(model).__name__} without any.")
    device = weight.device
    dtype = str(weight.dtype).removeprefix("torch.")
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        dtype += f", autocast {str(torch.get_autocast_dtype(device.type)).removeprefix('torch.')}"
    return Setting(
        model=model.spec.name if isinstance(model, Model) else type(model).__name__,
        digest=_digest(model),
        dtype=dtype,
        device=f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type,
        training=model.training,
        exact=bool(getattr(model, "exact", False)),
        batch=tuple(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors_in(batch)),
    )


def _digest(model: nn.Module) -> str:
    """Return what tells models of one name apart, as far as bytes and seconds depend on it."""
    facts = (
        model.spec.digest if isinstance(model, Model) else repr(model),
        getattr(model, "couplings", ()),
        [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()],
        [module.training == model.training for module in model.modules()],  # not so for a BatchNorm that is frozen
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _said(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
