"""Every family: its small member learns its recipe's real data, in a few epochs of a smaller setting."""

import pytest
import torch

import revzoo
from revzoo.data.base import IGNORED
from revzoo.data.loading import load_data
from revzoo.spec.names import model_files
from revzoo.training.loop import train
from revzoo.training.recipe import load_recipe

NARROW = "stem.width=32,block.f.heads=2,stages.0.width=32,stages.0.depth=1,block.f.hashes=1"
CALM = "stages.0.depth=1,stem.dropout=0,block.f.dropout=0,block.f.attention_dropout=0,block.g.dropout=0"
# The recipe, what makes it short, and the accuracy to reach as a multiple of the most frequent label's share.
FAMILIES = {
    "irevnet": ("digits_irevnet", ["train.epochs=2", "model.overrides=[stages.0.depth=2,stages.1.depth=2]"], 3),
    "rev_gpt": ("lm", ["data.batch_size=32", "train.epochs=1", "model.overrides=[stages.0.depth=1,input.length=64]"], 1.3),
    "reformer": ("text_reformer", ["data.batch_size=32", f"model.overrides=[{NARROW},input.length=64]"], 1.3),
    "resnext": (
        "digits_resnext",
        ["train.epochs=2", f"model.overrides=[{','.join(f'stages.{i}.depth=1' for i in range(3))}]"],
        3,
    ),
    "rev_bert": ("text_bert", ["train.epochs=2", "data.batch_size=8", f"model.overrides=[input.length=24,{CALM}]"], 1.3),
    "rev_mvit": ("digits_rev_mvit", ["train.epochs=1", "ema=null", "model.overrides=[stages.1.depth=1]"], 3),
    "rev_roberta": ("text_roberta", ["train.epochs=2", "data.batch_size=16", f"model.overrides=[input.length=32,{CALM}]"], 1.3),
    "rev_swin": ("digits_rev_swin", ["train.epochs=1", "model.overrides=[stages.1.depth=1]"], 3),
    "rev_vit": ("digits", ["train.epochs=2", "ema=null", "model.overrides=[stages.0.depth=2]"], 3),
    "revnext": ("digits_revnext", ["train.epochs=2", "schedule.warmup_epochs=0"], 3),
    "revnet": ("digits_revnet", ["train.epochs=2", "model.overrides=[stages.0.depth=1,stages.1.depth=1,stages.2.depth=1]"], 3),
}
QUICK = ("rev_bert", "rev_vit")  # one of images, one of texts


def test_every_family_is_here():
    assert sorted({path.parent.name for path in model_files().values()}) == sorted(FAMILIES)


@pytest.mark.parametrize("family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def test_a_small_member_learns_its_data(family, tmp_path):
    name, short, times = FAMILIES[family]
    recipe = load_recipe(name, ["schedule.warmup_epochs=0", *short])
    spec = revzoo.load_spec(recipe.model.name, recipe.model.overrides)
    assert spec.family == family
    labels = torch.cat([labels.flatten() for _, labels in load_data(recipe.data, spec.input, 0).test])
    labels = labels[labels != IGNORED]
    majority = 100 * labels.bincount().max().item() / len(labels)
    assert train(recipe, tmp_path / "run").score > times * majority
