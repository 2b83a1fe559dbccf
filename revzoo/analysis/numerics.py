"""Measure what rounding does to rebuilt activations and gradients, and how much the inverse of each layer amplifies noise.

Inversion gives each state once more, with an error. Three figures say how much it matters:

    signal-to-noise ratio    mean square of a state over that of the error of the rebuilt one. Below about 100 the error is a
                             tenth of the state.
    alpha of a layer         the factor by which its inverse changes this ratio, measured: noise of known size is added to the
                             output, which is then inverted. Below 1 noise is amplified.
    angle                    between the gradients of all parameters, rebuilt and stored [degrees]

Source: ratio and alpha are those of Hascoet et al. 2023, section 4.1; the angle is that of Gomez et al. 2017, figure 4.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from statistics import mean
from typing import Any, cast

import torch
from torch import Tensor, nn

from revzoo.analysis.chains import find_chains, preserve_schedules, require_chains
from revzoo.analysis.dry_run import LossFunction, Paths, call, isolated, select_differentiable
from revzoo.bijection import Bijection
from revzoo.format import count_noun, format_ratio
from revzoo.runtime.drift import ignore_error_growth
from revzoo.runtime.layer_call import find_alpha
from revzoo.runtime.layer_rules import Layer, expand, find_layers
from revzoo.runtime.mode import Mode
from revzoo.runtime.observation import CompareFunction, observe_states
from revzoo.runtime.tripwire import set_tripwire

Gradients = dict[str, Tensor | None]

# Size of the noise that is added, relative to the output. So small that few elements of a LeakyReLU change their sign, and in
# float64 so large that rounding does not count.
_NOISE = 1e-5
_NOISE_SEED = 7_340_033  # not one that anybody's inputs were drawn with: the noise must not follow the signal


@dataclass(frozen=True)
class RebuiltState:
    """A state of forward and what inversion made of it.

    Args:
        name: path of the step or layer whose inversion gave it. It is the state before it, the older one of a pair.
        of_layer: whether it is the input of a layer that is inverted by itself, or half of it (f and g of a coupled layer), and
            not a state between steps.
        signal: mean square of the state.
        noise: mean square of the error; 0 where every bit was rebuilt.
        predicted_snr: signal-to-noise ratio expected from the spacing of numbers, the couplings and the formulas of the layers'
            alpha; infinite in exact arithmetic.
    """

    name: str
    of_layer: bool
    signal: float
    noise: float
    predicted_snr: float

    @property
    def snr(self) -> float:
        """The signal-to-noise ratio; infinite where every bit was rebuilt, 0 where the rebuilt state is not finite."""
        if self.noise == 0:
            return math.inf
        return self.signal / self.noise if math.isfinite(self.noise) else 0.0


@dataclass(frozen=True)
class LayerAlpha:
    """How the inverse of a layer changes the signal-to-noise ratio, in the network and on the batch that were measured.

    Args:
        name: path of the layer.
        kind: its class.
        measured: the ratio of its rebuilt input over that of its output.
        formula: the same from the layer's `alpha`, which assumes inputs of a certain kind; None if it has none.
    """

    name: str
    kind: str
    measured: float
    formula: float | None


@dataclass(frozen=True)
class NumericsReport:
    """What rounding does to the activations and gradients of one model on one batch.

    Args:
        states: rebuilt states, in the order of forward.
        layers: layers with an inverse, in the order of forward.
        angle: between the gradients with this schedule and those of storing everything [degrees]; NaN if some are not finite.
    """

    states: tuple[RebuiltState, ...]
    layers: tuple[LayerAlpha, ...]
    angle: float

    @property
    def worst(self) -> RebuiltState | None:
        """The state with the lowest signal-to-noise ratio; None if nothing was rebuilt."""
        return min(self.states, key=lambda state: state.snr, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON. It has no infinite numbers and no NaN: they are None."""
        states = [asdict(state) | {"snr": state.snr} for state in self.states]
        rows = {"states": states, "layers": [asdict(layer) for layer in self.layers]}
        plain: dict[str, Any] = {key: [_replace_non_finite(row) for row in each] for key, each in rows.items()}
        return plain | _replace_non_finite({"angle": self.angle})

    def __str__(self) -> str:
        if self.worst is None:
            return "Nothing was rebuilt: no step or layer of the schedule is inverted."
        count = count_noun(len(self.states), "state")
        if math.isinf(self.worst.snr):
            return f"{count} rebuilt, bit for bit."
        return (
            f"{count} rebuilt, with a signal-to-noise ratio of {format_ratio(self.worst.snr)} at least "
            f"(before {self.worst.name}). The gradients are turned by {self.angle:.2g} degrees against those of storing "
            "everything."
        )


