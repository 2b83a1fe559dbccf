"""Build everything a run consists of from its recipe: data, model, optimizer, learning-rate and coupling schedules."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import InitProcessGroupKwargs
from timm.data import Mixup
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from revzoo.data.base import IGNORED, Data
from revzoo.data.loading import load_data
from revzoo.data.options import TextOptions
from revzoo.data.random import reseed
from revzoo.display.progress import TrainingDisplay
from revzoo.errors import InputError, join_names
from revzoo.model.network import Model
from revzoo.spec.names import BYTES, TOKENIZER
from revzoo.spec.schema import Spec, TextInput
from revzoo.training.captured_step import Step
from revzoo.training.class_weights import weigh_classes
from revzoo.training.coupling_schedule import CouplingSchedule, make_coupling_schedule
from revzoo.training.divided_update import updates_divided
from revzoo.training.in_backward import updates_each_alone
from revzoo.training.main_process import call_on_all
from revzoo.training.mixup import SharedMixup
from revzoo.training.network import load_model_spec, make_network
from revzoo.training.optimizer import OptimizerError, find_accepted_options, make_optimizer
from revzoo.training.options import ModelOptions, Recipe
from revzoo.training.origin import Origin, read_origin, require_same_origin, require_same_recipe
from revzoo.training.preprocessing import adopt_preprocessing
from revzoo.training.processes import Shares, describe_division, form_group_anew, make_run_mesh, open_accelerator
from revzoo.training.recipe_check import find_ineffective_settings
from revzoo.training.run_folder import Progress, RunFolder
from revzoo.training.tracking import require_trackers
from revzoo.training.upload import Upload


class Loss(nn.Module):
    """Mean cross-entropy over the labels of a batch that are not IGNORED, each weighted by its class.

    The gradient of an update is the mean of its batches' gradients, however many labels each batch has. Weights are not divided
    by their sum in the batch, as PyTorch does: so it does not matter how processes share one.

    Shapes: logits (B, C), targets (B,) or (B, C) of probabilities; or (B, N, C) and (B, N).
    Args:
        smoothing: label smoothing, in [0, 1); 0 where the targets are smoothed already.
        weights: weight of each class (C,); None: all are 1.
    """

    weights: Tensor | None

    def __init__(self, smoothing: float, weights: Tensor | None = None):
        super().__init__()
        self.smoothing = smoothing
        self.register_buffer("weights", weights)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        if logits.dim() == 3:
            logits, targets = logits.flatten(0, 1), targets.flatten()
        arguments: dict[str, Any] = {"ignore_index": IGNORED, "label_smoothing": self.smoothing}
        if self.weights is None:
            return nn.functional.cross_entropy(logits, targets, **arguments)
        total = nn.functional.cross_entropy(logits, targets, self.weights, reduction="sum", **arguments)
        return total / len(targets)


@dataclass
class Run:
    """What the training loop works with.

    The coupling of the models is at all times that of the next update, `progress.updates`: `build_run` sets it, and the loop
    sets it again after every update.

    Args:
        recipe: the recipe.
        folder: where the run is saved.
        accelerator: Accelerate's object for device, processes and precision.
        data: the data set, which chooses order and augmentation of every epoch.
        train_loader: loader of training batches for this process.
        test_loader: loader of test batches for this process.
        model: the bare model.
        wrapped: the model as it is called in training: inside DistributedDataParallel, or divided over processes.
        mesh: the processes that divide the network among them; None where each has all of it.
        shares: how the processes share each batch.
        optimizer: the optimizer, prepared by Accelerate.
        scheduler: the learning-rate schedule, stepped once per update.
        ema: running average of the weights over updates; None where the recipe has none.
        mix: turns a batch, its labels and a key into what the loss is computed on (mixup); returns both as they are without
            mixup. The key, which is the same in every process, determines all random numbers.
        loss: the training loss.
        coupling: schedule of the coupling; None where the coupling stays.
        batch_size: examples of a batch in each process.
        progress: how far the run has come.
        display: what is printed.
        upload: the state that is being written.
        origin: what the run is made of; every state says what the run was started with.
        notes: remarks on the model for the reader.
        last_loss: loss of the last batch of this process; None before the first.
        step: forward and backward of a batch with its targets; returns the loss.
    """

    recipe: Recipe
    folder: RunFolder
    accelerator: Accelerator
    data: Data
    train_loader: Any
    test_loader: Any
    model: Model
    wrapped: nn.Module
    mesh: DeviceMesh | None
    shares: Shares
    optimizer: Any
    scheduler: Any
    ema: ModelEmaV3 | None
    mix: Callable[..., tuple[Tensor, Tensor]]
    loss: nn.Module
    coupling: CouplingSchedule | None
    batch_size: int
    progress: Progress
    display: TrainingDisplay
    upload: Upload
    origin: Origin
    notes: list[str]
    last_loss: Tensor | None = None
    step: Step = field(init=False)

    def __post_init__(self) -> None:
        self.step = self._run_step

    def _run_step(self, batch: Tensor, targets: Tensor) -> Tensor:
        with self.accelerator.autocast():  # Accelerate calls it for all networks but divided ones
            outputs = self.wrapped(batch)
        loss: Tensor = self.loss(outputs, targets)
        self.last_loss = loss  # the one before is freed, as plans count; backward frees the outputs
        del outputs
        self.accelerator.backward(loss)
        return loss

    @property
    def evaluated(self) -> Model:
        """The model whose weights are evaluated and saved: the running average where there is one."""
        return self.model if self.ema is None else self.ema.module

    def set_coupling(self, update: int) -> None:
        """Give the model and its running average the coupling of an update."""
        if self.coupling is not None:
            self.coupling.apply(update, *(self.model,) if self.ema is None else (self.model, self.ema.module))

    def describe(self) -> dict[str, str]:
        """Return the text files that say what the run is, by name: recipe, spec, names of the classes, tokenizer."""
        texts = {"config.yaml": self.recipe.to_yaml(), "spec.yaml": self.model.spec.to_yaml()}
        if self.data.class_names is not None:
            texts["classes.json"] = json.dumps(self.data.class_names, ensure_ascii=False)
        if (tokenizer := self.data.data_config.get("tokenizer", BYTES)) != BYTES:
            texts[TOKENIZER] = Path(tokenizer).read_text(encoding="utf-8")
        return texts

    def print_start(self) -> None:
        """Print what is trained, where and on what, and remarks on data and recipe."""
        sizes = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        parameters, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
        frozen = "" if trained == parameters else f" ({trained:,} of them trained)"
        data, console = self.data, self.display.console
        divided = "" if self.mesh is None else f", {describe_division(self.mesh)}"
        classes = "" if data.num_classes is None else f", {data.num_classes} classes"
        console.print(
            f"{self.model.spec.name}: {parameters:,} parameters{frozen} on {self.accelerator.device}{divided}; "
            f"{data.num_train:,} {data.example_noun} for training, {data.num_test:,} for testing{classes}"
        )
        for line in [*data.notes, *self.notes, *find_ineffective_settings(self.recipe)]:
            console.print(f"Note: {line}.")


def build_run(
    recipe: Recipe, folder: Path, *, resumed: bool, begun_with: int | None = None, accelerator: Accelerator | None = None
) -> Run:
    """Build a run on the device, and among the processes, that Accelerate finds.

    Args:
        recipe: the recipe.
        folder: folder of the run.
        resumed: the folder already holds the run. The model is made from the spec in it; weights and optimizer state are not
            loaded yet.
        begun_with: examples of a batch of all processes together, if the run was begun before, but without leaving a state.
        accelerator: Accelerate's object for this recipe; None: a new one.

    Raises:
        SpecError: recipe, spec and data contradict one another.
        DataError: the data cannot be used.
        InputError: the processes have been given different things, or a resumed run's batch cannot be shared by so many.
        CheckpointError: a resumed run has no usable state.
    """
    options = recipe.train
    accelerator = accelerator or make_accelerator(recipe)
    require_same_recipe(recipe)
    mesh = make_run_mesh(recipe, accelerator, begun=resumed or begun_with is not None)
    run_folder = RunFolder(folder)
    progress = call_on_all(accelerator, run_folder.read_progress) if resumed else Progress()
    shares = Shares.of(accelerator, mesh)
    whole_batch = begun_with or recipe.data.batch_size * shares.count
    if resumed:  # by any number of processes: they share the batches that the run began with
        whole_batch = call_on_all(accelerator, lambda: read_origin(run_folder)).batch_size
    batch_size = _share_batch(whole_batch, shares, recipe)
    reseed(options.seed)
    model_options = recipe.model
    if resumed:  # the weights come from the state
        spec_file = str(run_folder.path / "spec.yaml")
        model_options = ModelOptions(spec_file, schedule=model_options.schedule, exact=model_options.exact)
    spec, is_open = call_on_all(accelerator, lambda: load_model_spec(model_options))
    if recipe.mixup is not None and isinstance(spec.input, TextInput):  # hfds may be either
        raise recipe.error("mixup", str(recipe.mixup), "null, for texts: ids cannot be mixed")
    prepared_as: list[str] = []
    if not resumed:  # the recipe in the folder of a run has it
        recipe, prepared_as = call_on_all(accelerator, partial(adopt_preprocessing, recipe, spec))
    data_options = replace(recipe.data, batch_size=batch_size, text=_find_tokenizer(recipe.data.text, folder))
    data = call_on_all(accelerator, lambda: load_data(data_options, spec.input, options.seed, shares.count))
    if resumed and "outputs" in spec.head.arguments:  # the spec may have more outputs than there are classes
        model_options = replace(model_options, num_outputs=max(spec.head.arguments["outputs"], data.num_classes or 0))
    model, ema, notes = call_on_all(
        accelerator, lambda: make_network(model_options, spec, is_open, data, recipe, accelerator.device, mesh)
    )
    origin = Origin.of(recipe, spec if resumed else model.spec, data, whole_batch)
    require_same_origin(origin)
    optimizer = _make_optimizer(recipe, model)
    if mesh is not None and not updates_divided(optimizer, mesh):
        allowed = f"one that updates divided parameters as it does whole ones with train.shard={options.shard}, such as adamw"
        raise recipe.error("optimizer.opt", repr(recipe.optimizer.opt), allowed)
    if options.optimizer_in_backward:
        _require_updates_in_backward(recipe, optimizer, accelerator)
    if options.cuda_graph:
        _require_static_steps(recipe, spec, accelerator)
    wrapped = model if mesh is not None else accelerator.prepare_model(model)
    prepared = accelerator.prepare_optimizer(optimizer)
    train_loader, test_loader = (
        prepare_data_loader(loader, accelerator.device, shares.count, shares.own, put_on_device=True)
        for loader in (data.train, data.test)
    )
    updates_per_epoch = math.ceil(len(train_loader) / options.accumulate)  # the last one may take fewer batches
    coupling = make_coupling_schedule(recipe, model, options.epochs * updates_per_epoch)
    if coupling is not None:  # the spec that is saved has the coupling of the first update
        coupling.apply(0, model)
    smoothing = 0.0 if recipe.mixup else options.label_smoothing  # mixup has smoothed the targets already
    run = Run(
        recipe=recipe,
        folder=run_folder,
        accelerator=accelerator,
        data=data,
        train_loader=train_loader,
        test_loader=test_loader,
        model=model,
        wrapped=wrapped,
        mesh=mesh,
        shares=shares,
        optimizer=prepared,
        scheduler=_make_scheduler(recipe, optimizer, updates_per_epoch),
        ema=ema,
        mix=_make_mixup(recipe, model.num_outputs, shares.own),
        loss=Loss(smoothing, weigh_classes(recipe, data, model.num_outputs)).to(accelerator.device),
        coupling=coupling,
        batch_size=batch_size,
        progress=progress,
        display=TrainingDisplay(
            accelerator.is_main_process,
            options.epochs,
            len(train_loader),
            whole_batch,
            data.example_noun,
            data.label_noun,
            "CUDA peak" if torch.cuda.is_available() else "process",
        ),
        upload=Upload(accelerator, run_folder, options),
        origin=origin,
        notes=[*prepared_as, *notes],
    )
    run.set_coupling(progress.updates)
    return run


def _find_tokenizer(text: TextOptions, folder: Path) -> TextOptions:
    """Return the options with the run's own copy of the tokenizer, if the file that they name is not there any more."""
    name, own = text.tokenizer, folder / TOKENIZER
    is_gone = name is not None and name != BYTES and not Path(name).is_file()
    return replace(text, tokenizer=str(own)) if is_gone and own.is_file() else text


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Return Accelerate's object for device, processes and the recipe's precision.

    Raises:
        SpecError: the precision is not one of this machine, or a tracker is not installed.
    """
    options = recipe.train
    if options.mixed_precision == "fp16" and not torch.accelerator.is_available():
        raise recipe.error("train.mixed_precision", "'fp16' without a GPU", "bf16 or 'no'")
    require_trackers(recipe)
    group: dict[str, Any] = {}
    if options.timeout_seconds is not None:
        group["timeout"] = timedelta(seconds=options.timeout_seconds)
    if options.offload and torch.cuda.is_available():  # what lies on the host is added up there
        group["backend"] = "cuda:nccl,cpu:gloo"
    form_group_anew(**group)
    handlers = [InitProcessGroupKwargs(**group)] if group else []
    return open_accelerator(
        options.mixed_precision,
        gradient_accumulation_steps=options.accumulate,
        kwargs_handlers=handlers,
        log_with=list(options.track) or None,
        project_dir=".",  # until there is a folder; TensorBoard's tracker wants one
    )


def _share_batch(whole: int, shares: Shares, recipe: Recipe) -> int:
    """Return how many examples of a batch each process takes."""
    parts = whole // 2 if recipe.mixup else whole  # mixup's pairs stay together
    if parts % shares.count:
        possible = [str(number * shares.holders) for number in range(1, whole + 1) if parts % number == 0]
        pairs = f", {parts} pairs for mixup" if recipe.mixup else ""
        raise InputError(
            f"A batch of this run has {whole} examples{pairs}, as it was started, which {shares.count * shares.holders} "
            f"processes cannot share equally. Resume it with {join_names(possible, most=8)} processes."
        )
    return whole // shares.count


def _make_optimizer(recipe: Recipe, model: Model) -> torch.optim.Optimizer:
    options = recipe.optimizer
    values = {name: getattr(options, name) for name in find_accepted_options(options.opt)}
    arguments = {name: value for name, value in values.items() if value is not None}
    try:
        return make_optimizer(
            model,
            options.opt,
            options.lr,
            options.weight_decay,
            weight_decay_of=options.weight_decay_of,
            layer_decay=options.layer_decay,
            **arguments,
        )
    except OptimizerError as error:
        allowed = f"what timm's {options.opt} accepts on this machine"
        raise recipe.error("optimizer.opt", str(error), allowed) from error


def _require_updates_in_backward(recipe: Recipe, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> None:
    allowed = ""
    if accelerator.num_processes > 1:
        allowed = "false with several processes: they add up their gradients before an update"
    elif not updates_each_alone(optimizer):
        allowed = f"false with optimizer.opt={recipe.optimizer.opt}, which needs all gradients for an update, or adamw or sgd"
    if allowed:
        raise recipe.error("train.optimizer_in_backward", "true", allowed)


def _require_static_steps(recipe: Recipe, spec: Spec, accelerator: Accelerator) -> None:
    allowed = ""
    if accelerator.device.type != "cuda":
        allowed = f"false on {accelerator.device}: the graphs are those of CUDA"
    elif accelerator.num_processes > 1:
        allowed = "false with several processes"
    elif isinstance(spec.input, TextInput) and recipe.data.name != "characters":
        allowed = f"false with data.name={recipe.data.name}: batches of texts differ in length"
    if allowed:
        raise recipe.error("train.cuda_graph", "true", allowed)


def _make_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer, updates_per_epoch: int) -> Any:
    options = recipe.schedule
    decay = {"decay_epochs": options.decay_epochs, "decay_rate": options.decay_rate}
    name = options.sched
    if name == "constant":  # which timm has since 1.0.30, and makes of the same steps
        name, decay = "step", {"decay_epochs": 1, "decay_rate": 1.0}
    starts_after_warm_up = options.warmup_prefix or name == "linear"
    if name == "linear":
        name, decay = "poly", {"decay_rate": 1.0}
    epochs = recipe.train.epochs - (options.warmup_epochs if starts_after_warm_up else 0)
    arguments: dict[str, Any] = {key: value for key, value in decay.items() if value is not None}
    scheduler, _ = create_scheduler_v2(
        optimizer,
        name,
        num_epochs=epochs,
        warmup_epochs=options.warmup_epochs,
        warmup_prefix=starts_after_warm_up,
        warmup_lr=options.warmup_lr,
        min_lr=options.min_lr,
        decay_milestones=list(options.decay_milestones),
        step_on_epochs=False,
        updates_per_epoch=updates_per_epoch,
        **arguments,
    )
    return scheduler


def _make_mixup(recipe: Recipe, outputs: int, share: int) -> Callable[..., tuple[Tensor, Tensor]]:
    options = recipe.mixup
    if options is None:
        return lambda images, labels, *key: (images, labels)
    mixup = Mixup(
        mixup_alpha=options.mixup_alpha,
        cutmix_alpha=options.cutmix_alpha,
        prob=options.prob,
        switch_prob=options.switch_prob,
        mode=options.mode,
        label_smoothing=recipe.train.label_smoothing,
        num_classes=outputs,
    )
    return SharedMixup(mixup, share)
