"""Train a reversible network, from the beginning or from the newest state of a run, in one process or many.

    revzoo train digits                                                 one process
    accelerate launch --num_processes 8 -m zoo_cli train RECIPE ...     several, each with a GPU

Every random number depends only on (seed, epoch, example or batch), and that of a dropout mask on the process, too. So no state
of a random generator is saved, and a resumed run ends with the weights and metrics of an uninterrupted one: bit for bit where
the kernels are deterministic, as on CPUs. Another number of processes may resume it, and share the same batches. After a signal
the current update is finished and a state is saved; a killed run resumes from its newest state.
"""

import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from accelerate import Accelerator

from revzoo.data.options import is_own
from revzoo.display.console import show_status
from revzoo.display.tables.memory import MemoryTable
from revzoo.errors import InputError, MissingValueError, quote
from revzoo.format import count_noun
from revzoo.planning.plan import Plan
from revzoo.spec.parsing import to_plain
from revzoo.spec.tree import find_differences
from revzoo.training.batch_size import settle_batch_size
from revzoo.training.epochs import Summary, train_epochs
from revzoo.training.gradient_check import describe_gradients
from revzoo.training.interrupt import Interrupted
from revzoo.training.memory import describe_memory, explain_lack_of_memory
from revzoo.training.options import Recipe
from revzoo.training.origin import check_changes, needs_new_plan
from revzoo.training.planned_step import PlannedStep
from revzoo.training.processes import call_on_main, count_restarts, describe_division, follow_launcher, make_accelerator
from revzoo.training.recipe import load_recipe
from revzoo.training.recipe_check import find_ineffective_settings
from revzoo.training.run import Run
from revzoo.training.run_folder import RECIPE, RunFolder, claim_free_folder, name_run
from revzoo.training.run_plan import apply_plan, save_plan
from revzoo.training.setup import build_run
from revzoo.training.state import load_state, save_state
from revzoo.training.terminal import send_output_to

_RUNS = Path("runs")  # where folders are made that the user has not named


def train(recipe: Recipe, out: Path | None = None, *, is_kept: bool = True) -> Summary:
    """Train from the beginning.

    Args:
        recipe: what to train, on which data, how.
        out: folder of the run, new or empty; None: runs/<recipe>, with a number appended if that exists. Where torchrun has
            started its processes again, a run by the same recipe in this folder goes on.
        is_kept: whether the folder stays, so that the last lines say what can be done with it.

    Raises:
        InputError: torchrun is to start the processes again, and no folder is named.
        SpecError: recipe, spec and data contradict one another.
        DataError: the data cannot be used.
        BudgetError: no schedule fits the recipe's memory budget, or a step takes more than is free; the folder is not made.
        DivergedError: the loss or the weights are not finite; the newest state is from before.
        Interrupted: stopped by a signal, after everything was saved.
    """
    recipe = follow_launcher(recipe)
    if out is None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        raise InputError("With --max-restarts a run needs a folder to go on from after a restart: add --out DIR.")
    accelerator = make_accelerator(recipe)
    if out is not None and call_on_main(accelerator, lambda: _was_begun(recipe, out)):
        return resume(out, [f"data.name={recipe.data.name}"] if is_own(recipe.data.name) else ())
    with _claim_folder(recipe, out, accelerator) as folder:  # too small a budget leaves none
        run = _build_run(recipe, folder, accelerator)
        _print_start(run)
        plan = _apply_plan(run, anew=True)
        _print_memory(run)
    with _hold_folder(folder, accelerator):
        call_on_main(accelerator, folder.require_free)  # another run may have begun there in the meantime
        send_output_to(folder.logs)
        save_plan(run, plan)
        _print_plan(run, plan)
        _verify_gradients(run)
        save_state(run)
        run.upload.wait()
        call_on_main(accelerator, lambda: folder.write(run.describe()))  # now there is a run that can be resumed
        return _train_to_the_end(run, is_kept=is_kept)


