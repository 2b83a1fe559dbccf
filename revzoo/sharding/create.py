"""Create a network that is divided over processes: no device ever holds the whole."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from revzoo.checkpoint.files import load_weights
from revzoo.checkpoint.slices import copy_whole_
from revzoo.errors import InputError
from revzoo.hub import fetch_if_on_hub
from revzoo.model.create import build_for_weights, choose_weights, create, find_own_spec
from revzoo.model.model import Model
from revzoo.runtime.lookahead import LookaheadOption
from revzoo.runtime.mode import Mode
from revzoo.sharding.shard import ignore_view_warnings
from revzoo.spec.loading import load_spec

_CPU = torch.device("cpu")


def create_sharded(
    source: str | Path,
    shard: Callable[[Model], Any],
    *,
    pretrained: bool = False,
    checkpoint: str | Path | None = None,
    num_outputs: int | None = None,
    overrides: Iterable[str] | None = None,
    schedule: str | Sequence[str] = Mode.INVERT,
    lookahead: LookaheadOption = 0,
    exact: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    offload: bool = False,
) -> Model:
    """Create the network that `revzoo.create` gives for these arguments and the same seed, divided over processes.

    It is built on the meta device and divided by `shard`; then every process gets its own part. Weights are read slice by
    slice. Random values are drawn as in one process, so each process has the whole network on the CPU for a moment; its device
    never has. All processes call this, each after the same `torch.manual_seed`.

    Args:
        source: as for `create`.
        shard: divides the model in place, for example by `fully_shard` of every step and then of the model. Before it has
            values is also the time to freeze parts.
        pretrained: as for `create`.
        checkpoint: as for `create`. Pickled state dicts are read whole; safetensors are not.
        num_outputs: as for `create`.
        overrides: as for `create`, but where weights are loaded, they must not change the input or the head.
        schedule: as for `create`.
        lookahead: as for `create`.
        exact: as for `create`.
        device: of this process's part. None: the CPU.
        dtype: data type of the parameters. None: float32.
        offload: whether the parameters are on the CPU all the same, as `CPUOffloadPolicy` wants them.

    Raises:
        InputError: weights would have to be adapted to another input or head, or an argument has a value that is not allowed.
        CheckpointError: the weights do not fit the model, or are missing.
        SpecError: the spec or the overrides have problems.
    """
    source, changes = fetch_if_on_hub(source), list(overrides or ())
    file = choose_weights(source, pretrained, checkpoint)
    spec = load_spec(source, changes)
    if file is not None and file != checkpoint and changes:
        original = find_own_spec(source, spec)
        if (original.input, original.head) != (spec.input, spec.head):
            raise InputError(
                f"Weights are adapted to another input or head in one process. Received: overrides={changes} with the weights "
                f"of {source}. Save the adapted network, revzoo.create(...).save_pretrained(FOLDER), and create FOLDER."
            )
    # The spec's file, and not a folder: that names the network without its weights.
    build = partial(create, spec.file, num_outputs=num_outputs, overrides=changes)
    model = build(schedule=schedule, lookahead=lookahead, exact=exact, device="meta", dtype=dtype)
    shard(model)
    ignore_view_warnings(model)
    allocate_(model, device=device, offload=offload)
    if file is None or num_outputs is not None:
        with _CPU:
            _copy_values_(model, build())
    if file is not None:
        load_weights(model, file, original=None if num_outputs is None else build_for_weights(spec, file))
    return model


def allocate_(model: nn.Module, *, device: torch.device | str | None = None, offload: bool = False) -> None:
    """Give a model on the meta device memory without values, for what this process holds of it.

    Args:
        model: the model, sharded or not.
        device: of parameters and buffers. None: the CPU.
        offload: whether the parameters are on the CPU all the same.
    """
    place = torch.device(device or _CPU)
    model.to_empty(device=_CPU if offload else place)
    if offload and place.type != "cpu":
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty_like(buffer, device=place)


@torch.no_grad()
def _copy_values_(model: nn.Module, whole: nn.Module) -> None:
    """Give a sharded model its part of the values of the same network."""
    values = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        copy_whole_(tensor, values[name])
