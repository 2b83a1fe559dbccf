"""A network of layers, which are inverted one by one in backward (`layerwise.py`)."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from revzoo.bijection import Bijection
from revzoo.dtype import HALF
from revzoo.errors import InputError, ScheduleError
from revzoo.runtime.compiling import exclude_from_compilation, is_exporting
from revzoo.runtime.forward import Forward
from revzoo.runtime.layer_rules import Layer, expand
from revzoo.runtime.layerwise import Recording
from revzoo.runtime.layout import LayoutEntry, Scheduled
from revzoo.runtime.lookahead import Lookahead, begin_lookahead
from revzoo.runtime.mode import Mode
from revzoo.runtime.observation import begin_call, end_call
from revzoo.runtime.recorded_call import RecordedCall
from revzoo.runtime.round import begin_round
from revzoo.runtime.seams import traces_backward
from revzoo.runtime.segment import InvertedSegment, KeptStates, SavedInputs
from revzoo.runtime.traced_chain import trace_layers
from revzoo.runtime.transforms import must_store


class LayerChain(Scheduled, nn.Sequential):
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
        self.schedule = Mode.INVERT
        self.lookahead = 0

    def forward(self, input: Tensor) -> Tensor:
        return run_layers(self._layers(), input, lookahead=begin_lookahead(self._lookahead))

    def layout(self) -> list[LayoutEntry]:
        """Return the layers in order; bijections among them have no mode."""
        return [
            LayoutEntry(name, layer, "bijection" if isinstance(layer, Bijection) else "layer")
            for name, layer in self._modules.items()
            if layer is not None
        ]

    def _layers(self) -> list[Layer]:
        layout = self.layout()
        if (count := sum(entry.is_unit for entry in layout)) != len(self._schedule):
            raise ScheduleError(
                f"The schedule of this chain is for {len(self._schedule)} layers. Received: {count}. Set `schedule` again "
                "after layers have been added or removed."
            )
        modes = iter(self._schedule)
        return [Layer(e.module, e.name, next(modes) if e.kind == "layer" else Mode.INVERT) for e in layout]


def run_layers(layers: Sequence[Layer], x: Tensor, *, lookahead: Lookahead | None = None) -> Tensor:
    """Run a chain given as a list of layers; `LayerChain` is this function as a module.

    Raises: as `run_layers_before`.
    """
    out = run_layers_before(layers, [x], lookahead=lookahead)
    return out.end() if isinstance(out, Recording) else out


def run_layers_apart(
    layers: Sequence[Layer], inputs: list[Tensor], *, lookahead: Lookahead | None = None
) -> tuple[Tensor, ...]:
    """Run a chain as `run_layers` does, and return both halves of the channels apart if the last layer leaves them so.

    Args and Raises: as `run_layers_before`.
    """
    out = run_layers_before(layers, inputs, lookahead=lookahead)
    return out.end_apart() if isinstance(out, Recording) else (out,)


def run_layers_before(
    layers: Sequence[Layer], inputs: list[Tensor], *, lookahead: Lookahead | None = None
) -> Tensor | Recording:
    """Run layers before something else; return their output or, if the last ones are inverted, the recording of these.

    The caller ends the recording, or hands it on to what comes next, so that the output is rebuilt by that and not kept.

    Args:
        layers: the chain.
        inputs: the input alone, in a list that is emptied, so that the caller does not keep it alive.
        lookahead: recovers layers ahead of backward. One for all chains and nodes of a forward.
    Raises:
        InputError: x is not a floating tensor.
        RecoveryError: a layer that cannot be repeated.
    """
    x = inputs.pop()
    if not isinstance(x, Tensor) or not x.is_floating_point():
        received = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"A chain of layers takes a floating tensor. Received: {received}.")
    if not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype in HALF:
        x = x.float()  # as in `run_chain`: in half precision inversion loses too much
    drops = any(layer.mode.drops for layer in layers)
    if drops and torch.is_grad_enabled() and not is_exporting():
        if traces_backward():
            return trace_layers(layers, x)
        inputs.append(x)
        del x
        return _run_recorded(layers, inputs, lookahead)
    return _run_plain(layers, x)


def _run_plain(layers: Sequence[Layer], x: Tensor) -> Tensor:
    for layer in layers:
        begin_call(layer.module, (x,))
        x = layer.module(x)
        end_call(layer.module, x)
    return x


@exclude_from_compilation
def _run_recorded(layers: Sequence[Layer], inputs: list[Tensor], lookahead: Lookahead | None) -> Tensor | Recording:
    """Run forward, recording what backward needs to rebuild the tensors that are dropped."""
    x = inputs.pop()
    if must_store():
        return _run_plain(layers, x)
    forward = Forward(x, lookahead=lookahead)
    forward.round = begin_round(layers[0].module, x, tuple([(id(layer.module), layer.mode) for layer in layers]))
    recording: Recording | None = None
    with forward:
        for is_inverted, run in groupby(expand(layers), key=lambda layer: layer.is_inverted):
            if is_inverted:
                inverted = list(run)
                begin_call(inverted[0].module, (x,))
                recording = Recording(InvertedSegment(False, forward.round), x, inverted, forward)
                del x  # freed as soon as it is not needed
                for layer in inverted:
                    if layer is not inverted[0]:
                        begin_call(layer.module, recording.states)
                    recording.run(layer)
                    end_call(layer.module, recording.states)
                continue
            if recording is not None:
                x, recording = recording.end(), None
            for layer in run:
                begin_call(layer.module, (x,))
                if layer.mode.keeps_input:
                    call = RecordedCall(layer.module, layer.name, forward, selective=layer.mode.is_selective)
                    x = call.first_run(SavedInputs(KeptStates((x,)), forward.round), x)
                else:
                    x = layer.module(x)
                end_call(layer.module, x)
    return x if recording is None else recording
