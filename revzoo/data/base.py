"""Loaders whose random choices are a function of the seed, the epoch and the example.

Order and augmentation never draw from the global random generators. A run that was interrupted and resumed therefore sees
exactly the batches of an uninterrupted one, with any number of loader processes, and from the middle of an epoch too. The
processes that train share each batch; which examples are in it does not depend on how many they are.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate

from revzoo.data.options import DataOptions
from revzoo.data.random import make_generator
from revzoo.errors import DataError

IGNORED = -100  # the label of a token that is not to be predicted: the default `ignore_index` of torch's cross-entropy


class BrokenExampleError(DataError):
    """An example that cannot be used.

    A loader process passes the error on with its traceback inside the message; only the message proper is kept.
    """

    def __init__(self, message: str):
        super().__init__(message.rpartition("BrokenExampleError: ")[2].strip())


class Examples(Dataset[tuple[Tensor, Any]], ABC):
    """A map-style data set, and what it says about itself.

    Attributes:
        label_noun: what one label belongs to: "images", "texts", "tokens" or "bytes".
        class_names: names of the classes in order; None for a language model, whose labels are ids of the text.
        labels: class of each example in order; None where it is not known before the example is read.
        notes: remarks for the reader.
        data_config: how an example is preprocessed for evaluation, as a model's `data_config`.
        is_held_out: whether these were split off the training examples by position, so that adding examples moves some from
            one side to the other.
        epoch: number of the epoch, from 0.
        length: number of ids in each example, where all of them are to be predicted; None for other data.
    """

    label_noun: str
    class_names: Sequence[str] | None = None
    labels: Any = None
    notes: Sequence[str] = ()
    data_config: Mapping[str, Any] = MappingProxyType({})
    is_held_out: bool = False
    epoch: int = 0
    length: int | None = None

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None for a language model's data."""
        return None if self.class_names is None else len(self.class_names)

    @property
    def noun(self) -> str:
        """What the examples are called: "images" or "texts"."""
        return "images" if self.label_noun == "images" else "texts"

    @abstractmethod
    def __len__(self) -> int: ...

    def start_epoch(self, epoch: int) -> None:
        """Choose the epoch, which determines what is random, if anything is.

        It is not called `set_epoch`: Accelerate calls that with a count of its own, which starts at 0 in a resumed run.
        """
        self.epoch = epoch

    @abstractmethod
    def list_contents(self) -> Iterable[bytes]:
        """Return what tells these examples from others, in their order: names of files, or the examples themselves."""

    def list_unreadable(self) -> list[str]:
        """Return the names of the examples that were asked for in this process, or in its loaders, and could not be read."""
        return []

    def name_example(self, index: int) -> str:
        """Return the file or the row of an example, for people to find it; its number, from 0, where there is neither."""
        return f"example {index}"