def measure_numerics(model: nn.Module, batch: Any, *, loss: LossFunction | None = None) -> NumericsReport:
    """Measure the errors of everything that the model rebuilds in one backward, and alpha of its layers.

    Arithmetic is that around the call: float32, autocast, half precision or exact. No error is raised and no warning given for
    what rounding does: it is what is measured. Afterwards the model is as before.

    Args:
        model: a `revzoo.Model`, a chain, or any module with chains inside, as it is to be trained.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        loss: of the model's outputs; None is a sum with random weights.
    Raises:
        InputError: the model is no module, or has no chain inside; the batch has no tensor or no example; nothing requires a
            gradient; or the parameters have no values (meta, FakeTensor).
    Cost: time of two training steps and one forward; memory of a training step that stores everything, and of a copy of the
        states that are rebuilt, or of the inputs of the layers with an inverse.
    """
    require_chains(model)
    recorder = _StateRecorder(model)
    stored = _compute_gradients(model, batch, loss or _sum_with_random_weights, Mode.STORE)
    rebuilt = _compute_gradients(model, batch, loss or _sum_with_random_weights, recorder=recorder)
    return NumericsReport(tuple(recorder.list_rebuilt()), tuple(_measure_layers(model, batch)), measure_angle(rebuilt, stored))


@torch.no_grad()
def measure_angle(gradients: Gradients, others: Gradients) -> float:
    """Return the angle between two sets of gradients, each taken as one vector [degrees]; NaN if one is 0 or not finite.

    A missing gradient is 0.
    """
    names = [name for name, g in gradients.items() if g is not None or others[name] is not None]
    pairs = [(gradients[name], others[name]) for name in names]

    def norm(combine: Callable[[Tensor, Tensor], Tensor]) -> float:
        zero = torch.zeros((), dtype=torch.float64)
        parts = [combine(*(zero if g is None else g.double() for g in pair)) for pair in pairs]
        return math.hypot(*(float(part.norm()) for part in parts))

    size, other = norm(lambda g, _: g), norm(lambda _, h: h)
    if not (0 < size < math.inf and 0 < other < math.inf):
        return math.nan
    # Unlike the arc cosine, this is accurate for small angles.
    return math.degrees(2 * math.atan2(norm(lambda g, h: g / size - h / other), norm(lambda g, h: g / size + h / other)))


@torch.no_grad()
def measure_alpha(layer: nn.Module, x: Tensor) -> tuple[float, float | None]:
    """Return by which factor a layer's inverse changes the signal-to-noise ratio: measured on x, and from its `alpha`.

    Computed in float64 on a copy of the layer, with noise that is the same in all elements.

    Args:
        layer: a layer with an inverse; None is returned for the formula if it has none.
        x: the layer's input.
    """
    module, x = copy.deepcopy(layer).double(), x.detach().double()
    keep = getattr(module, "forward_keeping", None)
    y, *kept = (module(x),) if keep is None else keep(x)
    inverse: Callable[..., Tensor] = cast(Any, module).inverse
    generator = torch.Generator().manual_seed(_NOISE_SEED)
    noise = torch.randn(y.shape, generator=generator, dtype=y.dtype).to(y.device) * (_NOISE * y.square().mean().sqrt())
    error = inverse(y + noise, *kept) - inverse(y, *kept)
    ratio = (x.square().sum() / error.square().sum()) / (y.square().sum() / noise.square().sum())
    if isinstance(module, Bijection):
        return float(ratio), 1.0
    formula = find_alpha(module)
    return float(ratio), None if formula is None else float(formula(y, *kept))


