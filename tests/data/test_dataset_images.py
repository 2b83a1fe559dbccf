"""Data sets of Hugging Face: what is read of images and texts in each form, and what is refused."""

import re
import shutil
import socket
import sys

import pytest

from revzoo.data.base import BrokenExampleError
from revzoo.data.options import ImageOptions
from revzoo.errors import RevzooError
from revzoo.spec.schema import ImageInput

datasets = pytest.importorskip("datasets")

KIND = "hfds"  # which `load` loads
GREY = ImageInput("image", 1, (8, 8))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own, and no connection."""

    def refuse(*arguments):
        raise AssertionError(f"a connection to {arguments}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def save(root, train, validation, features=None):
    """Save a data set of two splits, given as columns."""
    splits = {"train": train, "validation": validation}
    datasets.DatasetDict({name: datasets.Dataset.from_dict(rows, features) for name, rows in splits.items()}).save_to_disk(root)
    return root


def convert(saved, kind):
    """Write the splits of a saved data set in another form, and return where."""
    if kind == "saved":
        return saved
    for name, rows in datasets.load_from_disk(str(saved)).items():
        rows.to_parquet(saved.parent / "parquet" / f"{name}-00000-of-00001.parquet")
    return saved.parent / "parquet"


@pytest.mark.parametrize(("kind", "workers"), [("saved", 2), ("parquet", 0), ("folder", 0)])
def test_the_examples_are_those_of_a_folder(saved_dataset, image_folder, kind, workers, load, epoch, same):
    """Order and augmentation, too, in a whole epoch and in the second half of one."""
    folder = load(image_folder, "folder")
    data = load(image_folder if kind == "folder" else convert(saved_dataset, kind), num_workers=workers)
    assert (data.class_names, data.num_train, data.num_test, data.notes) == (["cat", "dog"], 8, 8, [])
    assert same(epoch(data, 1), epoch(folder, 1))
    assert same(epoch(data, 2, skip=4), epoch(folder, 2, skip=4))
    assert same(data.test, folder.test)


def test_examples_are_told_from_others(saved_dataset, image_folder, tmp_path, load):
    digests = load(saved_dataset).describe_examples()
    assert load(convert(saved_dataset, "parquet")).describe_examples() == digests
    saved_dataset = saved_dataset.rename(tmp_path / "elsewhere")
    assert load(saved_dataset).describe_examples() == digests
    rows = datasets.load_from_disk(str(saved_dataset))
    others = datasets.DatasetDict(train=rows["train"].select([1, 0, *range(2, 8)]), validation=rows["validation"])
    others.save_to_disk(tmp_path / "others")
    now = load(tmp_path / "others").describe_examples()
    assert (now["test"] == digests["test"], now["training"] == digests["training"]) == (True, False)
    digests = load(image_folder).describe_examples()
    shutil.copytree(image_folder, tmp_path / "copied")
    assert load(tmp_path / "copied").describe_examples() == digests


def test_columns_and_words_as_labels(saved_dataset, tmp_path, load, refused):
    rows = datasets.load_from_disk(str(saved_dataset))["train"]
    words = rows.rename_column("image", "img").remove_columns("label").add_column("kind", list("bacbbabc"))
    datasets.DatasetDict(train=words, test=words.select([1])).save_to_disk(tmp_path / "words")
    data = load(tmp_path / "words", image=ImageOptions("img", "kind"))
    assert data.class_names == ["a", "b", "c"]
    assert data._examples.source.labels.tolist() == [1, 0, 2, 1, 1, 0, 1, 2]
    assert data.notes == [f"{tmp_path}/words (test) has no images of b, c"]
    assert re.search(r"\(train\) has no column 'image'. Did you mean 'img'.* data.image.column=", refused(tmp_path / "words"))
    other = refused(tmp_path / "words", image=ImageOptions("img", "kinds"))
    assert re.search(r"\(train\) has no column 'kinds'. Did you mean 'kind'.* data.image.label=", other)


def test_each_split_has_its_own_numbers_for_the_classes(saved_dataset, tmp_path, load, same):
    rows = datasets.load_from_disk(str(saved_dataset))
    turned = rows["validation"].cast_column("label", datasets.Value("string"))
    names = {"0": "cat", "1": "dog"}
    turned = turned.map(lambda row: {"label": names.get(row["label"], row["label"])})
    turned = turned.cast_column("label", datasets.ClassLabel(names=["dog", "cat"]))
    datasets.DatasetDict(train=rows["train"], validation=turned).save_to_disk(tmp_path / "turned")
    assert same(load(tmp_path / "turned").test, load(saved_dataset).test)


def test_names_of_classes_that_look_like_numbers_stay_as_they_are(saved_dataset, tmp_path, load):
    """As those of class folders do."""
    rows, names = datasets.load_from_disk(str(saved_dataset)), datasets.ClassLabel(names=["00007", "-1 "])
    for split in rows:
        rows[split] = rows[split].cast(datasets.Features(rows[split].features | {"label": names}))
    rows.save_to_disk(tmp_path / "numbers")
    data, expected = load(tmp_path / "numbers"), load(saved_dataset)
    assert data.class_names == names.names
    assert data._examples.source.labels.tolist() == expected._examples.source.labels.tolist()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, None], r"Row 2 of .* \(train\) has no label: 'label' is neither a word nor a number .* data.image.label="),
        ([-1, 0], "Row 1 of .* has no label"),
        (["cat", "dog"], r"\(validation\) has the labels 7. The training images have: cat, dog"),
    ],
)
def test_refusals_of_labels(tmp_path, labels, message, refused):
    save(tmp_path / "data", {"image": ["a", "b"], "label": labels}, {"image": ["a"], "label": [7]})
    assert re.search(message, refused(tmp_path / "data"))


def test_refusals_of_folders(tmp_path, saved_dataset, image_folder, refused):
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty").startswith(f"{tmp_path}/empty cannot be read as a data set of Hugging Face (")
    assert re.search("/train has no train split: .* without a split.* train_test_split", refused(saved_dataset / "train"))
    shutil.rmtree(image_folder / "val")
    assert "has no validation split: looked for val or valid or" in refused(image_folder)
    numbers = save(tmp_path / "numbers", {"image": [1, 2], "label": [0, 1]}, {"image": [1], "label": [0]})
    assert refused(numbers).startswith(f"The column 'image' of {numbers} (train) does not hold images (")
    arrow = next((saved_dataset / "train").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:100])
    assert refused(saved_dataset).startswith(f"{saved_dataset} cannot be read as a data set of Hugging Face (")


@pytest.mark.parametrize("image", [None, {"bytes": b"no image", "path": None}])
def test_broken_images_are_named_with_their_row(tmp_path, image, load, epoch):
    features = datasets.Features(image=datasets.Image(decode=False), label=datasets.Value("int64"))
    rows = {"image": [image, image], "label": [0, 1]}
    root = save(tmp_path / "data", rows, rows, features)
    with pytest.raises(BrokenExampleError, match=rf"^The image in row \d of {root} \(train\) cannot be read \("):
        epoch(load(root, batch_size=2), 0)


def test_what_is_not_installed_is_named(saved_dataset, monkeypatch, load):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RevzooError, match="^Data sets of Hugging Face need the package datasets. Install it: pip install data"):
        load(saved_dataset)
