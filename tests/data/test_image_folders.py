"""Folders of images: which files are examples, what is said of the others, and how a file becomes an image."""

import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from revzoo.data.image_folders import find_classes
from revzoo.data.stored_images import read_image
from revzoo.errors import DataError

KIND = "folder"  # which `load` loads


def save(path, pixels, **options):
    Image.fromarray(np.asarray(pixels)).save(path, **options)
    return path


def test_pixels_of_16_bits_are_scaled(tmp_path):
    values = np.array([[0, 128, 129, 257], [32767, 32768, 65406, 65535]], dtype=np.uint16)
    file = save(tmp_path / "deep.png", values)
    assert np.asarray(read_image(file, "L")).tolist() == [[0, 0, 1, 1], [127, 128, 254, 255]]  # value / 257, rounded
    assert np.asarray(read_image(file, "RGB"))[..., 2].tolist() == [[0, 0, 1, 1], [127, 128, 254, 255]]
    assert np.asarray(read_image(save(tmp_path / "deep.tif", values), "L")).tolist() == [[0, 0, 1, 1], [127, 128, 254, 255]]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_of_unknown_range_are_refused(tmp_path, dtype):
    file = save(tmp_path / "numbers.tif", np.zeros((2, 2), dtype))
    with pytest.raises(ValueError, match="its pixels are 32-bit numbers of unknown range: save it with 8 or 16 bits"):
        read_image(file, "L")


def test_the_orientation_of_a_camera_is_applied(tmp_path):
    upright = np.zeros((16, 32), np.uint8)
    upright[:8, :16] = 255  # the upper left quarter
    exif = Image.Exif()
    exif[0x0112] = 6  # stored so that a quarter turn to the right makes it upright
    file = save(tmp_path / "photo.jpg", np.rot90(upright), exif=exif, quality=100)
    assert np.array_equal(np.asarray(read_image(file, "L")) > 127, upright > 127)


def test_a_damaged_orientation_is_none(tmp_path):
    file = save(tmp_path / "photo.jpg", np.full((4, 6), 90, np.uint8), exif=b"Exif\x00\x00no such thing")
    assert read_image(file, "L").size == (6, 4)


@pytest.mark.parametrize("suffix", ["apng", "JPG", "webp", "gif"])
def test_formats(tmp_path, image_folder, suffix):
    pixels = np.full((8, 8, 3), (200, 100, 50), np.uint8)
    options = {"format": "PNG"} if suffix == "apng" else {}
    save(image_folder / "train" / "cat" / f"9.{suffix}", pixels, **options)
    assert len(find_classes(image_folder / "train").files["cat"]) == 5
    image = np.asarray(read_image(image_folder / "train" / "cat" / f"9.{suffix}", "RGB")).astype(int)
    assert np.abs(image - pixels).max() <= 4  # lossy formats


def test_a_palette_with_transparency_has_its_colours(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])
    image.save(tmp_path / "palette.png", transparency=b"\x80\xff")  # Pillow warns where this is converted without a detour
    assert np.asarray(read_image(tmp_path / "palette.png", "RGB")).tolist() == [[[10, 20, 30], [40, 50, 60]]]


def test_what_is_skipped_is_counted(image_folder, load):
    cat = image_folder / "train" / "cat"
    for name in ("notes.txt", "LICENSE", ".DS_Store", "._0.png", "more.TXT"):
        (cat / name).write_bytes(b"")
    (image_folder / "train" / "README.md").write_text("")
    os.mkfifo(cat / "pipe.png")
    shutil.copytree(cat, image_folder / "train" / ".ipynb_checkpoints", ignore=lambda *_: ["pipe.png"])
    data = load(image_folder)
    assert data.num_classes == 2
    assert data.class_names == ["cat", "dog"]
    assert data.num_train == 8
    assert data.notes == [f"skipped in {image_folder}/train: 1 .md, 2 .txt, 3 hidden, 1 not a regular file, 1 without suffix"]
    assert load(image_folder, batch_size=8).train.dataset.source.files == data.train.dataset.source.files