class _StateRecorder:
    """Copy the states of forward, and compare those that inversion gives with them."""

    def __init__(self, model: nn.Module) -> None:
        layouts = (chain.layout() for chain in find_chains(model).values())
        self._steps = {id(entry.module) for layout in layouts for entry in layout if entry.kind == "step"}
        self._paths = Paths(model)
        self._count = 0
        self._rebuilt: dict[int, RebuiltState] = {}

    def list_rebuilt(self) -> list[RebuiltState]:
        """Return the states that were rebuilt, in the order of forward."""
        in_order = [self._rebuilt[i] for i in sorted(self._rebuilt)]
        same_layer = groupby(in_order, key=lambda state: state.name if state.of_layer else id(state))
        return [_join_halves(list(rows)) for _, rows in same_layer]

    def note(self, module: nn.Module, name: str, state: Tensor) -> CompareFunction:
        self._count += 1
        path, of_layer = self._paths.find(module, name), id(module) not in self._steps
        return partial(self._compare, self._count, path, of_layer, state.clone())

    def _compare(
        self, index: int, path: str, of_layer: bool, state: Tensor, rebuilt: Tensor, predicted_error: float | Tensor
    ) -> None:
        signal, noise = (float(x.square().mean()) for x in (state.double(), rebuilt.double() - state.double()))
        error = float(predicted_error)
        self._rebuilt[index] = RebuiltState(
            path,
            of_layer,
            signal=signal,
            noise=noise if math.isfinite(noise) else math.inf,
            predicted_snr=error**-2 if error else math.inf,
        )


def _join_halves(rows: Sequence[RebuiltState]) -> RebuiltState:
    """Return one state for the halves of the channels, equal in size, on which a layer is run one after the other."""
    signal, noise = mean(row.signal for row in rows), mean(row.noise for row in rows)
    return replace(rows[0], signal=signal, noise=noise, predicted_snr=min(row.predicted_snr for row in rows))


def _compute_gradients(
    model: nn.Module, batch: Any, loss: LossFunction, mode: Mode | None = None, recorder: _StateRecorder | None = None
) -> Gradients:
    """Return the gradients of the loss; every call draws the same random numbers."""
    with ExitStack() as stack:
        inputs, assign = stack.enter_context(isolated(model, batch)), stack.enter_context(preserve_schedules(model))
        stack.enter_context(set_tripwire(False))
        stack.enter_context(ignore_error_growth())  # what rounding does is what is measured
        if mode is not None:
            assign(mode)
        with nullcontext() if recorder is None else observe_states(recorder.note):
            outputs = call(model, inputs)
        loss(outputs).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def _sum_with_random_weights(outputs: Any) -> Tensor:
    rng = torch.Generator().manual_seed(0)  # a constant gradient would vanish in a norm before the output
    parts = [(y * torch.randn(y.shape, generator=rng).to(y)).sum().real for y in select_differentiable(outputs)]
    return sum(parts[1:], parts[0])


def _measure_layers(model: nn.Module, batch: Any) -> Iterator[LayerAlpha]:
    """Yield alpha of every layer with an inverse, on what its first call in one forward gets."""
    inputs: dict[str, tuple[nn.Module, Tensor]] = {}

    def note(name: str, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        if name not in inputs:
            inputs[name] = layer, args[0].detach().clone()

    with isolated(model, batch) as example, torch.no_grad():
        hooks = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in _find_invertible(model)]
        try:
            call(model, example)
        finally:
            for hook in hooks:
                hook.remove()
    for name, (layer, x) in inputs.items():
        measured, formula = measure_alpha(layer, x)
        yield LayerAlpha(name, type(layer).__name__, measured, formula)


def _find_invertible(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of every layer and bijection that the runtime can invert."""
    for prefix, chain in find_chains(model).items():
        for entry in chain.layout():
            if entry.kind == "step":
                for layer in find_layers(entry.module) or ():
                    if layer.is_inverted:
                        yield f"{prefix}{entry.name}.{layer.name}", layer.module
            elif entry.kind in ("bijection", "layer"):
                for layer in expand([Layer(entry.module, entry.name)]):
                    if layer.is_inverted:
                        yield f"{prefix}{layer.name}", layer.module


def _replace_non_finite(row: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
