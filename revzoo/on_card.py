"""`revzoo.fits`: what a training step of any network takes stored, checkpointed, planned and reversible, and what fits a card.

Nothing is computed: steps run in FakeTensors. Where the largest batch of a plan is asked for, two batches are planned. All that
is alive in a step grows evenly with the batch, from what does not grow at all: at least weights and optimizer state, at most
gradients, too. That bounds the peaks of the plan from above in every other batch. With the length of texts it grows at least
evenly, and at most as its square.
"""

import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn

from revzoo.analysis.chains import preserve_schedules
from revzoo.analysis.dry_run import (
    LossFunction,
    compute_cross_entropy,
    compute_usual_loss,
    isolated,
    require_batch,
    require_module,
)
from revzoo.analysis.flops import FlopCounter
from revzoo.analysis.optimizer_step import OptimizerBytes, count_optimizer
from revzoo.analysis.report import MemoryReport
from revzoo.analysis.step_memory import run_and_measure
from revzoo.errors import BudgetError, InputError, MissingValueError, RevzooError
from revzoo.graph.module_planner import plan_module
from revzoo.graph.progress import Report, keep_silent
from revzoo.in_place.ways import Way, has_head_of_tokens, in_mode, list_ways, without_masks
from revzoo.planning.card import Fits, Method, parse_card
from revzoo.planning.fit import find_largest
from revzoo.planning.planner import solve
from revzoo.planning.profiling.hooks import PlannableModel
from revzoo.planning.profiling.profile import profile
from revzoo.runtime.drift import ignore_error_growth
from revzoo.runtime.lazy_logits import WholeLogitsWarning
from revzoo.runtime.mode import Mode
from revzoo.runtime.nested import map_tensors, tensors_in

_MOST = 2**20  # examples or tokens
_BEFORE_PLANS = ("checkpointed", "inverted")  # a plan may be as large as they are
_USUAL_CARD = 24 * 10**9  # RTX 3090 and 4090, L4, A10
_PLENTY = 2**60  # a budget that everything fits
_LONGEST_PROBLEM = 240  # characters


def fits(
    model: nn.Module,
    batch: Any,
    card: str | int | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: LossFunction | None = None,
    vary_length: bool = False,
    report: Report | None = None,
) -> Fits:
    """Return what a training step takes stored, checkpointed, planned and reversible in place, and what fits a card.

    Bytes are counted and nothing is computed, so model and batch may be on the meta device, however large they are.

    Args:
        model: any, set up as it will be trained. It stays as it is.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        card: its memory, such as "24GB"; None is that of the CUDA device, or 24 GB where there is none.
        optimizer: its state is part of every peak, and its update may be the peak.
        loss: computes the loss from what the model returns; None is cross-entropy of its logits, where it returns an object
            that has some or a row of numbers for each example, or is a language model of the zoo, and otherwise a sum.
        vary_length: look for the longest text instead of the largest batch.
        report: is told now and then what is being done, for a status line; None tells nobody.
    Raises:
        InputError: a model, batch, optimizer or card that cannot be used, or a step that cannot be counted without values.
    """
    require_module(model)
    report = report or keep_silent
    card_bytes = _read_card() if card is None else parse_card(card)
    taken, dim = count_optimizer(model, optimizer), int(vary_length)
    size = next((t.shape[dim] for t in require_batch(batch) if t.dim() > dim), 0)
    if not size:
        raise InputError("A batch of texts has a tensor of two dimensions: texts and tokens. Received: none.")
    most = min(_MOST, getattr(getattr(model, "config", None), "max_position_embeddings", _MOST)) if vary_length else _MOST
    answer = Fits(type(model).__name__, size, ("batch", "tokens")[dim], card_bytes, 0, ())
    own = isinstance(model, PlannableModel)
    loss = loss or (compute_cross_entropy if own and has_head_of_tokens(model) else compute_usual_loss)
    count = _Count(model, batch, dim, size, most, answer.limit_bytes, optimizer, taken, loss)
    report("counting a step that stores everything")
    with in_mode(model, Mode.STORE) if own else nullcontext():
        try:
            memory, flops = count.run(size)
        except Exception as error:  # a network may raise anything where its tensors have no values
            raise InputError(f"A step of {type(model).__name__} cannot be counted: {_describe_problem(error)}.") from error
        try:
            stored = count.describe("stored", memory, 1.0)
        except Exception as error:
            raise InputError(
                f"A step of {type(model).__name__} is counted for other batches, too, and cannot be: "
                f"{_describe_problem(error)}. The {('first', 'second')[dim]} dimension of a batch's tensors is "
                f"resized, from {size} here: make it that of the {('examples', 'tokens')[dim]}."
            ) from error

    def count_ways(ways: Mapping[str, Way]) -> Iterator[Method]:
        for name, change in ways.items():
            report(f"counting: {name}")
            yield _try(name, partial(count.count_with, name, change, flops))

    ways = list_ways(model, batch)
    first = {name: ways.pop(name) for name in _BEFORE_PLANS if name in ways}
    methods = [stored, *count_ways(first)]
    fixed = memory.weight_bytes + memory.buffer_bytes + memory.gradient_bytes + memory.optimizer_bytes
    if fixed > answer.limit_bytes:
        methods.append(Method("planned", problem="Weights, gradients and optimizer state are more than the card has"))
    else:
        report("planning")
        most_of_others = max(method.largest for method in methods)
        methods.append(_try("planned", partial(_plan, count, stored, memory, most_of_others, report)))
    methods += count_ways(ways)
    return replace(answer, fixed_bytes=fixed, methods=tuple(methods))


