"""Train a reversible network: one loop for one process or many, that can be stopped and resumed anywhere.

    revzoo train digits                                                 one process
    accelerate launch --num_processes 8 -m zoo_cli train RECIPE ...     several, each with a GPU

Every random number of a batch follows from (seed, epoch, batch, process), so a state needs no random streams, and a
resumed run ends with the weights and metrics of an uninterrupted one: bit for bit where the kernels themselves repeat,
as on CPUs. A signal saves a state after the update under way; a killed run goes on from its last complete epoch.
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

import torch
from safetensors import SafetensorError
from timm.utils import distribute_bn

from revzoo.checkpoint import files
from revzoo.data.random import reseed
from revzoo.display.figures.curves import draw_curves
from revzoo.display.progress import memory_bytes
from revzoo.display.tables.memory import memory_table
from revzoo.errors import CheckpointError, RevzooError
from revzoo.file import write_atomically
from revzoo.training.budget import keep, put_to_work
from revzoo.training.evaluation import evaluate
from revzoo.training.interrupt import Interrupted, StopSignal
from revzoo.training.recipe import Recipe, load_recipe, notes
from revzoo.training.run_folder import FILES
from revzoo.training.setup import Run, set_up

_LOOK_EVERY = 10  # updates between two looks at the loss: each makes the host wait for the GPU


class DivergedError(RevzooError, ArithmeticError):
    """The loss is no longer a number."""


@dataclass(frozen=True)
class Summary:
    """How a run ended: top-1 [%] after its last epoch and in its best one, and where everything is."""

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
        out: folder of the run, new or empty; None is runs/<recipe>, numbered if there is one already.

    Raises:
        SpecError: recipe, spec and data contradict one another.
        DataError: the data cannot be used.
        BudgetError: nothing fits the recipe's memory budget; the folder is not made then.
        DivergedError: the loss is not finite.
        Interrupted: stopped by a signal, with everything saved.
    """
    run = set_up(recipe, out, resumed=False)
    for line in notes(recipe):
        run.display.console.print(f"Note: {line}.")
    run.couple(0)
    plan = put_to_work(run)  # before there is a folder: a budget that is too small leaves none
    if run.accelerator.is_main_process:
        run.folder.start({"config.yaml": recipe.to_yaml(), "spec.yaml": run.model.spec.to_yaml()})
    keep(run, plan)
    if run.accelerator.is_main_process:
        batch = run.model.example_input(recipe.data.batch_size)
        run.display.console.print(memory_table(run.model, batch, run.optimizer))
    if plan is not None:
        run.display.console.print(f"The plan: {plan}", markup=False)
    save_state(run)
    return _epochs(run)


def resume(folder: Path) -> Summary:
    """Go on with a run from its newest state, with the recipe and spec in its folder; raises as `train` does.

    Raises:
        CheckpointError: the folder is not that of a run, has no state, or something in it is damaged.
    """
    for name in FILES:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} is not the folder of a run: there is no {name} in it.")
    run = set_up(load_recipe(folder / "config.yaml"), folder, resumed=True)
    _load_state(run)
    run.couple(0)  # as it was planned
    plan = put_to_work(run)
    keep(run, plan)
    if run.accelerator.is_main_process:
        run.folder.forget_after(run.progress.epoch)
    run.display.console.print(f"Going on after {run.progress.epoch} epochs and {run.progress.batch} batches: {folder}")
    if plan is not None:
        run.display.console.print(f"The plan: {plan}", markup=False)
    return _epochs(run)


def _load_state(run: Run) -> None:
    state = run.folder.state()
    run.couple(run.progress.updates)  # as the averaged weights were saved
    try:
        files.load_weights(run.model, run.model.spec, state / "model.safetensors")  # says what is wrong better than Accelerate
        if run.ema is not None:
            files.load_weights(run.ema.module, run.model.spec, state / "ema.safetensors")
    except CheckpointError as error:
        raise run.folder.damaged(state, error) from error
    try:
        run.accelerator.load_state(str(state))
    except Exception as error:  # the reader answers damaged bytes with whatever it stumbles over
        raise run.folder.damaged(state / "optimizer.bin", error) from error


def _epochs(run: Run) -> Summary:
    progress = run.progress
    with run.display, StopSignal(run.accelerator) as stop:
        for epoch in range(progress.epoch, run.recipe.train.epochs):
            seen = progress.batch * run.recipe.data.batch_size * run.accelerator.num_processes
            run.data.start_epoch(epoch, skip=seen)
            run.display.start_epoch(epoch, progress.batch)
            signum = _train_epoch(run, epoch, stop)
            if signum:
                save_state(run)
                _draw(run)
                raise Interrupted(run.folder.path, signum)
            _finish_epoch(run, epoch)
    _draw(run)
    summary = Summary(run.folder.path, progress.top1, progress.best_top1, progress.best_epoch)
    run.display.console.print(str(summary))
    return summary


