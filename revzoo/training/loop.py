"""Train a reversible network: one loop for one process or many, which can be stopped and resumed after any update.

    revzoo train digits                                                 one process
    accelerate launch --num_processes 8 -m zoo_cli train RECIPE ...     several, each with a GPU

Every random number depends only on (seed, epoch, example or batch), and that of a dropout mask on the process, too. So no state
of a random generator is saved, and a resumed run ends with the weights and metrics of an uninterrupted one: bit for bit where
the kernels are deterministic, as on CPUs. Another number of processes may resume it, and share the same batches. After a signal
the current update is finished and a state is saved; a killed run resumes from its newest state.
"""

import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.distributed.fsdp import FSDPModule

from revzoo.analysis.memory_report import measure_modes
from revzoo.checkpoint import files
from revzoo.data.random import reseed
from revzoo.display.figures.curves import plot_curves
from revzoo.display.tables.memory import MemoryTable
from revzoo.errors import RecoveryError
from revzoo.file import sync, write_atomically
from revzoo.model.compile_steps import compile_steps
from revzoo.planning.plan import Plan
from revzoo.training.budget import apply_plan, save_plan
from revzoo.training.change import check_changes, needs_new_plan
from revzoo.training.clipping import clip_gradients_
from revzoo.training.divergence import add_losses, check_test_loss, check_weights
from revzoo.training.evaluation import evaluate
from revzoo.training.in_backward import update_in_backward
from revzoo.training.interrupt import Interrupted, StopRequested, StopSignal
from revzoo.training.lock import hold_lock
from revzoo.training.main_process import call_on_all, call_on_main
from revzoo.training.options import Recipe
from revzoo.training.origin import read_begun
from revzoo.training.processes import follow_launcher
from revzoo.training.recipe import load_recipe
from revzoo.training.restart import find_own_folder, name_agents, sign_folder
from revzoo.training.run_folder import RunFolder, claim_free_folder, name_run
from revzoo.training.setup import Run, build_run, make_accelerator
from revzoo.training.state import load_state, save_state
from revzoo.training.statistics import share_statistics
from revzoo.training.terminal import send_output_to
from revzoo.training.upload import saving
from revzoo.training.verification import describe_gradients

_RUNS = Path("runs")  # where folders are made that the user has not named
_CHECK_EVERY = 10  # updates between two checks of the loss, each of which makes the host wait for the GPU


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
        DivergedError: the loss or the weights are not finite; the newest state is from before.
        Interrupted: stopped by a signal, after everything was saved.
    """
    recipe = follow_launcher(recipe)
    accelerator = make_accelerator(recipe)
    agents = name_agents()
    [own] = broadcast_object_list([find_own_folder(_RUNS, name_run(recipe.file), out, agents)])
    if own is not None and own.is_begun():
        call_on_main(accelerator, lambda: sign_folder(own, agents))  # those that are new, too
        return resume(own.path, release_lock=True)  # torchrun has ended the processes that held it
    with _claim_folder(recipe, out if own is None else own.path, accelerator) as folder:  # too small a budget leaves none
        run = build_run(recipe, folder.path, resumed=False, accelerator=accelerator)
        run.print_start()
        plan = apply_plan(run)
    with _hold_folder(folder, accelerator):
        call_on_main(accelerator, lambda: sign_folder(folder, agents))
        call_on_main(accelerator, lambda: _create(run))
        send_output_to(folder.logs)
        return _begin(run, plan)


def preview(recipe: Recipe) -> None:
    """Print what `train` prints before the first step: data, model, memory, plan and gradients. Nothing is written.

    Args:
        recipe: what would be trained.

    Raises:
        SpecError: recipe, spec and data contradict one another.
        DataError: the data cannot be used.
        BudgetError: no schedule fits the recipe's memory budget.
    """
    recipe = follow_launcher(recipe)
    with tempfile.TemporaryDirectory() as folder:
        run = build_run(recipe, Path(folder), resumed=False, accelerator=make_accelerator(recipe))
        run.print_start()
        _print_setting(run, apply_plan(run))
        run.display.console.print("Dry run: nothing was trained, and nothing is written.")


@contextmanager
def _claim_folder(recipe: Recipe, out: Path | None, accelerator: Accelerator) -> Iterator[RunFolder]:
    """Yield the folder of a new run: `out`, or the first free one under runs/, which is made at once.

    Of jobs that start together each then gets its own. If the block fails, what was made is removed.
    """
    if out is not None:
        folder = RunFolder(out)
        call_on_main(accelerator, folder.require_free)
        yield folder
        return
    made = [] if _RUNS.exists() else [_RUNS]
    folder = call_on_main(accelerator, lambda: claim_free_folder(_RUNS, name_run(recipe.file)))
    try:
        yield folder
    except BaseException:
        for path in [folder.path, *made] if accelerator.is_main_process else []:
            with suppress(OSError):  # it is not empty
                path.rmdir()
        raise


def _create(run: Run) -> None:
    """Write into a new folder what is trained; InputError if another run has begun there in the meantime."""
    run.folder.require_free()
    _describe(run)


def _describe(run: Run) -> None:
    run.origin.save(run.folder.states)  # before the recipe, which makes the folder that of a run
    sync(run.folder.origin)
    run.folder.write(run.describe())


@contextmanager
def _hold_folder(folder: RunFolder, accelerator: Accelerator, *, release: bool = False) -> Iterator[None]:
    """Hold the folder's lock in the main process, for all of them."""
    with ExitStack() as held:
        call_on_main(accelerator, lambda: held.enter_context(hold_lock(folder.lock, folder.path, release=release)))
        yield


