"""Verify a model's gradients: compare its schedule with storing all activations, for the same model and batch."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

from revzoo.analysis.dry_run import (
    call,
    find_chains,
    find_steps,
    isolated,
    preserve_schedules,
    require_module,
    select_differentiable,
)
from revzoo.analysis.leftover import measure_leftovers
from revzoo.errors import InputError, RecoveryError, join_names
from revzoo.format import format_bytes, format_dtype
from revzoo.runtime.schedule import Mode

Gradients = dict[str, Tensor | None]

# Largest relative error allowed of a reconstructed state, of all gradients together, and of a single gradient, by the
# coarsest precision in use.
#   float64: a correct run reaches 1e-15; apart from activations that flip at the kink of a ReLU, more is a mistake.
#   float32: the states of 100 blocks are reconstructed to 2e-6. Rounding alone changes the gradients of ReLU networks by up to
#       3e-3 (float32 against float64, both storing everything), far less than the noise of a mini-batch.
#   half: with autocast in f, the states of 100 blocks are reconstructed to 1e-2. bfloat16 alone changes gradients by 7e-3
#       (transformer, 12 blocks) to 9e-2 (convolutions with ReLU, 8 blocks) against float64.
_HALF = (2e-2, 1e-1, 5e-1)
_LIMITS = {
    torch.float64: (1e-8, 1e-8, 1e-7),
    torch.float32: (1e-4, 1e-2, 1e-1),
    torch.float16: _HALF,
    torch.bfloat16: _HALF,
}
# The error of a gradient is relative to its norm, or to this share of a typical gradient of the model (root mean square) if
# that is larger: the true gradient of a bias before a softmax or a BatchNorm is 0, and what is computed is rounding.
_SHARE = 1e-2


@dataclass(frozen=True)
class VerifyReport:
    """Comparison of a model's schedule with storing all activations.

    Args:
        dtype: the coarsest precision in use: of weights, streams, or autocast.
        modes: mode of each step, in order.
        reconstruction_errors: for each step that ran again in backward, the relative error of its input:
            ||w' - w|| / ||w|| of the reconstructed w' and the original w.
        gradient_error: ||g - g_store|| / ||g_store|| over the gradients of all parameters.
        gradient_errors: the same for each parameter with a gradient; relative to 1 % of a typical gradient at least.
        identical: whether every gradient is the same bit for bit.
        problems: reasons why the model is not safe to train like this; none if it is.
        leftover_bytes: for each step that keeps more from forward to backward than its mode says, how much more. It costs
            memory and changes no gradient.
    """

    dtype: torch.dtype
    modes: dict[str, Mode]
    reconstruction_errors: dict[str, float] = field(default_factory=dict)
    gradient_error: float = math.nan
    gradient_errors: dict[str, float] = field(default_factory=dict)
    identical: bool = False
    problems: tuple[str, ...] = ()
    leftover_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the model is safe to train with this schedule in this precision."""
        return not self.problems

    def __str__(self) -> str:
        dtype = format_dtype(self.dtype)
        width = max(map(len, self.modes), default=0)
        lines = ["step, mode, relative error of its input when reconstructed in backward:"]
        for name, mode in self.modes.items():
            error = self.reconstruction_errors.get(name)
            lines.append(f"  {name:<{width}}  {mode:<9}  {'not run again' if error is None else f'{error:.1e}'}")
        if self.gradient_errors:
            name, worst = max(self.gradient_errors.items(), key=lambda item: item[1])
            lines.append(
                f"{len(self.gradient_errors)} gradients against storing everything: relative error {self.gradient_error:.1e}, "
                f"at most {worst:.1e} ({name})"
            )
        if self.leftover_bytes:
            names, total = join_names(list(self.leftover_bytes), most=4), format_bytes(sum(self.leftover_bytes.values()))
            lines.append(
                f"Kept although the mode drops it: {total}, by {names}. Not autograd keeps it but the step itself: on the ctx "
                "of an autograd.Function without save_for_backward, in an attribute, with hooks of its own such as "
                "save_on_cpu, or in a chain inside it."
            )
        if self.ok:
            agreement = "gradients are bit-identical to" if self.identical else "gradients agree, up to rounding, with"
            return "\n".join([*lines, f"Safe to train in {dtype}: {agreement} those of storing everything."])
        return "\n".join([*lines, f"Not safe to train in {dtype}:", *(f"  - {problem}" for problem in self.problems)])


def verify(model: nn.Module, batch: Any) -> VerifyReport:
    """Compare the gradients of the model's schedule with those of storing all activations.

    Runs the model three times with the same weights, batch and random numbers, and with the same random gradient of the
    outputs: twice with `store`, to see whether the model repeats itself at all, and once with its schedule. One more forward
    shows what is kept. Afterwards the model is as before.

    Args:
        model: a `revzoo.Model`, a `ReversibleChain`, or any module with chains inside, as it is to be trained.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
    Raises:
        InputError: the model is no module, or has no chain inside; the batch has no tensor or no example; nothing requires a
            gradient; or the parameters have no values (meta, FakeTensor).
    """
    require_module(model)
    if not find_chains(model):
        raise InputError(f"There is no revzoo.Model or ReversibleChain in this {type(model).__name__} to verify.")
    if any(p.is_meta or isinstance(p, FakeTensor) for p in model.parameters()):
        raise InputError("Gradients can be compared where parameters have values. Received: meta or fake parameters.")
    with preserve_schedules(model) as assign:
        assign("store")
        stored, repeated = _run(model, batch), _run(model, batch)
    recorder = _InputRecorder(model)
    with recorder:
        try:
            scheduled = _run(model, batch, recorder)
        except RecoveryError as error:
            return VerifyReport(recorder.precision, recorder.modes, recorder.errors, problems=(str(error),))
    overall, each = _compare_gradients(scheduled.gradients, stored.gradients)
    report = VerifyReport(
        dtype=recorder.precision,
        modes=recorder.modes,
        reconstruction_errors=recorder.errors,
        gradient_error=overall,
        gradient_errors=each,
        identical=_are_identical(scheduled.gradients, stored.gradients),
        leftover_bytes=measure_leftovers(model, batch),
    )
    return replace(report, problems=tuple(_find_problems(report, scheduled, stored, repeated)))


