"""Data sets of the user's own: what a function returns that the recipe names as `data.name=package.module:function`."""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from revzoo.data.base import BrokenExampleError, Examples
from revzoo.data.options import DataOptions
from revzoo.data.random import seeded
from revzoo.errors import DataError, InputError, RevzooError
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
    """

    def __init__(self, source: Any, name: str, class_names: list[str] | None, input: Input, seed: int):
        self.source, self.name, self.class_names, self.seed, self.epoch = source, name, class_names, seed, 0
        of_texts = "tokens" if class_names is None else "texts"
        self.label_noun = "images" if isinstance(input, ImageInput) else of_texts
        self.labels = getattr(source, "targets", None)
        self.data_config: dict[str, Any] = _read_config(name, source)

    def __len__(self) -> int:
        return len(self.source)

    def start_epoch(self, epoch: int) -> None:
        """Choose the epoch, which determines the random choices."""
        self.epoch = epoch

    def list_contents(self) -> list[bytes]:
        """Return the function, the number of examples, and their labels where the data set lists them."""
        labels = b"" if self.labels is None else torch.as_tensor(self.labels).numpy().tobytes()
        return [self.name.encode(), str(len(self)).encode(), labels]

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        with seeded(self.seed, self.epoch, index):
            example, label = self.source[index]
        if self.num_classes is not None and not _is_class(label, self.num_classes):
            raise BrokenExampleError(
                f"{self.name}: example {index} has the label {label!r}. Labels are integers from 0 to {self.num_classes - 1}, "
                "the numbers of the names in `classes`."
            )
        return example, label


def load_own(options: DataOptions, input: Input, seed: int) -> tuple[OwnExamples, OwnExamples]:
    """Call the function that the recipe names with its options and the model's input; return training and test examples.

    Raises:
        DataError: there is no such function, or it does not return two data sets that the model takes.
    """
    function = _find_function(options.name)
    try:
        returned = function(options, input)
    except RevzooError:
        raise
    except Exception as error:  # of a function of the user's
        raise DataError(
            f"{options.name} raises {describe_failure(error)}. It is called with the data section of the recipe and the "
            "model's input: correct it there."
        ) from error
    if not (isinstance(returned, tuple) and len(returned) == 2 and all(map(_is_data_set, returned))):
        raise DataError(
            f"{options.name} has to return two data sets, for training and for testing, that have a length and examples by "
            f"number: return train, test. Received: {type(returned).__name__}."
        )
    class_names = _list_classes(options.name, returned[0])
    train, test = (OwnExamples(source, options.name, class_names, input, seed) for source in returned)
    if isinstance(input, ImageInput) and class_names is None:
        raise DataError(
            f"The training data of {options.name} need an attribute `classes`: a list with the names of the classes."
        )
    for examples in (train, test):
        _require_fitting_example(examples, input)
    return train, test


def _find_function(name: str) -> Callable[[DataOptions, Input], Any]:
    module, _, attribute = name.partition(":")
    try:
        function: Callable[[DataOptions, Input], Any] = getattr(import_from_here(module), attribute)
    except InputError as error:
        raise DataError(f"data.name={name}: {error}") from error
    except AttributeError as error:
        raise DataError(f"data.name={name}: {error}. Write it as package.module:function.") from error
    if not callable(function):
        raise DataError(f"data.name={name} should be a function. Received: {type(function).__name__}.")
    return function


def _list_classes(name: str, source: Any) -> list[str] | None:
    classes = getattr(source, "classes", None)  # as torchvision's data sets have it
    if classes is None:
        return None
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        raise DataError(
            f"The training data of {name} have an attribute `classes`, which is a list with the names of the classes. "
            f"Received: {classes!r}."
        )
    return [str(each) for each in classes]


def _read_config(name: str, source: Any) -> dict[str, Any]:
    config = getattr(source, "data_config", {})
    if not isinstance(config, Mapping):
        raise DataError(
            f"The data of {name} have an attribute `data_config`, which is a dictionary such as {{'mean': (0.5, 0.5, 0.5)}}. "
            f"Received: {config!r}."
        )
    return dict(config)


def _is_class(label: Any, count: int) -> bool:
    try:
        return 0 <= operator.index(label) < count
    except TypeError:
        return False


def _is_data_set(source: Any) -> bool:
    return hasattr(source, "__len__") and hasattr(source, "__getitem__")


def _require_fitting_example(examples: OwnExamples, input: Input) -> None:
    if not len(examples):
        raise DataError(
            f"{examples.name} returned a data set without examples. Return at least one for training and for testing."
        )
    example = examples[0][0]
    if isinstance(input, ImageInput):
        shape, wanted = (input.channels, *input.size), "images of the shape (channels, height, width)"
    else:
        shape, wanted = (input.length,), "ids of the shape (length,)"
    if not isinstance(example, Tensor) or tuple(example.shape) != shape:
        received = tuple(example.shape) if isinstance(example, Tensor) else type(example).__name__
        raise DataError(f"{examples.name}: the model takes tensors, {wanted} = {shape}. Received: {received}.")
