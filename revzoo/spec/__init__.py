"""The spec language: what a YAML file may say, read and checked without torch."""

from revzoo.bounds import Bound, PositiveInt, Rate
from revzoo.spec.loading import load_spec
from revzoo.spec.names import data_root, list_models, list_recipes, recipe_file, spec_file
from revzoo.spec.parsing import Part, parse, plain
from revzoo.spec.schema import DropPath, ImageInput, Input, Spec, Stage, TextInput
from revzoo.spec.tree import Node, apply_overrides, load_tree, merge

__all__ = [
    "Bound",
    "DropPath",
    "ImageInput",
    "Input",
    "Node",
    "Part",
    "PositiveInt",
    "Rate",
    "Spec",
    "Stage",
    "TextInput",
    "apply_overrides",
    "data_root",
    "list_models",
    "list_recipes",
    "load_spec",
    "load_tree",
    "merge",
    "parse",
    "plain",
    "recipe_file",
    "spec_file",
]