def test_links_are_followed_and_loops_are_not(image_folder, tmp_path):
    cat, dog = image_folder / "train" / "cat", image_folder / "train" / "dog"
    (tmp_path / "more").mkdir()
    shutil.move(dog / "3.png", tmp_path / "more" / "3.png")
    (dog / "more").symlink_to(tmp_path / "more")
    (cat / "loop").symlink_to(image_folder / "train")
    (cat / "self").symlink_to(cat)
    (cat / "round").symlink_to(cat / "round")
    (cat / "twice").symlink_to(tmp_path / "more")
    (cat / "again").symlink_to(tmp_path / "more")
    found = find_classes(image_folder / "train")
    assert [str(file.relative_to(image_folder / "train")) for files in found.files.values() for file in files] == [
        *(f"cat/{i}.png" for i in range(4)),
        "cat/again/3.png",
        *(f"dog/{i}.png" for i in range(3)),
        "dog/more/3.png",
    ]
    assert found.skipped == {"without suffix": 1}  # the link to itself


def test_photos_of_phones_name_the_package_that_reads_them(image_folder, load, refused, monkeypatch):
    monkeypatch.setattr("revzoo.data.image_folders.list_formats", lambda: [".jpg", ".png"])  # also where it is installed
    (image_folder / "train/cat/0.HEIC").write_bytes(b"")
    remedy = "; .heic is read after python -m pip install pillow-heif"
    assert load(image_folder).notes == [f"skipped in {image_folder}/train: 1 .heic{remedy}"]
    for path in (image_folder / "train/cat").glob("*.png"):
        path.unlink()
    assert refused(image_folder).endswith(f"Images end with .jpg, .png{remedy}.")


def test_a_link_to_nowhere_is_a_broken_image(image_folder, load):
    (image_folder / "train" / "cat" / "0.png").unlink()
    (image_folder / "train" / "cat" / "0.png").symlink_to("nowhere.png")
    with pytest.raises(DataError, match=r"The image .*/cat/0\.png cannot be read"):
        list(load(image_folder, unreadable="stop").train)


@pytest.mark.parametrize("target", ["gone/dog", "dog"])
def test_a_class_folder_that_is_a_link_to_nowhere_is_named(image_folder, target):
    """As on a disk that is not mounted; without that class the labels of those after it would be others."""
    shutil.rmtree(image_folder / "train" / "dog")
    (image_folder / "train" / "dog").symlink_to(target)
    with pytest.raises(DataError, match=f"train/dog is a link to {target}, which does not exist. Correct or remove it."):
        find_classes(image_folder / "train")


def test_classes_are_in_natural_order_and_have_the_images_of_nested_folders(image_folder):
    train = image_folder / "train"
    (train / "cat").rename(train / "class10")
    (train / "dog").rename(train / "class2")
    (train / "class2" / "more").mkdir()
    (train / "class2" / "0.png").rename(train / "class2" / "more" / "0.png")
    found = find_classes(train)
    assert {name: len(files) for name, files in found.files.items()} == {"class2": 4, "class10": 4}
    assert list(found.files) == ["class2", "class10"]


def test_names_that_are_not_utf8(image_folder, load):
    """Such as those of an archive that another system has packed: of images they may be, of classes not."""
    cat = image_folder / "train" / "cat"
    os.rename(cat / "0.png", os.path.join(os.fsencode(cat), b"\xe9.png"))
    assert load(image_folder).describe_examples()["training"]["count"] == 8
    os.rename(cat, os.path.join(os.fsencode(cat.parent), b"caf\xe9"))
    with pytest.raises(DataError, match=r"The name of the class folder '.*/train/caf.udce9' is not UTF-8\. Rename it"):
        load(image_folder)


def test_names_of_splits_may_have_capitals(image_folder, load):
    """Otherwise Train and Val would be the classes, and what is in them their images."""
    plain = load(image_folder)
    (image_folder / "train").rename(image_folder / "Train")
    (image_folder / "val").rename(image_folder / "VAL")
    assert load(image_folder).describe_examples() == plain.describe_examples()


def test_a_class_without_validation_images_is_named(image_folder, load):
    shutil.rmtree(image_folder / "val" / "cat")
    data = load(image_folder)
    assert data.notes == [f"{image_folder}/val has no images of cat"]
    assert torch.cat([labels for _, labels in data.test]).tolist() == [1, 1, 1, 1]
