"""Are the gradients the right ones? The scheduled run against the stored run of the same model and batch."""

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

from revzoo.analysis.dry_run import call, chains, differentiable, isolated, require_module, scheduled, steps
from revzoo.errors import InputError, RecoveryError, listing
from revzoo.runtime.schedule import Mode

Gradients = dict[str, Tensor | None]

# Largest error of a rebuilt state, of all gradients together, and of one, by the coarsest precision at work.
#   float64: nothing but a kink (a ReLU at 0) lies between 1e-15, what a right run reaches, and a mistake.
#   float32: states of 100 blocks are rebuilt to 2e-6. Rounding by itself moves the gradients of ReLU networks by up to 3e-3
#       (stored float32 against float64: units flip at their kink), which is far below the noise of a mini-batch.
#   half: with autocast in f, states of 100 blocks are rebuilt to 1e-2. bfloat16 by itself moves gradients by 7e-3
#       (transformer, 12 blocks) to 9e-2 (convolutions with ReLU, 8 blocks) against float64.
_HALF = (2e-2, 1e-1, 5e-1)
_LIMITS = {
    torch.float64: (1e-8, 1e-8, 1e-7),
    torch.float32: (1e-4, 1e-2, 1e-1),
    torch.float16: _HALF,
    torch.bfloat16: _HALF,
}
# A gradient below this share of the model's typical one (root mean square) is measured against that share instead: the
# true gradient of a bias before a softmax or a BatchNorm is 0, and all that is there is rounding.
_SHARE = 1e-2


