"""Digits, folders of images and CIFAR: what is loaded, that it follows from the seed, and what is refused."""

import pickle
import random
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch._utils import ExceptionWrapper
from torchvision.datasets import CIFAR10

from revzoo.data.base import IGNORED
from revzoo.data.loading import load_data
from revzoo.data.options import AugmentOptions, DataOptions
from revzoo.errors import DataError
from revzoo.spec.schema import ImageInput

GREY = ImageInput("image", 1, (8, 8))
COLOUR = ImageInput("image", 3, (32, 32))


def digits(**options):
    return DataOptions("digits", **{"batch_size": 100, **options})


def images(root, **options):
    return DataOptions("folder", **{"batch_size": 4, "root": str(root), **options})


def test_digits_split(epoch):
    data = load_data(digits(), GREY, seed=0)
    labels = torch.cat([labels for _, labels in data.test])
    assert len(data.test.dataset) == len(labels) == 355
    assert len(data.train.dataset) == 1442
    assert labels.bincount().tolist() == [35, 36, 35, 36, 36, 36, 36, 35, 34, 36]  # a fifth of each class
    assert data.num_classes == 10
    everything = torch.cat([batch for batch, _ in epoch(load_data(digits(batch_size=1442), GREY, 0), 0)])
    assert everything.shape == (1442, 1, 8, 8)
    assert everything.mean().abs() < 1e-6
    torch.testing.assert_close(everything.std(), torch.tensor(1.0))


def test_digits_are_moved_by_at_most_the_shift(epoch):
    still, moved = (load_data(digits(batch_size=1442, shift=shift), GREY, 0) for shift in (0, 1))
    (before, labels), (after, same_labels) = *epoch(still, 3), *epoch(moved, 3)
    assert torch.equal(labels, same_labels)
    padded = torch.nn.functional.pad(before, [1] * 4, value=before.min().item())
    places = torch.stack([padded[:, :, i : i + 8, j : j + 8] for i in range(3) for j in range(3)])
    hits = (places == after).flatten(2).all(2)  # (9, n)
    assert hits.any(0).all()
    assert (hits.sum(1) > 1442 // 9 // 2).all()  # every one of the nine places is taken, about equally often
    assert torch.equal(next(iter(moved.test))[0], next(iter(still.test))[0])


@pytest.mark.parametrize(("kind", "workers"), [("digits", 0), ("folder", 2)])
def test_order_and_augmentation_follow_from_seed_and_epoch(kind, workers, image_folder, epoch, same):
    def load(seed=7, workers=workers):
        options = digits(shift=1, num_workers=workers) if kind == "digits" else images(image_folder, num_workers=workers)
        return load_data(options, GREY, seed)

    data = load()
    second = epoch(data, 1)
    assert same(second, epoch(load(workers=0), 1))
    assert same(second, epoch(data, 1))
    assert not same(second, epoch(data, 2))
    assert not same(second, epoch(load(seed=8), 1))
    drawn = [sorted(float(image.sum()) for batch, _ in epoch(data, number) for image in batch) for number in (1, 2)]
    assert drawn[0] != drawn[1]  # in whatever order
    size = len(second[0][1])
    assert same(second[1:], epoch(data, 1, skip=size))
    assert epoch(data, 1, skip=len(second) * size) == []


def test_the_process_draws_its_own_numbers(image_folder, epoch):
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    epoch(load_data(images(image_folder), GREY, 0), 0)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def test_folder(image_folder):
    plain = AugmentOptions(hflip=0, color_jitter=None, scale=(1, 1), ratio=(1, 1), crop_pct=1.0, mean=(0.5,), std=(0.25,))
    data = load_data(images(image_folder, augment=plain), GREY, 0)
    assert data.num_classes == 2
    for loader in (data.train, data.test):
        for batch, labels in loader:
            assert batch.shape == (4, 1, 8, 8)
            for image, label in zip(batch, labels, strict=True):
                pixels = (image * 0.25 + 0.5)[0] * 255
                paths = [image_folder / "train" / ("cat", "dog")[label] / f"{i}.png" for i in range(4)]
                assert any(np.allclose(np.asarray(Image.open(path)), pixels, atol=1e-3) for path in paths)


def test_padding_replaces_the_resized_crop(image_folder, epoch):
    augment = AugmentOptions(padding=1, hflip=0, color_jitter=None, mean=(0.0,), std=(1.0,))
    (batch, labels), *_ = epoch(load_data(images(image_folder, augment=augment), GREY, 0), 0)
    for image, label in zip(batch, labels, strict=True):
        matches = []
        for i in range(4):
            source = torch.tensor(np.asarray(Image.open(image_folder / "train" / ("cat", "dog")[label] / f"{i}.png")) / 255)
            padded = torch.nn.functional.pad(source, [1] * 4)
            matches += [torch.allclose(padded[y : y + 8, x : x + 8].float(), image[0]) for y in range(3) for x in range(3)]
        assert any(matches)


@pytest.mark.parametrize("side", [1, 3])
def test_cutout_erases_one_square_of_each_image_after_normalisation(image_folder, side, epoch):
    augment = AugmentOptions(padding=1, hflip=0, color_jitter=None, mean=(2.0,), std=(1.0,), cutout=side)
    batch = torch.cat(
        [batch for number in range(4) for batch, _ in epoch(load_data(images(image_folder, augment=augment), GREY, 0), number)]
    )
    corners = set()
    for image in batch[:, 0]:
        rows, columns = (image == 0).nonzero().unbind(1)  # 0 is no pixel, those are between -2 and -1
        assert len(rows) == side**2
        assert (rows.max() - rows.min() + 1, columns.max() - columns.min() + 1) == (side, side)
        corners.add((int(rows.min()), int(columns.min())))
    assert len(corners) > 1
    assert max(max(corner) for corner in corners) <= 8 - side


def test_cutout_as_large_as_the_images_is_refused(image_folder):
    with pytest.raises(
        DataError, match=r"Cutout has to leave some of an image\. Received: data\.augment\.cutout=8 for images of 8x8"
    ):
        load_data(images(image_folder, augment=AugmentOptions(cutout=8)), GREY, 0)


def test_cifar(tmp_path, monkeypatch):
    """CIFAR's own files, with ten random images in each, through timm and torchvision."""
    rng = np.random.default_rng(0)
    root = tmp_path / "cifar-10-batches-py"
    root.mkdir()
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        batch = {"data": rng.integers(0, 256, (10, 3072), dtype=np.uint8), "labels": list(range(10))}
        (root / name).write_bytes(pickle.dumps(batch))
    (root / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    options = DataOptions("cifar10", batch_size=25, root=str(tmp_path), augment=AugmentOptions(padding=2))
    with pytest.raises(DataError, match=r"No complete cifar10 in .*: looked for the folder cifar-10-batches-py"):
        load_data(options, COLOUR, 0)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    data = load_data(options, COLOUR, 0)
    assert [tuple(batch.shape) for batch, _ in data.train] == [(25, 3, 32, 32)] * 2
    batch, labels = next(iter(data.test))
    assert labels.tolist() == list(range(10))
    raw = torch.from_numpy(np.array(CIFAR10(tmp_path, train=False).data)).permute(0, 3, 1, 2) / 255
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2471, 0.2435, 0.2616])
    torch.testing.assert_close(batch, (raw - mean[:, None, None]) / std[:, None, None])


