"""Where torch's random streams stood in front of a call and behind it, so that it can draw the same numbers again."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import string_at
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Generator(Protocol):
    """A source of random numbers, such as a torch.Generator."""

    def get_state(self) -> Tensor: ...

    def set_state(self, state: Tensor) -> object: ...


class RandomState:
    """The states of torch's default generators around one call.

    Consecutive calls that draw nothing share their states, so these take no memory.

    Args:
        devices: the devices that the call computes on; the CPU's generator is recorded in any case.
    """

    def __init__(self, devices: Iterable[torch.device]):
        self._generators = list(dict.fromkeys([torch.default_generator, *(g for d in devices for g in _find_generators(d))]))
        self._in_front = self._behind = self._get()

    def end_first_run(self) -> None:
        """Record the states behind the call."""
        self._behind = self._get()

    @property
    def is_behind(self) -> bool:
        """Whether as many numbers have been drawn as in the first run."""
        return all(map(_same, self._get(), self._behind))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the numbers of the first run inside the context; after it the streams are as if nothing had been drawn."""
        present = [generator.get_state() for generator in self._generators]
        self._set(self._in_front)
        try:
            yield
        finally:
            self._set(present)

    def _get(self) -> list[Tensor]:
        return [_share(generator, generator.get_state()) for generator in self._generators]

    def _set(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


_latest: dict[Generator, Tensor] = {}


def _share(generator: Generator, state: Tensor) -> Tensor:
    """Return the state recorded last if this is the same; the state of the CPU's generator takes 5 KB."""
    latest = _latest.get(generator)
    if latest is not None and _same(latest, state):
        return latest
    _latest[generator] = state
    return state


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


def _same(left: Tensor, right: Tensor) -> bool:
    """Compare without a dispatched operation, which a FakeTensorMode around the call would refuse."""
    return left is right or string_at(left.data_ptr(), left.nbytes) == string_at(right.data_ptr(), right.nbytes)
