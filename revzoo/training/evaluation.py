"""Top-1, top-5 and loss over a data set, each example counted exactly once, however many processes share the work."""

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from revzoo.checkpoint.files import read_metadata, read_tensors
from revzoo.checkpoint.index import WeightsEntry, read_index, shipped_weights
from revzoo.data.base import IGNORED
from revzoo.data.loading import load_data
from revzoo.data.requirement import needed_outputs
from revzoo.errors import CheckpointError, InputError, listing
from revzoo.format import format_bits
from revzoo.model.create import create
from revzoo.spec.names import CONVERTED_WEIGHTS
from revzoo.training.recipe import DEFAULT_RECIPE, Recipe, load_recipe


@dataclass(frozen=True)
class Scores:
    """How well a model classifies, or how well it says the ids of texts.

    Args:
        top1: labels that got the highest logit [%].
        top5: labels among the five highest logits [%].
        loss: mean cross-entropy [nats], without label smoothing.
        count: number of labels.
        unit: what has a label: images, texts, tokens or bytes.
    """

    top1: float
    top5: float
    loss: float
    count: int
    unit: str = "images"

    def __str__(self) -> str:
        loss = f"loss {self.loss:.4f}{format_bits(self.loss, self.unit, prefix=', ')}"
        return f"top-1 {self.top1:.2f} %, top-5 {self.top5:.2f} %, {loss} on {self.count} {self.unit}"


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: Iterable[tuple[Tensor, Tensor]], accelerator: Accelerator, unit: str = "images"
) -> Scores:
    """Classify everything the loader gives, or predict the ids it asks for; labels that are IGNORED count nowhere.

    Args:
        model: on the accelerator's device; its training flag is put back.
        loader: prepared by the accelerator.
        unit: what has a label.
    """
    training = model.training
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64)
    for batch, labels in loader:
        with accelerator.autocast():
            logits = model(batch).float()
        losses = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=IGNORED)
        best = logits.topk(min(5, logits.shape[-1])).indices == labels[..., None]
        parts = losses.view_as(labels), best[..., 0], best.any(-1), labels != IGNORED
        # Added up for each example, because batches of texts differ in length from process to process.
        rows = torch.stack([part.double().view(len(labels), -1).sum(1) for part in parts], 1)
        sums += accelerator.gather_for_metrics(rows).sum(0).cpu()
    model.train(training)
    loss, hits1, hits5, count = sums.tolist()
    return Scores(100 * hits1 / count, 100 * hits5 / count, loss / count, int(count), unit)


def evaluate_checkpoint(path: Path, overrides: Iterable[str] = ()) -> Scores:
    """Evaluate what training has saved, on the test data it was evaluated on.

    Args:
        path: a run folder, of which the best weights are taken, or a checkpoint: it holds its spec and recipe.
        overrides: of `data` and `train.mixed_precision`, laid over the recipe, such as `data.root=/elsewhere`.

    Raises:
        InputError: another override, which would have no effect, or data of other classes than it was trained on.
        CheckpointError: no such checkpoint, damaged, or not one that training has saved.
    """
    overrides = _of_data(overrides)
    if (path / CONVERTED_WEIGHTS).is_file():
        raise CheckpointError(
            f"{path} was converted and not trained: it does not say on which data to evaluate it. Train it first: revzoo train "
            f"finetune model={path} data.root=IMAGES"
        )
    checkpoint = path / "best.safetensors" if path.is_dir() else path
    read_tensors(checkpoint)  # says what is wrong with a missing or damaged file
    texts = read_metadata(checkpoint) if checkpoint.suffix == ".safetensors" else {}
    if not {"revzoo.spec", "revzoo.recipe"} <= texts.keys():
        raise CheckpointError(f"{checkpoint} was not saved by `revzoo train`: it does not say on which data to evaluate it.")
    with TemporaryDirectory() as folder:
        for name, key in (("spec.yaml", "revzoo.spec"), ("config.yaml", "revzoo.recipe")):
            (Path(folder) / name).write_text(texts[key])
        return _evaluated(load_recipe(folder, overrides), folder, texts.get("revzoo.classes"), checkpoint=checkpoint)


def evaluate_pretrained(name: str, overrides: Iterable[str] = ()) -> tuple[Scores, WeightsEntry]:
    """Evaluate shipped weights on the data of the command that trained them; return their row of the index too."""
    shipped_weights(name)
    entry = read_index()[name]
    words = shlex.split(entry.command)  # revzoo train [RECIPE] [OVERRIDE...]
    words = words[words.index("train") + 1 :]
    source = next((word for word in words if "=" not in word), DEFAULT_RECIPE)
    trained = [word for word in words if "=" in word]
    return _evaluated(load_recipe(source, [*trained, *_of_data(overrides)]), name, pretrained=True), entry


def _of_data(overrides: Iterable[str]) -> list[str]:
    """Return the overrides if all of them matter to an evaluation."""
    overrides = list(overrides)
    for override in overrides:
        if not re.match(r"data\b|train\.mixed_precision\b", override):
            raise InputError(
                f"The rest of a recipe says how a model was trained. Received: {override}. "
                "Evaluation takes data.... and train.mixed_precision=... only."
            )
    return overrides


def _evaluated(recipe: Recipe, source: str, classes: str | None = None, **weights: Any) -> Scores:
    accelerator = Accelerator(mixed_precision=recipe.train.mixed_precision)
    model = create(source, device=accelerator.device, **weights)
    data = load_data(recipe.data, model.spec.input, recipe.train.seed, processes=0)
    if model.num_outputs < (needed := needed_outputs(model.spec, data, recipe.data.name)):
        apart = f"{needed} classes" if data.classes else f"the {needed} ids of its vocabulary"
        raise InputError(
            f"{model.spec.name} has {model.num_outputs} outputs and cannot tell {apart} apart. Received: "
            f"data.name={recipe.data.name}, data.root={recipe.data.root}."
        )
    known: list[str] | None = None if classes is None else json.loads(classes)
    if known is not None and data.names is not None and data.names != known:
        raise InputError(
            f"{model.spec.name} was trained to tell these {len(known)} classes apart: {listing(known)}. Received: data of "
            f"{len(data.names)}: {listing(data.names)}. Evaluate it on data with the same classes."
        )
    return evaluate(model, accelerator.prepare(data.test), accelerator, data.unit)
