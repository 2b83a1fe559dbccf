"""Train a reversible network: one loop for one process or many, which can be stopped and resumed after any update.

    revzoo train digits                                                 one process
    accelerate launch --num_processes 8 -m zoo_cli train RECIPE ...     several, each with a GPU

Every random number of a batch depends only on (seed, epoch, batch, process), so no state of a random generator is saved, and a
resumed run ends with the weights and metrics of an uninterrupted one: bit for bit where the kernels are deterministic, as on
CPUs. After a signal the current update is finished and a state is saved; a killed run resumes after its last complete epoch.
"""

import json
import logging
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from safetensors import SafetensorError
from timm.utils import distribute_bn

from revzoo.analysis.memory_report import measure_modes
from revzoo.checkpoint import files
from revzoo.data.random import reseed
from revzoo.display.figures.curves import plot_curves
from revzoo.display.tables.memory import MemoryTable
from revzoo.errors import CheckpointError, RevzooError
from revzoo.file import write_atomically
from revzoo.model.compile_steps import compile_steps
from revzoo.planning.plan import Plan
from revzoo.training.budget import apply_plan, save_plan
from revzoo.training.evaluation import evaluate
from revzoo.training.interrupt import Interrupted, StopSignal
from revzoo.training.options import Recipe
from revzoo.training.recipe import load_recipe
from revzoo.training.run_folder import REQUIRED_FILES
from revzoo.training.setup import Run, build_run

_CHECK_EVERY = 10  # updates between two checks of the loss, each of which makes the host wait for the GPU


class DivergedError(RevzooError, ArithmeticError):
    """The training loss is infinite or not a number."""


@dataclass(frozen=True)
class Summary:
    """How a run ended.

    Args:
        folder: folder of the run.
        top1: top-1 after the last epoch [%].
        best_top1: best top-1 of all epochs [%].
        best_epoch: first epoch that reached it, from 1.
    """

    folder: Path
    top1: float
    best_top1: float
    best_epoch: int

    def __str__(self) -> str:
        return (
            f"top-1 {self.top1:.2f} % after the last epoch, {self.best_top1:.2f} % after epoch {self.best_epoch}: {self.folder}"
        )


def train(recipe: Recipe, out: Path | None = None) -> Summary:
    """Train from the beginning.

    Args:
        recipe: what to train, on which data, how.
        out: folder of the run, new or empty; None: runs/<recipe>, with a number appended if that exists.

    Raises:
        SpecError: recipe, spec and data contradict one another.
        DataError: the data cannot be used.
        BudgetError: no schedule fits the recipe's memory budget; the folder is then not made.
        DivergedError: the loss is not finite.
        Interrupted: stopped by a signal, after everything was saved.
    """
    run = build_run(recipe, out, resumed=False)
    run.print_start()
    plan = apply_plan(run)  # before the folder is made: a budget that is too small leaves none
    if run.accelerator.is_main_process:
        texts = {"config.yaml": recipe.to_yaml(), "spec.yaml": run.model.spec.to_yaml()}
        if run.data.class_names is not None:
            texts["classes.json"] = json.dumps(run.data.class_names, ensure_ascii=False)
        run.folder.create(texts)
    save_plan(run, plan)
    if run.accelerator.is_main_process:
        batch = run.model.example_input(recipe.data.batch_size)
        run.display.console.print(MemoryTable(*measure_modes(run.model, batch, run.optimizer)))
    _print_plan(run, plan)
    save_state(run)
    return _train_epochs(run)


def resume(folder: Path) -> Summary:
    """Resume a run from its newest state, with the recipe and spec in its folder; raises as `train` does.

    Args:
        folder: folder of the run.

    Raises:
        CheckpointError: the folder is not that of a run, has no state, or something in it is damaged.
    """
    for name in REQUIRED_FILES:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} is not the folder of a run: there is no {name} in it.")
    run = build_run(load_recipe(folder / "config.yaml"), folder, resumed=True)
    load_state(run)
    run.print_start()
    plan = apply_plan(run)
    save_plan(run, plan)
    if run.accelerator.is_main_process:
        run.folder.drop_records_after(run.progress.epoch)
    run.display.console.print(f"Resuming after {run.progress.epoch} epochs and {run.progress.batch} batches: {folder}")
    _print_plan(run, plan)
    return _train_epochs(run)


