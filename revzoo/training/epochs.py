"""The epochs of a run: its updates, its evaluations, and what is written of them."""

import json
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.fsdp import FSDPModule

from revzoo.checkpoint import files
from revzoo.data.random import reseed
from revzoo.display.figures.curves import plot_curves
from revzoo.file import write_atomically
from revzoo.format import count_noun
from revzoo.metric import CHOSEN
from revzoo.training.divergence import add_losses, check_test_loss, check_weights, explain_lost_states
from revzoo.training.evaluation import describe_unreadable, evaluate, gather_unreadable
from revzoo.training.in_backward import update_in_backward
from revzoo.training.interrupt import Interrupted, StopRequested, StopSignal
from revzoo.training.processes import call_on_main
from revzoo.training.run import Run
from revzoo.training.state import save_state, share_statistics
from revzoo.training.tracking import log_record, open_trackers

_CHECK_EVERY = 10  # updates between two checks of the loss, each of which makes the host wait for the GPU or other processes


@dataclass(frozen=True)
class Summary:
    """How a run ended.

    Args:
        folder: folder of the run.
        score: the CHOSEN metric after the last epoch.
        best_score: best of all epochs.
        best_epoch: first epoch that reached it, from 1.
    """

    folder: Path
    score: float
    best_score: float
    best_epoch: int

    def __str__(self) -> str:
        last, best = CHOSEN.format(self.score), CHOSEN.format(self.best_score)
        return (
            f"{CHOSEN.label} {last} after the last epoch, {best} after epoch {self.best_epoch} (best.safetensors): "
            f"{self.folder}"
        )


def train_epochs(run: Run) -> Summary:
    """Train from where the run is to its last epoch, and return how it ended.

    Raises:
        DivergedError: the loss or the weights are not finite, or far too large; the newest state is from before.
        Interrupted: stopped by a signal, after everything was saved.
        RecoveryError: states of the network could not be recovered, though it has not diverged.
        RevzooError: nothing more can be saved.
    """
    progress = run.progress
    if run.recipe.train.compile:  # after planning and measuring: what compiled code keeps cannot be counted
        for module in (
            run.model.steps if isinstance(run.wrapped, FSDPModule) else [run.model]
        ):  # weights are gathered in between
            module.compile()
        run.display.console.print("The network is compiled, in its first updates.")
    in_backward = run.recipe.train.optimizer_in_backward  # from here on: what runs before must not change the weights
    updates = update_in_backward(run.optimizer.optimizer) if in_backward else nullcontext()
    tracked = open_trackers(run.accelerator, run.recipe, run.folder.path)
    lost = explain_lost_states(run)
    with run.display, StopSignal(run.accelerator) as stop, updates, tracked, run.upload.complete(), lost:
        for epoch in range(progress.epoch, run.recipe.train.epochs):
            if _has_lost_patience(run) or _is_past_max_updates(run):
                break
            batches = run.count_batches()
            run.data.start_epoch(epoch, progress.examples, batches - progress.batch)
            run.display.start_epoch(epoch, progress.batch, batches)
            signum = train_epoch(run, epoch, stop) or _finish_epoch(run, epoch, stop)
            _report_unreadable(run)
            if signum:
                save_state(run)
                run.upload.wait()
                _save_curves(run)
                raise Interrupted(run.folder.path, signum)
        run.upload.wait()
        _save_curves(run)
    return Summary(run.folder.path, progress.score, progress.best_score, progress.best_epoch)


def _has_lost_patience(run: Run) -> bool:
    """Return, and say, whether training ends early because the metric has not improved for `patience` epochs."""
    patience, progress = run.recipe.train.patience, run.progress
    if patience is None or progress.epoch - progress.best_epoch < patience:
        return False
    waited = count_noun(progress.epoch - progress.best_epoch, "epoch")
    run.display.console.print(f"Stopping early: no better {CHOSEN.label} in the last {waited}.")
    return True


def _is_past_max_updates(run: Run) -> bool:
    """Return whether all updates are done, and the epoch of the last one is evaluated."""
    most = run.recipe.train.max_updates
    return most is not None and run.progress.updates >= most and not run.progress.batch


def train_epoch(run: Run, epoch: int, stop: StopSignal) -> int:
    """Train until the end of the epoch or until a signal; return the signal, or 0."""
    options, accelerator, progress = run.recipe.train, run.accelerator, run.progress
    losses = torch.zeros((), dtype=torch.float64, device=accelerator.device)  # of batches that are not yet in the epoch's sum
    before, began, signum, loss = progress.seconds, time.perf_counter(), 0, math.nan
    check_every = 1 if accelerator.device.type == "cpu" and accelerator.num_processes == 1 else _CHECK_EVERY
    batches = run.count_batches()
    run.wrapped.train()
    for batch, labels in run.data.train:
        losses += train_batch(run, batch, labels, (options.seed, epoch, progress.batch)).detach() * len(batch)
        progress.batch += 1
        progress.examples += len(batch) * accelerator.num_processes
        if not accelerator.sync_gradients:
            continue
        progress.updates += 1
        run.set_coupling(progress.updates)
        run.scheduler.step_update(progress.updates)
        if run.ema is not None:
            run.ema.update(run.model, progress.updates)
        signum = stop.poll()
        if signum or math.isnan(loss) or progress.updates % check_every == 0 or progress.batch == batches:
            add_losses(run, losses)
            run.upload.collect()
            loss = progress.loss_sum / progress.examples
        if run.display.step(progress.batch, loss, lr := _read_lr(run)):
            log_record(accelerator, {"updates": progress.updates, "lr": lr, "train_loss": loss})
        if signum:
            break
        if options.save_every and progress.updates % options.save_every == 0 and progress.batch < batches:
            progress.seconds = before + time.perf_counter() - began
            add_losses(run, losses)
            save_state(run)
    progress.seconds = before + time.perf_counter() - began
    return signum


