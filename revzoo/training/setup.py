"""Build everything a run consists of from its recipe: data, model, optimizer, schedules."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader

from revzoo.data.loading import load_data
from revzoo.data.options import TextOptions
from revzoo.data.random import reseed
from revzoo.display.progress import TrainingDisplay
from revzoo.errors import InputError, join_names
from revzoo.in_place.chunk_loss import chunk_loss_
from revzoo.spec.edit import with_coupling
from revzoo.spec.names import BYTES, TOKENIZER
from revzoo.spec.parsing import to_plain
from revzoo.spec.schema import TextInput
from revzoo.spec.tree import find_differences
from revzoo.training.converted import convert_if_foreign
from revzoo.training.coupling_schedule import CouplingSchedule, make_coupling_schedule
from revzoo.training.loss import make_loss
from revzoo.training.make_network import load_model_spec, make_network
from revzoo.training.optimizer import make_recipe_optimizer, make_scheduler
from revzoo.training.options import ModelOptions, Recipe
from revzoo.training.origin import Origin, read_origin, require_same
from revzoo.training.preprocessing import adopt_preprocessing
from revzoo.training.processes import call_on_all, make_accelerator, make_run_mesh
from revzoo.training.run import Run
from revzoo.training.run_folder import Progress, RunFolder
from revzoo.training.state_files import Upload


def build_run(recipe: Recipe, folder: Path | RunFolder, accelerator: Accelerator | None = None, *, resumed: bool) -> Run:
    """Build a run on the device, and among the processes, that Accelerate finds.

    Args:
        recipe: the recipe.
        folder: folder of the run, or where it is; what holds its lock notices if it is deleted.
        accelerator: Accelerate's object for this recipe; None: a new one.
        resumed: the folder already holds the run. The model is made from the spec in it; weights and optimizer state are not
            loaded yet.

    Raises:
        SpecError: recipe, spec and data contradict one another.
        DataError: the data cannot be used.
        InputError: the processes have been given different things, or cannot share a resumed run's batch.
        CheckpointError: a resumed run has no usable state.
    """
    options, model_options = recipe.train, recipe.model
    run_folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    accelerator = accelerator or make_accelerator(recipe)
    require_same(to_plain(recipe), find_differences)
    mesh = make_run_mesh(recipe, accelerator, begun=resumed)
    processes, own, progress = accelerator.num_processes, accelerator.process_index, Progress()
    if resumed:  # by any number of processes: they share the batches that the run began with
        progress = call_on_all(run_folder.read_progress)
        whole_batch = call_on_all(lambda: read_origin(run_folder)).batch_size
        spec_file = str(run_folder.path / "spec.yaml")  # the weights come from the state
        kept = {key: getattr(model_options, key) for key in ("schedule", "tiles", "exact")}
        model_options = ModelOptions(spec_file, **kept)
    else:
        assert isinstance(recipe.data.batch_size, int)  # `settle_batch_size`
        whole_batch = recipe.data.batch_size * processes
    batch_size = share_batch(whole_batch, processes, recipe)
    reseed(options.seed)
    with TemporaryDirectory() as temporary:
        convert = partial(convert_if_foreign, model_options, Path(temporary), recipe.data.name)
        model_options, report = call_on_all(convert)
        reseed(options.seed)
        # The spec says what is read of the data, and the data how many outputs the model needs.
        spec, is_open = call_on_all(lambda: load_model_spec(model_options))
        if resumed and recipe.coupling is not None:  # the folder's spec has the coupling of the best weights
            spec = with_coupling(spec, CouplingSchedule(recipe.coupling, 1, []).at(0))
        if recipe.mixup is not None and isinstance(spec.input, TextInput):  # data of a function may be either
            raise recipe.error("mixup", str(recipe.mixup), "null, for texts: ids cannot be mixed")
        prepared_as: list[str] = []
        if not resumed:  # the recipe in the folder of a run has it
            config = None if report is None else report.model.data_config
            recipe, prepared_as = call_on_all(partial(adopt_preprocessing, recipe, spec, config))
        data_options = replace(recipe.data, batch_size=batch_size, text=_find_tokenizer(recipe.data.text, run_folder.path))
        data = call_on_all(lambda: load_data(data_options, spec.input, options.seed, processes))
        if resumed and "outputs" in spec.head.arguments:  # the spec may have more outputs than there are classes
            model_options = replace(model_options, num_outputs=max(spec.head.arguments["outputs"], data.num_classes or 0))
        device = accelerator.device
        model, ema, notes = call_on_all(lambda: make_network(model_options, spec, is_open, data, recipe, device, mesh))
    if report is not None:
        notes.insert(0, f"{recipe.model.name} became reversible. {report.expect.rstrip('.')}")
    origin = Origin.of(recipe, spec if resumed else model.spec, data, whole_batch)
    require_same(origin, Origin.list_changes)

    if data.num_classes is None and mesh is None:
        chunk_loss_(model)
    optimizer = make_recipe_optimizer(recipe, model)
    if options.optimizer_in_backward and processes > 1:
        allowed = "false with several processes: they add up their gradients before an update"
        raise recipe.error("train.optimizer_in_backward", "true", allowed)
    wrapped = model if mesh is not None else accelerator.prepare_model(model)
    data.train, data.test = (
        prepare_data_loader(loader, accelerator.device, processes, own, put_on_device=True)
        for loader in (data.train, data.test)
    )
    updates_per_epoch = math.ceil(len(data.train) / options.accumulate)  # the last one may take fewer batches
    updates = options.count_updates(updates_per_epoch)
    epochs = math.ceil(updates / updates_per_epoch)
    batches = min(options.epochs * len(data.train), updates * options.accumulate)
    warmup, short = recipe.schedule.warmup_epochs, updates // (10 * updates_per_epoch)
    if (rising := min(warmup * updates_per_epoch, updates)) > updates / 2:
        part = f"schedule.warmup_epochs={warmup} lasts {rising} of the {updates} updates, which learn little"
        notes.append(f"{part}: in a run this short use schedule.warmup_epochs={short}")
    coupling = make_coupling_schedule(recipe, model, updates)
    if coupling is not None:  # the spec that is saved has the coupling of the first update
        coupling.apply(0, model)
    run = Run(
        recipe,
        run_folder,
        accelerator,
        mesh,
        data,
        model,
        wrapped,
        ema,
        loss=make_loss(recipe, data, model.num_outputs, own).to(accelerator.device),
        optimizer=accelerator.prepare_optimizer(optimizer),
        scheduler=make_scheduler(recipe, optimizer, updates_per_epoch),
        coupling=coupling,
        progress=progress,
        origin=origin,
        display=TrainingDisplay(accelerator.is_main_process, epochs, batches, data, options.log_every),
        upload=Upload(accelerator, run_folder, options),
        notes=[*prepared_as, *notes],
        conversion=None if report is None else json.dumps(report.to_dict(), indent=2),
    )
    run.set_coupling(progress.updates)
    return run


def _find_tokenizer(text: TextOptions, folder: Path) -> TextOptions:
    """Return the options with the run's own copy of the tokenizer, if the file that they name is not there any more."""
    name, own = text.tokenizer, folder / TOKENIZER
    is_gone = name is not None and name != BYTES and not Path(name).is_file()
    return replace(text, tokenizer=str(own)) if is_gone and own.is_file() else text


def share_batch(whole: int, processes: int, recipe: Recipe) -> int:
    """Return how many examples of a batch each process takes."""
    parts = whole // 2 if recipe.mixup else whole  # mixup's pairs stay together
    if parts % processes:
        possible = [str(number) for number in range(1, whole + 1) if parts % number == 0]
        pairs = f", {parts} pairs for mixup" if recipe.mixup else ""
        raise InputError(
            f"A batch of this run has {whole} examples{pairs}, as it was started; {processes} processes cannot share it "
            f"equally. Resume it with {join_names(possible, most=8)} processes."
        )
    return whole // processes
