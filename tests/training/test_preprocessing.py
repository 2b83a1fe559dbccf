"""Fine-tuning prepares images as those were that the starting weights were trained on."""

import pytest
import timm
import torch
from omegaconf import OmegaConf
from PIL import Image
from timm.data import create_transform, resolve_data_config

import revzoo
from revzoo.data.images import load_images
from revzoo.data.loading import load_data
from revzoo.errors import DataError
from revzoo.spec.schema import ImageInput
from revzoo.training.evaluate_checkpoint import evaluate_checkpoint
from revzoo.training.loop import resume, train
from revzoo.training.preprocessing import adopt_preprocessing
from revzoo.training.recipe import load_recipe

FACTS = {"mean": (0.25,), "std": (0.5,), "interpolation": "bilinear", "crop_pct": 0.6, "crop_mode": "squash"}
STILL = ["data.batch_size=4", "data.num_workers=0", "train.epochs=1", "schedule={sched: constant}"]


@pytest.fixture
def weights(tmp_path):
    """A folder of weights for grey images that were prepared like no others."""
    model = revzoo.create("revnet_digits", num_outputs=2)
    model.data_config = FACTS
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def adopt(model, *overrides):
    recipe = load_recipe("finetune", [f"model={model}", "data.root=photos", *overrides])
    return adopt_preprocessing(recipe, revzoo.load_spec(model, recipe.model.overrides))


def test_a_run_has_the_preprocessing_of_its_weights(weights, image_folder, tmp_path, capsys):
    train(load_recipe("finetune", [f"model={weights}", f"data.root={image_folder}", *STILL]), tmp_path / "run")
    printed = capsys.readouterr().out
    assert (
        "Note: images are prepared as the weights need them: mean=[0.25], std=[0.5], interpolation=bilinear, "
        "crop_pct=0.6, crop_mode=squash (data.augment sets others)."
    ) in " ".join(printed.split())
    assert revzoo.create(tmp_path / "run").data_config == FACTS
    augment = OmegaConf.load(tmp_path / "run" / "config.yaml").data.augment
    assert {name: augment[name] for name in FACTS} == FACTS | {"mean": [0.25], "std": [0.5]}
    top1 = float(printed.rpartition("top-1 ")[2].split()[0])
    assert evaluate_checkpoint(tmp_path / "run" / "last.safetensors").metrics["top1"] == pytest.approx(top1, abs=0.01)
    resume(tmp_path / "run", ["train.epochs=2"])  # nothing has changed that would have to be accepted
    assert revzoo.create(tmp_path / "run").data_config == FACTS


def test_images_are_what_timm_makes_of_them_for_the_original(image_folder, tmp_path):
    original = timm.create_model("test_vit").eval()
    original.pretrained_cfg |= {"mean": (0.4, 0.5, 0.6), "std": (0.1, 0.2, 0.3), "crop_pct": 0.7, "interpolation": "lanczos"}
    revzoo.convert(original, out=tmp_path / "converted")
    recipe, _ = adopt(tmp_path / "converted", f"data.root={image_folder}")
    spec = revzoo.load_spec(tmp_path / "converted")
    _, test = load_images(recipe.data, spec.input, seed=0)
    config = resolve_data_config({}, model=original)
    assert (spec.input.channels, *spec.input.size) == config["input_size"]
    image = Image.open(image_folder / "val" / "cat" / "0.png").convert("RGB")
    torch.testing.assert_close(test[0][0], create_transform(**config)(image), rtol=0, atol=0)


def test_what_the_recipe_sets_stays(weights):
    recipe, [note] = adopt(weights, "data.augment={mean: [0.1], crop_pct: 1.0}")
    augment = recipe.data.augment
    assert (augment.mean, augment.crop_pct) == ((0.1,), 1.0)
    assert (augment.std, augment.interpolation, augment.crop_mode) == ((0.5,), "bilinear", "squash")
    assert "mean" not in note
    everything = "data.augment={mean: [0], std: [1], crop_pct: 1, interpolation: bicubic, crop_mode: center}"
    assert adopt(weights, everything)[1] == []


