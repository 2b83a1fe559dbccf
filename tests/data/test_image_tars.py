"""Tars: the examples that they hold, in which layouts, and what is refused."""

import re
from pathlib import Path

import pytest
import torch

from revzoo.data.base import BrokenExampleError
from revzoo.spec.schema import ImageInput

KIND = "wds"  # which `load` loads
GREY = ImageInput("image", 1, (8, 8))


def test_the_examples_are_those_of_a_folder(tar_folder, image_folder, load, epoch, same):
    """Order and augmentation, too, in a whole epoch and in the second half of one."""
    tars, folder = load(tar_folder, num_workers=2), load(image_folder, "folder")
    assert same(epoch(tars, 1), epoch(folder, 1))
    assert same(epoch(tars, 2, skip=4), epoch(folder, 2, skip=4))
    assert same(tars.test, folder.test)
    assert (tars.class_names, tars.num_train, tars.num_test, tars.notes) == (["cat", "dog"], 8, 8, [])


def test_each_example_is_seen_once_by_all_processes(tar_folder, load, epoch, same):
    """In an epoch of two processes; the sampler of both has the indices of one after those of the other."""
    data = load(tar_folder, processes=2, batch_size=2)
    assert same(epoch(data, 3, skip=4), epoch(data, 3)[2:])
    images = torch.cat([batch for batch, _ in load(tar_folder).test]).flatten(1)
    assert len(images.unique(dim=0)) == data.num_train == 8
    assert sorted(data._sampler) == list(range(8))


def test_it_makes_no_difference_in_which_tar_an_example_is(tar_folder, image_folder, tmp_path, write_tar, load):
    digests = load(tar_folder).describe_examples()
    images = sorted((image_folder / "train").rglob("*.png"))
    files = {f"{image.parent.name}/{image.stem}.png": image.read_bytes() for image in images}
    files |= {f"{image.parent.name}/{image.stem}.cls": image.parent.name.encode() for image in images}  # after all images
    for path in tar_folder.glob("*train*"):
        path.unlink()
    write_tar(tar_folder / "train" / "all.tar", files)
    assert load(tar_folder).describe_examples() == digests
    write_tar(tar_folder / "train" / "all.tar", files | {"cat/0.cls": b"dog"})
    assert load(tar_folder).describe_examples()["training"] != digests["training"]


def picture(image_folder: Path) -> bytes:
    return (image_folder / "train" / "cat" / "0.png").read_bytes()


def test_layouts(tmp_path, image_folder, write_tar, load):
    """Folders of splits, dots in names, hidden files, upper case, labels in .json; numbers are the classes' own."""
    image = picture(image_folder)
    files = {
        "./v1.0/a.PNG": image, "./v1.0/a.cls": b"3",
        "b.mask.json": b"", "b.png": image, "b.json": b'{"label": 1, "other": "x"}', "b.cls": b" 02\n",
        ".hidden.png": b"", "__meta__/x.png": b"", "README": b"",
        "c.png": image, "c.json": b'{"label": "0"}',
    }  # fmt: skip
    root = tmp_path / "layouts"
    write_tar(root / "training" / "10.tar", {"z.png": image, "z.cls": b"1"})
    write_tar(root / "training" / "2.tar", files)
    (root / "training" / ".2.tar").write_bytes(b"")
    write_tar(root / "Some_val2.tar", {"a.png": image, "a.cls": b"0"})
    write_tar(root / "test-0.tar", {"a.png": b"not looked at"})
    data = load(root, batch_size=1)
    assert data.class_names == ["0", "1", "2", "3"]
    assert data._examples.source.labels.tolist() == [3, 2, 0, 1]  # 2.tar comes before 10.tar
    assert [data._examples.source.name(i) for i in (0, 3)] == [
        f"./v1.0/a of {root}/training/2.tar",
        f"z of {root}/training/10.tar",
    ]
    assert data.notes == [f"{root} (validation) has no images of 1, 2, 3"]
    assert next(iter(data.test))[0].shape == (1, 1, 8, 8)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.png": b""}, "The image a of .*/train.tar has no label: .* 'label' .* data.image.label="),
        ({"a.png": b"", "a.json": b"{"}, "The image a of .* has no label"),
        ({"a.txt": b"", "a.cls": b"1"}, "An example has one image, and a of .*/train.tar has 0. Received: a.txt, a.cls"),
        ({"a.png": b"", "a.PNG": b""}, "/train.tar has two files a.PNG"),
        ({"a.png": b"", "a.cls": b"cat"}, r"\(train\) has one class: cat"),
        ({"README": b""}, "The train tars in .* hold no examples: train.tar"),
        ({"a.png": b"", "a.cls": b"20261123"}, r"\(train\) has the label 20261123. .* is this the label of a class"),
        (
            {"a.png": b"", "a.cls": b"cat", "b.png": b"", "b.cls": b"dog"},
            r"\(validation\) has the labels cow. The training images have: cat, dog",
        ),
    ],
)
def test_refusals_of_examples(tmp_path, write_tar, files, message, refused):
    write_tar(tmp_path / "train.tar", files)
    write_tar(tmp_path / "val.tar", {"z.png": b"", "z.cls": b"cow"})
    assert re.search(message, refused(tmp_path))


@pytest.mark.parametrize("damage", ["cut in a file", "cut between files", "header", "compressed"])
def test_broken_tars_are_refused(tar_folder, damage, refused):
    tar = tar_folder / "animals-train-0001.tar"
    content = bytearray(tar.read_bytes())
    second = content.index(b"cat/3.cls")  # after an image
    match damage:
        case "cut in a file":
            content = content[: second - 512]
        case "cut between files":
            content = content[:second]
        case "header":
            content[second] ^= 1
        case "compressed":
            content = bytearray(b"\x1f\x8b" + bytes(1000))
    tar.write_bytes(content)
    assert refused(tar_folder).startswith(f"{tar} is not a whole, uncompressed tar (")


def test_missing_tars_are_refused(tmp_path, write_tar, refused):
    write_tar(tmp_path / "trainset.tar", {})
    assert re.search("No train tars in .*such as training-0000.tar, .* Received: trainset.tar", refused(tmp_path))


def test_a_tar_for_both_splits_is_refused(tmp_path, write_tar, refused):
    write_tar(tmp_path / "train-val-0.tar", {"0.png": b"", "0.cls": b"0", "1.png": b"", "1.cls": b"1"})
    assert refused(tmp_path).startswith(
        f"A tar is for training or for validation. Received in {tmp_path}: train-val-0.tar, for both."
    )


def test_broken_images_are_named_with_their_tar(tar_folder, image_folder, write_tar, load, epoch):
    tar = tar_folder / "animals-train-0001.tar"
    write_tar(tar, {"cat/3.png": b"no image", "cat/3.cls": b"cat", "dog/0.png": picture(image_folder), "dog/0.cls": b"dog"})
    with pytest.raises(BrokenExampleError, match=rf"^The image cat/3 of {tar} cannot be read \(cannot identify image file"):
        epoch(load(tar_folder, batch_size=7, unreadable="stop"), 0)