def _begin(run: Run, plan: Plan | None) -> Summary:
    """Train from the beginning, in a folder that holds recipe and spec."""
    save_plan(run, plan)
    _print_setting(run, plan)
    save_state(run)
    return _train_epochs(run)


def _print_setting(run: Run, plan: Plan | None) -> None:
    """Print the memory of a training step in every mode, the plan, and how well gradients agree."""
    if run.accelerator.is_main_process and run.mesh is None:
        batch = run.model.example_input(run.batch_size)
        in_backward = run.recipe.train.optimizer_in_backward
        run.display.console.print(MemoryTable(*measure_modes(run.model, batch, run.optimizer, in_backward=in_backward)))
    _print_plan(run, plan)
    _verify_gradients(run)


def resume(folder: Path, overrides: Iterable[str] = (), *, accept_changes: bool = False, release_lock: bool = False) -> Summary:
    """Resume a run from its newest state, with the recipe and spec in its folder; raises as `train` does.

    Args:
        folder: folder of the run.
        overrides: changes to its recipe that make sense in the middle of a run, such as `train.epochs=20`.
        accept_changes: accept all such changes, also those that were made in the folder's files or in the data's place.
        release_lock: the process of another host that held the folder's lock does not run any more.

    Raises:
        CheckpointError: the folder is not that of a run, or no state in it is whole.
        LockedError: another process works in the folder.
        InputError: recipe, spec, classes or examples are not those the run was started with; all changes are listed.
    """
    overrides = list(overrides)
    typed = [override.partition("=")[0] for override in overrides]
    run_folder = RunFolder(folder)
    run_folder.require_run()
    recipe = follow_launcher(load_recipe(folder / "config.yaml", overrides))
    accelerator = make_accelerator(recipe)
    with _hold_folder(run_folder, accelerator, release=release_lock):
        send_output_to(run_folder.logs)
        call_on_main(accelerator, run_folder.sweep)
        if call_on_main(accelerator, run_folder.is_untouched):
            return _begin_again(recipe, run_folder, accelerator, typed)
        damage = call_on_main(accelerator, run_folder.set_damaged_states_aside)
        run = build_run(recipe, folder, resumed=True, accelerator=accelerator)
        for line in damage:
            run.display.console.print(line, markup=False)
        changes = check_changes(run, typed, accept_changes)
        return _go_on(run, changes)


def _begin_again(recipe: Recipe, folder: RunFolder, accelerator: Accelerator, typed: list[str]) -> Summary:
    """Train a run from the beginning that was killed before its first state was saved."""
    begun = call_on_all(accelerator, lambda: read_begun(folder))
    batch = recipe.data.batch_size * accelerator.num_processes
    if begun is not None and "data.batch_size" not in typed:
        batch = begun.batch_size
    run = build_run(recipe, folder.path, resumed=False, begun_with=batch, accelerator=accelerator)
    run.display.console.print(f"Nothing was trained yet in {folder.path}: starting from the beginning.")
    run.print_start()
    plan = apply_plan(run, anew=needs_new_plan(typed))
    call_on_main(accelerator, lambda: _describe(run))
    return _begin(run, plan)


