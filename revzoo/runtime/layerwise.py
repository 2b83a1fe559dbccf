"""Layers with an inverse: their activations are rebuilt layer by layer in backward, beside the gradient.

A layer in mode `invert` is a recorded call, as a step is, and consecutive ones form an `InvertedSegment` with one state: its
inverse gives its input x from its output, and the layer, run on x, refills what autograd had saved. Most layers save x alone
and before they compute anything, so this run computes nothing. A `Coupled` layer is two additive steps between its split and
join, so going back through it runs f and g once.

There are two places for such layers:

    LayerChain        a network of layers. The chain keeps its output.
                      Backward costs one forward more, and noise grows from layer to layer.
    f of a step       a step of a reversible chain in mode `invert` whose f is an `nn.Sequential` with such layers.
                      They keep nothing in forward. When backward asks for the last of them, the step is inverted as any other,
                      which gives its input w[k-1] and the output of f; then the layers are walked back from that output.
                      Backward costs two forwards more; noise grows within a step alone, as each step starts anew.
                      Between layers without an inverse, each run of such layers starts from an output of its own.

A layer with hooks counts as one without an inverse: a hook may change what the layer returns.

Source: Hascoet et al. 2023, "Reversible designs for extreme memory cost reduction of CNN training", sections 4.3 and 4.4.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from revzoo.bijection import Bijection
from revzoo.errors import InputError, RecoveryError
from revzoo.invertible import Coupled
from revzoo.runtime.compiling import is_compiled
from revzoo.runtime.drift import Noise
from revzoo.runtime.exact import has_value
from revzoo.runtime.lookahead import Lookahead
from revzoo.runtime.recorded_call import RecordedCall, Recoverer
from revzoo.runtime.schedule import Mode
from revzoo.runtime.settings import Settings
from revzoo.runtime.strides import get_strides, restore_strides
from revzoo.runtime.tape import InvertedSegment

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Layer:
    """One layer of a chain, and its mode in this forward call."""

    module: nn.Module
    name: str
    mode: Mode

    @property
    def is_inverted(self) -> bool:
        """Whether its input is rebuilt from its output."""
        return self.mode == "invert" and has_inverse(self.module)


def has_inverse(module: nn.Module) -> bool:
    """Return whether a module is a layer whose input its own `inverse` can rebuild."""
    return _defines_inverse(module) and not _has_hooks(module) and not is_compiled(module)


def find_layers(f: Callable[..., Any]) -> list[Layer] | None:
    """Return the layers of a step's f, some of which can be inverted one by one; None if f is not made of such layers."""
    if not isinstance(f, nn.Sequential) or not _contains_inverse(f) or not _is_plain_sequential(f):
        return None
    layers = list(expand(Layer(module, name, "invert") for name, module in f._modules.items()))
    return layers if any(layer.is_inverted and not isinstance(layer.module, Bijection) for layer in layers) else None


def expand(layers: Iterable[Layer]) -> Iterator[Layer]:
    """Yield the layers, and the layers of every inverted `nn.Sequential` among them in its place."""
    for layer in layers:
        if layer.mode == "invert" and _is_plain_sequential(layer.module):
            inner = cast(nn.Sequential, layer.module)._modules.items()  # not named_children, which passes over repetitions
            yield from expand(Layer(module, f"{layer.name}.{name}", "invert") for name, module in inner)
        else:
            yield layer


def _contains_inverse(f: nn.Sequential) -> bool:
    """Return whether a layer has an inverse. Asked of every step in every forward, so it looks at little."""
    return any(_defines_inverse(m) or (isinstance(m, nn.Sequential) and _contains_inverse(m)) for m in f._modules.values())


def _defines_inverse(module: nn.Module | None) -> bool:
    # Not hasattr: for what is missing, a module looks through its parameters, buffers and children.
    return callable(getattr(type(module), "inverse", None)) or "inverse" in vars(module)


def _is_plain_sequential(module: Callable[..., Any]) -> bool:
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return False
    return not _has_hooks(module) and not is_compiled(module)


def run_plain(layers: Sequence[Layer], x: Tensor) -> Tensor:
    """Return what the layers make of x, recording nothing."""
    for layer in layers:
        x = layer.module(x)
    return x


