"""Give a sharded network its values, while no process ever holds more than its own part and one whole parameter.

The network was built on the meta device and sharded there. Here it is built once more, with values and exactly as one process
would: the same random numbers are drawn in the same order, whatever the initialisations do with them. But as soon as another
parameter is created or written, each process copies its slice of the one before, and gives the memory of that one back. A
parameter that is written again, as a spec's `init` does after the initialisations of the parts, gets memory full of NaN: an
initialisation that reads an old value leaves NaN, and is refused.

Cost: every process draws every number, which takes as long as creating the network in one process. Memory beside the process's
own part: the largest parameter, with what its initialisation takes for itself, and the buffers, which are whole.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from revzoo.checkpoint.slices import copy_whole_
from revzoo.errors import InputError, join_names

_MOST_FREE_BYTES = 16 * 10**6  # that may wait until they are given back to the system
_CPU, _META = torch.device("cpu"), torch.device("meta")


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


def materialize_(
    model: nn.Module, build: Callable[[], nn.Module], *, device: torch.device | str | None = None, offload: bool = False
) -> None:
    """Give a model on the meta device the values that `build` draws, to the bit; each process keeps only its own part.

    Args:
        model: sharded by `fully_shard`, or whole; of the dtype that is wanted.
        build: makes the same network in PyTorch's default dtype and on its default device. It is called twice: for the names on
            the meta device, and for the values on the CPU, whose generator is used (`torch.manual_seed`) and left as after
            `build()`.
        device: of parameters and buffers. None: the CPU.
        offload: whether the parameters are on the CPU all the same.

    Raises:
        InputError: `build` makes another network, or an initialisation reads a parameter after it has gone on to the next.
    """
    names = list_parameters(build)
    allocate_(model, device=device, offload=offload)
    keys = dict(model.named_parameters(remove_duplicate=False))
    if unknown := sorted(keys.keys() - {name for each in names for name in each}):
        raise InputError(f"build makes a network without {join_names(unknown)}. Return the network that was sharded.")
    with _CPU, _SliceKeeper([[keys[name] for name in each if name in keys] for each in names]) as keeper:
        whole = build()
    keeper.finish()
    if keeper.spoilt:
        spoilt = [name for index in sorted(keeper.spoilt) for name in names[index]]
        raise InputError(
            f"The initialisation of {join_names(spoilt)} reads values that were set before those of another parameter, so the "
            "network cannot be made in pieces. Create it in one process, save it (save_pretrained), and name that folder."
        )
    made = dict(whole.named_buffers())
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            copy_whole_(buffer, made[name])


def list_parameters(build: Callable[[], nn.Module]) -> list[list[str]]:
    """Return the names of every parameter that `build` registers, in that order; none for one that is replaced later."""
    registered = dict[int, nn.Parameter]()

    def register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        registered.setdefault(_get_address(parameter), parameter)

    hook = register_module_parameter_registration_hook(register)
    try:
        with _META:
            model = build()
    finally:
        hook.remove()
    names = {id(parameter): list[str]() for parameter in registered.values()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.get(id(parameter), []).append(name)
    return list(names.values())


def _get_address(tensor: Tensor) -> int:
    """Return what tensors that share their memory have in common."""
    address: int = tensor.untyped_storage()._cdata
    return address


class _SliceKeeper(TorchDispatchMode):
    """While a network is built: copies of every parameter the slices that are wanted, and holds one parameter at a time.

    Args:
        targets: for every parameter in the order of registration, the tensors that get its values.
    """

    def __init__(self, targets: Sequence[Sequence[Tensor]]):
        super().__init__()
        self._targets = targets
        self._parameters = list[nn.Parameter]()
        self._sizes = list[int]()  # of their memory [bytes]
        self._numbers = dict[int, int]()  # of the parameters, by address
        self._held, self._refilled = set[int](), set[int]()
        self._freed_bytes = 0  # since the last trim
        self.spoilt = set[int]()  # numbers of parameters that were left with NaN

    def __enter__(self) -> "_SliceKeeper":
        self._hook = register_module_parameter_registration_hook(self._register)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        used = {self._numbers[address] for address in map(_get_address, tensors) if address in self._numbers}
        if used:
            self._hold(used)
        return func(*args, **kwargs)

    def finish(self) -> None:
        """Copy the slices of what is still held."""
        self._hold(set())

    def _register(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        address = _get_address(parameter)
        if address in self._numbers:  # it is tied to one that was registered before
            return
        number = self._numbers[address] = len(self._parameters)
        self._parameters.append(parameter)
        self._sizes.append(parameter.untyped_storage().nbytes())
        with _disable_current_modes():
            self._hold(set())
        self._held = {number}

    @torch.no_grad()
    def _hold(self, numbers: set[int]) -> None:
        """Release all parameters but these, and give these their memory back."""
        for number in self._held - numbers:
            self._release(number)
        for number in numbers - self._held:
            parameter = self._parameters[number]
            parameter.untyped_storage().resize_(self._sizes[number])
            parameter.fill_(torch.nan)
            self._refilled.add(number)
        self._held = numbers

    def _release(self, number: int) -> None:
        parameter = self._parameters[number]
        if number in self._refilled:
            (self.spoilt.add if parameter.sum().isnan() else self.spoilt.discard)(number)
        for target in self._targets[number]:
            copy_whole_(target, parameter)
        parameter.untyped_storage().resize_(0)
        self._freed_bytes += self._sizes[number]
        if self._freed_bytes > _MOST_FREE_BYTES:
            _trim()
            self._freed_bytes = 0


def _trim() -> None:
    """Give freed memory back to the system: the C library of Linux keeps blocks below 32 MB, however many."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
