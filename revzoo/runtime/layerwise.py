"""Layers with an inverse: their activations are rebuilt layer by layer in backward, beside the gradient.

A layer in mode `invert` is a recorded call, as a step is, and consecutive ones form an `InvertedSegment` with one state: its
inverse gives its input x from its output, and the layer, run on x, refills what autograd had saved. Most layers save x alone
and before they compute anything, so this run computes nothing. A `Coupled` layer is two additive steps between its split and
join, so going back through it runs f and g once.

There are two places for such layers:

    LayerChain        a network of layers. The chain keeps its output.
                      Backward costs one forward more, and noise grows from layer to layer.
    f of a step       a step of a reversible chain in mode `invert` whose f is an `nn.Sequential` of nothing but such layers.
                      It keeps nothing in forward. When backward asks for its last layer, the step is inverted as any other,
                      which gives its input w[k-1] and the output of f; then the layers are walked back from that output.
                      Backward costs two forwards more; noise grows within a step alone, as each step starts anew.

A layer with hooks counts as one without an inverse: a hook may change what the layer returns.

Source: Hascoet et al. 2023, "Reversible designs for extreme memory cost reduction of CNN training", sections 4.3 and 4.4.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from revzoo.bijection import Bijection
from revzoo.errors import InputError, ScheduleError
from revzoo.invertible import Coupled
from revzoo.runtime.compiling import exclude_from_compilation, is_compiled, is_exporting
from revzoo.runtime.drift import HALF
from revzoo.runtime.layout import LayoutEntry
from revzoo.runtime.lookahead import Lookahead
from revzoo.runtime.lookahead_setting import LookaheadDepth, LookaheadSetting
from revzoo.runtime.recorded_call import RecordedCall, Recoverer
from revzoo.runtime.schedule import Applicable, Mode, check_schedule
from revzoo.runtime.settings import Settings
from revzoo.runtime.strides import get_strides, restore_strides
from revzoo.runtime.tape import InvertedSegment, SavedInputs
from revzoo.runtime.transforms import must_store, refuse_to_drop
from revzoo.runtime.tripwire import judge_arrived, send_comparisons

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class LayerChain(nn.Sequential):
    """Run layers one after the other and rebuild their activations in backward, layer by layer.

    Use it for networks of a few such layers, or where nothing else fits: rounding errors grow with depth by what each layer's
    `alpha` predicts. As f of a reversible step, an `nn.Sequential` of the same layers has no such limit.

    Shapes: those of the layers.
    Args:
        layers: as those of `nn.Sequential`. Those with `inverse` (`revzoo/invertible.py`, or your own) are inverted, others
            stored, unless `schedule` says otherwise.
    Raises:
        InputError: there is no layer.
    Cost: the output, and one extra forward of each layer.
    Source: Hascoet et al. 2023, section 4.3.
    """

    def __init__(self, *layers: Any):  # modules, or an OrderedDict of them
        if not layers:
            raise InputError("A chain needs at least one layer. Received: none.")
        super().__init__(*layers)
        self.schedule = "invert"
        self.lookahead = 0

    @property
    def lookahead(self) -> LookaheadDepth:
        """How many layers are recovered ahead of backward, beside the gradient of the layer after it: 0, 1, or "auto"."""
        return self._lookahead.depth

    @lookahead.setter
    def lookahead(self, lookahead: LookaheadDepth) -> None:
        self._lookahead = LookaheadSetting(lookahead)

    @property
    def schedule(self) -> list[Mode]:
        """The mode of every layer; bijections have none. Assign a list, the name of one mode for all, or a `revzoo.Plan`.

        In mode `invert`, a layer without an inverse is stored.
        """
        return list(self._schedule)

    @schedule.setter
    def schedule(self, modes: Sequence[str] | str | Applicable) -> None:
        if isinstance(modes, Applicable):
            return modes.apply(self)
        self._schedule = check_schedule(modes, [entry.name for entry in self.layout() if entry.is_unit])

    def forward(self, input: Tensor) -> Tensor:
        lookahead = self._lookahead.begin_forward(self._schedule, input)
        return run_layers(self._layers(), input, lookahead=lookahead)

    def layout(self) -> list[LayoutEntry]:
        """Return the layers in order; bijections among them have no mode."""
        return [
            LayoutEntry(name, layer, "bijection" if isinstance(layer, Bijection) else "node")
            for name, layer in self.named_children()
        ]

    def _layers(self) -> list["Layer"]:
        layout = self.layout()
        if (count := sum(entry.is_unit for entry in layout)) != len(self._schedule):
            raise ScheduleError(
                f"The schedule of this chain is for {len(self._schedule)} layers. Received: {count}. Set `schedule` again "
                "after layers have been added or removed."
            )
        modes = iter(self._schedule)
        return [Layer(module, name, next(modes) if kind == "node" else "invert") for name, module, kind, _ in layout]


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
    return callable(getattr(module, "inverse", None)) and not _has_hooks(module) and not is_compiled(module)


def find_layers(f: Callable[..., Any]) -> list[Layer] | None:
    """Return the layers of a step's f that can be walked back one by one; None if f is not made of such layers alone."""
    if not isinstance(f, nn.Sequential) or type(f).forward is not nn.Sequential.forward or _has_hooks(f) or is_compiled(f):
        return None
    layers = [Layer(module, name, "invert") for name, module in f.named_children()]
    inverted = all(layer.is_inverted for layer in layers)
    return layers if inverted and any(not isinstance(layer.module, Bijection) for layer in layers) else None


