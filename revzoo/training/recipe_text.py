"""A recipe as YAML with a comment for each setting, taken from the docstrings of the options."""

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from revzoo.spec.parsing import NOT_WRITTEN, to_plain
from revzoo.training.options import Recipe

_WIDTH = 98  # of a comment
_YAML_WORDS = {"None": "null", "True": "true", "False": "false"}
_ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)


def write_recipe(recipe: Recipe) -> str:
    """Return a recipe as self-contained YAML, which `revzoo train` takes, with what each section and setting is."""
    return "\n".join(_list_lines(recipe, "")) + "\n"


def _list_lines(options: Any, indent: str) -> Iterator[str]:
    meanings, types = read_arguments(type(options)), get_type_hints(type(options))
    for field in fields(options):
        if field.metadata == NOT_WRITTEN:
            continue
        value = getattr(options, field.name)
        meaning = read_summary(type(value)) if is_dataclass(value) else _explain(meanings[field.name], types[field.name])
        yield from textwrap.wrap(
            _write_as_yaml(meaning), _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#   "
        )
        if is_dataclass(value):
            yield f"{indent}{field.name}:"
            yield from _list_lines(value, f"{indent}  ")
        else:
            text = OmegaConf.to_yaml(OmegaConf.create({field.name: to_plain(value)})).rstrip("\n")
            yield from textwrap.indent(text, indent).splitlines()


def _explain(meaning: str, annotation: Any) -> str:
    """Return the meaning of a setting, with the words that it takes and the settings of a section that is null."""
    annotations = list(_unfold(annotation))
    words = [word for each in annotations if get_origin(each) is Literal for word in get_args(each) if isinstance(word, str)]
    keys = [field.name for each in annotations if is_dataclass(each) for field in fields(each)]
    unnamed = words if any(not re.search(rf"\b{word}\b", meaning) for word in words) else []
    return " ".join([meaning, *_list_all("One of", unnamed), *_list_all("Its settings", keys)])


def _list_all(title: str, names: list[str]) -> list[str]:
    return [f"{title}: {', '.join(names)}."] if names else []


def _unfold(annotation: Any) -> Iterator[Any]:
    """Yield an annotation and the members of a union in it."""
    yield annotation
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _unfold(member)


def _write_as_yaml(meaning: str) -> str:
    return re.sub(rf"\b({'|'.join(_YAML_WORDS)})\b", lambda match: _YAML_WORDS[match[0]], meaning)


def read_arguments(cls: type) -> dict[str, str]:
    """Return what the docstring of a class says about each of its arguments."""
    _, _, arguments = (inspect.getdoc(cls) or "").partition("Args:\n")
    return {name: " ".join(meaning.split()) for name, meaning in _ARGUMENT.findall(arguments)}


def read_summary(cls: type) -> str:
    """Return what the docstring of a class says before its arguments."""
    return " ".join((inspect.getdoc(cls) or "").partition("Args:")[0].split())
