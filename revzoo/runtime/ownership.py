"""Whether anybody else could see that a tensor is changed in place."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_OWN_REFERENCES = 2  # to a storage: the tensor, and the Python object that is asked


def is_held_alone(x: Tensor) -> bool:
    """Return whether no other tensor shares the memory of x: no view, no saved tensor of a graph, no output of a user.

    Other names of the same tensor object are not seen, nor is a kernel of another stream that still reads the memory: whoever
    asks must be ordered behind it.
    """
    if is_traceable_wrapper_subclass(x):
        return False
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata) == _OWN_REFERENCES