def preview(recipe: Recipe) -> None:
    """Print what `train` prints before the first step: data, model, memory, plan and gradients. Nothing is written.

    Args:
        recipe: what would be trained.

    Raises:
        SpecError: recipe, spec and data contradict one another.
        DataError: the data cannot be used.
        BudgetError: no schedule fits the recipe's memory budget, or a step takes more than is free.
    """
    recipe = follow_launcher(recipe)
    with tempfile.TemporaryDirectory() as folder:
        run = _build_run(recipe, Path(folder), make_accelerator(recipe))
        _print_start(run)
        plan = _apply_plan(run, anew=True)
        _print_memory(run, table=True)
        _print_plan(run, plan)
        _verify_gradients(run)
        run.display.console.print("Dry run: nothing was trained, and nothing is written.")


def try_out(recipe: Recipe) -> None:
    """Train by a recipe, in a temporary folder that goes when it ends; raises as `train` does."""
    accelerator = make_accelerator(follow_launcher(recipe))
    with ExitStack() as kept:
        folder = call_on_main(accelerator, lambda: kept.enter_context(tempfile.TemporaryDirectory()))
        try:
            train(recipe, Path(folder, "run"), is_kept=False)
        except Interrupted as caught:
            caught.args = ("Stopped. Nothing is kept.",)
            raise


def _was_begun(recipe: Recipe, out: Path) -> bool:
    """Return whether torchrun starts this training again, which it has begun in this folder, after a process has died."""
    if not count_restarts() or not RunFolder(out).is_begun():
        return False
    changes = find_differences(to_plain(follow_launcher(load_recipe(out, complete=False))), to_plain(recipe))
    own = ("data.augment.", "data.text.tokenizer", *(["data.batch_size"] * isinstance(recipe.data.batch_size, str)))
    return all(path.startswith(own) for path in changes)  # which weights may have set, or the search for a batch size


def _build_run(recipe: Recipe, folder: Path | RunFolder, accelerator: Accelerator, *, resumed: bool = False) -> Run:
    with show_status("loading data and model", shown=accelerator.is_main_process) as report:
        recipe, notes = (recipe, []) if resumed else settle_batch_size(recipe, accelerator, report)
        run = build_run(recipe, folder, accelerator, resumed=resumed)
    run.notes += notes
    return run


def _apply_plan(run: Run, *, anew: bool) -> Plan | None:
    with show_status("planning", shown=run.accelerator.is_main_process):
        return apply_plan(run, anew=anew)


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


@contextmanager
def _hold_folder(folder: RunFolder, accelerator: Accelerator) -> Iterator[None]:
    """Hold the folder's lock in the main process, for all of them."""
    with ExitStack() as held:
        call_on_main(accelerator, lambda: held.enter_context(folder.hold_lock()))
        yield


def _print_start(run: Run) -> None:
    """Print what is trained, where and on what, and remarks on data and recipe."""
    sizes = [(p.numel(), p.requires_grad) for p in run.model.parameters()]
    parameters, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    frozen = "" if trained == parameters else f" ({trained:,} of them trained)"
    data, console = run.data, run.display.console
    divided = "" if run.mesh is None else f", {describe_division(run.mesh)}"
    classes = "" if data.num_classes is None else f", {data.num_classes} classes"
    console.print(
        f"{run.model.spec.name}: {parameters:,} parameters{frozen} on {run.accelerator.device}{divided}; "
        f"{data.num_train:,} {data.example_noun} for training, {data.num_test:,} for testing{classes}"
    )
    for line in [*data.notes, *run.notes, *find_ineffective_settings(run.recipe)]:
        console.print(f"Note: {line}.")


def _print_memory(run: Run, *, table: bool = False) -> None:
    """Print what a training step takes, as a table in every mode; it is refused where it takes more than there is."""
    if run.mesh is not None:
        return
    try:
        with show_status("counting memory", shown=run.accelerator.is_main_process):
            line = call_on_main(run.accelerator, lambda: describe_memory(run))
            modes = PlannedStep(run).measure_modes() if table and run.accelerator.is_main_process else None
    except MissingValueError as error:
        line, modes = f"Note: memory is not counted. {error}", None
    run.display.console.print(line)
    if modes is not None:
        run.display.console.print(MemoryTable(*modes))