def test_refusals_of_folders(tmp_path, image_folder, refusal):
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    assert refusal(images(missing)) == f"There is no folder {missing}. Set data.root to where the data are."
    empty.mkdir()
    assert f"No train images in {empty}: looked for a folder called train or training " in refusal(images(empty))
    (empty / "train").mkdir()
    assert refusal(images(empty)) == f"{empty}/train has no classes: looked for one folder of images per class."
    (image_folder / "val").rename(image_folder / "elsewhere")
    imagenet = refusal(DataOptions("imagenet", 4, str(image_folder)))
    assert re.search("No validation images in .*: looked for a folder called val or .* Received: elsewhere, train", imagenet)
    (image_folder / "elsewhere" / "dog").rename(image_folder / "elsewhere" / "wolf")
    (image_folder / "elsewhere").rename(image_folder / "val")
    assert "/train does not have: wolf. Remove them, or add images of them for training" in refusal(images(image_folder))
    (image_folder / "train" / "cat" / "0.png").rename(image_folder / "train" / "0.png")
    assert f"There are images directly in {image_folder}/train" in refusal(images(image_folder))


def test_refusals_of_other_data(image_folder, refusal):
    assert refusal(digits(batch_size=1000), processes=2) == (
        "The 1442 training images are too few for one batch in each of 2 processes. Received: data.batch_size=1000. "
        "Use data.batch_size=721 or less."
    )
    assert refusal(digits(), COLOUR).startswith("Digits are images of 1 channel and 8x8 pixels. Received: a model for 3")
    message = refusal(DataOptions("imagenet", 4, str(image_folder)))
    assert message.startswith(f"{image_folder}/train should hold ImageNet's 1000 class")
    assert refusal(DataOptions("cifar10", 4, str(image_folder))).startswith(
        "cifar10 has images of 3 channels. Received: a model for 1."
    )
    assert refusal(digits(shift=8)) == "Digits have 8x8 pixels. Received: data.shift=8. Use data.shift=7 or less."
    augment = AugmentOptions(mean=(0.5,), std=(0.5,))
    assert refusal(images(image_folder, augment=augment), COLOUR).startswith("One mean and std per channel is needed")


