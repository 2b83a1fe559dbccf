"""Evaluate weights: those of a run, what `revzoo convert` or `save_pretrained` wrote, and those that ship."""

import json
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from revzoo.checkpoint.facts import read_fact
from revzoo.checkpoint.files import find_weights, read_metadata, read_tensors
from revzoo.checkpoint.index import WeightsEntry, find_shipped_weights, read_index
from revzoo.data.base import Data
from revzoo.data.loading import load_data
from revzoo.data.requirement import count_required_outputs
from revzoo.errors import CheckpointError, InputError, RevzooError, SpecError, join_names, quote
from revzoo.model.create import create
from revzoo.spec.loading import load_spec
from revzoo.spec.names import (
    BEST_WEIGHTS,
    CONVERTED_WEIGHTS,
    NAME_A_RUN,
    TOKENIZER,
    WEIGHTS_INDEX,
    find_inside,
    model_files,
    require_checkpoint,
)
from revzoo.spec.schema import TextInput
from revzoo.training.evaluation import Scores, describe_unreadable, evaluate, gather_unreadable
from revzoo.training.options import Recipe
from revzoo.training.origin import compare_examples
from revzoo.training.preprocessing import adopt_preprocessing
from revzoo.training.processes import open_accelerator
from revzoo.training.recipe import DEFAULT_RECIPE, load_recipe
from revzoo.training.recipe_check import find_ineffective_settings


def evaluate_checkpoint(path: Path, overrides: Iterable[str] = (), *, by_class: bool = False) -> Scores:
    """Evaluate a checkpoint that training has saved, on the test data of its recipe.

    Args:
        path: folder of a run (its best weights are evaluated); a checkpoint, which holds its spec and recipe; or a folder that
            `revzoo convert` or `save_pretrained` wrote (the overrides name the data).
        overrides: changes to `data` and `train.mixed_precision` of the recipe, such as `data.root=/elsewhere`.
        by_class: whether to refuse a model that has no classes before it is run.

    Raises:
        InputError: another override, which would have no effect; data with other classes than the model was trained on, or
            none.
        CheckpointError: the checkpoint does not exist, is damaged, or was not saved by training.
    """
    typed = overrides = _require_data_overrides(overrides)
    if any((path / name).is_file() for name in (CONVERTED_WEIGHTS, WEIGHTS_INDEX)):
        return _evaluate_saved(path, overrides, by_class)
    checkpoint = path / BEST_WEIGHTS if os.path.isdir(path) else path
    if not os.path.isfile(find_weights(checkpoint)):
        raise _explain_missing(path)
    read_tensors(checkpoint)  # reports a missing or damaged file
    texts = read_metadata(checkpoint) if checkpoint.suffix == ".safetensors" else {}
    if not {"revzoo.spec", "revzoo.recipe"} <= texts.keys():
        raise CheckpointError(
            f"{checkpoint} was not saved by `revzoo train`: it does not say on which data to evaluate it. Name the folder of a "
            "run, or a checkpoint in it."
        )
    if (tokenizer := checkpoint.parent / TOKENIZER).is_file():  # the run's own copy; an override follows it
        overrides = [_set("data.text.tokenizer", tokenizer), *overrides]
    overrides = ["data.limit=null", "mixup=null", *overrides]  # which training has
    with TemporaryDirectory() as folder:
        for name, key in (("spec.yaml", "revzoo.spec"), ("config.yaml", "revzoo.recipe")):
            (Path(folder) / name).write_text(texts[key], encoding="utf-8")
        try:
            recipe = load_recipe(folder, overrides)
            _refuse_ineffective(recipe, typed)
            examples = read_fact(texts["revzoo.examples"], Any, checkpoint) if "revzoo.examples" in texts else None
            return _load_and_evaluate(recipe, folder, by_class, examples, checkpoint=checkpoint)
        except SpecError as error:
            inside = [replace(each, file=each.file.replace(f"{folder}/", f"{checkpoint}: ")) for each in error.problems]
            raise SpecError(inside) from error
        except InputError as error:
            raise InputError(str(error).replace(f"{folder}/", f"{checkpoint}: ")) from error


def _explain_missing(path: Path) -> RevzooError:
    """Return the error for a path without weights; it says what to name instead."""
    if str(path) in model_files():
        return CheckpointError(
            f"No weights ship for {path}; they do for {join_names(sorted(read_index()))}. Train it (revzoo train images "
            f"model={path} data.root=IMAGES), and evaluate the folder of the run."
        )
    require_checkpoint(str(path))
    return CheckpointError(
        f"{path} is not the folder of a run with weights: there is no {BEST_WEIGHTS} in it."
        f"{find_inside(str(path), BEST_WEIGHTS) or NAME_A_RUN}"
    )