@dataclass(frozen=True)
class _Outcome:
    """Gradients, buffers and states of the random generators after one forward and backward."""

    gradients: Gradients
    buffers: dict[str, Tensor]
    rng_states: list[Tensor]


def _run(model: nn.Module, batch: Any, recorder: "_InputRecorder | None" = None) -> _Outcome:
    with isolated(model, batch) as inputs:
        outputs = select_differentiable(call(model, inputs))
        if recorder is not None:
            recorder.in_forward = False
        rng = torch.Generator().manual_seed(0)  # a constant gradient would vanish in a norm before the output
        output_gradients = [torch.randn(y.shape, generator=rng).to(y) for y in outputs]
        torch.autograd.backward(outputs, output_gradients)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        return _Outcome(gradients, dict(model.named_buffers()), _rng_states(model))


def _rng_states(model: nn.Module) -> list[Tensor]:
    gpus = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]


class _InputRecorder:
    """Record each step's input in forward and its relative error when reconstructed in backward."""

    def __init__(self, model: nn.Module):
        self.in_forward = True
        self.modes: dict[str, Mode] = {}
        self.errors: dict[str, float] = {}
        self.precision = max((p.dtype for p in model.parameters()), key=_coarseness)
        self._inputs: dict[str, list[Tensor]] = defaultdict(list)
        self._steps: list[tuple[str, nn.Module]] = []
        self._hooks: list[RemovableHandle] = []
        for name, step, mode in find_steps(model):
            self.modes[name] = mode
            self._steps.append((name, step))

    def __enter__(self) -> None:
        self._hooks = [step.register_forward_pre_hook(partial(self._record, name)) for name, step in self._steps]

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _record(self, name: str, step: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach()
        if self.in_forward:
            self._inputs[name].append(x)
            dtypes = [self.precision, x.dtype]
            if torch.is_autocast_enabled(x.device.type):
                dtypes.append(torch.get_autocast_dtype(x.device.type))
            self.precision = max(dtypes, key=_coarseness)
            return
        calls = self._inputs[name]
        original = calls.pop() if len(calls) > 1 else calls[0]  # backward goes through a chain's calls from the last one
        error = _norm(x - original) / max(_norm(original), torch.finfo(original.dtype).tiny)
        self.errors[name] = max(error, self.errors.get(name, 0.0))


def _find_problems(report: VerifyReport, scheduled: _Outcome, stored: _Outcome, repeated: _Outcome) -> Iterator[str]:
    """Yield a sentence for every reason not to train like this."""
    state_limit, gradient_limit, single_limit = _LIMITS[report.dtype]
    if not all(_is_finite(g) for g in stored.gradients.values()):
        yield "With all activations stored the gradients are not finite, so there is nothing to compare with."
        return
    noise, _ = _compare_gradients(repeated.gradients, stored.gradients)
    if not noise <= gradient_limit:
        yield (
            f"The model does not repeat itself: the gradients of two runs with the same seed, both storing all activations, "
            f"differ by {noise:.1e}. Some function depends on more than its input, its parameters and torch's random numbers, "
            "so it cannot be run again in backward."
        )
    missing = [name for name, g in scheduled.gradients.items() if (g is None) != (stored.gradients[name] is None)]
    if missing:
        yield f"Parameters with a gradient in one run and none in the other: {join_names(missing)}."
    errors = report.reconstruction_errors
    inaccurate = [name for name, error in errors.items() if not error <= state_limit]
    if inaccurate:
        worst = max(inaccurate, key=lambda name: errors[name])
        yield (
            f"{len(inaccurate)} of {len(errors)} states are reconstructed with an error above {state_limit:.0e}, the worst at "
            f"{worst} ({errors[worst]:.1e}). Set the schedule of later steps to 'recompute' or 'store', keep the streams in "
            "float32, or use exact=True if the coupling allows it."
        )
    error = report.gradient_error
    if not error <= gradient_limit:
        yield f"The gradients differ from those of storing everything by {error:.1e}; rounding explains {gradient_limit:.0e}."
    wrong = [name for name, error in report.gradient_errors.items() if not error <= single_limit]
    if wrong:
        yield f"Single gradients differ by more than {single_limit:.0e}: {join_names(wrong, most=4)}."
    changed = [name for name, b in scheduled.buffers.items() if not torch.allclose(b, stored.buffers[name], equal_nan=True)]
    if changed:
        yield f"Buffers end with other values than when everything is stored, as if updated twice: {join_names(changed)}."
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


def _is_finite(x: Tensor | None) -> bool:
    return x is None or bool(torch.isfinite(x).all())


def _coarseness(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype in _LIMITS else 0.0
