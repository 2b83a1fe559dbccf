"""Names of classes and preprocessing: attributes of a model that its file of weights brings back."""

from copy import deepcopy

import pytest
import timm

import revzoo
from revzoo.errors import InputError

SMALL = ["stages.0.depth=1", "head.outputs=3"]
NAMES = ("cat", "dog", "größe")


@pytest.fixture
def saved(tmp_path):
    model = revzoo.create("rev_vit_digits", overrides=SMALL)
    model.class_names, model.data_config = list(NAMES), {"mean": (0.25,), "std": (0.5,), "crop_pct": 1.0}
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_they_are_saved_with_the_weights(saved):
    model = revzoo.create(saved)
    assert model.class_names == NAMES
    assert model.data_config == {"mean": (0.25,), "std": (0.5,), "crop_pct": 1.0}
    assert model.pretrained_cfg["label_names"] == NAMES
    assert timm.data.resolve_data_config({}, model=model)["mean"] == (0.25,)
    assert deepcopy(model).class_names == NAMES
    assert revzoo.create(saved / "spec.yaml").class_names is None


@pytest.mark.parametrize("change", [lambda m: m.reset_head(3), lambda m: m.reset_classifier(5)])
def test_a_new_head_has_no_names(saved, change):
    model = revzoo.create(saved)
    change(model)
    assert model.class_names is None
    assert revzoo.create(saved, num_outputs=2).class_names is None


def test_they_stay_with_an_adapted_input(saved):
    """Mean and standard deviation are numbers per channel."""
    model = revzoo.create(saved, overrides=["input.size=[16,16]", "head.dropout=0.1"])
    assert (model.class_names, model.data_config["mean"]) == (NAMES, (0.25,))
    model = revzoo.create(saved, overrides=["input.channels=3"])
    assert (model.class_names, model.data_config) == (NAMES, {"crop_pct": 1.0})


def test_other_names_are_refused(saved):
    model = revzoo.create(saved)
    with pytest.raises(InputError, match="has 3 outputs. Received: 4 class_names"):
        model.class_names = ["a", "b", "c", "d"]
    for wrong in ("cat", [1, 2]):
        with pytest.raises(InputError, match="class_names is a list of strings"):
            model.class_names = wrong
    assert model.class_names == NAMES


@pytest.fixture
def of_texts(tmp_path):
    """Return a model for texts whose tokenizer is a file."""
    (tmp_path / "made.json").write_text("{the tokenizer}")
    model = revzoo.create("rev_bert_mini", overrides=["stages.0.depth=1"])
    model.data_config = {"tokenizer": str(tmp_path / "made.json")}
    return model


def test_a_saved_folder_has_the_tokenizer_and_needs_no_other_file(of_texts, tmp_path):
    of_texts.save_pretrained(tmp_path / "saved")
    (tmp_path / "made.json").unlink()
    (tmp_path / "saved").rename(tmp_path / "moved")
    model = revzoo.create(tmp_path / "moved")
    assert model.data_config == {"tokenizer": str(tmp_path / "moved" / "tokenizer.json")}
    assert (tmp_path / "moved" / "tokenizer.json").read_text() == "{the tokenizer}"
    model.save_pretrained(tmp_path / "moved")  # where its tokenizer is already
    assert revzoo.create(tmp_path / "moved").data_config == model.data_config


def test_a_tokenizer_that_was_there_is_replaced_or_is_not_that_of_bytes(of_texts, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{of another model}")
    bytewise = revzoo.create("rev_bert_mini", overrides=["stages.0.depth=1"])
    bytewise.data_config = {"tokenizer": "bytes"}
    bytewise.save_pretrained(tmp_path)
    assert revzoo.create(tmp_path).data_config == {"tokenizer": "bytes"}
    of_texts.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{the tokenizer}"
    revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"]).save_pretrained(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()  # of the model that was there before


def test_shipped_weights_know_their_digits():
    model = revzoo.create("rev_vit_digits", pretrained=True)
    assert model.class_names == tuple("0123456789")
    assert len(model.data_config["mean"]) == 1