@dataclass(frozen=True)
class _Count:
    """Counts steps of a model.

    Args:
        model, batch, optimizer, loss: as for `fits`.
        dim: of the batch's tensors that is varied: 0 for examples, 1 for tokens.
        size: of the batch in it.
        most: of the sizes to look at.
        limit: bytes that a step may take.
        taken: by the optimizer.
    """

    model: nn.Module
    batch: Any
    dim: int
    size: int
    most: int
    limit: int
    optimizer: torch.optim.Optimizer | None
    taken: OptimizerBytes
    loss: LossFunction

    def resize(self, size: int) -> Any:
        """Return a batch of another size, without values; the batch itself if it has this size."""

        def resize(t: Tensor) -> Tensor:
            if t.dim() <= self.dim or t.shape[self.dim] != self.size:
                return t
            shape = (*t.shape[: self.dim], size, *t.shape[self.dim + 1 :])
            return torch.empty(shape, dtype=t.dtype, device="meta").requires_grad_(t.requires_grad)

        return self.batch if size == self.size else map_tensors(resize, self.batch)

    def run(self, size: int) -> tuple[MemoryReport, int]:
        """Return the memory and the FLOPs of a step."""
        step = isolated(self.model, self.resize(size), fake=True)
        with ignore_error_growth(), without_masks(self.batch), step as inputs, FlopCounter() as flops:
            memory = run_and_measure(self.model, inputs, self.taken, loss=self.loss).memory
        return memory, flops.forward + flops.backward

    def describe(self, name: str, memory: MemoryReport, work: float) -> Method:
        """Return the row of a step, and find the largest that fits."""
        largest = self._find_largest(memory.peak_bytes)
        return Method(name, memory.after_forward_bytes, memory.peak_bytes, work, largest)

    def count_with(self, name: str, change: Way, stored: int) -> Method:
        """Return the row of a model that is changed meanwhile, given the FLOPs of storing everything."""
        with change(self.model), catch_warnings():
            simplefilter("error", WholeLogitsWarning)
            memory, flops = self.run(self.size)
            return self.describe(name, memory, flops / max(1, stored))

    def _find_largest(self, peak: int) -> int:
        @cache
        def look(size: int) -> int:
            try:
                return peak if size == self.size else self.run(size)[0].peak_bytes
            except Exception:  # batch norm has no variance in a single number
                if size > 1:
                    raise
                return look(2)

        high = self.size
        if peak < self.limit and self.size < self.most:
            each = (look(2 * self.size) - peak) / self.size
            high = self.most if each <= 0 else min(self.most, self.size + int((self.limit - peak) / each))
        return find_largest(look, high, self.limit, self.size if peak <= self.limit else 1)