@dataclass(frozen=True)
class VerifyReport:
    """How a model's scheduled run compares with its stored run.

    Args:
        dtype: the coarsest precision at work: of weights, streams, or autocast.
        modes: of each step, in order.
        reconstruction_errors: of each step that was run again, ||w' - w|| / ||w|| of the state it was given.
        gradient_error: ||g - stored|| / ||stored|| over all parameters.
        gradient_errors: the same per parameter with a gradient, measured against at least 1 % of a typical gradient.
        identical: every gradient equals the stored one bit for bit.
        problems: why the model is not safe to train like this; empty when it is.
    """

    dtype: torch.dtype
    modes: dict[str, Mode]
    reconstruction_errors: dict[str, float] = field(default_factory=dict)
    gradient_error: float = math.nan
    gradient_errors: dict[str, float] = field(default_factory=dict)
    identical: bool = False
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the model is safe to train with this schedule in this precision."""
        return not self.problems

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        width = max(map(len, self.modes), default=0)
        lines = ["step, mode, relative error of the state it is run on again:"]
        for name, mode in self.modes.items():
            error = self.reconstruction_errors.get(name)
            lines.append(f"  {name:<{width}}  {mode:<9}  {'not run again' if error is None else f'{error:.1e}'}")
        if self.gradient_errors:
            name, worst = max(self.gradient_errors.items(), key=lambda item: item[1])
            lines.append(
                f"{len(self.gradient_errors)} gradients against the stored run: relative error {self.gradient_error:.1e}, "
                f"at most {worst:.1e} ({name})"
            )
        if self.ok:
            how = "gradients are bit-identical to" if self.identical else "gradients agree, up to rounding, with"
            return "\n".join([*lines, f"Safe to train in {dtype}: {how} those of storing everything."])
        return "\n".join([*lines, f"Not safe to train in {dtype}:", *(f"  - {problem}" for problem in self.problems)])


def verify(model: nn.Module, batch: Any) -> VerifyReport:
    """Compare every gradient of the model's current schedule with the run that stores everything.

    Three runs with the same weights, batch, random streams and a fixed random gradient at the outputs: stored, stored once
    more (does the model repeat itself at all?), and scheduled. The model is left exactly as it was found.

    Args:
        model: a `revzoo.Model`, a `ReversibleChain`, or any module with chains inside, in the state it is to be trained.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
    Raises:
        InputError: not a module or no chain in it, an unusable batch, no gradient to compare, or parameters without values.
    """
    require_module(model)
    if not chains(model):
        raise InputError(f"There is no revzoo.Model or ReversibleChain in this {type(model).__name__} to verify.")
    if any(p.is_meta or isinstance(p, FakeTensor) for p in model.parameters()):
        raise InputError("Gradients can be compared where parameters have values. Received: meta or fake parameters.")
    with scheduled(model) as assign:
        assign("store")
        stored, repeated = _outcome(model, batch), _outcome(model, batch)
    watch = _Watch(model)
    with watch:
        try:
            outcome = _outcome(model, batch, watch)
        except RecoveryError as error:
            return VerifyReport(watch.precision, watch.modes, watch.errors, problems=(str(error),))
    overall, each = _gradient_errors(outcome.gradients, stored.gradients)
    report = VerifyReport(
        dtype=watch.precision,
        modes=watch.modes,
        reconstruction_errors=watch.errors,
        gradient_error=overall,
        gradient_errors=each,
        identical=_identical(outcome.gradients, stored.gradients),
    )
    return replace(report, problems=tuple(_problems(report, outcome, stored, repeated)))


@dataclass(frozen=True)
class _Outcome:
    """What one forward and backward leaves behind."""

    gradients: Gradients
    buffers: dict[str, Tensor]
    random: list[Tensor]


def _outcome(model: nn.Module, batch: Any, watch: "_Watch | None" = None) -> _Outcome:
    with isolated(model, batch) as inputs:
        outputs = differentiable(call(model, inputs))
        if watch is not None:
            watch.forward = False
        dice = torch.Generator().manual_seed(0)  # a sum would do for most heads, but its gradient through a norm is 0
        weights = [torch.randn(y.shape, generator=dice).to(y) for y in outputs]
        torch.autograd.backward(outputs, weights)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        return _Outcome(gradients, dict(model.named_buffers()), _random_state(model))


def _random_state(model: nn.Module) -> list[Tensor]:
    cards = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, cards)]


class _Watch:
    """Notes the state each step is given in forward, and how far from it the one is that it is given in recovery."""

    def __init__(self, model: nn.Module):
        self.forward = True
        self.modes: dict[str, Mode] = {}
        self.errors: dict[str, float] = {}
        self.precision = max((p.dtype for p in model.parameters()), key=_coarseness)
        self._states: dict[str, list[Tensor]] = defaultdict(list)
        self._steps: list[tuple[str, nn.Module]] = []
        self._hooks: list[RemovableHandle] = []
        for name, step, mode in steps(model):
            self.modes[name] = mode
            self._steps.append((name, step))

    def __enter__(self) -> None:
        self._hooks = [step.register_forward_pre_hook(partial(self._called, name)) for name, step in self._steps]

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _called(self, name: str, step: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        state = inputs[0].detach()
        if self.forward:
            self._states[name].append(state)
            kinds = [self.precision, state.dtype]
            if torch.is_autocast_enabled(state.device.type):
                kinds.append(torch.get_autocast_dtype(state.device.type))
            self.precision = max(kinds, key=_coarseness)
            return
        calls = self._states[name]
        true = calls.pop() if len(calls) > 1 else calls[0]  # a chain that was called twice is recovered last call first
        error = _norm(state - true) / max(_norm(true), torch.finfo(true.dtype).tiny)
        self.errors[name] = max(error, self.errors.get(name, 0.0))


def _problems(report: VerifyReport, outcome: _Outcome, stored: _Outcome, repeated: _Outcome) -> Iterator[str]:
    """Yield, in words, everything that speaks against training like this."""
    state_limit, gradient_limit, single_limit = _LIMITS[report.dtype]
    if not all(_finite(g) for g in stored.gradients.values()):
        yield "The stored run itself gives gradients that are not finite, so there is nothing to compare with."
        return
    noise, _ = _gradient_errors(repeated.gradients, stored.gradients)
    if not noise <= gradient_limit:
        yield (
            f"The model does not repeat itself: two stored runs with the same seed differ by {noise:.1e} in their gradients. "
            "Some function depends on more than its input, parameters and torch's random stream, so it cannot be run again."
        )
    lost = [name for name, g in outcome.gradients.items() if (g is None) != (stored.gradients[name] is None)]
    if lost:
        yield f"Parameters with a gradient in one run and none in the other: {listing(lost)}."
    states = report.reconstruction_errors
    far = [name for name, error in states.items() if not error <= state_limit]
    if far:
        worst = max(far, key=lambda name: states[name])
        yield (
            f"{len(far)} of {len(states)} states are rebuilt with an error above {state_limit:.0e}, the worst at {worst} "
            f"({states[worst]:.1e}). Set the schedule of steps behind it to 'recompute' or 'store', keep the streams in "
            "float32, or use exact=True where the coupling allows it."
        )
    error = report.gradient_error
    if not error <= gradient_limit:
        yield f"The gradients differ from the stored ones by {error:.1e}; up to {gradient_limit:.0e} may be rounding."
    wrong = [name for name, error in report.gradient_errors.items() if not error <= single_limit]
    if wrong:
        yield f"Single gradients differ by more than {single_limit:.0e}: {listing(wrong, most=4)}."
    moved = [name for name, b in outcome.buffers.items() if not torch.allclose(b, stored.buffers[name], equal_nan=True)]
    if moved:
        yield f"Buffers end otherwise than in the stored run, as if counted twice: {listing(moved)}."
    if not all(map(torch.equal, outcome.random, stored.random)):
        yield "The run leaves torch's random stream elsewhere than the stored run."


def _gradient_errors(found: Gradients, expected: Gradients) -> tuple[float, dict[str, float]]:
    """Return the relative error of all gradients together and of each."""
    pairs = {name: (g, expected[name]) for name, g in found.items()}
    both = {name: (g, ref) for name, (g, ref) in pairs.items() if g is not None and ref is not None}
    if not both:
        return 0.0, {}
    errors = {name: _norm(g - ref) for name, (g, ref) in both.items()}
    norms = {name: _norm(ref) for name, (_, ref) in both.items()}
    whole = math.hypot(*norms.values())
    typical = _SHARE * whole / math.sqrt(sum(ref.numel() for _, ref in both.values()))
    scales = {name: max(norms[name], typical * math.sqrt(ref.numel())) for name, (_, ref) in both.items()}
    return _ratio(math.hypot(*errors.values()), whole), {name: _ratio(errors[name], scales[name]) for name in both}


def _ratio(error: float, scale: float) -> float:
    return error / scale if scale else (0.0 if error == 0 else math.inf)


def _identical(found: Gradients, expected: Gradients) -> bool:
    pairs = [(g, expected[name]) for name, g in found.items()]
    return all(g is ref or (g is not None and ref is not None and torch.equal(g, ref)) for g, ref in pairs)


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)))


def _finite(x: Tensor | None) -> bool:
    return x is None or bool(torch.isfinite(x).all())


def _coarseness(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype in _LIMITS else 0.0
