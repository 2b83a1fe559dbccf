"""A recipe as YAML with a comment for each setting, taken from the docstrings of the options."""

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import OmegaConf

from revzoo.spec.parsing import NOT_WRITTEN, to_plain
from revzoo.training.options import Recipe

_WIDTH = 110  # of a comment
_ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)


def write_recipe(recipe: Recipe) -> str:
    """Return a recipe as self-contained YAML, which `revzoo train` takes, with what each section and setting is."""
    return "\n".join(_list_lines(recipe, "")) + "\n"


def _list_lines(options: Any, indent: str) -> Iterator[str]:
    meanings = read_arguments(type(options))
    for field in fields(options):
        if field.metadata == NOT_WRITTEN:
            continue
        value = getattr(options, field.name)
        meaning = _read_summary(type(value)) if is_dataclass(value) else meanings.get(field.name, "")
        yield from textwrap.wrap(meaning, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#   ")
        if is_dataclass(value):
            yield f"{indent}{field.name}:"
            yield from _list_lines(value, f"{indent}  ")
        else:
            text = OmegaConf.to_yaml(OmegaConf.create({field.name: to_plain(value)})).rstrip("\n")
            yield from textwrap.indent(text, indent).splitlines()


def read_arguments(cls: type) -> dict[str, str]:
    """Return what the docstring of a class says about each of its arguments."""
    _, _, arguments = (inspect.getdoc(cls) or "").partition("Args:\n")
    return {name: " ".join(meaning.split()) for name, meaning in _ARGUMENT.findall(arguments)}


def _read_summary(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").partition("Args:")[0].split())
