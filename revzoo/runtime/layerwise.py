"""Layers with an inverse: backward rebuilds their activations layer by layer, along with the gradient.

A layer in mode `invert` is a recorded call, as a step is. Consecutive ones form an `InvertedSegment` with one state: a layer's
inverse gives its input x from its output; then the layer runs on x and refills what autograd had saved. If autograd saved only
x, parameters and small tensors such as statistics, the layer does not run. If it saved the output instead of x, the inverse
waits until backward asks for the layer before.

A `Coupled` layer is two additive steps on the two halves of its channels, so going back through it runs f and g once. Its
halves stay apart as long as the layers after it treat each channel by itself, such as norms, activations and some pools: these
are run on one half after the other, and so are such layers before it. Then there is never more than one new half in addition
to the state and its gradient.

There are two places for such layers:

    LayerChain        a network of layers. The chain keeps its output.
                      Backward costs one forward more, and noise grows from layer to layer.
    f of a step       a step of a reversible chain in mode `invert` whose f is an `nn.Sequential` with such layers.
                      They keep nothing in forward. When backward asks for the last of them, the step is inverted as any other,
                      which gives its input w[k-1] and the output of f; then the layers are walked back from that output.
                      Backward costs two forwards more; noise grows within a step alone, as each step starts again.
                      Between layers without an inverse, each run of such layers starts from an output of its own.

Source: Hascoet et al. 2023, "Reversible designs for extreme memory cost reduction of CNN training", sections 4.3 and 4.4.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from revzoo.bijection import Bijection
from revzoo.device import has_value
from revzoo.errors import InputError, put_name_in_front
from revzoo.invertible import add, halve, join_halves
from revzoo.runtime import seams
from revzoo.runtime.compiling import exclude_from_compilation
from revzoo.runtime.drift import warn_of_noise
from revzoo.runtime.forward import Forward
from revzoo.runtime.layer_call import LayerCall, call_layer, predict_growth, predict_growth_of_addition
from revzoo.runtime.layer_rules import Layer, find_layers, is_channelwise, is_coupled, starts_in_halves
from revzoo.runtime.ownership import is_held_alone
from revzoo.runtime.recorded_call import RecordedCall
from revzoo.runtime.refill_hooks import Recoverer
from revzoo.runtime.segment import InvertedSegment, StepOrigin
from revzoo.runtime.update import AdditionUpdate, BijectionUpdate, LayerUpdate, RegroupUpdate, States, Step


def run_without_storing(layers: Sequence[Layer], x: Tensor) -> Tensor:
    """Return what layers with an inverse make of x, without gradients, in halves where they are recorded in halves."""
    with torch.no_grad():
        states: States = halve(x) if starts_in_halves(layers, x) else (x,)
        del x
        for module in [layer.module for layer in layers]:
            if is_coupled(module):
                states = states if len(states) == 2 else halve(*states)
                for f in (module.f, module.g):
                    out = f(states[1].detach())  # not the state itself, which is changed in place unless f holds on to it
                    states = states[1], add(states[0], out, in_place=is_held_alone(states[0]))
                    del out
            elif len(states) == 2 and is_channelwise(module):
                for channels in slice_halves(states):
                    states = states[1], call_layer(module, states[0], channels)[0].detach()
            else:
                x = _join(states)
                del states
                states = (module(x),)
                del x
        return _join(states)


def _join(states: States) -> Tensor:
    return states[0] if len(states) == 1 else join_halves(*states)


def _join_states(*states: Tensor) -> States:
    return (join_halves(*states),)


def slice_halves(states: States) -> tuple[slice, slice]:
    """Return the channels of each of two halves."""
    channels = states[0].size(1)
    return slice(0, channels), slice(channels, 2 * channels)


class LayerwiseCall(RecordedCall):
    """A call of a step's f whose layers are walked back one by one.

    Consecutive layers with an inverse are a segment. The second run stores nothing in them, and gives each segment the state to
    start from. What the layers between them save is dropped and refilled as in any other step.

    Args:
        f: the layers, as one module.
        name: name of the step, for messages.
        forward: what it shares with the other calls of the forward.
        layers: the layers one by one.
        watched: whether the tensors saved last are read whole to be compared.
    """

    def __init__(self, f: nn.Module, name: str, forward: Forward, layers: Sequence[Layer], watched: bool):
        super().__init__(f, name, forward, watched=watched)
        self._sources = None  # its layers need it to run
        runs = groupby(layers, key=lambda layer: layer.is_inverted)
        self._runs = [_Run([replace(layer, name=f"{name}.{layer.name}") for layer in run], inverts) for inverts, run in runs]
        self._origin: StepOrigin | None = None  # during the first run
        self._gives_states = False

    def first_run(self, recoverer: Recoverer, *inputs: Tensor) -> Any:
        self._origin = StepOrigin(self, recoverer)
        try:
            return super().first_run(recoverer, *inputs)
        finally:
            self._origin = None

    def run_again(self, *inputs: Tensor, refill: bool = True, stop_early: bool = False, check_draws: bool = True) -> Any:
        self._gives_states = refill
        return super().run_again(*inputs, refill=refill, check_draws=check_draws)  # to the end, which the segments need

    def free_refilled(self) -> None:
        super().free_refilled()
        for run in self._runs:
            if (segment := run.find_segment()) is not None:
                segment.free_states()

    def _call(self, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        for run in self._runs:
            if not run.inverts:
                given, version = x, x._version
                for layer in run.layers:
                    x = layer.module(x)
                if self._origin is not None and given._version != version:
                    raise _make_in_place_error(run.layers[0].name)
                del given
            elif self._origin is not None:
                x = self._record(run, x, self._origin)
            else:
                x = run_without_storing(run.layers, x)
                if self._gives_states and (segment := run.find_segment()) is not None:
                    segment.end((x,))
                if run is not self._runs[-1]:
                    x = x.detach().requires_grad_(run.requires_grad)
        return x

    def _record(self, run: "_Run", x: Tensor, origin: StepOrigin) -> Tensor:
        segment = InvertedSegment(False, self.forward.round, origin)
        recording = Recording(segment, x, run.layers, self.forward, outer=self)
        del x
        for layer in run.layers:
            recording.run(layer)
        x = recording.join()
        recording.warn_of_noise(x.dtype, self.name)
        run.find_segment, run.requires_grad = ref(segment), x.requires_grad
        return x


@dataclass(eq=False)
class _Run:
    """Consecutive layers of a step, all with an inverse or all without."""

    layers: Sequence[Layer]
    inverts: bool
    find_segment: Callable[[], InvertedSegment | None] = lambda: None  # held by the graph alone: it refers to the call
    requires_grad: bool = False


class Recording:
    """Runs layers for the first time, and records each as an item of a segment.

    Args:
        segment: where to append them.
        x: the input of the first layer.
        layers: those that will be run.
        forward: what they share.
        outer: the call that they are a part of.
    """

    def __init__(
        self, segment: InvertedSegment, x: Tensor, layers: Sequence[Layer], forward: Forward, outer: RecordedCall | None = None
    ):
        self.segment = segment
        self.states: States = (x,)  # one tensor, or two halves of the channels
        self._outer = outer
        self._forward = forward
        self._growths: list[tuple[nn.Module, str, float | Tensor]] = []
        if starts_in_halves(layers, x):
            self._halve()

    def end(self) -> Tensor:
        """Return the output of the last layer, and keep it: recovery will start from there."""
        x = self.join()
        self.end_apart()
        return x

    def end_apart(self) -> States:
        """Return the output of the last layer, perhaps in two halves of its channels, and keep it as `end` does."""
        self.segment.end(self.states)
        self.warn_of_noise(self.states[0].dtype)
        return self.states

    def split(self, split: nn.Module) -> tuple[Tensor, Tensor]:
        """Return two streams of the output, and leave it to a chain to go on with the segment, and to end it."""
        x = self.join()
        self.warn_of_noise(x.dtype)
        self.segment.append(RegroupUpdate(split, lambda *streams: (cast(Any, split).inverse(*streams),), x), None, (x,))
        x1, x2 = split(x)
        return x1, x2

    def join(self) -> Tensor:
        """Return the output of the last layer."""
        if len(self.states) == 2:
            states, self.states = self.states, (join_halves(*self.states),)
            self.segment.append(RegroupUpdate(_join_states, halve), None, states)
        return self.states[0]

    @exclude_from_compilation  # it reads numbers, for which a compiled function would be cut in two, with a warning
    def warn_of_noise(self, dtype: torch.dtype, step: str | None = None) -> None:
        """Warn if rounding is predicted to grow so much that it is no longer small against what is rebuilt.

        Args:
            dtype: of the states.
            step: name of the step that the layers are f of, if they are.
        """
        if not self._growths or not has_value(self.states[0]):
            return
        warn_of_noise(dtype, self._growths, step, reads_always=self.states[0].is_cpu)

    def run(self, layer: Layer) -> None:
        """Run the layer on the output of the one before."""
        module, name = layer.module, layer.name
        if isinstance(module, Bijection):
            if not is_channelwise(module):
                self.join()
            with put_name_in_front(name):
                for _ in self.states:
                    self._run_bijection(module)
        elif is_coupled(module):
            with put_name_in_front(name):
                self._halve()
            growth_of_both = self._run_addition(module.f, f"{name}.f") * self._run_addition(module.g, f"{name}.g")
            self._growths.append((module, name, growth_of_both))
        else:
            halves = slice_halves(self.states) if len(self.states) == 2 and is_channelwise(module) else (None,)
            if len(halves) == 1:
                self.join()
            self._run_layer(layer, [LayerCall(module, name, self._forward, channels) for channels in halves])

    def _halve(self) -> None:
        if len(self.states) == 1:
            (x,), self.states = self.states, halve(*self.states)
            self.segment.append(RegroupUpdate(halve, _join_states, x), None, (x,))

    def _run_bijection(self, bijection: Bijection) -> None:
        """Run a bijection on the state, or on the first of two."""
        states, update = self.states, BijectionUpdate(bijection, self.states[0])
        self.states = update.advance(states, None)
        self.segment.append(update, None, states)

    def _run_layer(self, layer: Layer, calls: Sequence[LayerCall]) -> None:
        """Run a layer on the state, or on one of two after the other. The last call grows errors for both."""
        growth: float | Tensor = 1.0
        for call in calls:
            states = self.states
            y = self._run_call(call, states[0])
            self.states = *states[1:], y
            if call is calls[-1]:
                growth = predict_growth(layer.module, self.states, calls)
            self.segment.append(LayerUpdate(call.invert, states[0], growth), call, states)
            del states, y
        self._growths.append((layer.module, layer.name, growth))

    def _run_addition(self, f: nn.Module, name: str) -> float | Tensor:
        """Add f of the second state to the first, and let the two change places; return how errors grow."""
        states = self.states
        # The input of the first call of a segment is not compared as a state.
        call = RecordedCall(f, name, self._forward, watched=self.segment.is_empty)
        out = self._run_call(call, states[1])
        if out.shape != states[0].shape:
            raise InputError(
                f"{name} must return a tensor shaped like the half that it is added to, {tuple(states[0].shape)}. Received: "
                f"{tuple(out.shape)}."
            )
        update = AdditionUpdate(states[0])
        self.states = update.advance(states, out)
        update.growth = predict_growth_of_addition(states[0], states[1], out, self.states[1])
        self.segment.append(update, call, states)
        return update.growth

    def _run_call(self, call: RecordedCall, x: Tensor) -> Tensor:
        call.outer = self._outer
        version = None if x.is_inference() else x._version
        out = call.first_run(self.segment, x)
        if version is not None and x._version != version:
            raise _make_in_place_error(call.name)
        if not isinstance(out, Tensor):
            raise InputError(f"{call.name} must return a tensor. Received: {type(out).__name__}.")
        return out


def _make_in_place_error(name: str) -> InputError:
    return InputError(
        f"{name} changes its input in place, which could not be rebuilt. Replace the in-place operation, for example "
        "ReLU(inplace=True), by one that returns a new tensor."
    )


def record_layerwise(step: Step, forward: Forward, watched: bool) -> LayerwiseCall | None:
    """Return the call of a step whose f is made of layers with an inverse; None for any other step."""
    layers = find_layers(step.f)
    return None if layers is None else LayerwiseCall(cast(nn.Module, step.f), step.name, forward, layers, watched)


seams.record_layerwise = record_layerwise