def _go_on(run: Run, changes: dict[str, str]) -> Summary:
    """Train from the newest state of the run's folder; changes of the recipe are saved first."""
    load_state(run)
    run.print_start()
    processes = run.progress.processes, run.accelerator.num_processes
    shared_anew = len(set(processes)) > 1  # each process has another part of the batch
    plan = apply_plan(run, anew=shared_anew or needs_new_plan(changes))
    save_plan(run, plan)
    call_on_main(run.accelerator, lambda: run.folder.drop_records_after(run.progress.epoch))
    done = f"{run.progress.epoch} epochs and {run.progress.batch} batches"
    run.display.console.print(f"Resuming after {done}: {run.folder.path}")
    if shared_anew:
        run.display.console.print(f"Processes: {processes[0]} before, {processes[1]} now, which share the same batches.")
    _print_plan(run, plan)
    _verify_gradients(run)
    if changes:
        for path, words in changes.items():
            run.display.console.print(f"Changed: {path}: {words}.", markup=False)
        call_on_main(run.accelerator, lambda: run.folder.write({"config.yaml": run.recipe.to_yaml()}))
        save_state(run)
    return _train_epochs(run)


def _verify_gradients(run: Run) -> None:
    line = call_on_main(run.accelerator, lambda: describe_gradients(run)) if run.mesh is None else describe_gradients(run)
    if line:
        run.display.console.print(line, markup=False)


def _print_plan(run: Run, plan: Plan | None) -> None:
    if plan is not None:
        run.display.console.print(f"The plan: {plan}", markup=False)
    elif run.model.lookahead == "auto":
        run.display.console.print("Look-ahead: the first training steps are timed with and without it.")
    elif run.model.lookahead:
        run.display.console.print("Look-ahead: the next step is recovered beside the gradient of the present one.")


def _train_epochs(run: Run) -> Summary:
    progress = run.progress
    if run.recipe.train.compile:  # after planning and measuring: what compiled code keeps cannot be counted
        compile_steps(run.model)
        run.display.console.print(f"The {len(run.model.steps)} steps are compiled, each kind of step when it first runs.")
    in_backward = run.recipe.train.optimizer_in_backward  # from here on: what runs before must not change the weights
    updates = update_in_backward(run.optimizer.optimizer) if in_backward else nullcontext()
    tracked = run.tracking.open(progress.epoch)
    with run.display, StopSignal(run.accelerator) as stop, updates, tracked, run.upload.complete():
        for epoch in range(progress.epoch, run.recipe.train.epochs):
            if _has_lost_patience(run):
                break
            run.data.start_epoch(epoch, skip=progress.examples)
            run.display.start_epoch(epoch, progress.batch)
            signum = _train_epoch(run, epoch, stop) or _finish_epoch(run, epoch, stop)
            if signum:
                save_state(run)
                run.upload.wait()
                _save_curves(run)
                raise Interrupted(run.folder.path, signum)
        run.upload.wait()
        _save_curves(run)
    summary = Summary(run.folder.path, progress.top1, progress.best_top1, progress.best_epoch)
    run.display.console.print(str(summary))
    return summary


def _has_lost_patience(run: Run) -> bool:
    """Return, and say, whether training ends early because top-1 has not become better for so many epochs."""
    patience, progress = run.recipe.train.patience, run.progress
    if patience is None or progress.epoch - progress.best_epoch < patience:
        return False
    run.display.console.print(f"Stopping early: no better top-1 in the last {progress.epoch - progress.best_epoch} epochs.")
    return True


def _train_epoch(run: Run, epoch: int, stop: StopSignal) -> int:
    """Train until the end of the epoch or until a signal; return the signal, or 0."""
    options, accelerator, progress = run.recipe.train, run.accelerator, run.progress
    losses = torch.zeros((), dtype=torch.float64, device=accelerator.device)  # of batches that are not yet in the epoch's sum
    before, began, signum = progress.seconds, time.perf_counter(), 0
    run.wrapped.train()
    for batch, labels in run.train_loader:
        with _say_when(run):
            losses += train_batch(run, batch, labels, (options.seed, epoch, progress.batch)).detach() * len(batch)
        progress.batch += 1
        progress.examples += len(batch) * run.shares.count
        if not accelerator.sync_gradients:
            continue
        progress.updates += 1
        run.set_coupling(progress.updates)
        run.scheduler.step_update(progress.updates)
        if run.ema is not None:
            run.ema.update(run.model, progress.updates)
        signum = stop.poll()
        if signum or progress.updates % _CHECK_EVERY == 0 or progress.batch == len(run.train_loader):
            add_losses(run, losses)
            run.upload.collect()
            run.display.step(progress.batch, progress.loss_sum / progress.examples, _read_memory_bytes())
        if signum:
            break
        if options.save_every and progress.updates % options.save_every == 0 and progress.batch < len(run.train_loader):
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
        batch, targets = run.mix(batch, labels, *key)
        reseed(*key, run.shares.own)
        if isinstance(run.wrapped, FSDPModule):  # gradients stay divided; nodes exchange theirs before an update
            run.wrapped.set_requires_all_reduce(accelerator.sync_gradients)
        run.last_loss = run.loss(_call(run, batch), targets)  # which a plan counts until there is a next one
        accelerator.backward(run.last_loss)
        if accelerator.sync_gradients and clip_grad is not None:
            clip = accelerator.clip_grad_norm_ if run.mesh is None else clip_gradients_
            clip(run.wrapped.parameters(), clip_grad)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run.last_loss


