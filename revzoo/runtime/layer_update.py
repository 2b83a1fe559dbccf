"""How a layer, or a half of its channels, changes the states of a segment, how to undo that, and the call that is recorded.

What `pair_update.py` is for the steps of two streams.
"""

from collections.abc import Sequence
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from revzoo.bijection import Bijection
from revzoo.errors import RecoveryError
from revzoo.invertible import add, halve, join, subtract
from revzoo.runtime.ownership import is_held_alone
from revzoo.runtime.recorded_call import OUTPUT, RecordedCall
from revzoo.runtime.refill_hooks import detach
from revzoo.runtime.settings import Settings
from revzoo.runtime.strides import get_strides, restore_strides
from revzoo.runtime.tape import States

_SMALL = 16  # what a layer saves is kept where this many such tensors are no larger than its input


def call_layer(module: nn.Module, x: Tensor, channels: slice | None = None) -> Sequence[Tensor]:
    """Return what a layer makes of x or of some channels of it, and what its inverse needs besides."""
    forward_keeping = getattr(module, "forward_keeping", None)
    if forward_keeping is None:
        return (module(x),)
    out: Sequence[Tensor] = forward_keeping(x) if channels is None else forward_keeping(x, channels=channels)
    return out


class Growth:
    """The factor by which the inverse of a layer is predicted to multiply relative errors, at least 1.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: nn.Module):
        self._alpha = getattr(layer, "alpha", None)
        self.kept: list[tuple[Tensor, ...]] = []  # what the inverse needs, by call of the layer

    @property
    def value(self) -> float | Tensor:
        if self._alpha is None:
            return 1.0
        with torch.no_grad():
            kept = self.kept[0] if len(self.kept) == 1 else [torch.cat(halves) for halves in zip(*self.kept, strict=True)]
            reduction = self._alpha(*kept)
        return reduction.clamp(max=1).rsqrt() if isinstance(reduction, Tensor) else min(reduction, 1.0) ** -0.5


class LayerCall(RecordedCall):
    """A call of a layer, with what its inverse needs beside the output.

    Args:
        layer: the layer.
        name: its name, for messages.
        settings: the settings of PyTorch under which it is called.
        growth: what to tell the statistics of the batch.
        channels: those that its input consists of; None is all.
    """

    def __init__(self, layer: nn.Module, name: str, settings: Settings, growth: Growth, channels: slice | None = None):
        super().__init__(layer, name, settings, watched=False)
        self._growth = growth
        self._channels = channels
        self._kept: tuple[Tensor, ...] | None = None
        self._possible_outputs: list[tuple[int, ref[Tensor]]] = []  # tensors that were saved in the first run, by slot

    def invert(self, y: Tensor, shape: torch.Size) -> Tensor:
        """Return the layer's input, which has this shape, under the conditions of the first run."""
        assert self._kept is not None
        kept, channels = self._kept, {} if self._channels is None or not self._kept else {"channels": self._channels}

        def run() -> Tensor:
            with torch.no_grad():
                x: Tensor = cast(Any, self._f).inverse(y, *kept, **channels)
                return x

        x = self._replay.run_again(run, check_draws=False)
        if not isinstance(x, Tensor) or x.shape != shape:
            received = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise RecoveryError(
                f"The inverse of {self.name} must return a tensor shaped like its input, {tuple(shape)}. Received: {received}. "
                "Correct it, or set the schedule to 'store'."
            )
        return x

    def _call(self, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        y, *kept = call_layer(cast(nn.Module, self._f), x, self._channels)
        if self._kept is None:  # in the first run; a second one is on a rebuilt input
            self._kept = tuple(kept)
            self._growth.kept.append(self._kept)
            self._find_output(y)
        return y

    def _note_source(self, tensor: Tensor, inputs: Sequence[Tensor]) -> None:
        """Note it as in any call, and keep small tensors. Whether one is the output is known later."""
        if self._sources is None:
            return
        if any(tensor is x for x in inputs) or isinstance(tensor, nn.Parameter):
            super()._note_source(tensor, inputs)
        elif tensor.untyped_storage().nbytes() * _SMALL <= inputs[0].nbytes:  # a small view would keep all that it views
            self._sources.append((detach(tensor), tensor._version))  # detached, so that it does not hold the graph
        else:
            self._possible_outputs.append((len(self._sources), ref(tensor)))
            self._sources.append(OUTPUT)

    def _find_output(self, y: Tensor) -> None:
        if any(find() is not y for _, find in self._possible_outputs):
            self._sources = None
        self._possible_outputs.clear()


class _Update:
    """What most items of a segment of layers have in common."""

    b = 1.0
    inverts_first = False
    reads = 0
    kept_bits: Sequence[Tensor] = ()
    growth: float | Tensor = 1.0


class BijectionUpdate(_Update):
    """A bijection of the only state, or of the first of two. What it returns is then the last."""

    def __init__(self, bijection: Bijection, x: Tensor):
        self._bijection = bijection
        self._strides = get_strides(x)

    def advance(self, states: States, out: None) -> States:
        return *states[1:], self._bijection(states[0])

    def invert(self, states: States, out: None) -> States:
        return restore_strides(self._bijection.inverse(states[-1]), self._strides), *states[:-1]


class LayerUpdate(_Update):
    """A layer on the only state, or on the first of two. What it returns is then the last."""

    inverts_first = True

    def __init__(self, call: LayerCall, x: Tensor, growth: Growth | None):
        self._layer_call = call
        self._growth = growth
        self._shape = x.shape
        self._strides = get_strides(x)

    @property
    def growth(self) -> float | Tensor:  # type: ignore[override]
        return 1.0 if self._growth is None else self._growth.value

    def advance(self, states: States, out: Tensor) -> States:
        return *states[1:], out

    def invert(self, states: States, out: None) -> States:
        return restore_strides(self._layer_call.invert(states[-1], self._shape), self._strides), *states[:-1]


class HalveUpdate(_Update):
    """One tensor becomes two halves of its channels."""

    def __init__(self, x: Tensor):
        self._strides = get_strides(x)

    def advance(self, states: tuple[Tensor], out: None) -> tuple[Tensor, Tensor]:
        return halve(*states)

    def invert(self, states: tuple[Tensor, Tensor], out: None) -> tuple[Tensor]:
        return (restore_strides(join(*states), self._strides),)


class StreamsUpdate(_Update):
    """One tensor becomes the two streams of a chain."""

    def __init__(self, split: nn.Module, x: Tensor):
        self._split = split
        self._strides = get_strides(x)

    def advance(self, states: tuple[Tensor], out: None) -> tuple[Tensor, ...]:
        streams: tuple[Tensor, ...] = self._split(*states)
        return streams

    def invert(self, states: tuple[Tensor, Tensor], out: None) -> tuple[Tensor]:
        return (restore_strides(cast(Any, self._split).inverse(*states), self._strides),)


class AdditionUpdate(_Update):
    """What f makes of the second half is added to the first, which is then the second."""

    reads = 1

    def __init__(self, x: Tensor):
        self._strides = get_strides(x)

    def advance(self, states: States, out: Tensor) -> States:
        return states[1], add(states[0], out)

    def invert(self, states: States, out: Tensor) -> States:
        y = states[1]
        return restore_strides(subtract(y, out, in_place=is_held_alone(y)), self._strides), states[0]


class JoinUpdate(_Update):
    """Two halves become one tensor."""

    def advance(self, states: tuple[Tensor, Tensor], out: None) -> tuple[Tensor]:
        return (join(*states),)

    def invert(self, states: tuple[Tensor], out: None) -> tuple[Tensor, Tensor]:
        return halve(*states)
