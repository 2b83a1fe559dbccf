"""Where torch's random streams stood before and after a call, so that it can draw the same numbers again."""

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from ctypes import c_char
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_CPU = torch.device("cpu")
_END_BYTES = 64
_End = c_char * _END_BYTES
_leaves_alone = ContextVar("leaves_alone", default=False)


def leave_alone() -> None:
    """Have this context neither read nor set random streams: it runs only calls that need no rewinding."""
    _leaves_alone.set(True)


class Generator(Protocol):
    """A source of random numbers, such as a torch.Generator."""

    def get_state(self) -> Tensor: ...

    def set_state(self, state: Tensor) -> object: ...


class Snapshot(NamedTuple):
    """The state of a generator.

    Args:
        state: as the generator takes it.
        ends: the first and last bytes of it, which any draw changes: place, counters, and the second of two normal numbers.
            They are compared instead of 5 KB, without an operation of torch.
    """

    state: Tensor
    ends: bytes


def find_generators(devices: Iterable[torch.device]) -> list[Generator]:
    """Return the default generators of devices, that of the CPU in any case."""
    generators: list[Generator] = [torch.default_generator]
    for device in devices:
        if device != _CPU:  # `device.type` would make a string, which takes a microsecond
            generators += _find_generators(device)
    return generators


_latest: dict[Generator, Snapshot] = {}


def take_snapshots(generators: Sequence[Generator]) -> list[Snapshot]:
    """Return the states of generators; where one has not moved, the snapshot taken last, since that of a CPU takes 5 KB."""
    snapshots = []
    for generator in generators:
        state, latest = generator.get_state(), _latest.get(generator)
        address, size = state.data_ptr(), state.nbytes
        if size < 2 * _END_BYTES:
            ends = (c_char * size).from_address(address).raw
        else:
            ends = _End.from_address(address).raw + _End.from_address(address + size - _END_BYTES).raw
        if latest is None or latest.ends != ends:
            latest = _latest[generator] = Snapshot(state, ends)
        snapshots.append(latest)
    return snapshots


_get_ends: Callable[[Snapshot], bytes] = attrgetter("ends")


def _are_same(states: list[Snapshot], others: list[Snapshot]) -> bool:
    return list(map(_get_ends, states)) == list(map(_get_ends, others))


class RandomState:
    """The states of torch's default generators around one call.

    Args:
        generators: of the devices that the call computes on.
    """

    __slots__ = ("_before", "after", "generators", "has_drawn")

    def __init__(self, generators: Sequence[Generator]):
        self.generators = generators
        self._before = self.after = take_snapshots(generators)
        self.has_drawn = False  # whether the first run drew a number

    def end_first_run(self) -> None:
        """Record the states after the call."""
        self.after = take_snapshots(self.generators)
        self.has_drawn = not _are_same(self._before, self.after)

    @property
    def has_drawn_all(self) -> bool:
        """Whether as many numbers have been drawn as in the first run."""
        return _leaves_alone.get() or _are_same(take_snapshots(self.generators), self.after)

    @property
    def has_to_draw(self) -> bool:
        """Whether the second run, which began where the first one did, has still to draw numbers."""
        return self.has_drawn and not self.has_drawn_all

    @property
    def needs_no_rewinding(self) -> bool:
        """Whether the call drew nothing, and the generators are where they were."""
        return not self.has_drawn and self.has_drawn_all

    def rewind(self) -> list[Tensor]:
        """Go back to the states before the call, if they are others; return the present ones, for `restore`.

        Also where the call has drawn nothing: it may have put back the state, as under `torch.random.fork_rng`.
        """
        if _leaves_alone.get() or self.needs_no_rewinding:
            return []
        present = [generator.get_state() for generator in self.generators]
        for generator, snapshot in zip(self.generators, self._before, strict=True):
            generator.set_state(snapshot.state)
        return present

    def restore(self, states: list[Tensor]) -> None:
        """Go to the given states."""
        for generator, state in zip(self.generators, states, strict=False):  # no states if nothing was rewound
            generator.set_state(state)


def _find_generators(device: torch.device) -> Sequence[Generator]:
    if device.type in ("cpu", "meta") or not (module := torch.get_device_module(device)).is_available():
        return ()
    if not hasattr(module, "default_generators"):
        return (_OnlyGenerator(module.get_rng_state, module.set_rng_state),)
    index = device.index or 0
    return module.default_generators[index : index + 1]  # none before the device is initialised


class _OnlyGenerator(NamedTuple):
    """The generator of a kind of device that has one and does not show it, as MPS."""

    get_state: Callable[[], Tensor]
    set_state: Callable[[Tensor], object]
