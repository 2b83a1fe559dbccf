"""Specs: YAML files that describe a network, read and checked.

Reading them needs no torch. Checking the arguments of parts imports the parts, and with them torch.
"""

from revzoo.spec.loading import load_spec
from revzoo.spec.names import data_root, list_models, list_recipes
from revzoo.spec.parsing import Part, parse, to_plain
from revzoo.spec.schema import DropPathSpec, ImageInput, Input, Spec, StageSpec, TextInput
from revzoo.spec.tree import YamlNode, apply_overrides

__all__ = [
    "DropPathSpec",
    "ImageInput",
    "Input",
    "Part",
    "Spec",
    "StageSpec",
    "TextInput",
    "YamlNode",
    "apply_overrides",
    "data_root",
    "list_models",
    "list_recipes",
    "load_spec",
    "parse",
    "to_plain",
]