class LayerwiseCall(RecordedCall):
    """A call of a step's f whose layers are walked back one by one.

    Consecutive layers with an inverse are a segment. The second run stores nothing in them, and gives each segment the state to
    start from. What the layers between them save is dropped and refilled as in any other step.

    Args:
        f: the layers, as one module.
        name: name of the step, for messages.
        settings: the settings of PyTorch under which it is called.
        layers: the layers one by one.
        watched: whether the tensors saved last are compared when they have been refilled.
    """

    def __init__(self, f: nn.Module, name: str, settings: Settings, layers: Sequence[Layer], watched: bool):
        super().__init__(f, name, settings, watched=watched)
        runs = groupby(layers, key=lambda layer: layer.is_inverted)
        self._runs = [_Run([replace(layer, name=f"{name}.{layer.name}") for layer in run], inverts) for inverts, run in runs]
        self._origin: _StepOrigin | None = None  # during the first run
        self._lookahead: Lookahead | None = None
        self._gives_states = False

    def first_run(self, recoverer: Recoverer, *inputs: Tensor, lookahead: Lookahead | None = None) -> Any:
        self._origin, self._lookahead = _StepOrigin(self, recoverer), lookahead
        try:
            return super().first_run(recoverer, *inputs)
        finally:
            self._origin = self._lookahead = None

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
                x = run_plain(run.layers, x)
                if self._origin is not None and given._version != version:
                    raise _make_in_place_error(run.layers[0].name)
                del given
            elif self._origin is not None:
                x = self._record(run, x, self._origin)
            else:
                with torch.no_grad():
                    x = run_plain(run.layers, x)
                if self._gives_states and (segment := run.find_segment()) is not None:
                    segment.end((x,))
                if run is not self._runs[-1]:
                    x = x.detach().requires_grad_(run.requires_grad)
        return x

    def _record(self, run: "_Run", x: Tensor, origin: "_StepOrigin") -> Tensor:
        segment = InvertedSegment(exact=False, origin=origin)
        recording = Recording(segment, self._settings, self._lookahead, outer=self)
        for layer in run.layers:
            x = recording.run(layer, x)
        recording.warn_of_noise(x, self.name)
        run.find_segment, run.requires_grad = ref(segment), x.requires_grad
        return x


@dataclass(eq=False)
class _Run:
    """Consecutive layers of a step, all with an inverse or all without."""

    layers: Sequence[Layer]
    inverts: bool
    find_segment: Callable[[], InvertedSegment | None] = lambda: None  # held by the graph alone: it refers to the call
    requires_grad: bool = False


class _StepOrigin:
    """Where the layers of a step get their last state from: the step is inverted, or run again."""

    def __init__(self, call: LayerwiseCall, recoverer: Recoverer):
        self.lock = recoverer.lock
        self._call = call
        self._recoverer = recoverer

    def recover(self, *, ahead: bool) -> None:
        self._recoverer.recover(self._call, ahead=ahead)

    def get_sources(self) -> Iterable[Tensor]:
        return self._recoverer.get_sources(self._call)


class Recording:
    """Runs layers for the first time, and records each as an item of a segment."""

    def __init__(
        self, segment: InvertedSegment, settings: Settings, lookahead: Lookahead | None, outer: RecordedCall | None = None
    ):
        self._segment = segment
        self._outer = outer
        self._settings = settings
        self._lookahead = lookahead
        self._calls: list[_LayerCall] = []

    def end(self, x: Tensor) -> None:
        """Keep the output of the last layer, from which recovery will start."""
        self._segment.end((x,))
        self.warn_of_noise(x)

    def warn_of_noise(self, x: Tensor, step: str | None = None) -> None:
        """Warn if rounding is predicted to grow so much that it is no longer small against what is rebuilt.

        Args:
            x: the output of the last layer.
            step: name of the step that the layers are f of, if they are.
        """
        if not self._calls or not has_value(x):
            return
        noise = Noise(x.dtype, [call.module for call in self._calls])
        if x.is_cpu or noise.is_new:
            noise.check([(call.name, float(call.growth)) for call in self._calls], step)

    def run(self, layer: Layer, x: Tensor) -> Tensor:
        """Return what the layer makes of x."""
        if isinstance(layer.module, Bijection):
            y: Tensor = layer.module(x)
            self._segment.append(_BijectionUpdate(layer.module, x), None, (x,))
            return y
        if isinstance(layer.module, Coupled):
            return self._run_coupled(layer.module, layer.name, x)
        call = _LayerCall(layer.module, layer.name, self._settings, watched=False)
        y = self._run_call(call, x)
        self._segment.append(_LayerUpdate(call, x), call, (x,))
        self._calls.append(call)
        return y

    def _run_coupled(self, layer: Coupled, name: str, x: Tensor) -> Tensor:
        states: tuple[Tensor, ...] = layer.split(x)
        self._segment.append(_SplitUpdate(layer, x), None, (x,))
        del x
        for part, f in (("f", layer.f), ("g", layer.g)):
            # The input of the first call of a segment is not compared as a state.
            call = RecordedCall(f, f"{name}.{part}", self._settings, watched=self._segment.is_empty)
            out = self._run_call(call, states[1])
            if out.shape != states[0].shape:
                raise InputError(
                    f"{call.name} must return a tensor shaped like the half that it is added to, {tuple(states[0].shape)}. "
                    f"Received: {tuple(out.shape)}."
                )
            update = _AdditionUpdate(layer, states[0])
            before, states = states, update.advance(states, out)
            del out
            self._segment.append(update, call, before)
            del before
        self._segment.append(_JoinUpdate(layer), None, states)
        return layer.join(*states)

    def _run_call(self, call: RecordedCall, x: Tensor) -> Tensor:
        call.outer = self._outer
        version = None if x.is_inference() else x._version
        out = call.first_run(self._segment, x, lookahead=self._lookahead)
        if version is not None and x._version != version:
            raise _make_in_place_error(call.name)
        if not isinstance(out, Tensor):
            raise InputError(f"{call.name} must return a tensor. Received: {type(out).__name__}.")
        return out


