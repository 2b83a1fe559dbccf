"""Settings of other tools lead to ours."""

import pytest

from revzoo.spec import load_spec
from revzoo.spec.parsing import list_paths
from revzoo.spec.schema import Spec
from revzoo.spec.synonym import TIMM, find_settings, translate_timm
from revzoo.training.options import Recipe

RECIPE = list_paths(Recipe)


def test_every_setting_of_a_recipe_and_a_spec_has_a_path():
    assert {"optimizer.lr", "data.augment.mean", "mixup.prob", "memory.budget", "coupling.kept_bits"} <= set(RECIPE)
    paths = set(list_paths(Spec))
    assert {"input.size", "input.vocabulary", "stages.0.depth", "block.drop_path.max", "head", "stages.0.f"} <= paths
    assert "file" not in paths


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("lr", ["optimizer.lr"]),
        ("data.text.num_epochs", ["train.epochs"]),
        ("num_classes", ["model.num_outputs"]),
        ("data.img_size", ["model.size"]),
        ("name", ["data.name", "model.name"]),
    ],
)
def test_the_setting_of_the_same_key_is_found(path, settings):
    assert find_settings(path, RECIPE) == settings


def test_timms_arguments_are_overrides():
    spec = load_spec("rev_vit_s", ["num_classes=7", "img_size=160", "in_chans=1", "drop_path_rate=0.2"])
    assert (spec.head.arguments["outputs"], spec.input.size, spec.input.channels) == (7, (160, 160), 1)
    assert spec.drop_path.max == 0.2
    assert load_spec("rev_vit_s", ["img_size=[160, 192]"]).input.size == (160, 192)
    assert [translate_timm(word) for word in ("img_size", "head.outputs=3")] == ["img_size", "head.outputs=3"]
    assert len(TIMM) == 5