def run_layers(layers: Sequence[Layer], x: Tensor, *, lookahead: Lookahead | None = None) -> Tensor:
    """Run a chain given as a list of layers; `LayerChain` is this function as a module.

    Raises:
        InputError: x is not a floating tensor.
        RecoveryError: a layer that cannot be repeated, or a transform of `torch.func` under which nothing can be recovered.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        received = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"A chain of layers takes a floating tensor. Received: {received}.")
    if not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype in HALF:
        x = x.float()  # as in `run_chain`: in half precision inversion loses too much
    drops = any(layer.mode != "store" for layer in layers)
    if drops and torch.is_grad_enabled() and not is_exporting():
        return _run_recorded(layers, x, lookahead)
    return _run_plain(layers, x)


def _run_plain(layers: Sequence[Layer], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer.module(x)
    return x


@exclude_from_compilation
def _run_recorded(layers: Sequence[Layer], x: Tensor, lookahead: Lookahead | None) -> Tensor:
    """Run forward, recording what backward needs to rebuild the tensors that are dropped."""
    if must_store():
        return _run_plain(layers, x)
    refuse_to_drop("every layer")
    send_comparisons()
    judge_arrived()
    settings = Settings(x.device)
    segment: InvertedSegment | None = None
    for layer in layers:
        if layer.is_inverted:
            segment = segment or InvertedSegment(exact=False)
            x = _Recording(segment, settings, lookahead).run(layer, x)
            continue
        if segment is not None:
            segment.end((x,))
            segment = None
        if layer.mode in ("store", "invert"):
            x = layer.module(x)
        else:
            call = RecordedCall(layer.module, layer.name, settings, selective=layer.mode == "selective")
            x = call.first_run(SavedInputs((x,)), x, lookahead=lookahead)
    if segment is not None:
        segment.end((x,))
    return x


class LayerwiseCall(RecordedCall):
    """A call of a step's f whose layers are walked back one by one.

    It drops nothing itself: its layers do. Its second run stores nothing either, and gives the segment of its layers the state
    to start from.

    Args:
        f: the layers, as one module.
        name: name of the step, for messages.
        settings: the settings of PyTorch under which it is called.
        layers: the layers one by one.
    """

    def __init__(self, f: nn.Module, name: str, settings: Settings, layers: Sequence[Layer]):
        super().__init__(f, name, settings, watched=False)
        self._layers = layers
        # Held by the graph alone: it refers to this call.
        self._segment: ref[InvertedSegment] | None = None
        self._record: _Recording | None = None  # during the first run
        self._gives_state = False

    def first_run(self, recoverer: Recoverer, *inputs: Tensor, lookahead: Lookahead | None = None) -> Any:
        segment = InvertedSegment(exact=False, origin=_StepOrigin(self, recoverer))
        self._segment = ref(segment)
        self._record = _Recording(segment, self._settings, lookahead)
        try:
            return super().first_run(recoverer, *inputs)
        finally:
            self._record = None

    def run_again(self, *inputs: Tensor, refill: bool = True, stop_early: bool = False, check_draws: bool = True) -> Any:
        self._gives_state = refill
        return super().run_again(*inputs, refill=refill, check_draws=check_draws)

    def free_refilled(self) -> None:
        super().free_refilled()
        if (segment := self._find_segment()) is not None:
            segment.free_states()

    def _find_segment(self) -> InvertedSegment | None:
        return None if self._segment is None else self._segment()

    def _call(self, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        if self._record is not None:
            for layer in self._layers:
                x = self._record.run(Layer(layer.module, f"{self.name}.{layer.name}", layer.mode), x)
            return x
        with torch.no_grad():
            x = _run_plain(self._layers, x)
        if self._gives_state and (segment := self._find_segment()) is not None:
            segment.end((x,))
        return x


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


class _Recording:
    """Runs layers for the first time, and records each as an item of a segment."""

    def __init__(self, segment: InvertedSegment, settings: Settings, lookahead: Lookahead | None):
        self._segment = segment
        self._settings = settings
        self._lookahead = lookahead

    def run(self, layer: Layer, x: Tensor) -> Tensor:
        """Return what the layer makes of x."""
        if isinstance(layer.module, Bijection):
            y: Tensor = layer.module(x)
            self._segment.append(_BijectionUpdate(layer.module, x), None, (x,))
            return y
        if isinstance(layer.module, Coupled):
            return self._run_coupled(layer.module, layer.name, x)
        call = _LayerCall(layer.module, layer.name, self._settings, watched=False)
        y = call.first_run(self._segment, x, lookahead=self._lookahead)
        self._segment.append(_LayerUpdate(call, x), call, (x,))
        return y

    def _run_coupled(self, layer: Coupled, name: str, x: Tensor) -> Tensor:
        states: tuple[Tensor, ...] = layer.split(x)
        self._segment.append(_SplitUpdate(layer, x), None, (x,))
        del x
        for part, f in (("f", layer.f), ("g", layer.g)):
            # The input of the first call of a segment is not compared as a state.
            call = RecordedCall(f, f"{name}.{part}", self._settings, watched=self._segment.is_empty)
            out = call.first_run(self._segment, states[1], lookahead=self._lookahead)
            if not isinstance(out, Tensor) or out.shape != states[0].shape:
                received = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
                raise InputError(
                    f"{name}.{part} must return a tensor shaped like the half that it is added to, {tuple(states[0].shape)}. "
                    f"Received: {received}."
                )
            update = _AdditionUpdate(layer, states[0])
            before, states = states, update.advance(states, out)
            del out
            self._segment.append(update, call, before)
            del before
        self._segment.append(_JoinUpdate(layer), None, states)
        return layer.join(*states)


class _LayerCall(RecordedCall):
    """A call of a layer, with what its inverse needs beside the output."""

    kept: tuple[Tensor, ...] = ()

    def invert(self, y: Tensor) -> Tensor:
        """Return the layer's input, under the conditions of the first run."""

        def run() -> Tensor:
            with torch.no_grad():
                x: Tensor = cast(Any, self._f).inverse(y, *self.kept)
                return x

        return self._replay.run_again(run, check_draws=False)

    @property
    def growth(self) -> float | Tensor:
        """The factor by which the inverse is predicted to multiply relative errors, at least 1."""
        alpha = getattr(self._f, "alpha", None)
        if alpha is None:
            return 1.0
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
        self._strides = get_strides(x)

    @property
    def growth(self) -> float | Tensor:  # type: ignore[override]
        return self._layer_call.growth

    def advance(self, states: tuple[Tensor], out: Tensor) -> tuple[Tensor]:
        return (out,)

    def invert(self, states: tuple[Tensor], out: None) -> tuple[Tensor]:
        return (restore_strides(self._layer_call.invert(*states), self._strides),)


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


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in _HOOKS)