def _try(name: str, count: Callable[[], Method]) -> Method:
    """Return a row, or the one that says why there is none."""
    try:
        return count()
    except Exception as error:  # a network may raise anything where its tensors have no values, or while it is captured
        return Method(name, problem=_describe_problem(error))


def _describe_problem(error: Exception) -> str:
    words = str(error) if isinstance(error, RevzooError) else f"{type(error).__name__}: {error}"
    if isinstance(error, MissingValueError):
        words = words.partition("Received: ")[2]
    return textwrap.shorten(words.partition(". ")[0], _LONGEST_PROBLEM, placeholder=" ...").rstrip(".")


def _plan(count: _Count, stored: Method, memory: MemoryReport, most_of_others: int, report: Report) -> Method:
    """Return the row of the plan with the least work that fits; where everything or nothing does, of one that takes little."""
    make = _plan_of_the_zoo if isinstance(count.model, PlannableModel) else _plan_module
    chosen, least = None, 0
    if stored.peak_bytes > count.limit:
        with suppress(BudgetError):
            chosen, least = make(count, count.size, count.limit, report)
    if chosen is None:
        chosen, least = make(count, count.size, None, report)
    fixed = memory.weight_bytes + memory.buffer_bytes + memory.optimizer_bytes
    grown = fixed + memory.gradient_bytes  # while backward runs
    updated = grown + count.taken.update

    def scale(size: int, taken: int, fixed: int) -> int:
        """Return a size that takes no more than the limit, if `taken` bytes of a size grow from `fixed`."""
        ratio = (count.limit - fixed) / max(1, taken - fixed)
        if count.dim and ratio > 1:  # attention may take as much as the square of a text's length
            ratio **= 0.5
        return max(0, min(count.most, int(size * ratio)))

    near = max(1, min(scale(count.size, least, updated), 4 * max(count.size, most_of_others)))
    if count.dim:
        near = most_of_others or near
    taken = least if near == count.size else make(count, near, None, report)[1]
    largest = scale(near, taken, fixed if taken <= count.limit else grown)
    if not count.dim:  # an update fits beside the batch
        batch_bytes = sum(t.numel() * t.element_size() for t in tensors_in(count.batch))
        largest = min(largest, scale(count.size, updated + batch_bytes, updated))
    # A plan may store everything, and put all steps of the zoo's models in one mode.
    known = most_of_others if make is _plan_of_the_zoo else stored.largest
    known = max(known, count.size if chosen.peak_bytes <= count.limit else 0)
    return replace(chosen, largest=max(largest, known))


def _plan_module(count: _Count, size: int, budget: int | None, report: Report) -> tuple[Method, int]:
    """Return the row of a plan, and the smallest peak that was found."""
    plan, details = plan_module(
        count.model, count.resize(size), budget, optimizer=count.optimizer, loss=count.loss, report=report
    )
    work = 1 + plan.extra_flops / max(1, plan.total_flops)
    return Method("planned", details.kept_bytes, plan.peak_bytes, work), plan.min_peak_bytes or plan.peak_bytes


def _plan_of_the_zoo(count: _Count, size: int, budget: int | None, report: Report) -> tuple[Method, int]:
    batch = count.resize(size)
    measured = profile(count.model, batch, count.optimizer, loss=count.loss, run=False)
    least = solve(measured, _PLENTY).min_peak_bytes
    plan = solve(measured, budget or least)
    with preserve_schedules(count.model):
        plan.apply(count.model)
        memory, flops = replace(count, batch=batch, size=size).run(size)
    return Method("planned", memory.after_forward_bytes, memory.peak_bytes, flops / max(1, flops - plan.extra_flops)), least


def _read_card() -> int:
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else _USUAL_CARD
