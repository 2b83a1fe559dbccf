"""A run: what the training loop works with."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from revzoo.data.base import Data
from revzoo.display.progress import TrainingDisplay
from revzoo.model.model import Model
from revzoo.plugin import RECORD, list_packages
from revzoo.spec.names import BYTES, CONVERSION, TOKENIZER
from revzoo.training.coupling_schedule import CouplingSchedule
from revzoo.training.loss import Loss
from revzoo.training.options import Recipe
from revzoo.training.origin import Origin
from revzoo.training.run_folder import RECIPE, Progress, RunFolder
from revzoo.training.state_files import Upload


@dataclass
class Run:
    """What the training loop works with.

    The coupling of the models is at all times that of the next update, `progress.updates`: `build_run` sets it, and the loop
    sets it again after every update.

    Args:
        recipe: the recipe.
        folder: where the run is saved.
        accelerator: Accelerate's object for device, processes and precision.
        mesh: the processes that divide the network among them; None where each has all of it.
        data: the loaders of this process, with the order and augmentation of every epoch.
        model: the bare model.
        wrapped: the model as it is called in training: inside DistributedDataParallel, or divided over processes.
        ema: running average of the weights over updates; None where the recipe has none.
        loss: the training loss, with mixup.
        optimizer: the optimizer, prepared by Accelerate.
        scheduler: the learning-rate schedule, stepped once per update.
        coupling: schedule of the coupling; None where the coupling stays.
        progress: how far the run has come.
        origin: what the run is made of; every state says what the run was started with.
        display: what is printed.
        upload: the state that is being written.
        notes: remarks on the model for the reader.
        conversion: report of the conversion of a network that was no model of revzoo; None for others.
        last_loss: loss of the last batch of this process; None before the first.
    """

    recipe: Recipe
    folder: RunFolder
    accelerator: Accelerator
    mesh: DeviceMesh | None
    data: Data
    model: Model
    wrapped: nn.Module
    ema: ModelEmaV3 | None
    loss: Loss
    optimizer: Any
    scheduler: Any
    coupling: CouplingSchedule | None
    progress: Progress
    origin: Origin
    display: TrainingDisplay
    upload: Upload
    notes: list[str]
    conversion: str | None = None
    last_loss: Tensor | None = None

    def run_step(self, batch: Tensor, targets: Tensor) -> Tensor:
        """Run a batch forward and backward, and return the loss."""
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

    def count_batches(self) -> int:
        """Return up to which batch the epoch is trained that is about to begin or to go on: `train.max_updates` may end it."""
        train, progress = self.recipe.train, self.progress
        if train.max_updates is None:
            return len(self.data.train)
        return min(len(self.data.train), progress.batch + (train.max_updates - progress.updates) * train.accumulate)

    @property
    def batch_size(self) -> int:
        """Examples of a batch in this process."""
        processes: int = self.accelerator.num_processes
        return self.origin.batch_size // processes

    def set_coupling(self, update: int) -> None:
        """Give the model and its running average the coupling of an update."""
        if self.coupling is not None:
            self.coupling.apply(update, *dict.fromkeys([self.model, self.evaluated]))

    def describe(self) -> dict[str, str]:
        """Return the text files that say what the run is, by name: recipe, spec, names of the classes, tokenizer, imports."""
        texts = {"spec.yaml": self.model.spec.to_yaml()}
        if self.data.class_names is not None:
            texts["classes.json"] = json.dumps(self.data.class_names, ensure_ascii=False)
        if (tokenizer := self.data.data_config.get("tokenizer", BYTES)) != BYTES:
            texts[TOKENIZER] = Path(tokenizer).read_text(encoding="utf-8")
        if packages := list_packages():
            texts[RECORD] = "\n".join(packages)
        if self.conversion is not None:
            texts[CONVERSION] = self.conversion
        return {**texts, RECIPE: self.recipe.to_yaml()}  # which makes the folder that of a run
