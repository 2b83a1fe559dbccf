"""Data whose every random choice is a function of the seed, the epoch and the example.

Order and augmentation never draw from the process's own random streams. So a run that was interrupted and resumed sees
exactly what the uninterrupted one sees, with any number of loader processes, and in the middle of an epoch too.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, default_collate

from revzoo.errors import DataError
from revzoo.spec.schema import ImageInput, Input, TextInput
from revzoo.training.config import TEXTS, DataOptions

IGNORED = -100  # the label of a token that need not be predicted, as torch's cross-entropy has it


class Examples(Protocol):
    """What a loader draws from: a data set whose augmentation is chosen by `start_epoch`.

    Not `set_epoch`: Accelerate calls that with a count of its own, which starts at 0 in a resumed run.
    """

    @property
    def classes(self) -> int | None:
        """Number of classes; None where labels are ids of the text."""

    @property
    def unit(self) -> str:
        """What has a label: images, texts, tokens or bytes."""

    def __len__(self) -> int: ...

    def start_epoch(self, epoch: int) -> None: ...


class Data:
    """Loaders of (images, labels) or (ids, labels) for training and test.

    Labels are classes (B,), or for a language model the ids (B, N) it should say, IGNORED where it need not say any.

    Args:
        train: examples to learn from; an incomplete last batch is left out.
        test: examples to evaluate on, all of them, in order.
        options: batch size per process and number of loader processes.
        seed: of order and augmentation.
    """

    def __init__(self, train: Examples, test: Examples, options: DataOptions, seed: int):
        self.classes, self.unit, self.things = train.classes, train.unit, _things(train)
        self.names: list[str] | None = getattr(train, "names", None)  # of the classes, where the data say them
        self._examples = train
        self._sampler = EpochSampler(len(train), seed)
        self.train = _loader(train, options, sampler=self._sampler, drop_last=True)
        self.test = _loader(test, options)

    def start_epoch(self, epoch: int, skip: int = 0) -> None:
        """Choose the order and augmentation of an epoch, before `train` is iterated over.

        Args:
            skip: examples to leave out at the start, over all processes: what an interrupted run has already seen.
        """
        self._sampler.epoch, self._sampler.skip = epoch, skip
        self._examples.start_epoch(epoch)


class EpochSampler(Sampler[int]):
    """A permutation drawn from the seed and `epoch`, of which the first `skip` indices are left out."""

    def __init__(self, length: int, seed: int):
        self.length, self.seed = length, seed
        self.epoch = self.skip = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length, generator=generator(self.seed, self.epoch))
        return iter(order[self.skip :].tolist())


def load_data(options: DataOptions, input: Input, seed: int, processes: int = 1) -> Data:
    """Open the training and test data for a model's input.

    Args:
        processes: that share every epoch of training; 0 is no training.

    Raises:
        DataError: the data are missing, empty, without classes, not what the model takes, or less than a batch for each
            process.
    """
    train: Examples
    test: Examples
    _check_kind(options.name, input)
    if isinstance(input, TextInput):
        from revzoo.training.text import load_text

        train, test = load_text(options, input, seed)
    elif options.name == "digits":
        from revzoo.training.digits import load_digits

        train, test = load_digits(options, input, seed)
    else:
        from revzoo.training.image import load_images

        train, test = load_images(options, input, seed)
    if processes and (most := len(train) // processes) < options.batch_size:
        raise DataError(
            f"The {len(train)} training {_things(train)} are not a batch for each of {processes} processes. Received: "
            f"data.batch_size={options.batch_size}. Use {f'data.batch_size={most} or less' if most else 'fewer processes'}."
        )
    return Data(train, test, options, seed)


def _check_kind(name: str, input: Input) -> None:
    if isinstance(input, TextInput) and name not in TEXTS:
        fitting = f"data.name={' or '.join(TEXTS)}, or a model for images such as model.name=rev_vit_digits"
        raise DataError(f"data.name={name} is images. Received: a model for text. Use {fitting}.")
    if isinstance(input, ImageInput) and name in TEXTS:
        fitting = "data.name=digits or folder, or a model for text such as model.name=rev_roberta_mini"
        raise DataError(f"data.name={name} is text. Received: a model for images. Use {fitting}.")


def _things(examples: Examples) -> str:
    return "images" if examples.unit == "images" else "texts"


def _loader(examples: Any, options: DataOptions, **order: Any) -> DataLoader[tuple[Tensor, Tensor]]:
    """Workers start anew every epoch, because they hold copies of the examples and so the epoch they were told."""
    collate: Callable[[Any], Any] = _as_is if hasattr(examples, "__getitems__") else default_collate
    return DataLoader(
        examples,
        batch_size=options.batch_size,
        num_workers=options.num_workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # else every epoch would draw a number from the process's stream
        **order,
    )


def _as_is(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


def number(*key: int) -> int:
    """Return a 64-bit seed that is a function of the key, unrelated for neighbouring keys."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


def generator(*key: int) -> torch.Generator:
    """Return a CPU generator seeded with the key."""
    return torch.Generator().manual_seed(number(*key))


def reseed(*key: int) -> None:
    """Seed the process's random streams (Python, NumPy, torch on all devices) with the key."""
    seed = number(*key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Seed the process's CPU streams with the key inside, and have them untouched outside."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed = number(*key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which would seed the accelerators as well
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