class _LayerCall(RecordedCall):
    """A call of a layer, with what its inverse needs beside the output."""

    kept: tuple[Tensor, ...] = ()

    @property
    def module(self) -> nn.Module:
        """The layer."""
        return cast(nn.Module, self._f)

    def invert(self, y: Tensor, shape: torch.Size) -> Tensor:
        """Return the layer's input, which has this shape, under the conditions of the first run."""

        def run() -> Tensor:
            with torch.no_grad():
                x: Tensor = cast(Any, self._f).inverse(y, *self.kept)
                return x

        x = self._replay.run_again(run, check_draws=False)
        if not isinstance(x, Tensor) or x.shape != shape:
            received = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise RecoveryError(
                f"The inverse of {self.name} must return a tensor shaped like its input, {tuple(shape)}. Received: {received}. "
                "Correct it, or set the schedule to 'store'."
            )
        return x

    @property
    def growth(self) -> float | Tensor:
        """The factor by which the inverse is predicted to multiply relative errors, at least 1."""
        alpha = getattr(self._f, "alpha", None)
        if alpha is None:
            return 1.0
        with torch.no_grad():
            reduction = alpha(*self.kept)
        return reduction.clamp(max=1).rsqrt() if isinstance(reduction, Tensor) else min(reduction, 1.0) ** -0.5

    def _call(self, *inputs: Tensor) -> Tensor:
        forward_keeping = getattr(self._f, "forward_keeping", None)
        if forward_keeping is None:
            y: Tensor = self._f(*inputs)
            return y
        y, *kept = forward_keeping(*inputs)
        if not self.kept:  # the second run is on a rebuilt input
            self.kept = tuple(kept)
        return y


class _Update:
    """What most items of a segment of layers have in common."""

    b = 1.0
    inverts_first = False
    kept_bits: Sequence[Tensor] = ()
    growth: float | Tensor = 1.0


class _BijectionUpdate(_Update):
    def __init__(self, bijection: Bijection, x: Tensor):
        self._bijection = bijection
        self._strides = get_strides(x)

    def advance(self, states: tuple[Tensor], out: None) -> tuple[Tensor]:
        return (self._bijection(*states),)

    def invert(self, states: tuple[Tensor], out: None) -> tuple[Tensor]:
        return (restore_strides(self._bijection.inverse(*states), self._strides),)


class _LayerUpdate(_Update):
    inverts_first = True

    def __init__(self, call: _LayerCall, x: Tensor):
        self._layer_call = call
        self._shape = x.shape
        self._strides = get_strides(x)

    @property
    def growth(self) -> float | Tensor:  # type: ignore[override]
        return self._layer_call.growth

    def advance(self, states: tuple[Tensor], out: Tensor) -> tuple[Tensor]:
        return (out,)

    def invert(self, states: tuple[Tensor], out: None) -> tuple[Tensor]:
        return (restore_strides(self._layer_call.invert(*states, self._shape), self._strides),)


class _SplitUpdate(_Update):
    def __init__(self, layer: Coupled, x: Tensor):
        self._layer = layer
        self._strides = get_strides(x)

    def advance(self, states: tuple[Tensor], out: None) -> tuple[Tensor, ...]:
        return self._layer.split(*states)

    def invert(self, states: tuple[Tensor, Tensor], out: None) -> tuple[Tensor]:
        return (restore_strides(self._layer.join(*states), self._strides),)


class _AdditionUpdate(_Update):
    def __init__(self, layer: Coupled, x: Tensor):
        self._layer = layer
        self._strides = get_strides(x)

    def advance(self, states: tuple[Tensor, ...], out: Tensor) -> tuple[Tensor, ...]:
        return states[1], self._layer.add(states[0], out)

    def invert(self, states: tuple[Tensor, ...], out: Tensor) -> tuple[Tensor, ...]:
        return restore_strides(self._layer.subtract(states[1], out), self._strides), states[0]


class _JoinUpdate(_Update):
    def __init__(self, layer: Coupled):
        self._layer = layer

    def advance(self, states: tuple[Tensor, Tensor], out: None) -> tuple[Tensor]:
        return (self._layer.join(*states),)

    def invert(self, states: tuple[Tensor], out: None) -> tuple[Tensor, ...]:
        return self._layer.split(*states)


def _make_in_place_error(name: str) -> InputError:
    return InputError(
        f"{name} changes its input in place, which could not be rebuilt. Replace the in-place operation, for example "
        "ReLU(inplace=True), by one that returns a new tensor."
    )


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in _HOOKS)