def test_what_training_does_not_take_is_left_out_and_said(weights):
    recipe, [note] = adopt(weights, "model.overrides=[input.channels=3]")
    assert (recipe.data.augment.mean, recipe.data.augment.std) == (None, None)
    assert recipe.data.augment.interpolation == "bilinear"
    assert "std" not in note

    def save(**facts):
        model = revzoo.create(weights)
        model.data_config = FACTS | facts
        model.save_pretrained(weights)

    save(interpolation="lanczos")
    assert adopt(weights)[0].data.augment.interpolation == "lanczos"
    recipe, [_, left_out] = adopt(weights, "data.augment.auto_augment=rand-m9-mstd0.5")
    assert recipe.data.augment.interpolation is None
    assert left_out == "data.augment.interpolation takes no 'lanczos', as the weights have it"
    save(interpolation="sinc", mean=0.5)
    recipe, [adopted, *left_out] = adopt(weights)
    assert (recipe.data.augment.interpolation, recipe.data.augment.mean, recipe.data.augment.std) == (None, None, (0.5,))
    assert "std=[0.5]" in adopted
    assert [line.partition(" takes no ")[0] for line in left_out] == ["data.augment.mean", "data.augment.interpolation"]


def test_weights_in_files_and_random_ones(weights, tmp_path):
    by_file, _ = adopt("revnet_digits", f"model.checkpoint={weights / 'model.safetensors'}")
    assert by_file.data.augment.mean == (0.25,)
    torch.save({}, tmp_path / "pickle.pth")
    assert adopt("revnet_digits", f"model.checkpoint={tmp_path / 'pickle.pth'}")[1] == []
    assert adopt("revnet_digits", "model.pretrained=false")[1] == []
    assert len(adopt("revnet_digits")[1]) == 1  # those that ship say how digits were normalised
    for data in ("digits", "shapes:load"):  # the latter are prepared by their author
        assert adopt(weights, f"data.name={data}", "data.root=null")[1] == []


def test_an_interpolation_of_training_is_that_of_evaluation(image_folder):
    for chosen, used in ((None, "bicubic"), ("random", "bicubic"), ("nearest", "nearest"), ("lanczos", "lanczos")):
        recipe = load_recipe(
            "images", [f"data.root={image_folder}", *([f"data.augment.interpolation={chosen}"] if chosen else [])]
        )
        _, test = load_images(recipe.data, ImageInput("image", 1, (8, 8)), seed=0)
        assert test.data_config["interpolation"] == used


def test_texts_have_the_tokenizer_of_the_weights(tmp_path, tables, tokenizer):
    """Another one is remarked, and a copy of it is not."""
    model, saved = revzoo.create("rev_roberta_mini", overrides=["stages.0.depth=1", "input.vocabulary=280"]), tmp_path / "saved"
    model.data_config = {"tokenizer": str(tokenizer)}
    model.save_pretrained(saved)
    texts = ["data.name=text_classification", f"data.root={tables}", "data.batch_size=4", "data.num_workers=0"]
    recipe, [note] = adopt(saved, *texts)
    own = str(saved / "tokenizer.json")
    assert recipe.data.text.tokenizer == own
    assert note == f"the tokenizer is that of the weights, {own} (data.text.tokenizer sets another)"
    assert load_data(recipe.data, revzoo.load_spec(saved).input, 0).data_config == {"tokenizer": own}
    recipe, [note] = adopt(saved, *texts, "data.text.tokenizer=bytes")
    assert recipe.data.text.tokenizer == "bytes"
    assert note == f"the weights have another tokenizer, {own}: what they learnt of its ids is lost"
    recipe, notes = adopt(saved, *texts, f"data.text.tokenizer={tokenizer}")
    assert (recipe.data.text.tokenizer, notes) == (str(tokenizer), [])
    (saved / "tokenizer.json").unlink()
    assert adopt(saved, *texts)[0].data.text.tokenizer == str(tokenizer)  # which the weights name


def test_texts_without_a_tokenizer_are_refused(tables):
    recipe = load_recipe("text_roberta", [f"data.root={tables}"])
    with pytest.raises(DataError, match=r"Set data\.text\.tokenizer to bytes, or to a file: revzoo tokenizer FILES"):
        load_data(recipe.data, revzoo.load_spec("rev_roberta_mini").input, 0)