def _print_plan(run: Run, plan: Plan | None) -> None:
    if plan is not None:
        run.display.console.print(f"The plan: {plan}", markup=False)
    elif run.model.lookahead == "auto":
        run.display.console.print("Look-ahead: the first training steps are timed with and without it.")
    elif run.model.lookahead:
        run.display.console.print("Look-ahead: the next step is recovered beside the gradient of the present one.")


def load_state(run: Run) -> None:
    """Load weights, their running average and the optimizer's state from the newest state of the run's folder.

    Raises:
        CheckpointError: a file is missing, damaged, or of another model.
    """
    state = run.folder.find_state()
    try:
        # Accelerate loads the weights once more; this reports what is wrong with the file.
        files.load_weights(run.model, state / "model.safetensors")
        if run.ema is not None:
            files.load_weights(run.ema.module, state / "ema.safetensors")
    except CheckpointError as error:
        raise run.folder.explain_damage(state, error) from error
    try:
        run.accelerator.load_state(str(state))
    except Exception as error:  # damaged files make the reader raise all kinds of exceptions
        raise run.folder.explain_damage(state / "optimizer.bin", error) from error


def _train_epochs(run: Run) -> Summary:
    progress = run.progress
    if run.recipe.train.compile:  # after planning and measuring: what compiled code keeps cannot be counted
        compile_steps(run.model)
        run.display.console.print(f"The {len(run.model.steps)} steps are compiled, each kind of step when it first runs.")
    with run.display, StopSignal(run.accelerator) as stop:
        for epoch in range(progress.epoch, run.recipe.train.epochs):
            seen = progress.batch * run.recipe.data.batch_size * run.accelerator.num_processes
            run.data.start_epoch(epoch, skip=seen)
            run.display.start_epoch(epoch, progress.batch)
            signum = _train_epoch(run, epoch, stop)
            if signum:
                save_state(run)
                _save_curves(run)
                raise Interrupted(run.folder.path, signum)
            _finish_epoch(run, epoch)
    _save_curves(run)
    summary = Summary(run.folder.path, progress.top1, progress.best_top1, progress.best_epoch)
    run.display.console.print(str(summary))
    return summary


