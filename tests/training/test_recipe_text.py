"""A recipe as it is printed is the same recipe, and every setting has its words."""

import inspect
from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

import pytest

from revzoo.spec import list_recipes
from revzoo.spec.parsing import NOT_WRITTEN
from revzoo.training.options import Recipe
from revzoo.training.recipe import load_recipe

# What a recipe leaves to be set; those of texts take the texts of Python.
NEEDED = {"finetune": "model=rev_vit_digits"} | dict.fromkeys(["text_bert", "text_roberta", "text_reformer"], "data.root=null")


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_is_printed_as_itself(name, tmp_path):
    recipe = load_recipe(name, ["data.root=examples", NEEDED.get(name, "train.seed=0")])
    (tmp_path / "mine.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "mine.yaml") == recipe


def test_every_setting_is_documented():
    sections = list(list_sections(Recipe))
    assert len(sections) == 13
    for section in sections:
        written = [field.name for field in fields(section) if field.metadata != NOT_WRITTEN]
        assert [name for name in written if f"\n    {name}: " not in inspect.getdoc(section)] == [], section


def list_sections(cls):
    yield cls
    for hint in get_type_hints(cls).values():
        for section in filter(is_dataclass, (hint, *get_args(hint))):
            yield from list_sections(section)
