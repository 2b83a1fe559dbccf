"""Verify a model's gradients: compare its schedule with storing all activations, for the same model and batch."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from revzoo.analysis.chains import find_steps, require_chains
from revzoo.analysis.dry_run import LossFunction, Paths
from revzoo.analysis.trial import Gradients, Outcome, Trial
from revzoo.device import is_sharded
from revzoo.errors import RecoveryError, join_names
from revzoo.format import format_dtype, format_ratio
from revzoo.runtime.layer_rules import is_made_of_layers
from revzoo.runtime.mode import Mode
from revzoo.runtime.observation import CompareFunction, observe_states

# Largest relative error allowed of a reconstructed state, of all gradients together, and of a single gradient, by the
# coarsest precision in use.
#   float64: a correct run reaches 1e-15; apart from activations that flip at the kink of a ReLU, more is a mistake.
#   float32: the states of 100 blocks are reconstructed to 2e-6. Rounding alone changes the gradients of ReLU networks by up to
#       3e-3 (float32 against float64, both storing everything), far less than the noise of a mini-batch.
#   half: with autocast in f, the states of 100 blocks are reconstructed to 1e-2. bfloat16 alone changes gradients by 7e-3
#       (transformer, 12 blocks) to 9e-2 (convolutions with ReLU, 8 blocks) against float64.
_HALF = (2e-2, 1e-1, 5e-1)
_LIMITS = {torch.float64: (1e-8, 1e-8, 1e-7), torch.float32: (1e-4, 1e-2, 1e-1), torch.float16: _HALF, torch.bfloat16: _HALF}
# The error of a gradient is relative to its norm, or to this share of a typical gradient of the model (root mean square) if
# that is larger: the true gradient of a bias before a softmax or a BatchNorm is 0, and what is computed is rounding.
_SHARE = 1e-2


@dataclass(frozen=True)
class VerifyReport:
    """Comparison of a model's schedule with storing all activations.

    Args:
        dtype: the coarsest precision in use: of weights, streams, or autocast.
        modes: mode of each step, or layer of a network without coupling, in order.
        reconstruction_errors: for each of them that ran again in backward, the relative error of its input:
            ||w' - w|| / ||w|| of the reconstructed w' and the original w. For a step made of layers with an inverse, the
            largest of all that was rebuilt in it.
        gradient_error: ||g - g_store|| / ||g_store|| over the gradients of all parameters.
        gradient_errors: the same for each parameter with a gradient; relative to 1 % of a typical gradient at least.
        identical: whether every gradient is the same bit for bit.
        problems: reasons why the model is not safe to train like this; none if it is.
    """

    dtype: torch.dtype
    modes: dict[str, Mode]
    reconstruction_errors: dict[str, float] = field(default_factory=dict)
    gradient_error: float = math.nan
    gradient_errors: dict[str, float] = field(default_factory=dict)
    identical: bool = False
    problems: tuple[str, ...] = ()

    @property
    def snr(self) -> float:
        """The smallest signal-to-noise ratio of what was rebuilt; infinite if every bit was, or nothing."""
        error = max(self.reconstruction_errors.values(), default=0.0)
        return error**-2 if error else math.inf

    @property
    def ok(self) -> bool:
        """Whether the model is safe to train with this schedule in this precision."""
        return not self.problems

    def __str__(self) -> str:
        dtype = format_dtype(self.dtype)
        width = max(map(len, self.modes), default=0)
        lines = ["step or layer, mode, relative error of its input when reconstructed in backward:"]
        for name, mode in self.modes.items():
            error = self.reconstruction_errors.get(name)
            lines.append(f"  {name:<{width}}  {mode:<9}  {'not run again' if error is None else f'{error:.1e}'}")
        if any(mode.inverts for mode in self.modes.values()) and self.reconstruction_errors:
            lines.append(f"Signal-to-noise ratio of rebuilt activations, mean squares: {format_ratio(self.snr)} at least.")
        if self.gradient_errors:
            name, worst = max(self.gradient_errors.items(), key=lambda item: item[1])
            lines.append(
                f"{len(self.gradient_errors)} gradients against storing everything: relative error {self.gradient_error:.1e}, "
                f"at most {worst:.1e} ({name})"
            )
        if self.ok:
            agreement = "gradients are bit-identical to" if self.identical else "gradients agree, up to rounding, with"
            return "\n".join([*lines, f"Safe to train in {dtype}: {agreement} those of storing everything."])
        return "\n".join([*lines, f"Not safe to train in {dtype}:", *(f"  - {problem}" for problem in self.problems)])


def verify(model: nn.Module, batch: Any, *, loss: LossFunction | None = None) -> VerifyReport:
    """Compare the gradients of the model's schedule with those of storing all activations.

    Runs the model twice with `store`, to see whether it repeats itself at all, and once with its schedule. Every run has a
    fresh copy of the model, the same random numbers, the tripwire on, and other draws between forward and backward. Afterwards
    the model is as before.

    All processes that divide a model call this together. Each has a batch of its own, and all return the problems of all; what
    a step refuses in one of them is raised there, since the others cannot go on without it.

    A model that cannot be copied is run itself: where processes communicate, a module is compiled, `copy.deepcopy` fails, or
    the copy computes with the parameters of the model.

    Args:
        model: a `revzoo.Model`, a `ReversibleChain`, or any module with chains inside, as it is to be trained.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        loss: computes the loss from what the model returns; None is a random gradient of every output.
    Raises:
        InputError: the model is no module, or has no chain inside; the batch has no tensor or no example; nothing requires a
            gradient; the loss is not one number; or the parameters have no values (meta, FakeTensor).
        RecoveryError: a step of a divided model could not be recovered.
    Cost: time of three training steps; besides the memory of a training step that stores everything, a copy of the model and
        another set of gradients.
    """
    require_chains(model)
    trial = Trial(model, batch, loss)
    return _share_problems(model, _run_and_compare(trial, model))


def _share_problems(model: nn.Module, report: VerifyReport) -> VerifyReport:
    """Return the report with the problems of all processes that divide the model: each sees the states of its own batch."""
    if not any(map(is_sharded, model.parameters())):
        return report
    everywhere: list[tuple[str, ...]] = [()] * distributed.get_world_size()
    distributed.all_gather_object(everywhere, report.problems)
    return replace(report, problems=tuple(dict.fromkeys(problem for problems in everywhere for problem in problems)))


def _run_and_compare(trial: Trial, model: nn.Module) -> VerifyReport:
    stored = trial.run(Mode.STORE)
    can_compare = _are_finite(stored)
    noise = _compare_gradients(trial.run(Mode.STORE).gradients, stored.gradients)[0] if can_compare else 0.0
    report, scheduled, failure = _run_schedule(trial, model, can_compare)
    if scheduled is None:
        return replace(report, problems=(*_find_noise(noise, report, failure), failure))
    overall, each = _compare_gradients(scheduled.gradients, stored.gradients)
    identical = _are_identical(scheduled.gradients, stored.gradients)
    report = replace(report, gradient_error=overall, gradient_errors=each, identical=identical)
    problems = [*_find_noise(noise, report, failure), *_find_problems(report, scheduled, stored, failure)]
    return replace(report, problems=tuple(problems))


def _run_schedule(trial: Trial, model: nn.Module, can_compare: bool) -> tuple[VerifyReport, Outcome | None, str]:
    """Run the model with its schedule; return errors of states, the outcome if there is one, and why the run failed.

    A run that the tripwire ends is repeated without it, for figures.
    """
    failure = ""
    for tripwire in (True, False) if can_compare else (False,):
        recorder = _InputRecorder(model)
        try:
            scheduled = trial.run(tripwire=tripwire, watch=recorder.watch)
        except RecoveryError as error:
            if any(map(is_sharded, model.parameters())):  # the other processes wait, and cannot begin again
                raise
            failure = failure or str(error)
        else:
            return recorder.report, scheduled, failure
    return recorder.report, None, failure


class _InputRecorder:
    """Record each step's input in forward and its relative error when reconstructed in backward.

    Hooks see the input of a step. Layers, and steps made of them, must not have hooks, which would have them run otherwise: of
    these the states that inversion rebuilds are seen.
    """

    def __init__(self, model: nn.Module):
        self._in_forward = True
        self._modes = {name: mode for name, _, mode in find_steps(model)}
        self._made_of_layers = {name for name, module, _ in find_steps(model) if is_made_of_layers(module)}
        self._errors: dict[str, float] = {}
        self._precision = max((p.dtype for p in model.parameters()), key=_coarseness)
        self._inputs: dict[str, list[Tensor]] = defaultdict(list)

    @property
    def report(self) -> VerifyReport:
        return VerifyReport(self._precision, self._modes, self._errors)

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[Callable[[], None]]:
        """Record a run of the model; call what is yielded between forward and backward."""
        self._in_forward = True
        self._errors.clear()
        self._inputs.clear()
        hooks = [
            step.register_forward_pre_hook(partial(self._record, name))
            for name, step, _ in find_steps(model)
            if name not in self._made_of_layers
        ]
        try:
            with observe_states(partial(self._note_state, Paths(model))):
                yield self._end_forward
        finally:
            for hook in hooks:
                hook.remove()
            self._inputs.clear()

    def _end_forward(self) -> None:
        self._in_forward = False

    def _note_state(self, paths: Paths, module: nn.Module, name: str, state: Tensor) -> CompareFunction | None:
        """Return what compares the rebuilt input of a layer, or of a step made of layers, with this one."""
        path = f"{paths.find(module, name)}."
        unit = next((unit for unit in self._made_of_layers if path.startswith(f"{unit}.")), None)
        return None if unit is None else partial(self._compare_state, unit, state.clone())

    @torch.no_grad()
    def _compare_state(self, unit: str, state: Tensor, rebuilt: Tensor, _: float | Tensor) -> None:
        self._precision = max(self._precision, state.dtype, key=_coarseness)
        error = _norm(rebuilt - state) / max(_norm(state), torch.finfo(state.dtype).tiny)
        self._errors[unit] = max(error, self._errors.get(unit, 0.0))

    @torch.no_grad()
    def _record(self, name: str, step: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach()
        if self._in_forward:
            self._inputs[name].append(x)
            dtypes = [self._precision, x.dtype]
            if torch.is_autocast_enabled(x.device.type):
                dtypes.append(torch.get_autocast_dtype(x.device.type))
            self._precision = max(dtypes, key=_coarseness)
            return
        calls = self._inputs[name]
        original = calls.pop() if len(calls) > 1 else calls[0]  # backward goes through a chain's calls from the last one
        error = _norm(x - original) / max(_norm(original), torch.finfo(original.dtype).tiny)
        self._errors[name] = max(error, self._errors.get(name, 0.0))


def _find_noise(noise: float, report: VerifyReport, failure: str) -> Iterator[str]:
    """Yield a sentence if two stored runs differ by more than rounding explains."""
    if not noise <= _LIMITS[report.dtype][1]:
        cause = (
            " Some function depends on more than its input, its parameters and torch's random numbers, so it cannot be run "
            "again in backward."
        )
        yield (
            f"The model does not repeat itself: the gradients of two runs with the same seed, both storing all activations, "
            f"differ by {noise:.1e}.{'' if failure else cause}"
        )


def _find_problems(report: VerifyReport, scheduled: Outcome, stored: Outcome, failure: str) -> Iterator[str]:
    """Yield a sentence for every reason not to train like this; `failure` is what the tripwire said."""
    state_limit, gradient_limit, single_limit = _LIMITS[report.dtype]
    if not _are_finite(stored):
        yield "With all activations stored the gradients are not finite, so there is nothing to compare with."
        return
    missing = [name for name, g in scheduled.gradients.items() if (g is None) != (stored.gradients[name] is None)]
    if missing:
        yield f"Parameters with a gradient in one run and none in the other: {join_names(missing)}."
    errors = report.reconstruction_errors
    inaccurate = [name for name, error in errors.items() if not error <= state_limit]
    if inaccurate:
        worst = max(inaccurate, key=lambda name: errors[name])
        remedy = failure or (
            "Set the schedule of later steps to 'recompute' or 'store', keep the streams in float32, or use exact=True if the "
            "coupling allows it."
        )
        yield (
            f"{len(inaccurate)} of {len(errors)} states are reconstructed with an error above {state_limit:.0e}, the worst at "
            f"{worst} ({errors[worst]:.1e}). {remedy}"
        )
    elif failure:
        yield failure
    error = report.gradient_error
    if not error <= gradient_limit:
        yield f"The gradients differ from those of storing everything by {error:.1e}; rounding explains {gradient_limit:.0e}."
    wrong = [name for name, error in report.gradient_errors.items() if not error <= single_limit]
    if wrong:
        yield f"Single gradients differ by more than {single_limit:.0e}: {join_names(wrong, most=4)}."
    pairs = zip(scheduled.buffers, stored.buffers, strict=True)
    changed = dict.fromkeys(name for (name, b), (_, then) in pairs if not torch.allclose(b, then, equal_nan=True))
    if changed:
        yield f"Buffers end with other values than when everything is stored, as if updated twice: {join_names(list(changed))}."
    if not all(map(torch.equal, scheduled.rng_states, stored.rng_states)):
        yield "The run uses another amount of torch's random numbers than when everything is stored."


def _compare_gradients(gradients: Gradients, expected: Gradients) -> tuple[float, dict[str, float]]:
    """Return the relative error of all gradients together and of each."""
    pairs = {name: (g, expected[name]) for name, g in gradients.items()}
    both = {name: (g, ref) for name, (g, ref) in pairs.items() if g is not None and ref is not None}
    if not both:
        return 0.0, {}
    errors = {name: _norm(g - ref) for name, (g, ref) in both.items()}
    norms = {name: _norm(ref) for name, (_, ref) in both.items()}
    total = math.hypot(*norms.values())
    floor = _SHARE * total / math.sqrt(sum(ref.numel() for _, ref in both.values()))
    scales = {name: max(norms[name], floor * math.sqrt(ref.numel())) for name, (_, ref) in both.items()}
    return _ratio(math.hypot(*errors.values()), total), {name: _ratio(errors[name], scales[name]) for name in both}


def _ratio(error: float, scale: float) -> float:
    return error / scale if scale else (0.0 if error == 0 else math.inf)


def _are_identical(gradients: Gradients, expected: Gradients) -> bool:
    pairs = [(g, expected[name]) for name, g in gradients.items()]
    return all(g is ref or (g is not None and ref is not None and torch.equal(g, ref)) for g, ref in pairs)


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)))


def _are_finite(outcome: Outcome) -> bool:
    return all(g is None or bool(torch.isfinite(g).all()) for g in outcome.gradients.values())


def _coarseness(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype in _LIMITS else 0.0