def _train_epoch(run: Run, epoch: int, stop: StopSignal) -> int:
    """Train until the end of the epoch or until a signal; return the signal, or 0."""
    options, accelerator, progress = run.recipe.train, run.accelerator, run.progress
    rank = accelerator.process_index
    loss_sum = torch.tensor(progress.loss_sums[rank], device=accelerator.device)
    before, began, signum = progress.seconds, time.perf_counter(), 0
    run.wrapped.train()
    for batch, labels in run.train_loader:
        reseed(options.seed, epoch, progress.batch, rank)
        with accelerator.accumulate(run.wrapped):
            batch, targets = run.mix(batch, labels)
            loss = run.loss(run.wrapped(batch), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients and options.clip_grad is not None:
                accelerator.clip_grad_norm_(run.wrapped.parameters(), options.clip_grad)
            run.optimizer.step()
            run.optimizer.zero_grad()
        progress.batch += 1
        progress.examples += len(batch)
        loss_sum += loss.detach() * len(batch)
        if not accelerator.sync_gradients:
            continue
        progress.updates += 1
        run.set_coupling(progress.updates)
        run.scheduler.step_update(progress.updates)
        if run.ema is not None:
            run.ema.update(run.model, progress.updates)
        signum = stop.poll()
        if signum or progress.updates % _CHECK_EVERY == 0 or progress.batch == len(run.train_loader):
            progress.loss_sums[rank] = loss_sum.item()
            _check_finite(run, epoch)
            run.display.step(progress.batch, progress.loss_sums[rank] / progress.examples, _read_memory_bytes())
        if signum:
            break
    progress.seconds = before + time.perf_counter() - began
    return signum


def _finish_epoch(run: Run, epoch: int) -> None:
    """Evaluate the model, write the metrics, save weights and state."""
    accelerator, progress = run.accelerator, run.progress
    if accelerator.num_processes > 1:  # BatchNorm's statistics differ between processes
        distribute_bn(run.evaluated, accelerator.num_processes, reduce=False)
    scores = evaluate(run.evaluated, run.test_loader, accelerator, run.data.label_noun)
    loss_sums = _gather_losses(run)
    examples = progress.examples * len(loss_sums)
    record = {
        "epoch": epoch + 1,
        "updates": progress.updates,
        "lr": max(group["lr"] for group in run.optimizer.param_groups),  # of the next update
        "train_loss": sum(loss_sums) / examples,
        "loss": scores.loss,
        "top1": scores.top1,
        "top5": scores.top5,
        "seconds": progress.seconds,
        f"{run.data.example_noun}_per_second": examples / progress.seconds,
        "memory_bytes": _read_memory_bytes(),
    }
    if run.coupling is not None:
        record |= run.coupling.at(progress.updates)
    improved = scores.top1 > progress.best_top1
    progress.top1 = scores.top1
    if improved:
        progress.best_top1, progress.best_epoch = scores.top1, epoch + 1
    if accelerator.is_main_process:
        metadata = {"revzoo.recipe": run.recipe.to_yaml(), "revzoo.epoch": str(epoch + 1), "revzoo.top1": repr(scores.top1)}
        if run.data.class_names is not None:
            metadata["revzoo.classes"] = json.dumps(run.data.class_names)
        with _saving(run):
            run.folder.append_record(record)
            files.save_weights(run.evaluated, run.folder.last, metadata)
            if improved:
                files.save_weights(run.evaluated, run.folder.best, metadata)
    progress.loss_sums = [0.0] * len(loss_sums)
    progress.epoch, progress.batch, progress.examples, progress.seconds = epoch + 1, 0, 0, 0.0
    save_state(run)
    run.display.end_epoch(record, progress.best_top1)


def save_state(run: Run) -> None:
    """Save everything needed to resume from here; until that is complete, the previous state stays the newest."""
    writing = run.folder.states / "writing"
    if run.accelerator.is_main_process:
        shutil.rmtree(writing, ignore_errors=True)
    run.accelerator.wait_for_everyone()
    run.progress.loss_sums = _gather_losses(run)
    with _saving(run), _quiet_about_tied_tensors():
        run.accelerator.save_state(str(writing))
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        with _saving(run):
            if run.ema is not None:
                files.save_weights(run.ema.module, writing / "ema.safetensors")
            run.folder.publish_state(writing, run.progress)
    run.accelerator.wait_for_everyone()


@contextmanager
def _saving(run: Run) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk raises any of these
        raise RevzooError(
            f"Nothing more can be saved in {run.folder.path} ({error}). Is the disk full? What was saved before is complete: "
            f"make room and resume with revzoo train --resume {run.folder.path}"
        ) from error


@contextmanager
def _quiet_about_tied_tensors() -> Iterator[None]:
    """Silence Accelerate's warning about a tied embedding, which it rightly saves only once."""
    logger = logging.getLogger("accelerate.utils.other")
    logger.addFilter(_is_not_about_tied_tensors)
    try:
        yield
    finally:
        logger.removeFilter(_is_not_about_tied_tensors)


def _is_not_about_tied_tensors(record: logging.LogRecord) -> bool:
    return "Removed shared tensor" not in record.getMessage()


def _read_memory_bytes() -> int:
    """Return the peak of allocated CUDA memory; without CUDA, the current resident memory of the process."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_info().rss


def _gather_losses(run: Run) -> list[float]:
    own = torch.tensor([run.progress.loss_sums[run.accelerator.process_index]], device=run.accelerator.device)
    losses: list[float] = run.accelerator.gather(own).tolist()
    return losses


def _save_curves(run: Run) -> None:
    records = run.folder.read_records()
    if run.accelerator.is_main_process and records:
        write_atomically(run.folder.curves, lambda path: plot_curves(records, path))


def _check_finite(run: Run, epoch: int) -> None:
    loss_sum = run.progress.loss_sums[run.accelerator.process_index]
    if not math.isfinite(loss_sum):
        options = run.recipe
        raise DivergedError(
            f"The training loss is {loss_sum} in epoch {epoch + 1}, by update {run.progress.updates}; nothing was "
            f"saved since {run.folder.find_state()}. Try a smaller optimizer.lr (it is {options.optimizer.lr:g}), a longer "
            f"schedule.warmup_epochs ({options.schedule.warmup_epochs}), train.clip_grad=1 ({options.train.clip_grad}) or "
            f"train.mixed_precision=no ({options.train.mixed_precision}); revzoo verify {options.model.name} "
            "checks the gradients."
        )
