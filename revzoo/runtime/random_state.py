"""Where torch's random streams stood before and after a call, so that it can draw the same numbers again."""

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from ctypes import string_at
from dataclasses import dataclass
from operator import is_, methodcaller
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_CPU = torch.device("cpu")


_leaves_alone = ContextVar("leaves_alone", default=False)


def leave_alone() -> None:
    """Have this context neither read nor set random streams: it runs only calls that need no rewinding."""
    _leaves_alone.set(True)


class Generator(Protocol):
    """A source of random numbers, such as a torch.Generator."""

    def get_state(self) -> Tensor: ...

    def set_state(self, state: Tensor) -> object: ...


class _Snapshot(NamedTuple):
    """The state of a generator, as it takes it, and as bytes, which are compared without an operation of torch."""

    state: Tensor
    data: bytes


class RandomState:
    """The states of torch's default generators around one call.

    Consecutive calls that draw nothing share their states, so these take no memory.

    Args:
        devices: the devices that the call computes on; the CPU's generator is recorded in any case.
    """

    def __init__(self, devices: Iterable[torch.device]):
        self._generators: list[Generator] = [torch.default_generator]
        for device in devices:
            if device != _CPU:  # `device.type` would make a string, which takes a microsecond
                self._generators += _find_generators(device)
        self._before = self._after = self._take()

    def end_first_run(self) -> None:
        """Record the states after the call."""
        self._after = self._take()

    @property
    def has_drawn_all(self) -> bool:
        """Whether as many numbers have been drawn as in the first run."""
        if _leaves_alone.get():
            return True
        return all(_read(g.get_state()) == then.data for g, then in zip(self._generators, self._after, strict=True))

    @property
    def has_drawn(self) -> bool:
        """Whether the first run drew a number."""
        return not all(map(is_, self._before, self._after))

    @property
    def needs_no_rewinding(self) -> bool:
        """Whether the call drew nothing, and the generators are where they were."""
        return not self.has_drawn and self.has_drawn_all

    def rewind(self) -> list[Tensor]:
        """Go back to the states before the call; return the present ones, for `restore`."""
        if _leaves_alone.get():
            return []
        present = list(map(_get_state, self._generators))
        for generator, snapshot in zip(self._generators, self._before, strict=True):
            generator.set_state(snapshot.state)
        return present

    def restore(self, states: list[Tensor]) -> None:
        """Go to the given states."""
        for generator, state in zip(self._generators, states, strict=False):  # no states if nothing was rewound
            generator.set_state(state)

    def _take(self) -> list[_Snapshot]:
        return list(map(_take_snapshot, self._generators))


_get_state: Callable[[Generator], Tensor] = methodcaller("get_state")
_latest: dict[Generator, _Snapshot] = {}


def _take_snapshot(generator: Generator) -> _Snapshot:
    """Return the snapshot taken last if the state is the same; that of the CPU's generator takes 5 KB."""
    state = generator.get_state()
    data = _read(state)
    latest = _latest.get(generator)
    if latest is None or latest.data != data:
        latest = _latest[generator] = _Snapshot(state, data)
    return latest


def _read(state: Tensor) -> bytes:
    return string_at(state.data_ptr(), state.nbytes)


def _find_generators(device: torch.device) -> Sequence[Generator]:
    if device.type in ("cpu", "meta") or not (module := torch.get_device_module(device)).is_available():
        return ()
    if not hasattr(module, "default_generators"):
        return (_OnlyGenerator(module),)
    index = device.index or 0
    generators: Sequence[Generator] = module.default_generators[index : index + 1]  # none before the device is initialised
    return generators


@dataclass(frozen=True)
class _OnlyGenerator:
    """The generator of a kind of device that has one and does not show it, as MPS."""

    _module: Any

    def get_state(self) -> Tensor:
        state: Tensor = self._module.get_rng_state()
        return state

    def set_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state)