def _train_epoch(run: Run, epoch: int, stop: StopSignal) -> int:
    """Train to the end of the epoch, or to a signal, which is returned."""
    options, accelerator, progress = run.recipe.train, run.accelerator, run.progress
    rank = accelerator.process_index
    loss_sum = torch.tensor(progress.loss_sums[rank], device=accelerator.device)
    before, began, signum = progress.seconds, time.perf_counter(), 0
    run.wrapped.train()
    for batch, labels in run.train_loader:
        reseed(options.seed, epoch, progress.batch, rank)
        run.couple(progress.updates)
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
        run.scheduler.step_update(progress.updates)
        if run.ema is not None:
            run.ema.update(run.model, progress.updates)
        signum = stop.received()
        if signum or progress.updates % _LOOK_EVERY == 0 or progress.batch == len(run.train_loader):
            progress.loss_sums[rank] = loss_sum.item()
            _check_finite(run, epoch)
            run.display.step(progress.batch, progress.loss_sums[rank] / progress.examples)
        if signum:
            break
    progress.seconds = before + time.perf_counter() - began
    return signum


def _finish_epoch(run: Run, epoch: int) -> None:
    """Evaluate, write down, save."""
    accelerator, progress = run.accelerator, run.progress
    run.couple(progress.updates)  # what is evaluated and saved is where the next epoch begins
    if accelerator.num_processes > 1:  # BatchNorm's statistics differ between processes
        distribute_bn(run.evaluated, accelerator.num_processes, reduce=False)
    scores = evaluate(run.evaluated, run.test_loader, accelerator, run.data.unit)
    loss_sums = _gathered_losses(run)
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
        f"{run.data.things}_per_second": examples / progress.seconds,
        "memory_bytes": memory_bytes(),
    }
    if run.coupling is not None:
        record |= run.coupling.at(progress.updates)
    improved = scores.top1 > progress.best_top1
    progress.top1 = scores.top1
    if improved:
        progress.best_top1, progress.best_epoch = scores.top1, epoch + 1
    if accelerator.is_main_process:
        facts = {"revzoo.recipe": run.recipe.to_yaml(), "revzoo.epoch": str(epoch + 1), "revzoo.top1": repr(scores.top1)}
        if run.data.names is not None:
            facts["revzoo.classes"] = json.dumps(run.data.names)
        with _saving(run):
            run.folder.append(record)
            files.save_weights(run.evaluated, run.model.spec, run.folder.last, facts)
            if improved:
                files.save_weights(run.evaluated, run.model.spec, run.folder.best, facts)
    progress.loss_sums = [0.0] * len(loss_sums)
    progress.epoch, progress.batch, progress.examples, progress.seconds = epoch + 1, 0, 0, 0.0
    save_state(run)
    run.display.end_epoch(record, progress.best_top1)


def save_state(run: Run) -> None:
    """Save everything needed to go on from here; until it is complete, the state before it stays the newest."""
    run.couple(run.progress.updates)  # so that averaged weights are saved with the coupling they go on with
    writing = run.folder.states / "writing"
    if run.accelerator.is_main_process:
        shutil.rmtree(writing, ignore_errors=True)
    run.accelerator.wait_for_everyone()
    run.progress.loss_sums = _gathered_losses(run)
    with _saving(run), _tied_tensors_expected():
        run.accelerator.save_state(str(writing))
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        with _saving(run):
            if run.ema is not None:
                files.save_weights(run.ema.module, run.model.spec, writing / "ema.safetensors")
            run.folder.publish_state(writing, run.progress)
    run.accelerator.wait_for_everyone()


@contextmanager
def _saving(run: Run) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # all three are what a full disk looks like
        raise RevzooError(
            f"Nothing more can be saved in {run.folder.path} ({error}). Is the disk full? What was saved before is complete: "
            f"make room and go on with revzoo train --resume {run.folder.path}"
        ) from error


@contextmanager
def _tied_tensors_expected() -> Iterator[None]:
    """Have Accelerate not warn of a tied embedding, which it saves once, as it should."""
    logger = logging.getLogger("accelerate.utils.other")
    logger.addFilter(_other_than_tied)
    try:
        yield
    finally:
        logger.removeFilter(_other_than_tied)


def _other_than_tied(record: logging.LogRecord) -> bool:
    return "Removed shared tensor" not in record.getMessage()


def _gathered_losses(run: Run) -> list[float]:
    own = torch.tensor([run.progress.loss_sums[run.accelerator.process_index]], device=run.accelerator.device)
    losses: list[float] = run.accelerator.gather(own).tolist()
    return losses


def _draw(run: Run) -> None:
    records = run.folder.records()
    if run.accelerator.is_main_process and records:
        write_atomically(run.folder.curves, lambda path: draw_curves(records, path))


def _check_finite(run: Run, epoch: int) -> None:
    loss_sum = run.progress.loss_sums[run.accelerator.process_index]
    if not math.isfinite(loss_sum):
        options = run.recipe
        raise DivergedError(
            f"The training loss is {loss_sum} in epoch {epoch + 1}, by update {run.progress.updates}; nothing was "
            f"saved since {run.folder.state()}. Try a smaller optimizer.lr (it is {options.optimizer.lr:g}), a longer "
            f"schedule.warmup_epochs ({options.schedule.warmup_epochs}), train.clip_grad=1 ({options.train.clip_grad}) or "
            f"train.mixed_precision=no ({options.train.mixed_precision}); revzoo check {options.model.name} tells whether the "
            "gradients are right."
        )