def _call(run: Run, batch: torch.Tensor) -> torch.Tensor:
    """Return the network's outputs; Accelerate calls autocast for all networks but divided ones."""
    with run.accelerator.autocast():
        outputs: torch.Tensor = run.wrapped(batch)
        return outputs


@contextmanager
def _say_when(run: Run) -> Iterator[None]:
    """Add update and newest state to an error of the runtime, such as states that leave the range of exact arithmetic."""
    try:
        yield
    except RecoveryError as error:
        progress = run.progress
        run.upload.settle()
        raise RecoveryError(
            f"{error} This was in epoch {progress.epoch + 1}, update {progress.updates + 1}. The newest state is "
            f"{run.folder.find_state()}; train.save_every=N saves one every N updates."
        ) from error


def _finish_epoch(run: Run, epoch: int, stop: StopSignal) -> int:
    """Evaluate the model, write the metrics, save weights and state; return the signal that ended the evaluation, or 0."""
    accelerator, progress = run.accelerator, run.progress
    share_statistics(run)
    check_weights(run)
    try:
        batches = stop.watch(run.test_loader)
        scores = evaluate(run.evaluated, batches, accelerator, run.data.label_noun, run.shares.holders)
    except StopRequested as caught:
        return caught.signum
    check_test_loss(run, scores.loss)
    record = {
        "epoch": epoch + 1,
        "updates": progress.updates,
        "lr": max(group["lr"] for group in run.optimizer.param_groups),  # of the next update
        "train_loss": progress.loss_sum / progress.examples,
        "loss": scores.loss,
        "top1": scores.top1,
        "top5": scores.top5,
        "seconds": progress.seconds,
        f"{run.data.example_noun}_per_second": progress.examples / progress.seconds,
        "memory_bytes": _read_memory_bytes(),
    }
    if run.coupling is not None:
        record |= run.coupling.at(progress.updates)
    run.upload.wait()
    improved = scores.top1 > progress.best_top1
    progress.top1 = scores.top1
    if improved:
        progress.best_top1, progress.best_epoch = scores.top1, epoch + 1
    _write_epoch(run, record, improved)
    progress.epoch, progress.batch, progress.examples = epoch + 1, 0, 0
    progress.loss_sum, progress.seconds = 0.0, 0.0
    save_state(run)
    run.display.end_epoch(record, progress.best_top1)
    return 0


def _write_epoch(run: Run, record: dict[str, Any], improved: bool) -> None:
    """Write the metrics and weights of an epoch."""
    metadata = {
        "revzoo.recipe": run.recipe.to_yaml(),
        "revzoo.epoch": str(record["epoch"]),
        "revzoo.top1": repr(record["top1"]),
    }
    call_on_main(run.accelerator, lambda: _append_record(run, record))
    for file in (run.folder.last, run.folder.best) if improved else (run.folder.last,):
        _save_weights(run, file, metadata)


def _append_record(run: Run, record: dict[str, Any]) -> None:
    with saving(run.folder):
        run.folder.append_record(record)
    run.tracking.log(record)


def _save_weights(run: Run, file: Path, metadata: dict[str, str]) -> None:
    def save() -> None:
        with saving(run.folder):
            files.save_weights(run.evaluated, file, metadata)

    if run.mesh is None:
        call_on_main(run.accelerator, save)
    else:  # every process has a share
        save()


def _read_memory_bytes() -> int:
    """Return the peak of allocated CUDA memory; without CUDA, the current resident memory of the process."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_info().rss


def _save_curves(run: Run) -> None:
    records = run.folder.read_records()
    if run.accelerator.is_main_process and records:
        with saving(run.folder):
            write_atomically(run.folder.curves, lambda path: plot_curves(records, path))
        run.tracking.show(run.folder.curves, run.progress.epoch)