def resume(folder: Path, overrides: Iterable[str] = (), *, accept_changes: bool = False) -> Summary:
    """Resume a run from its newest state, with the recipe and spec in its folder; raises as `train` does.

    Args:
        folder: folder of the run.
        overrides: changes to its recipe that make sense in the middle of a run, such as `train.epochs=20`.
        accept_changes: accept all such changes, also those that were made in the folder's files or in the data's place.

    Raises:
        CheckpointError: the folder is not that of a run, or no state in it is whole.
        InputError: another process works in the folder, or recipe, spec, classes or examples are not those the run was
            started with; all changes are listed.
    """
    overrides = list(overrides)
    typed = [override.partition("=")[0] for override in overrides]
    run_folder = RunFolder(folder)
    run_folder.require_run()
    recipe = follow_launcher(load_recipe(folder / RECIPE, overrides))
    accelerator = make_accelerator(recipe)
    with _hold_folder(run_folder, accelerator):
        send_output_to(run_folder.logs)
        call_on_main(accelerator, run_folder.sweep)
        damage = call_on_main(accelerator, run_folder.set_damaged_states_aside)
        run = _build_run(recipe, run_folder, accelerator, resumed=True)
        for line in damage:
            run.display.console.print(line)
        changes = check_changes(run_folder, run.origin, run.recipe, run.progress, typed, accept_changes)
        metrics = call_on_main(accelerator, lambda: run_folder.keep_records(run.progress, accept=accept_changes))
        load_state(run)
        _print_start(run)
        progress, processes = run.progress, accelerator.num_processes
        shared_anew = progress.processes != processes  # each process has another part of the batch
        plan = _apply_plan(run, anew=shared_anew or needs_new_plan(changes))
        save_plan(run, plan)
        call_on_main(accelerator, lambda: run_folder.write({run_folder.metrics.name: metrics}))
        done = f"{count_noun(progress.epoch, 'epoch')} and {count_noun(progress.batch, 'batch', 'es')}"
        run.display.console.print(f"Resuming after {done}: {folder}")
        if shared_anew:
            before = progress.processes
            run.display.console.print(f"Processes: {before} before, {processes} now, which share the same batches.")
        _print_memory(run)
        _print_plan(run, plan)
        _verify_gradients(run)
        if changes:
            for path, words in changes.items():
                run.display.console.print(f"Changed: {path}: {words}.")
            call_on_main(accelerator, lambda: run_folder.write({RECIPE: run.recipe.to_yaml()}))
            save_state(run)
        return _train_to_the_end(run)


def _train_to_the_end(run: Run, *, is_kept: bool = True) -> Summary:
    began = time.perf_counter()
    with explain_lack_of_memory(run):
        summary = train_epochs(run)
    end = f"{summary}\n{_describe_end(run, time.perf_counter() - began)}"
    run.display.console.print(end if is_kept else "It works: trained, evaluated and saved. Nothing is kept of it.")
    return summary


def _describe_end(run: Run, seconds: float) -> str:
    """Return how long training took, and what to type next."""
    folder, is_classifier = quote(run.folder.path), run.data.num_classes is not None
    predict = f"revzoo predict {folder} FILES, " if is_classifier else ""
    if run.recipe.data.name == "causal_lm":
        predict = f'revzoo generate {folder} "A text", '
    took = timedelta(seconds=round(seconds))
    return f"{took} in all. Next: revzoo eval {folder}, {predict}revzoo export {folder} --onnx FILE"


def _verify_gradients(run: Run) -> None:
    with show_status("comparing gradients", shown=run.accelerator.is_main_process):
        line = call_on_main(run.accelerator, lambda: describe_gradients(run)) if run.mesh is None else describe_gradients(run)
    if line:
        run.display.console.print(line)


def _print_plan(run: Run, plan: Plan | None) -> None:
    if plan is not None:
        run.display.console.print(f"The plan: {plan}")
    elif run.model.lookahead:
        run.display.console.print("Look-ahead: the next step is recovered during the gradient of the present one.")
