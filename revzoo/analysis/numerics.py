"""Measure what rounding does to rebuilt activations and gradients.

Inversion gives each state once more, with an error. Two figures say how much it matters:

    signal-to-noise ratio    mean square of a state over that of the error of the rebuilt one. Below about 100 the error is a
                             tenth of the state.
    angle                    between the gradients of all parameters, rebuilt and stored [degrees]

Source: the ratio is that of Hascoet et al. 2023, section 4.1; the angle is that of Gomez et al. 2017, figure 4.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from revzoo.analysis.chains import find_chains, preserve_schedules, require_chains
from revzoo.analysis.dry_run import LossFunction, Paths, call, isolated, select_differentiable
from revzoo.format import count_noun, format_ratio
from revzoo.runtime.drift import ignore_error_growth
from revzoo.runtime.mode import Mode
from revzoo.runtime.observation import CompareFunction, observe_states
from revzoo.runtime.tripwire import set_tripwire

Gradients = dict[str, Tensor | None]


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
class NumericsReport:
    """What rounding does to the activations and gradients of one model on one batch.

    Args:
        states: rebuilt states, in the order of forward.
        angle: between the gradients with this schedule and those of storing everything [degrees]; NaN if some are not finite.
    """

    states: tuple[RebuiltState, ...]
    angle: float

    @property
    def worst(self) -> RebuiltState | None:
        """The state with the lowest signal-to-noise ratio; None if nothing was rebuilt."""
        return min(self.states, key=lambda state: state.snr, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON. It has no infinite numbers and no NaN: they are None."""
        states = [_replace_non_finite(asdict(state) | {"snr": state.snr}) for state in self.states]
        return {"states": states} | _replace_non_finite({"angle": self.angle})

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
    """Measure the errors of everything that the model rebuilds in one backward.

    Arithmetic is that around the call: float32, autocast, half precision or exact. No error is raised and no warning given for
    what rounding does: it is what is measured. Afterwards the model is as before.

    Args:
        model: a `revzoo.Model`, a chain, or any module with chains inside, as it is to be trained.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        loss: of the model's outputs; None is a sum with random weights.
    Raises:
        InputError: the model is no module, or has no chain inside; the batch has no tensor or no example; nothing requires a
            gradient; or the parameters have no values (meta, FakeTensor).
    Cost: time of two training steps; memory of one that stores everything, and of a copy of the states that are rebuilt.
    """
    require_chains(model)
    recorder = _StateRecorder(model)
    stored = _compute_gradients(model, batch, loss or _sum_with_random_weights, Mode.STORE)
    rebuilt = _compute_gradients(model, batch, loss or _sum_with_random_weights, recorder=recorder)
    return NumericsReport(tuple(recorder.list_rebuilt()), measure_angle(rebuilt, stored))


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


def _replace_non_finite(row: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
