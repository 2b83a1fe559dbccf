"""How a layer, or a half of its channels, changes the states of a segment, how to undo that, and the call that is recorded.

What `pair_update.py` is for the steps of two streams.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from revzoo.bijection import Bijection
from revzoo.device import can_read_now, has_value
from revzoo.dtype import HALF
from revzoo.errors import RecoveryError, put_name_in_front
from revzoo.invertible import add, halve, join, subtract
from revzoo.noise import estimate_alpha_of_addition
from revzoo.runtime.forward import Forward
from revzoo.runtime.ownership import is_held_alone
from revzoo.runtime.pair_update import get_strides, restore_strides
from revzoo.runtime.recorded_call import OUTPUT, RecordedCall
from revzoo.runtime.refill_hooks import detach
from revzoo.runtime.segment import States

_SAMPLE = 6  # a sample has at least this many places of each dimension, and less than twice as many
_SMALL = 16  # what a layer saves is kept where this many such tensors are no larger than its input


def call_layer(module: nn.Module, x: Tensor, channels: slice | None = None) -> Sequence[Tensor]:
    """Return y, the layer's output for x or some channels of x, followed by what its inverse needs besides y."""
    forward_keeping = getattr(module, "forward_keeping", None)
    if forward_keeping is None:
        return (module(x),)
    out: Sequence[Tensor] = forward_keeping(x) if channels is None else forward_keeping(x, channels=channels)
    return out


def find_alpha(layer: nn.Module) -> Callable[..., Any] | None:
    """Return the layer's method `alpha`; None if it has none, or if its `alpha` is a number, which means something else."""
    return cast(Any, layer).alpha if callable(getattr(type(layer), "alpha", None)) else None


class LayerGrowth:
    """The factor by which the inverse of a layer is predicted to multiply relative errors.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: nn.Module):
        self._alpha = find_alpha(layer)
        self._samples: list[Tensor] = []  # of the outputs, by call of the layer
        self._kept: list[tuple[Tensor, ...]] = []  # what the inverse needs, by call
        self.value: float | Tensor = 1.0

    def note(self, y: Tensor, kept: tuple[Tensor, ...]) -> None:
        """Note what a call of the layer returns."""
        if self._alpha is not None and has_sample(y):
            self._samples.append(take_sample(y))
            self._kept.append(kept)

    @torch.no_grad()
    def predict(self) -> None:
        """Set the value from what was noted, and let go of that."""
        if self._alpha is not None and self._samples:
            samples, kept = self._samples, self._kept
            if len(samples) > 1:
                samples, kept = [torch.cat(samples, 1)], [tuple(torch.cat(halves) for halves in zip(*kept, strict=True))]
            self.value = _turn_to_growth(self._alpha(samples[0], *kept[0]))
        self._samples, self._kept = [], []


@torch.no_grad()
def predict_growth_of_addition(x1: Tensor, x2: Tensor, out: Tensor, y1: Tensor) -> float | Tensor:
    """Return the factor by which y1 - f(x2) is predicted to multiply relative errors, where out = f(x2)."""
    if not has_sample(x1):
        return 1.0
    return _turn_to_growth(estimate_alpha_of_addition(take_sample(x1), take_sample(x2), take_sample(out), take_sample(y1)))


def has_sample(x: Tensor) -> bool:
    """Return whether `take_sample` can be asked for numbers of x."""
    return type(x) is Tensor and has_value(x)


def take_sample(x: Tensor) -> Tensor:
    """Return a few elements of x, for averages over them."""
    sample = x.detach()[tuple([slice(None, None, max(1, size // _SAMPLE)) for size in x.shape])]
    return sample.float() if sample.dtype in HALF else sample


def _turn_to_growth(alpha: float | Tensor) -> float | Tensor:
    """Return 1 / sqrt(alpha); on a CPU as a number. 1 where there is no signal to compare noise with."""
    if isinstance(alpha, Tensor) and not can_read_now(alpha):
        return torch.where((alpha > 0) & (alpha < math.inf), alpha, 1.0).rsqrt()
    alpha = float(alpha)
    return alpha**-0.5 if 0 < alpha < math.inf else 1.0


class LayerCall(RecordedCall):
    """A call of a layer, with what its inverse needs besides the output.

    Args:
        layer: the layer.
        name: its name, for messages.
        forward: what it shares with the other calls of the forward.
        growth: what to tell what the layer returns.
        channels: those that its input consists of; None is all.
    """

    def __init__(self, layer: nn.Module, name: str, forward: Forward, growth: LayerGrowth, channels: slice | None = None):
        super().__init__(layer, name, forward, watched=None)  # what it saves is a state, or small
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
                x: Tensor = cast(Any, self.f).inverse(y, *kept, **channels)
                return x

        x = self._conditions.run_again(run)
        if not isinstance(x, Tensor) or x.shape != shape:
            received = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise RecoveryError(
                f"The inverse of {self.name} must return a tensor shaped like its input, {tuple(shape)}. Received: {received}. "
                "Correct it, or set the schedule to 'store'."
            )
        return x

    def free_kept(self) -> None:
        super().free_kept()
        self._kept = ()

    def _call(self, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        with put_name_in_front(self.name):
            y, *kept = call_layer(cast(nn.Module, self.f), x, self._channels)
        if self._kept is None:  # in the first run; a second one is on a rebuilt input
            self._kept = tuple(kept)
            self._growth.note(y, self._kept)
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
    lost_bits: Sequence[Tensor] = ()
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

    def __init__(self, call: LayerCall, x: Tensor, growth: float | Tensor):
        self._layer_call = call
        self.growth = growth
        self._shape = x.shape
        self._strides = get_strides(x)

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
    """f of the second half is added to the first half, and then the halves change places."""

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
