"""The most probable classes of images and texts of one's own."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from revzoo.data.base import BrokenExampleError
from revzoo.data.image_folders import list_images
from revzoo.data.options import TABLES, TEXT_FILES
from revzoo.data.stored_images import list_formats, make_printable, open_image
from revzoo.data.text_tables import STANDARD_INPUT, read_lines
from revzoo.data.transform import transform
from revzoo.errors import InputError, RevzooError, join_names, quote
from revzoo.model.model import Model
from revzoo.model.trained import create_trained
from revzoo.spec.names import find_beside
from revzoo.spec.schema import ImageInput, TextInput

_FAR, _SMALL = 4, 32  # ratio of sides; side of small images [pixels]


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
            f"{source} has the head {model.spec.head.type}, which predicts no classes of a whole example. A causal "
            "language model continues texts: revzoo generate. For classes fine-tune it on labelled texts first: revzoo train "
            f"finetune {quote(f'model={source}')} data.name=text_classification data.root=TABLE.csv."
        )
    return model


def list_inputs(
    model: Model, files: Iterable[Path], column: str | None = None, texts: Iterable[str] = ()
) -> list[tuple[str, Any]]:
    """Return the name of each example in some files, and what `revzoo.transform` takes.

    Args:
        model: for images or texts.
        files: images and folders of them; or tables, and text files with one text per line; - is the standard input.
        column: that of the texts in a table; None: "text".
        texts: more texts, which are their own names.
    Raises:
        InputError: a file is missing or of another kind, a folder holds no images, or a model for images gets texts.
        DataError: a file of texts cannot be read.
    """
    is_text, inputs = isinstance(model.spec.input, TextInput), list[tuple[str, Any]]()
    if column is not None and not is_text:
        raise InputError(f"{model.spec.name} takes images, which have no column. Received: --column {column}. Leave it out.")
    for text in texts:
        if not (is_text and text.strip()):
            received = f"{model.spec.name}, which takes {'texts' if is_text else 'images'}, and {text!r}"
            raise InputError(f"--text is a text for a model of texts. Received: {received}. Leave it out.")
        inputs.append((text, text))
    for file in files:
        if file == STANDARD_INPUT and not is_text:
            raise InputError(f"{model.spec.name} takes images, and the standard input (-) is texts. Name images instead.")
        if file != STANDARD_INPUT and not os.path.exists(file):  # unlike pathlib's, it does not raise for an impossible name
            what = f"For a text itself type --text {quote(file)[:300]}" if is_text else "Name images or folders of them"
            raise InputError(f"There is no file {str(file)[:300]}.{find_beside(str(file))} {what}.")
        inputs += _list_texts(file, column or "text") if is_text else _list_images(file, model.spec.name)
    return [(make_printable(name), example) for name, example in inputs]


def describe_misfit(input: ImageInput, file: Path) -> str | None:
    """Return how far an image is from those that a network takes; None where it is not, or cannot be read.

    Photographs are much larger than what networks for photographs take. An image is far where it has to be enlarged so much,
    or where the network is for small images.
    """
    try:
        with open_image(file) as image:  # reads the header only
            size, bands = image.size, image.getbands()
    except Exception:  # decoders raise all kinds of exceptions; reading all of it will say more
        return None
    ratio = min(size) / min(input.size)
    if 1 / _FAR <= ratio <= (_FAR if min(input.size) <= _SMALL else inf):
        return None
    height, width = input.size
    kinds = ("in colour" if is_colour else "in grey" for is_colour in (len(bands) > 2 or "P" in bands, input.channels > 1))
    return "{}x{} pixels {}, and the network takes {}x{} {}".format(*size, next(kinds), width, height, next(kinds))


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
        raise InputError(f"There are no images in {file}: looked for {', '.join(list_formats())}.")
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