class Data:
    """Loaders of (images, labels) or (ids, labels), `train` for training and `test` for evaluation.

    Labels are classes (B,), IGNORED for a test image that cannot be read, or for a language model the ids (B, N) to predict,
    IGNORED at positions where there is none.
    What `Examples` say of themselves is here, too: `notes` of both, `data_config` and `is_held_out` of the test examples, and
    the rest of the training examples (their `length`, `noun` as `example_noun`, `labels` as `train_labels`). `name_example`
    names an example for testing.

    Args:
        train: examples for training; an incomplete last batch of all processes is left out.
        test: examples for evaluation, all of them, in order.
        options: batch size per process, number of loader processes, and how many examples are taken at most.
        seed: determines order and augmentation.
        processes: number of processes that share each batch.
    """

    def __init__(self, train: Examples, test: Examples, options: DataOptions, seed: int, processes: int = 1):
        self.num_classes, self.label_noun, self.example_noun = train.num_classes, train.label_noun, train.noun
        self.class_names = None if train.class_names is None else list(train.class_names)
        chosen, tested = (_choose(examples, options.limit, seed) for examples in (train, test))
        self.train_labels, self.length = train.labels, train.length
        if isinstance(chosen, Subset) and train.labels is not None:
            self.train_labels = [train.labels[i] for i in chosen.indices]
        self.data_config, self.is_held_out = dict(test.data_config), test.is_held_out
        self.notes = [*train.notes, *test.notes]
        indices = tested.indices if isinstance(tested, Subset) else range(len(test))
        self.name_example = lambda place: test.name_example(indices[place])
        self.num_train, self.num_test = len(chosen), len(tested)
        if (self.num_train, self.num_test) != (len(train), len(test)):
            parts = f"{self.num_train:,} of {len(train):,} training and {self.num_test:,} of {len(test):,} test {train.noun}"
            self.notes.append(f"data.limit={options.limit}: {parts}, drawn by train.seed={seed}")
        self._examples, self._test_examples = train, test
        self._sampler = EpochSampler(self.num_train, seed, int(options.batch_size), processes)
        self.train = _make_loader(chosen, options, sampler=self._sampler, drop_last=True)
        self.test = _make_loader(tested, options)

    def describe_examples(self) -> dict[str, dict[str, Any]]:
        """Return for each split the number of its examples, and a digest that other examples, or another order, change.

        Both are those of all examples there are; seed and `data.limit` determine which of them are taken.
        """
        splits = {"training": self._examples, "test": self._test_examples}
        return {name: {"count": len(examples), "digest": _hash(examples.list_contents())} for name, examples in splits.items()}

    def list_unreadable(self) -> dict[str, list[str]]:
        """Return for each split which examples could not be read so far, in this process."""
        return {"training": self._examples.list_unreadable(), "test": self._test_examples.list_unreadable()}

    def start_epoch(self, epoch: int, skip: int = 0, batches: int | None = None) -> None:
        """Choose order and augmentation of an epoch; call it before iterating over `train`.

        Args:
            epoch: number of the epoch, from 0.
            skip: examples to leave out at the start, counted over all processes: those an interrupted run has already used.
            batches: how many batches follow at most; None: all there are.
        """
        self._sampler.epoch, self._sampler.skip, self._sampler.batches = epoch, skip, batches
        self._examples.start_epoch(epoch)


class EpochSampler(Sampler[int]):
    """A permutation that depends on the seed and on `epoch`: after `skip` indices, the next `batches` batches.

    A batch is shared by all processes: the first `batch_size` of its indices are for the first process, and so on. Each gets a
    run of indices from the batch's first half, and for each of them the one in the same place from the batch's end, so that
    mixup finds its pairs in one process.

    Args:
        length: number of examples.
        seed: determines the permutation.
        batch_size: examples per process.
        processes: number of processes.
    """

    def __init__(self, length: int, seed: int, batch_size: int, processes: int):
        self.length, self.seed = length, seed
        self.epoch = self.skip = 0
        self.batches: int | None = None
        half, whole = batch_size // 2, batch_size * processes
        first = torch.arange(half * processes).view(processes, half)
        middle = torch.arange(half * processes, whole - half * processes).view(processes, -1)  # where the size is odd
        self._places = torch.cat([first, middle, whole - 1 - first.flip(1)], 1).flatten()

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length, generator=make_generator(self.seed, self.epoch))[self.skip :]
        whole = len(self._places)
        batches = order[: len(order) // whole * whole].view(-1, whole)[: self.batches]
        return iter(batches[:, self._places].flatten().tolist())


def _choose(examples: Examples, limit: int | None, seed: int) -> Examples | Subset[tuple[Tensor, Any]]:
    """Return `limit` examples drawn by the seed, in their order; all of them if there are no more."""
    if limit is None or limit >= len(examples):
        return examples
    order = torch.randperm(len(examples), generator=make_generator(seed, 0, 3))  # another key than an epoch's order has
    return Subset(examples, sorted(order[:limit].tolist()))


def _hash(contents: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()


def _make_loader(examples: Any, options: DataOptions, **order: Any) -> DataLoader[tuple[Tensor, Tensor]]:
    # Workers are not persistent: they hold copies of the examples, which would stay in the epoch they were started in.
    source = examples.dataset if isinstance(examples, Subset) else examples
    collate: Callable[[Any], Any] = _keep_batch if hasattr(source, "__getitems__") else default_collate
    return DataLoader(
        examples,
        batch_size=int(options.batch_size),
        num_workers=options.num_workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # otherwise every epoch would draw a number from the global generator
        **order,
    )


def _keep_batch(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch
