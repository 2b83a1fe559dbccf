"""Data sets of the user's own, and those that torchvision reads."""

import os
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import MNIST

from revzoo.data.loading import load_data
from revzoo.data.options import DataOptions
from revzoo.errors import DataError
from revzoo.spec.schema import ImageInput, TextInput

_IMAGES = ImageInput("image", channels=3, size=(4, 4))

_MODULE = """
import torch
from torch.utils.data import Dataset

class Birds(Dataset):
    classes = ["wren", "finch"]
    data_config = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    def __init__(self, count, shape):
        self.count, self.shape, self.targets = count, shape, [i % 2 for i in range(count)]
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return torch.rand(self.shape), self.targets[index]

class Words(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return torch.full((5,), index), torch.full((5,), index + 1)

def birds(options, input):
    return Birds(8, (input.channels, *input.size)), Birds(3, (input.channels, *input.size))

def large(options, input):
    return Birds(8, (3, 99, 99)), Birds(3, (3, 99, 99))

def with_targets(*targets):
    birds = Birds(len(targets), (3, 4, 4))
    birds.targets = list(targets)
    return Birds(8, (3, 4, 4)), birds

def unnamed(options, input):
    return with_targets(2, 0)

def worded(options, input):
    return with_targets("wren", "finch")

def spelled(options, input):
    train, test = birds(options, input)
    train.classes = "wren"
    return train, test

class Odd(Birds):
    # The fifth example is what a function makes of a sound one.
    def __init__(self, change):
        super().__init__(8, (3, 4, 4))
        self.change = change
    def __getitem__(self, index):
        example = super().__getitem__(index)
        return self.change(*example) if index == 4 else example

def odd(change):
    return lambda options, input: (Odd(change), Odd(change))

broken = odd(lambda image, label: {}[label])
triple = odd(lambda image, label: (image, label, "wren"))
cropped = odd(lambda image, label: (image[:, 1:], label))
mislabeled = odd(lambda image, label: (image, 2))

def one(options, input):
    return Birds(8, (3, 4, 4))

def unreadable(options, input):
    return torch.load("absent.npy")

def reordered(options, input):
    train, test = birds(options, input)
    test.classes = ["finch", "wren"]
    return train, test

def words(options, input):
    return Words(), Words()

def labelled_words(options, input):
    class Labelled(Words):
        def __getitem__(self, index):
            return torch.full((5,), index), 1
    return Labelled(), Labelled()

nothing = None
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch) -> str:
    """The name of a module in the current folder."""
    (tmp_path / "my_birds.py").write_text(_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "my_birds"
    sys.modules.pop("my_birds", None)


def test_own_data(own):
    input = ImageInput("image", channels=3, size=(4, 4))
    data = load_data(DataOptions(f"{own}:birds", batch_size=4), input, seed=0)
    assert (data.num_train, data.num_test, data.class_names, data.label_noun) == (8, 3, ["wren", "finch"], "images")
    assert data.train_labels == [0, 1] * 4
    assert data.data_config == {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}

    def read(epoch: int) -> list[torch.Tensor]:
        data.start_epoch(epoch)
        return [images for images, _ in data.train]

    first, second = read(0), read(1)
    assert all(torch.equal(*pair) for pair in zip(first, read(0), strict=True))  # random numbers follow from the epoch
    assert not torch.equal(first[0], second[0])
    texts = load_data(DataOptions(f"{own}:words", batch_size=2), TextInput("text", length=5, vocabulary=9), seed=0)
    assert (texts.num_classes, texts.label_noun, texts.data_config) == (None, "tokens", {})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("large", r"large: example 0 does not fit: the model .* float32, images .* = \(3, 4, 4\). Received: \(3, 99, 99\) of"),
        ("unnamed", r"`targets`, which lists .* of their 2 examples, integers from 0 to 1. Received: 2, 0. Correct"),
        ("worded", r"`targets`, .* Received: 'wren', 'finch'"),
        ("spelled", "which lists the names of two or more classes, .* Received: 'wren'"),
        ("one", "one has to return two data sets, .* Received: Birds"),
        ("unreadable", r"unreadable raises FileNotFoundError: .*absent.npy', in line \d+ of .*my_birds.py. Correct it there"),
        ("reordered", "reordered have different classes, .* Received: wren, finch; for testing finch, wren"),
        ("words", "need an attribute `classes`"),
        ("nothing", "should be a function. Received: NoneType"),
        ("absent", "my_birds:absent: module 'my_birds' has no attribute 'absent'"),
    ],
)
def test_own_data_that_cannot_be_used(own, function, message, refusal):
    assert re.search(message, refusal(DataOptions(f"{own}:{function}", batch_size=4), _IMAGES))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("broken", r"broken: example 4 raises KeyError: 0, in line \d+ of .*my_birds.py. Correct it there.$"),
        ("triple", r"triple: example 4 should be a pair, \(tensor, label\). Received: tuple.$"),
        ("cropped", r"cropped: example 4 does not fit: .* Received: \(3, 3, 4\) of torch.float32.$"),
        ("mislabeled", r"example 4 has the label 2. Labels are integers from 0 to 1, the numbers of the names in `classes`.$"),
    ],
)
def test_an_example_that_cannot_be_used_is_named(own, function, message):
    data = load_data(DataOptions(f"{own}:{function}", batch_size=4), _IMAGES, seed=0)
    with pytest.raises(DataError, match=message):
        list(data.train)


def test_texts_that_cannot_be_used(own, refusal):
    texts = TextInput("text", length=5, vocabulary=9)
    labelled = refusal(DataOptions(f"{own}:labelled_words", batch_size=2), texts)
    assert "example 0 has the label int. Without an attribute `classes`, which lists the names" in labelled


def test_a_module_that_is_not_there_is_named(own, refusal):
    message = refusal(DataOptions("my_fish:all", batch_size=4), ImageInput("image", channels=3, size=(4, 4)))
    assert message.startswith(
        "data.name=my_fish:all: my_fish cannot be imported (ModuleNotFoundError: No module named 'my_fish')"
    )


@pytest.mark.slow  # starts a process
def test_processes_that_are_spawned_find_the_module(own, monkeypatch):
    """They import it anew, with the path of this process."""
    input = ImageInput("image", channels=3, size=(4, 4))
    data = load_data(DataOptions(f"{own}:birds", batch_size=4, num_workers=1), input, seed=0)
    data.train.multiprocessing_context = "spawn"
    data.start_epoch(0)
    assert [len(images) for images, _ in data.train] == [4, 4]


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_mnist(name, folder, tmp_path, refusal):
    """Files of the published format, with ten random images in each, through timm and torchvision."""
    options = DataOptions(name, batch_size=5, root=str(tmp_path))
    grey = ImageInput("image", channels=1, size=(28, 28))
    assert refusal(options, grey).startswith(f"No complete {name} in {tmp_path}: looked for the folder {folder}/raw")
    raw = tmp_path / folder / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split in ("train", "t10k"):
        pixels, labels = rng.integers(0, 256, (10, 28, 28), dtype=np.uint8), np.arange(10, dtype=np.uint8)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, *pixels.shape) + pixels.tobytes())
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, 10) + labels.tobytes())
    data = load_data(options, grey, seed=0)
    assert data.num_classes == 10
    assert data.train_labels.tolist() == list(range(10))
    images = torch.cat([images for images, _ in data.test])
    (mean,), (std,) = data.data_config["mean"], data.data_config["std"]
    pixels = MNIST(tmp_path, train=False).data if name == "mnist" else torch.from_numpy(pixels)
    torch.testing.assert_close(images[:, 0], (pixels / 255 - mean) / std, atol=1e-5, rtol=0)
    coloured = load_data(options, ImageInput("image", channels=3, size=(28, 28)), seed=0)
    torch.testing.assert_close(torch.cat([images for images, _ in coloured.test]), images.expand(-1, 3, -1, -1))
    os.truncate(raw / "train-images-idx3-ubyte", 6)
    assert refusal(options, grey).startswith(f"No complete {name} in {tmp_path}: ")
