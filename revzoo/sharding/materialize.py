"""Give a sharded network its values, while no process ever holds more than its own part and one whole parameter.

The network is built on the meta device and sharded there. Then `build` builds it once more, now with values, exactly as one
process would, so that every random number is drawn in the same order and is the same; this holds for whatever the initialisations do.
But whenever the next parameter is created or written, the memory of the one before is given back, after this process has
copied its slice. A parameter that is written again, as the spec's `init` does after the initialisations of its parts, gets its
memory back filled with NaN: were an old value read, NaN would be left, which is refused.

Cost: every process draws all numbers, so creating a network takes as long as in one process. Memory, beside the process's
own part: the largest parameter, with what its initialisation takes. Buffers are whole.
"""

from collections.abc import Callable

import torch
from torch import nn

_CPU = torch.device("cpu")
_META = torch.device("meta")


@torch.no_grad()
def materialize_(
    model: nn.Module, build: Callable[[], nn.Module], *, device: torch.device | str | None = None, offload: bool = False
) -> None:
    """Give a model on the meta device the values of the one that `build` returns, of which every process keeps its part.

    The values are those of `build()` on the CPU with the same seed, to the bit; those of another dtype are rounded.

    Args:
        model: sharded (`fully_shard`, `parallelize_module`) or not, on the meta device.
        build: makes the same network on PyTorch's default device. It is called twice: on the meta device and on the CPU.
        device: where the parameters and buffers are put. None: the CPU.
        offload: whether parameters are on the CPU all the same.

    Raises:
        InputError: `build` makes another network, or an initialisation reads a parameter after it has begun another.
    """
    with _META, _note_parameters() as noted:
        names = _find_names(build(), noted)
    allocate_(model, device=device, offload=offload)
    targets = model.state_dict(keep_vars=True) | dict(model.named_buffers())
    keeper = _SliceKeeper([[targets[name] for name in each if name in targets] for each in names])
    with _CPU, torch.enable_grad(), keeper:
        whole = build()
    keeper.finish()
    ...
