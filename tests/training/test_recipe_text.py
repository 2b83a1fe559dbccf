"""A recipe as it is printed: the same recipe, with what each of its settings is."""

from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

import pytest

from revzoo.spec import list_recipes
from revzoo.spec.parsing import NOT_WRITTEN
from revzoo.training.options import Recipe
from revzoo.training.recipe import load_recipe
from revzoo.training.recipe_text import read_arguments, write_recipe

# What a recipe leaves to be set; those of texts take the texts of Python.
NEEDED = {"finetune": "model=rev_vit_digits"} | dict.fromkeys(["text_bert", "text_roberta", "text_reformer"], "data.root=null")


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_is_printed_as_itself_with_a_comment_before_every_key(name, tmp_path):
    recipe = load_recipe(name, ["data.root=examples", NEEDED.get(name, "train.seed=0")])
    (tmp_path / "mine.yaml").write_text(text := write_recipe(recipe))
    assert load_recipe(tmp_path / "mine.yaml") == recipe
    lines = text.splitlines()
    keys = [i for i, line in enumerate(lines) if not line.lstrip().startswith(("#", "-"))]
    assert len(keys) >= 70
    assert [lines[i] for i in keys if not lines[i - 1].lstrip().startswith("#")] == []
    assert [line for line in lines if line.startswith("#") or "  # " in line if len(line) > 98] == []


def test_every_setting_is_documented():
    sections = list(list_sections(Recipe))
    assert len(sections) == 13
    for section in sections:
        written = {field.name for field in fields(section) if field.metadata != NOT_WRITTEN}
        assert written <= read_arguments(section).keys(), section


def list_sections(cls):
    yield cls
    for hint in get_type_hints(cls).values():
        for section in filter(is_dataclass, (hint, *get_args(hint))):
            yield from list_sections(section)


def test_comments_are_in_the_words_of_yaml():
    lines = write_recipe(load_recipe("digits")).splitlines()
    assert lines[0] == "# What is trained: arguments of `revzoo.create`."
    assert lines[lines.index("  num_outputs: null") - 1] == "  # outputs of the head; null: the number of classes in the data."
    coupling = "# how the coupling changes; null: it stays. Its settings: kept_bits, m, alpha, beta, share."
    assert lines[lines.index("coupling: null") - 1] == coupling
    assert lines[lines.index("  mixed_precision: 'no'") - 1].endswith('"no" is float32. One of: no, bf16, fp16.')
