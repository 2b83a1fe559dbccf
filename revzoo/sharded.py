"""Which tensors are divided over processes."""

import sys

from torch import Tensor


def is_sharded(*tensors: Tensor) -> bool:
    """Return whether one of the tensors is divided over processes (a DTensor)."""
    # Importing DTensor takes half a second, and there is none before somebody else has imported it.
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and any(isinstance(t, distributed.DTensor) for t in tensors)
