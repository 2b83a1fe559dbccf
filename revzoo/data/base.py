"""Data whose every random choice is a function of the seed, the epoch and the example.

Order and augmentation never draw from the process's own random streams. So a run that was interrupted and resumed sees
exactly what the uninterrupted one sees, with any number of loader processes, and in the middle of an epoch too.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, default_collate

from revzoo.data.options import DataOptions
from revzoo.data.random import generator

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
        self.classes, self.unit, self.things = train.classes, train.unit, example_noun(train)
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


def example_noun(examples: Examples) -> str:
    """Return what one calls the examples of a data set: images or texts."""
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
