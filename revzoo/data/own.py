"""Data sets of the user's own: what a function returns that the recipe names as `data.name=package.module:function`."""

import json
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from revzoo.data.base import BrokenExampleError, Examples
from revzoo.data.options import DataOptions
from revzoo.data.random import seeded
from revzoo.errors import DataError, InputError, RevzooError, join_names
from revzoo.plugin import describe_failure, import_from_here
from revzoo.spec.schema import ImageInput, Input


class OwnExamples(Examples):
    """A data set of the user's own, whose random choices are a function of the seed, the epoch and the example.

    Args:
        source: a map-style data set of (tensor, label). Its attribute `targets`, if there is one, lists the labels, and
            `data_config` says how examples are prepared, as a model's does.
        name: the function that returned it.
        class_names: names of the classes, whose numbers are the labels; None: the labels are ids (N,), for a language model.
        input: what the model takes.
        seed: determines the random choices.

    Raises:
        DataError: `targets` are not what they should be.
    """

    def __init__(self, source: Any, name: str, class_names: list[str] | None, input: Input, seed: int):
        self.source, self.name, self.class_names, self.seed = source, name, class_names, seed
        of_texts = "tokens" if class_names is None else "texts"
        self.label_noun = "images" if isinstance(input, ImageInput) else of_texts
        self.labels = None if class_names is None else _read_labels(name, source, len(class_names))
        # Saved as JSON, in which arrays are lists.
        config = json.loads(json.dumps(dict(getattr(source, "data_config", {})), default=lambda value: value.tolist()))
        self.data_config = {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}
        self._input = input

    def __len__(self) -> int:
        return len(self.source)

    def list_contents(self) -> list[bytes]:
        """Return the function, the number of examples, and their labels where the data set lists them."""
        labels = b"" if self.labels is None else torch.as_tensor(self.labels).numpy().tobytes()
        return [self.name.encode(), str(len(self)).encode(), labels]

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        called = f"{self.name}: example {index}"
        with seeded(self.seed, self.epoch, index), _explain(called):
            returned = self.source[index]
        if not (isinstance(returned, tuple | list) and len(returned) == 2):
            raise BrokenExampleError(f"{called} should be a pair, (tensor, label). Received: {_describe(returned)}.")
        example, label = returned
        if problem := _find_misfit(example, self._input):
            raise BrokenExampleError(f"{called} does not fit: {problem}. Received: {_describe(example)}.")
        if self.num_classes is not None and not _is_class(label, self.num_classes):
            raise BrokenExampleError(
                f"{called} has the label {label!r}. Labels are integers from 0 to {self.num_classes - 1}, "
                "the numbers of the names in `classes`."
            )
        if self.num_classes is None and not (isinstance(label, Tensor) and label.shape == example.shape):
            raise BrokenExampleError(
                f"{called} has the label {_describe(label)}. Without an attribute `classes`, which lists the names of classes, "
                f"labels are ids, one for each of the text: {tuple(example.shape)}."
            )
        return example, label


def load_own(options: DataOptions, input: Input, seed: int) -> tuple[OwnExamples, OwnExamples]:
    """Call the function that the recipe names with its options and the model's input; return training and test examples.

    Raises:
        DataError: there is no such function, or it does not return two data sets that the model takes.
    """
    name = options.name
    module, _, attribute = name.partition(":")
    try:
        function: Callable[[DataOptions, Input], Any] = getattr(import_from_here(module), attribute)
    except (InputError, AttributeError) as error:
        raise DataError(f"data.name={name}: {error}") from error
    if not callable(function):
        raise DataError(f"data.name={name} should be a function. Received: {type(function).__name__}.")
    with _explain(name):
        returned = function(options, input)
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise DataError(
            f"{name} has to return two data sets, for training and for testing, that have a length and examples by number: "
            f"return train, test. Received: {type(returned).__name__}."
        )
    with _explain(f"{name}: what it returns"):
        class_names, tested = (_list_classes(name, source) for source in returned)
        if tested not in (None, class_names):
            raise DataError(
                f"The two data sets of {name} have different classes, and so their labels different meanings. Received: "
                f"{join_names(class_names or [])}; for testing {join_names(tested or [])}. Give both the same list `classes`."
            )
        if isinstance(input, ImageInput) and class_names is None:
            raise DataError(f"The training data of {name} need an attribute `classes`: a list with the names of the classes.")
        train, test = (OwnExamples(source, name, class_names, input, seed) for source in returned)
        if not (len(train) and len(test)):
            raise DataError(f"{name} returned a data set without examples. Return at least one for training and for testing.")
    for examples in (train, test):
        examples[0]  # before anything is printed or written
    return train, test


@contextmanager
def _explain(what: str) -> Iterator[None]:
    """Say what code of the user's raises inside the block, and where; BrokenExampleError."""
    try:
        yield
    except RevzooError:
        raise
    except (Exception, SystemExit) as error:  # of code of the user's, which may raise anything
        raise BrokenExampleError(f"{what} raises {describe_failure(error)}. Correct it there.") from error


def _list_classes(name: str, source: Any) -> list[str] | None:
    classes = getattr(source, "classes", None)  # as torchvision's data sets have it
    if classes is None:
        return None
    names = [] if isinstance(classes, str) else [str(each) for each in classes]
    if len(set(names)) < max(2, len(names)):
        raise DataError(
            f"A data set of {name} has an attribute `classes`, which lists the names of two or more classes, all different. "
            f"Received: {classes!r}."
        )
    return names


def _read_labels(name: str, source: Any, classes: int) -> list[int] | None:
    targets = getattr(source, "targets", None)  # as torchvision's data sets have it
    if targets is None:
        return None
    labels = list(targets)
    if len(labels) != len(source) or not all(_is_class(label, classes) for label in labels):
        received = join_names([repr(label) for label in labels], most=4)
        raise DataError(
            f"The data of {name} have an attribute `targets`, which lists the label of each of their {len(source)} examples, "
            f"integers from 0 to {classes - 1}. Received: {received}. Correct or remove it."
        )
    return [int(label) for label in labels]


def _is_class(label: Any, count: int) -> bool:
    try:
        return 0 <= operator.index(label) < count
    except TypeError:
        return False


def _find_misfit(example: Any, input: Input) -> str | None:
    """Return what the model takes instead of an example; None where it takes it."""
    if isinstance(input, ImageInput):
        shape = (input.channels, *input.size)
        is_image = isinstance(example, Tensor) and example.shape == shape and example.dtype == torch.float32
        if is_image and torch.stack(example.aminmax()).isfinite().all():
            return None
        return f"the model takes finite tensors of float32, images of the shape (channels, height, width) = {shape}"
    is_ids = isinstance(example, Tensor) and example.shape == (input.length,) and not example.is_floating_point()
    if is_ids and example.min() >= 0 and example.max() < input.vocabulary:
        return None
    return f"the model takes tensors of int64, ids of the shape (length,) = {(input.length,)} from 0 to {input.vocabulary - 1}"


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {value.dtype}{'' if value.isfinite().all() else ', with infinities or NaN'}"
    return type(value).__name__
