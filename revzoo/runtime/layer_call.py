"""The recorded call of a layer with an inverse, or of a half of its channels, and what it does to rounding errors."""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from revzoo.device import can_read_now, has_value
from revzoo.dtype import HALF
from revzoo.errors import RecoveryError, put_name_in_front
from revzoo.noise import estimate_alpha_of_addition
from revzoo.runtime.forward import Forward
from revzoo.runtime.recorded_call import OUTPUT, RecordedCall
from revzoo.runtime.refill_hooks import detach

_SAMPLE = 6  # a sample has at least this many places of each dimension, and less than twice as many
_SMALL = 16  # what a layer saves is kept where this many such tensors are no larger than its input


def call_layer(module: nn.Module, x: Tensor, channels: slice | None = None) -> Sequence[Tensor]:
    """Return y, the layer's output for x or some channels of x, followed by what its inverse needs besides y."""
    forward_keeping = getattr(module, "forward_keeping", None)
    if forward_keeping is None:
        return (module(x),)
    return forward_keeping(x) if channels is None else forward_keeping(x, channels=channels)


def find_alpha(layer: nn.Module) -> Callable[..., Any] | None:
    """Return the layer's method `alpha`; None if it has none, or if its `alpha` is a number, which means something else."""
    return cast(Any, layer).alpha if callable(getattr(type(layer), "alpha", None)) else None


@torch.no_grad()
def predict_growth(layer: nn.Module, outputs: Sequence[Tensor], calls: Sequence["LayerCall"]) -> float | Tensor:
    """Return the factor by which the inverse of a layer is predicted to multiply relative errors.

    Args:
        layer: the layer.
        outputs: what it has returned, or both halves of it.
        calls: its call, or those of the halves.
    """
    alpha = find_alpha(layer)
    if alpha is None or not all(map(has_sample, outputs)):
        return 1.0
    samples, kept = list(map(take_sample, outputs)), [call.kept for call in calls]
    if len(samples) > 1:
        samples, kept = [torch.cat(samples, 1)], [tuple(torch.cat(halves) for halves in zip(*kept, strict=True))]
    return _turn_to_growth(alpha(samples[0], *kept[0]))


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
        channels: those that its input consists of; None is all.
    """

    def __init__(self, layer: nn.Module, name: str, forward: Forward, channels: slice | None = None):
        super().__init__(layer, name, forward, watched=None)  # what it saves is a state, or small
        self._channels = channels
        self.kept: tuple[Tensor, ...] = ()  # what the inverse needs besides the output
        self._has_run = False
        self._possible_outputs: list[tuple[int, ref[Tensor]]] = []  # tensors that were saved in the first run, by slot

    def invert(self, y: Tensor, shape: torch.Size) -> Tensor:
        """Return the layer's input, which has this shape, under the conditions of the first run."""
        kept, channels = self.kept, {} if self._channels is None or not self.kept else {"channels": self._channels}

        def run() -> Tensor:
            with torch.no_grad():
                return cast(Any, self.f).inverse(y, *kept, **channels)

        x = self.conditions.run_again(run)
        if not isinstance(x, Tensor) or x.shape != shape:
            received = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise RecoveryError(
                f"The inverse of {self.name} must return a tensor shaped like its input, {tuple(shape)}. Received: {received}. "
                "Correct it, or set the schedule to 'store'."
            )
        return x

    def free_kept(self) -> None:
        super().free_kept()
        self.kept = ()

    def _call(self, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        with put_name_in_front(self.name):
            y, *kept = call_layer(cast(nn.Module, self.f), x, self._channels)
        if not self._has_run:  # a second run is on a rebuilt input
            self._has_run, self.kept = True, tuple(kept)
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
