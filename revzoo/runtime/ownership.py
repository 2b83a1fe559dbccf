"""Who holds what: references that keep nothing alive, and whether anybody else could see that a tensor is changed in place."""

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class ModuleReference:
    """A reference to a module from something that the module itself holds: a strong one would be a cycle.

    Then a network that is deleted would keep its memory until Python's garbage collector comes by, which knows nothing of the
    memory of a device.

    Args:
        module: the module; a copy of this, or what is unpickled, refers to the copy of it.
    """

    def __init__(self, module: nn.Module | None):
        self._module = None if module is None else ref(module)

    def __call__(self) -> nn.Module | None:
        """Return the module, None if it does not exist any more."""
        return None if self._module is None else self._module()

    def __reduce__(self) -> Any:
        return ModuleReference, (self(),)


def is_held_alone(x: Tensor) -> bool:
    """Return whether no other tensor shares the memory of x: no view, no saved tensor of a graph, no output of a user.

    Other names of the same tensor object are not seen. Nor is a kernel of another stream that still reads the memory: the
    caller's work must be ordered after that kernel.
    """
    if torch.compiler.is_compiling() or is_traceable_wrapper_subclass(x):
        return False
    return _count_references(x) == _OWN_REFERENCES


def _count_references(x: Tensor) -> int:
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


_OWN_REFERENCES = _count_references(torch.empty(1))  # the tensor, and, in newer versions, the Python object that is asked