def write_images(folder, **counts):
    for label, count in counts.items():
        for i in range(count):
            file = folder / label / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), i).save(file)


@pytest.mark.parametrize("place", ["", "train"])
def test_images_are_held_out_where_there_are_none_for_validation(tmp_path, place):
    """Every fifth of a class, the last of fewer, and never the only one; without and with a folder for training."""
    write_images(tmp_path / place, cat=11, dog=3, owl=1)
    data = load_data(images(tmp_path), GREY, 0)
    train, test = ([name.decode() for name in loader.dataset.list_contents()] for loader in (data.train, data.test))
    assert test == ["cat/4.png", "cat/9.png", "dog/2.png"]
    assert train == [f"cat/{i}.png" for i in range(11) if i not in (4, 9)] + ["dog/0.png", "dog/1.png", "owl/0.png"]
    assert list(data.test.dataset.source.labels) == [0, 0, 1]
    assert data.class_names == ["cat", "dog", "owl"]
    assert data.notes == [
        f"{tmp_path / place} has no images for validation: every fifth of each class is held out, 3 in all",
        "validation has no images of owl",
    ]


def test_nothing_can_be_held_out_of_single_images(tmp_path, refusal):
    write_images(tmp_path, cat=1, dog=1)
    assert refusal(images(tmp_path)).startswith(f"The classes in {tmp_path} have one image each")


def test_empty_and_single_classes_are_named(image_folder, refusal):
    for path in (image_folder / "train" / "cat").iterdir():
        path.unlink()
    assert refusal(images(image_folder)).startswith(f"Class folders in {image_folder}/train without images in them: cat.")
    (image_folder / "train" / "cat").rmdir()
    assert refusal(images(image_folder)).startswith(f"{image_folder}/train has one class: dog.")


def damage(image_folder, split, content):
    """Damage an image, or cut it, and return its path."""
    path = image_folder / split / "cat" / "2.png"
    path.write_bytes(path.read_bytes()[:60] if content is None else content)
    return path


@pytest.mark.parametrize(("split", "content"), [("train", b"no image"), ("val", None)])
def test_broken_images_are_named(image_folder, split, content):
    path = damage(image_folder, split, content)
    data = load_data(images(image_folder, unreadable="stop"), GREY, 0)
    with pytest.raises(DataError) as caught:
        list(data.train if split == "train" else data.test)
    assert str(caught.value).startswith(f"The image {path} cannot be read (")


@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_image_takes_the_place_of_a_broken_one(image_folder, epoch, workers):
    """All others stay as they are, bit for bit."""
    options = images(image_folder, num_workers=workers, batch_size=1)
    sound, broken = ([], []), ([], [])
    for batches in (sound, broken):
        data = load_data(options, GREY, 0)
        for number in range(2):
            batches[number].extend(epoch(data, number))
        path = damage(image_folder, "train", b"no image")
    assert data.list_unreadable() == {"training": [str(path)], "test": []}
    for before, after in zip(sound, broken, strict=True):
        different = [i for i in range(8) if not torch.equal(before[i][0], after[i][0])]
        assert len(different) == 1
        assert [label.item() for _, label in before] == [label.item() for _, label in after]  # the next is a cat, too


def test_a_broken_image_is_left_out_of_an_evaluation(image_folder):
    path = damage(image_folder, "val", None)
    data = load_data(images(image_folder), GREY, 0)
    assert torch.cat([labels for _, labels in data.test]).tolist() == [0, 0, IGNORED, 0, 1, 1, 1, 1]
    assert data.list_unreadable() == {"training": [], "test": [str(path)]}


def test_nothing_but_broken_images_is_an_error(image_folder, epoch):
    for path in image_folder.glob("train/*/*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read"):
        epoch(load_data(images(image_folder), GREY, 0), 0)


def test_a_broken_image_in_a_loader_process_is_named_without_a_traceback(image_folder):
    """A worker hands an error on in an `ExceptionWrapper`, whose message is the traceback; here without the process."""
    path = damage(image_folder, "train", b"")
    data = load_data(images(image_folder, unreadable="stop"), GREY, 0)
    try:
        data.train.dataset[2]
    except DataError:
        passed_on = ExceptionWrapper(sys.exc_info(), where="in DataLoader worker process 0")
    assert "Traceback" in passed_on.exc_msg
    with pytest.raises(DataError) as caught:
        passed_on.reraise()
    assert str(caught.value).startswith(f"The image {path} cannot be read (")
    assert "Traceback" not in str(caught.value)
