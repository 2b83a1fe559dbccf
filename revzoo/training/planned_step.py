"""The training step that a plan is for: its batch, its loss, and what else is alive during it.

The batch is the run's (for texts, of the greatest length), and so are autocast and loss. Whatever is alive besides the step
counts too: the optimizer's state and what its update takes; averaged weights; labels; on a CPU the next batch, which is loaded
ahead; with gradient accumulation the gradients of earlier batches; and the buckets that processes exchange gradients in. With
an optimizer inside backward each gradient counts as long as it is there. The planner is imported where a step is planned: most
runs have no budget, and only print the table of memory.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from revzoo.analysis.chains import assign_tiles, preserve_schedules
from revzoo.analysis.dry_run import accumulated_gradients, memory_errors, updates_in_backward
from revzoo.analysis.optimizer_step import count_optimizer, count_updates_apart
from revzoo.analysis.report import MemoryReport
from revzoo.analysis.step_memory import measure_modes
from revzoo.data.random import seeded
from revzoo.planning.plan import Plan
from revzoo.planning.setting import Setting, read_setting
from revzoo.runtime.lookahead import LookaheadOption
from revzoo.runtime.mode import MODES
from revzoo.training.run import Run

_SCALAR_BYTES = 8 + 4  # the sum of an epoch's losses; a batch's loss, and the same divided by the batches of an update


class PlannedStep:
    """The step of a process that has the whole network.

    Args:
        run: the run.
        batch_size: examples of a batch of this process; None: the run's.
        setting: what a plan holds for.
        lookahead: that a plan is asked for.
        present_bytes: on the device already, and part of what a budget is for.
    """

    def __init__(self, run: Run, batch_size: int | None = None):
        from revzoo.planning.budget import count_model_bytes

        self._run = run
        recipe, device = run.recipe, run.accelerator.device
        with seeded(recipe.train.seed):
            self._batch = run.model.example_input(batch_size or run.batch_size, "cpu")
            # A language model has one label for each id; the loss flattens them as they are here.
            labels = torch.zeros(self._batch.numel() if run.data.num_classes is None else len(self._batch), dtype=torch.int64)
            targets = run.loss.mix(self._batch.clone(), labels, recipe.train.seed)[1]
        self._batch, self._targets = self._batch.to(device), targets.to(device)
        ahead = self._batch.nbytes + labels.nbytes if device.type == "cpu" else 0
        soft = 0 if targets is labels else targets.nbytes
        beside = ahead + labels.nbytes + soft + _SCALAR_BYTES
        self._accumulates = recipe.train.accumulate > 1
        with run.accelerator.autocast():
            self.setting: Setting = read_setting(run.model, self._batch)
        model, optimizer = run.model, run.optimizer
        gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        averaged = 0 if run.ema is None else count_model_bytes(run.ema.module)
        buckets = gradients if run.accelerator.num_processes > 1 else 0
        self.lookahead: LookaheadOption = recipe.memory.lookahead
        # One that updates inside backward makes no update after it: what it takes is counted by `_treat_gradients`.
        in_backward = recipe.train.optimizer_in_backward
        state = count_optimizer(model, optimizer).state if in_backward or optimizer.state else 0
        self._optimizer = None if in_backward else optimizer
        self._updates = count_updates_apart(model, optimizer) if in_backward else None
        self._run_bytes = averaged + buckets + beside
        self._other_bytes = self._run_bytes + (state if in_backward else 0)
        self.present_bytes = count_model_bytes(model) + averaged + buckets + (state if optimizer.state else 0)

    def plan(self, limit: int) -> Plan:
        """Return the plan for a budget [bytes]. Raises BudgetError if no schedule fits."""
        from revzoo.planning.planner import profile_and_plan

        with self._treat_gradients():
            _, plan = profile_and_plan(
                self._run.model,
                self._batch,
                limit,
                solver=self._run.recipe.memory.solver,
                optimizer=self._optimizer,
                loss=self._loss,
                lookahead=self.lookahead,
                tiles="auto" if self._run.recipe.model.tiles == "auto" else None,
                other_bytes=self._other_bytes,
                setting=self.setting,
            )
        return plan

    def count_peak(self, plan: Plan) -> int:
        """Return the peak of the step with a plan's schedule [bytes]."""
        from revzoo.planning.profiling.count import count_peak

        model = self._run.model
        taken = count_optimizer(model, self._optimizer)
        other_bytes = self._other_bytes + taken.state
        with self._treat_gradients(), preserve_schedules(model):
            assign_tiles(model, plan.setting.tiles)
            return count_peak(
                model, self._batch, plan.schedule, self._loss, other_bytes, update_bytes=taken.update, lookahead=plan.lookahead
            )

    def measure_seconds(self, plan: Plan) -> float:
        """Return the seconds of a forward and backward with a plan's schedule. Raises MemoryError."""
        from revzoo.planning.profiling.timing import measure_step_seconds

        with self._treat_gradients(), memory_errors():
            return measure_step_seconds(self._run.model, self._batch, plan.schedule, self._loss, plan.lookahead).seconds

    def measure_modes(self, modes: Sequence[str] = MODES) -> tuple[dict[str, MemoryReport], str | None]:
        """Return the memory of the step in these modes, and the network's present mode; None if its schedule mixes modes."""
        run = self._run
        with accumulated_gradients(run.model) if self._accumulates else nullcontext():
            return measure_modes(
                run.model,
                self._batch,
                run.optimizer,
                in_backward=self._updates is not None,
                loss=self._loss,
                other_bytes=self._run_bytes,
                modes=modes,
            )

    def _loss(self, outputs: Any) -> Tensor:
        return self._run.loss(outputs, self._targets)

    def _treat_gradients(self) -> AbstractContextManager[None]:
        """Let every step inside the block begin and end with the gradients that there are in training."""
        if self._updates is not None:
            return updates_in_backward(self._run.model, self._updates)
        return accumulated_gradients(self._run.model) if self._accumulates else nullcontext()
