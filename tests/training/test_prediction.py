"""Inputs of one's own are prepared as evaluation prepares them, and predicted as it predicts."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import revzoo
from revzoo.data.loading import load_data
from revzoo.data.options import AugmentOptions, DataOptions, TextOptions
from revzoo.errors import DataError, InputError, RevzooError
from revzoo.spec.schema import ImageInput
from revzoo.training.prediction import list_inputs, load_classifier, predict


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_is_prepared_as_for_evaluation(image_folder, channels):
    augment = AugmentOptions(mean=(0.2,) * channels, std=(0.4,) * channels, crop_pct=0.75)
    options = DataOptions("folder", 2, str(image_folder), augment=augment)
    model = revzoo.create("rev_vit_digits", overrides=[f"input.channels={channels}", "input.size=[16,16]"], device="meta")
    data = load_data(options, model.spec.input, 0)
    model.data_config = data.data_config
    prepare = revzoo.transform(model)
    sent = pickle.loads(pickle.dumps(prepare))  # as the workers of a DataLoader get it that are spawned
    files = data.test.dataset.source.files
    assert len(files) == 8
    for file, (expected, _) in zip(files, data.test.dataset, strict=True):
        assert torch.equal(prepare(file), expected)
        assert torch.equal(prepare(str(file)), expected)
        assert torch.equal(sent(file), expected)
        assert torch.equal(prepare(Image.open(file)), expected)
    assert expected.shape == (channels, 16, 16)


def test_a_text_is_prepared_as_for_evaluation(tables, tokenizer):
    model = revzoo.create("rev_roberta_mini", overrides=["input.vocabulary=280"], device="meta")
    for file, name in ((str(tokenizer), str(tokenizer)), ("bytes", "bytes")):
        options = DataOptions("text_classification", 2, str(tables), text=TextOptions(tokenizer=file))
        data = load_data(options, model.spec.input, 0)
        assert data.data_config == load_data(replace(options, name="masked_lm"), model.spec.input, 0).data_config
        assert data.data_config == {"tokenizer": name}
        model.data_config = data.data_config
        prepare = pickle.loads(pickle.dumps(revzoo.transform(model)))
        for text, ids in zip(("the cat purrs", "a dog", "cat"), data.test.dataset.ids, strict=True):
            assert prepare(text).tolist() == ids.tolist()


def test_a_model_that_says_nothing_of_its_images_is_warned_of(caplog):
    model = revzoo.create("rev_vit_digits", device="meta")
    revzoo.transform(model)
    assert "Nothing says how images of rev_vit_digits are prepared: they are normalised by ImageNet's mean" in caplog.text
    caplog.clear()
    model.data_config = {"mean": (0.0,), "std": (1.0,)}
    revzoo.transform(model)
    assert not caplog.text


def test_no_probability_is_nan():
    """Which JSON does not have."""
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"]).eval()
    model.data_config = {"mean": (0.0,), "std": (1.0,)}
    torch.nn.init.constant_(model.get_classifier().bias, torch.nan)
    with pytest.raises(RevzooError, match="rev_vit_digits returns infinities or NaN for dot: its weights cannot be used"):
        next(predict(model, [("dot", Image.new("L", (8, 8)))]))


def test_what_cannot_be_prepared_is_refused(image_folder):
    prepare = revzoo.transform(revzoo.create("rev_vit_digits", device="meta"))
    with pytest.raises(InputError, match="An image is a file or an image of Pillow. Received: ndarray"):
        prepare(np.zeros((8, 8)))
    with pytest.raises(DataError, match=r"The image .*missing\.png cannot be read"):
        prepare(image_folder / "missing.png")
    with pytest.raises(DataError, match=r"The image in mode F cannot be read \(its pixels are 32-bit numbers"):
        prepare(Image.new("F", (8, 8)))
    with pytest.raises(InputError, match="1 or 3 channels. Received: rev_vit_digits, which takes 2"):
        revzoo.transform(revzoo.create("rev_vit_digits", overrides=["input.channels=2"], device="meta"))
    with pytest.raises(InputError, match="Received: Linear"):
        revzoo.transform(torch.nn.Linear(2, 2))
    text = revzoo.create("rev_roberta_mini", device="meta")
    with pytest.raises(InputError, match="Nothing says which tokenizer rev_roberta_mini has"):
        revzoo.transform(text)
    text.data_config = {"tokenizer": "bytes"}
    with pytest.raises(InputError, match="A text is a string. Received: list"):
        revzoo.transform(text)(["a", "b"])


def test_pictures_of_digits_are_recognised(tmp_path):
    """Shipped weights read the first 40 test digits as the data set has them, up to the rounding to 8 bits."""
    test = load_data(DataOptions("digits", 40), ImageInput("image", 1, (8, 8)), 0).test.dataset
    pixels, classes = load_digits(return_X_y=True)
    rank = [int((classes[:i] == label).sum()) for i, label in enumerate(classes)]
    chosen = [i for i in range(len(classes)) if rank[i] % 5 == 4][:40]
    assert [int(classes[i]) for i in chosen] == test.labels[:40].tolist()
    for number, i in enumerate(chosen):
        Image.fromarray(np.uint8(np.rint(pixels[i].reshape(8, 8) * 255 / 16))).save(tmp_path / f"{number}.png")
    model = load_classifier("rev_vit_digits", "cpu")
    found = list(predict(model, list_inputs(model, [tmp_path]), top=2, batch_size=16))
    images, labels = test.__getitems__(list(range(40)))
    with torch.no_grad():
        expected = model(images).softmax(1).topk(2)
    assert [each.input for each in found] == [str(tmp_path / f"{i}.png") for i in range(40)]
    assert [each.classes for each in found] == [tuple(map(str, row)) for row in expected.indices.tolist()]
    torch.testing.assert_close(torch.tensor([each.probabilities for each in found]), expected.values, rtol=0, atol=0.01)
    hits = sum(each.classes[0] == str(label) for each, label in zip(found, labels.tolist(), strict=True))
    assert hits >= 39


def test_classes_without_names_have_numbers():
    model = load_classifier("rev_vit_digits", "cpu")
    model.class_names = ["zero"]
    [prediction] = predict(model, [("dot", Image.new("L", (8, 8)))], top=10)
    assert set(prediction.classes) == {"zero", *(f"class {i}" for i in range(1, 10))}


def test_the_padding_of_other_texts_changes_nothing():
    model = revzoo.create("rev_bert_mini").eval()
    model.data_config = {"tokenizer": "bytes"}
    rows = [("a", "short"), ("b", "a text that is longer than the other one")]
    together, alone = list(predict(model, rows)), [next(predict(model, [row])) for row in rows]
    assert [each.classes for each in together] == [each.classes for each in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-6)
