"""A recipe as it is printed: the same recipe, with what its settings are."""

from revzoo.training.options import EmaOptions, MemoryOptions
from revzoo.training.recipe import load_recipe
from revzoo.training.recipe_text import read_arguments, write_recipe


def test_what_is_printed_is_the_recipe(tmp_path):
    recipe = load_recipe("rev_vit_b_imagenet", ["data.root=images", "model.overrides=[stages.0.depth=2]", "memory.budget=8GiB"])
    text = write_recipe(recipe)
    (tmp_path / "mine.yaml").write_text(text)
    assert load_recipe(tmp_path / "mine.yaml") == recipe
    lines = text.splitlines()
    assert "# What is trained: arguments of `revzoo.create`." in lines
    assert lines[lines.index("  batch_size: 64") - 1] == "  # examples per batch and process."
    assert max(map(len, lines)) <= 120


def test_arguments_are_read_from_docstrings():
    assert list(read_arguments(MemoryOptions)) == ["budget", "solver", "lookahead"]
    assert read_arguments(MemoryOptions)["solver"] == '"timeline" or "knapsack", as for `revzoo.solve`.'
    assert read_arguments(MemoryOptions)["budget"].endswith("None: `model.schedule` is used.")
    assert read_arguments(EmaOptions) == {}
