"""Whether anybody else could see that a tensor is changed in place."""

import torch
from torch import Tensor

from revzoo.runtime.live_bytes import wraps_tensors

_OWN_REFERENCES = 2  # to a storage: the tensor, and the Python object that is asked


def is_held_alone(x: Tensor) -> bool:
    """Return whether no other tensor shares the memory of x: no view, no saved tensor of a graph, no output of a user.

    Other names of the same tensor object are not seen, nor is a kernel of another stream that still reads the memory: whoever
    asks must be ordered behind it.
    """
    if wraps_tensors(type(x)):
        return False
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata) == _OWN_REFERENCES