def _evaluate_saved(folder: Path, overrides: list[str], by_class: bool) -> Scores:
    """Evaluate what `revzoo convert` or `save_pretrained` wrote, with its preprocessing, on data that overrides name."""
    spec = load_spec(folder)
    is_text = isinstance(spec.input, TextInput)
    if not any(override.startswith(("data.root=", "data.name=")) for override in overrides):
        raise CheckpointError(
            f"{folder} does not say on which data to evaluate it. Name them: revzoo eval {quote(folder)} "
            f"data.root={'TABLE.csv' if is_text else 'IMAGES'}."
        )
    kind = ["data.name=text_classification"] if is_text else []
    recipe = load_recipe("finetune", [_set("model", folder), *kind, *overrides])
    _refuse_ineffective(recipe, overrides)
    recipe, notes = adopt_preprocessing(recipe, spec)
    scores = _load_and_evaluate(recipe, str(folder), by_class)
    return replace(scores, notes=(*notes, *scores.notes))


def _set(path: str, file: Path) -> str:
    """Return the override that sets a file, whatever letters its name has."""
    return f"{path}={json.dumps(str(file), ensure_ascii=False)}"


def _refuse_ineffective(recipe: Recipe, overrides: Iterable[str]) -> None:
    """Raise InputError for an override that changes nothing, so that nobody takes the scores for those of other data."""
    typed = [override.partition("=")[0] for override in overrides]
    for line in find_ineffective_settings(recipe):
        section = line.partition(" ")[0]
        if any(f"{path}.".startswith(f"{section}.") for path in typed):
            raise InputError(f"{line}. For other data name their kind, too: data.name=folder data.root=IMAGES.")


def evaluate_pretrained(name: str, overrides: Iterable[str] = (), *, by_class: bool = False) -> tuple[Scores, WeightsEntry]:
    """Evaluate shipped weights on the test data of the command that trained them; return their index entry too."""
    find_shipped_weights(name)
    entry = read_index()[name]
    words = shlex.split(entry.command)  # revzoo train [RECIPE] [OVERRIDE...]
    words = words[words.index("train") + 1 :]
    source = next((word for word in words if "=" not in word), DEFAULT_RECIPE)
    trained = [word for word in words if "=" in word]
    overrides = _require_data_overrides(overrides)
    recipe = load_recipe(source, [*trained, "mixup=null", *overrides])
    _refuse_ineffective(recipe, overrides)
    return _load_and_evaluate(recipe, name, by_class, pretrained=True), entry


def _require_data_overrides(overrides: Iterable[str]) -> list[str]:
    """Return the overrides, or raise InputError if one of them has no effect on an evaluation."""
    overrides = list(overrides)
    for override in overrides:
        if not re.match(r"data\b|train\.mixed_precision\b", override):
            raise InputError(
                f"The rest of a recipe says how a model was trained. Received: {override}. "
                "Evaluation takes data.... and train.mixed_precision=... only."
            )
    return overrides


def _load_and_evaluate(recipe: Recipe, source: str, by_class: bool, trained_on: Any = None, **weights: Any) -> Scores:
    accelerator = open_accelerator(recipe.train.mixed_precision)
    model = create(source, device=accelerator.device, **weights)
    data = load_data(recipe.data, model.spec.input, recipe.train.seed, processes=0)
    if by_class and data.num_classes is None:
        raise InputError(
            f"Only a classifier has classes. Received: {model.spec.name}, which predicts {data.label_noun}. Leave out "
            "--per-class, --plot and --errors."
        )
    if model.num_outputs < (needed := count_required_outputs(model.spec, data, recipe.data.name)):
        targets = f"{needed} classes" if data.num_classes else f"the {needed} ids of its vocabulary"
        raise InputError(
            f"{model.spec.name} has {model.num_outputs} outputs, too few for {targets}. Received: "
            f"data.name={recipe.data.name}, data.root={recipe.data.root}."
        )
    known = model.class_names
    if known is None and data.class_names is not None and model.num_outputs != needed:
        raise InputError(
            f"{model.spec.name} has {model.num_outputs} outputs without names, and the data have {needed} classes, in another "
            f"order. Fine-tune it first: revzoo train finetune model=DIR {quote(f'data.root={recipe.data.root}')}."
        )
    if known is not None and data.class_names is not None and data.class_names != list(known):
        raise InputError(
            f"{model.spec.name} was trained on these {len(known)} classes: {join_names(known)}. Received: data of "
            f"{len(data.class_names)} classes: {join_names(data.class_names)}. Evaluate it on data with the same classes."
        )
    scores = evaluate(model, accelerator.prepare(data.test), accelerator, data.label_noun)
    unreadable = gather_unreadable(data)["test"]
    left_out = [describe_unreadable("test", unreadable)] if unreadable else []
    classes = scores.classes
    if classes is not None and data.class_names is not None:
        classes = replace(classes, class_names=data.class_names, name_example=data.name_example)
    return replace(scores, notes=(*data.notes, *left_out, *_compare_examples(trained_on, data)), classes=classes)


def _compare_examples(trained_on: Any, data: Data) -> list[str]:
    """Return a note if the examples that are held out are not those that were held out in training."""
    if trained_on is None or not data.is_held_out:
        return []
    changes, noun = compare_examples(trained_on, data.describe_examples()), data.example_noun
    if len(changes) < 2:  # an example changes sides only if both sides change
        return []
    words = "; ".join(f"{split}: {change}" for split, change in changes.items())
    return [
        f"the {noun} held out now are not those that were held out in training ({words}). If {noun} were added since, some of "
        "these were trained on: keep those to evaluate apart (val)"
    ]