def train_batch(run: Run, batch: torch.Tensor, labels: torch.Tensor, key: tuple[int, int, int]) -> torch.Tensor:
    """Run a batch forward and backward, update the weights where a whole update is reached, and return the loss.

    Args:
        run: the run.
        batch, labels: as the loader yields them.
        key: determines all random numbers, together with this process's share.
    """
    accelerator, clip_grad = run.accelerator, run.recipe.train.clip_grad
    with accelerator.accumulate(*(() if run.mesh is not None else (run.wrapped,))):
        batch, targets = run.loss.mix(batch, labels, *key)
        reseed(*key, accelerator.process_index)
        if isinstance(run.wrapped, FSDPModule):  # gradients stay divided; nodes exchange theirs before an update
            run.wrapped.set_requires_all_reduce(accelerator.sync_gradients)
        run.last_loss = run.run_step(batch, targets)  # which a plan counts until there is a next one
        if accelerator.sync_gradients and clip_grad is not None:
            accelerator.clip_grad_norm_(run.wrapped.parameters(), clip_grad)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run.last_loss


def _finish_epoch(run: Run, epoch: int, stop: StopSignal) -> int:
    """Evaluate the model, write the metrics, save weights and state; return the signal that ended the evaluation, or 0."""
    accelerator, progress = run.accelerator, run.progress
    share_statistics(run)
    check_weights(run)
    try:
        batches = run.display.watch_evaluation(stop.watch(run.data.test), len(run.data.test))
        scores = evaluate(run.evaluated, batches, accelerator, run.data.label_noun)
    except StopRequested as caught:
        return caught.signum
    check_test_loss(run, scores.loss)
    counted = run.data.example_noun if run.data.length is None else run.data.label_noun
    record = {
        "epoch": epoch + 1,
        "updates": progress.updates,
        "lr": _read_lr(run),  # of the next update
        "train_loss": progress.loss_sum / progress.examples,
        "loss": scores.loss,
        **scores.metrics,
        "seconds": progress.seconds,
        f"{counted}_per_second": progress.examples * (run.data.length or 1) / progress.seconds,
        "memory_bytes": _read_memory_bytes(),
    }
    if run.coupling is not None:
        record |= run.coupling.at(progress.updates)
    run.upload.wait()
    progress.score = scores.metrics[CHOSEN.key]
    improved = not progress.best_epoch or progress.score > progress.best_score
    if improved:
        progress.best_score, progress.best_epoch = progress.score, epoch + 1
    _write_epoch(run, record, improved)
    progress.epoch, progress.batch, progress.examples = epoch + 1, 0, 0
    progress.loss_sum, progress.seconds = 0.0, 0.0
    save_state(run)
    run.display.end_epoch(record, progress.best_score)
    return 0


def _report_unreadable(run: Run) -> None:
    """Print, and write into the run's folder, which images could not be read, each of them once."""
    unreadable = gather_unreadable(run.data)
    for split, names in call_on_main(run.accelerator, lambda: run.folder.note_unreadable(unreadable)).items():
        run.display.console.print(f"Note: {describe_unreadable(split, names)}.")


def _write_epoch(run: Run, record: dict[str, Any], improved: bool) -> None:
    """Write the metrics and weights of an epoch."""
    metadata = {
        "revzoo.recipe": run.recipe.to_yaml(),
        "revzoo.examples": json.dumps(run.origin.examples),
        "revzoo.epoch": str(record["epoch"]),
        f"revzoo.{CHOSEN.key}": repr(record[CHOSEN.key]),
    }
    call_on_main(run.accelerator, lambda: run.folder.append_record(record))
    log_record(run.accelerator, record)
    for file in (run.folder.last, run.folder.best) if improved else (run.folder.last,):
        _save_weights(run, file, metadata)
    if improved and run.recipe.coupling is not None:  # the folder is a model with the best weights
        call_on_main(run.accelerator, lambda: run.folder.write({"spec.yaml": run.evaluated.spec.to_yaml()}))


def _save_weights(run: Run, file: Path, metadata: dict[str, str]) -> None:
    def save() -> None:
        with run.folder.saving():
            files.save_weights(run.evaluated, file, metadata)

    if run.mesh is None:
        call_on_main(run.accelerator, save)
    else:  # every process has a share
        save()


def _read_lr(run: Run) -> float:
    return max(group["lr"] for group in run.optimizer.param_groups)


def _read_memory_bytes() -> int:
    """Return the peak of allocated CUDA memory; without CUDA, the current resident memory of the process."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_info().rss


def _save_curves(run: Run) -> None:
    run.folder.require_held()
    records = run.folder.read_records()
    if run.accelerator.is_main_process and records:
        with run.folder.saving():
            write_atomically(run.folder.curves, lambda path: plot_curves(records, path))
