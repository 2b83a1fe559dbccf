"""The most probable classes of images and texts of one's own."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from revzoo.data.base import BrokenExampleError
from revzoo.data.image_folders import list_images
from revzoo.data.options import TABLES, TEXT_FILES
from revzoo.data.stored_images import list_suffixes, make_printable
from revzoo.data.text_tables import read_lines
from revzoo.data.transform import transform
from revzoo.errors import InputError, RevzooError, join_names, quote
from revzoo.model.model import Model
from revzoo.model.trained import create_trained
from revzoo.spec.names import find_beside
from revzoo.spec.schema import TextInput


@dataclass(frozen=True)
class Prediction:
    """What a model says about one image or text.

    Args:
        input: the image's file, or file and row of a text.
        classes: the most probable classes, the first one first.
        probabilities: of these.
    """

    input: str
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        rows = zip(self.classes, self.probabilities, strict=True)
        return {"input": self.input, "predictions": [{"class": name, "probability": p} for name, p in rows]}


def load_classifier(source: str, device: torch.device | str) -> Model:
    """Create a model with its weights, for prediction.

    Args:
        source: as for `create_trained`.
        device: where it predicts.
    Raises:
        InputError: there are no weights, or the model has no classes.
        UnknownNameError, CheckpointError: as for `create`.
    """
    model = create_trained(source, device)
    with torch.no_grad():
        outputs = model(model.example_input(1, device))
    if outputs.dim() != 2 or not model.num_classes:
        raise InputError(
            f"{source} has the head {model.spec.head.type}, which predicts no classes of a whole example. Fine-tune it on "
            f"labelled texts first: revzoo train finetune {quote(f'model={source}')} data.name=text_classification "
            "data.root=TABLE.csv."
        )
    return model


def list_inputs(model: Model, files: Iterable[Path], column: str | None = None) -> list[tuple[str, Any]]:
    """Return the name of each example in some files, and what `revzoo.transform` takes.

    Args:
        model: for images or texts.
        files: images and folders of them; or tables, and text files with one text per line.
        column: that of the texts in a table; None: "text".
    Raises:
        InputError: a file is missing or of another kind, a folder holds no images, or images are to have a column.
        DataError: a file of texts cannot be read.
    """
    is_text, inputs = isinstance(model.spec.input, TextInput), list[tuple[str, Any]]()
    if column is not None and not is_text:
        raise InputError(f"{model.spec.name} takes images, which have no column. Received: --column {column}. Leave it out.")
    for file in files:
        if not os.path.exists(file):  # unlike pathlib's, it does not raise for a name that no file can have
            what = "Texts are in tables or text files, a text in each line" if is_text else "Name images or folders of them"
            raise InputError(f"There is no file {str(file)[:300]}.{find_beside(str(file))} {what}.")
        inputs += _list_texts(file, column or "text") if is_text else _list_images(file, model.spec.name)
    return [(make_printable(name), example) for name, example in inputs]


def _list_texts(file: Path, column: str) -> Iterator[tuple[str, str]]:
    if file.is_dir():
        raise InputError(f"Texts are in tables ({join_names(list(TABLES))}) or text files. Received: the folder {file}.")
    for row, text in enumerate(read_lines(file, column), 1):
        if text.strip():
            yield f"{file}:{row}", text


def _list_images(file: Path, model: str) -> Iterator[tuple[str, Path]]:
    if file.suffix.lower() in TEXT_FILES:
        raise InputError(f"{model} takes images. Received: {file}. Name images or folders of them.")
    images = list_images(file) if file.is_dir() else [file]
    if not images:
        raise InputError(f"There are no images in {file}: looked for {', '.join(list_suffixes())}.")
    yield from ((str(image), image) for image in images)


@torch.inference_mode()
def predict(
    model: Model,
    inputs: Iterable[tuple[str, Any]],
    *,
    top: int = 5,
    batch_size: int = 32,
    on_broken: Callable[[BrokenExampleError], object] | None = None,
) -> Iterator[Prediction]:
    """Yield the predictions of a model for named images or texts.

    Args:
        model: in eval mode.
        inputs: names, and what `revzoo.transform` takes.
        top: how many classes of each.
        batch_size: examples that are computed together.
        on_broken: called with the error of an image that cannot be read, which is then left out. None: the error is raised.
    Raises:
        BrokenExampleError: an image cannot be read, and `on_broken` is None.
        RevzooError: the model returns infinities or NaN.
    """
    device = next(model.parameters()).device
    ready = _prepare(transform(model), inputs, on_broken)
    while batch := list(islice(ready, batch_size)):
        names, examples = zip(*batch, strict=True)
        logits = model(_stack(model, examples).to(device)).float()
        if invalid := [name for name, row in zip(names, logits.isfinite().all(1).tolist(), strict=True) if not row]:
            raise RevzooError(f"{model.spec.name} returns infinities or NaN for {invalid[0]}: its weights cannot be used.")
        best = logits.softmax(1).topk(min(top, model.num_outputs))
        for name, values, indices in zip(names, best.values.tolist(), best.indices.tolist(), strict=True):
            yield Prediction(name, tuple(_name_class(model, i) for i in indices), tuple(values))


def _prepare(
    prepare: Callable[[Any], Tensor],
    inputs: Iterable[tuple[str, Any]],
    on_broken: Callable[[BrokenExampleError], object] | None,
) -> Iterator[tuple[str, Tensor]]:
    for name, example in inputs:
        try:
            prepared = prepare(example)
        except BrokenExampleError as error:
            if on_broken is None:
                raise
            on_broken(error)
        else:
            yield name, prepared


def _stack(model: Model, examples: tuple[Tensor, ...]) -> Tensor:
    """Return a batch; texts are padded to the longest."""
    input = model.spec.input
    return pad_sequence(list(examples), True, input.padding or 0) if isinstance(input, TextInput) else torch.stack(examples)


def _name_class(model: Model, index: int) -> str:
    names = model.class_names or ()
    return names[index] if index < len(names) else f"class {index}"
