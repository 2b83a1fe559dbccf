"""YAML files as trees that remember where every value was written.

A `YamlNode` keeps its file and path through inheritance and overrides. So a problem in the merged tree is reported with the
file and key (or the override) that has to be changed.
"""

import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from revzoo.errors import SpecError, SpecProblem, did_you_mean, join_names

MISSING = object()  # value of a node that stands for an absent key
TOP = "(top level)"  # path of a whole file
OVERRIDE = "override"  # file of values that an override sets
_OVERRIDE = re.compile(r"(\w+(?:\.\w+|\[\w+\])*)=(.*)", re.DOTALL)
_ALIKE = 0.75  # one of two names may be a misspelling if they are at least as similar as this; 1: equal
BOOLEAN_HINT = " YAML reads a bare yes, no, on or off as true or false: quote it."


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A YAML value, with the place where it was written.

    Args:
        value: a scalar, a list of nodes, or a dict from key to node.
        file: the YAML file, or OVERRIDE.
        path: dotted path in that file, list indices included; empty for the whole file.
    """

    value: Any
    file: str
    path: str = ""

    @classmethod
    def from_plain(cls, plain: Any, file: str, path: str = "") -> "YamlNode":
        """Turn plain dicts, lists and scalars into a tree, as if written in `file` under `path`."""
        if isinstance(plain, Mapping):
            return cls({key: cls.from_plain(item, file, join_path(path, key)) for key, item in plain.items()}, file, path)
        if isinstance(plain, list):
            return cls([cls.from_plain(item, file, join_path(path, index)) for index, item in enumerate(plain)], file, path)
        return cls(plain, file, path)

    def to_plain(self) -> Any:
        """Return the value as dicts, lists and scalars without nodes."""
        if isinstance(self.value, dict):
            return {key: item.to_plain() for key, item in self.value.items()}
        return [item.to_plain() for item in self.value] if isinstance(self.value, list) else self.value

    def missing(self, key: str) -> "YamlNode":
        """Return a node that stands for a key that is absent from this mapping."""
        return YamlNode(MISSING, self.file, join_path(self.path, key))

    def problem(self, allowed: str, received: str = "", hint: str = "") -> SpecProblem:
        """Return a problem located at this node.

        Args:
            allowed: which values are allowed here.
            received: what to say was received; empty for the node's value.
            hint: a sentence with what to type instead, with a leading blank.
        """
        if not received:
            received = self._format_value()
            hint = hint or (BOOLEAN_HINT if isinstance(self.value, bool) else "")
        return SpecProblem(self.file, self.path or TOP, received, allowed, hint)

    def _format_value(self) -> str:
        if self.value is MISSING:
            return "nothing"
        if self.value is None or isinstance(self.value, bool):
            return {None: "null", True: "true", False: "false"}[self.value]
        text = repr(self.to_plain())
        return text if len(text) <= 60 else f"{text[:57]}..."


def join_path(path: str, key: object) -> str:
    """Return the dotted path of `key` under `path`."""
    return f"{path}.{key}" if path else str(key)


def find_differences(before: Any, now: Any) -> dict[str, str]:
    """Return the dotted paths at which nested dicts and lists differ, with both values in words."""
    old, new = dict(walk_leaves(before)), dict(walk_leaves(now))
    paths = dict.fromkeys([*old, *new])
    return {
        path: f"{_write(old.get(path, 'nothing'))} at the start, {_write(new.get(path, 'nothing'))} now"
        for path in paths
        if (path in old, old.get(path)) != (path in new, new.get(path))
    }


def _write(value: Any) -> Any:
    return "null" if value is None else value


def walk_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every scalar of nested mappings and lists, with its dotted path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
    else:
        for key, item in items:
            yield from walk_leaves(item, join_path(path, key))


def list_places(node: YamlNode, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted path of every value below a node, and the file in which it was written, or OVERRIDE."""
    children: Iterable[tuple[Any, YamlNode]] = ()
    if isinstance(node.value, dict):
        children = node.value.items()
    elif isinstance(node.value, list):
        children = enumerate(node.value)
    for key, item in children:
        here = join_path(path, key)
        yield here, item.file
        yield from list_places(item, here)


def merge(base: YamlNode, over: YamlNode) -> YamlNode:
    """Merge two trees: mappings key by key; of anything else, `over` replaces `base`.

    A mapping with another `type` or `kind` than that of `base` replaces it as a whole: another part has other arguments.
    """
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    for key in ("type", "kind"):
        if key in over.value and over.value[key].to_plain() != base.value.get(key, base.missing(key)).to_plain():
            return over
    merged = {key: merge(base.value[key], item) if key in base.value else item for key, item in over.value.items()}
    return YamlNode(base.value | merged, over.file, over.path)


def load_tree(
    path: Path,
    known: Mapping[str, Path],
    join_layers: Callable[[YamlNode, YamlNode], YamlNode] = merge,
    hint_at: Callable[[str], str] = lambda base: "",
) -> YamlNode:
    """Read a YAML file, merged over the files that it inherits from through its `base` key.

    Nothing in a file is evaluated: `${...}` stays text.

    Args:
        path: the file.
        known: files by the name that a `base` may give them; a base that ends in .yaml is a path relative to the file.
        join_layers: merges what a file inherits, in the end nothing, and the file.
        hint_at: returns what to type for a base that is not known, with a leading blank; or an empty string.

    Raises:
        SpecError: a file cannot be read, or is not YAML or not a mapping; or a base is missing or inherits from itself.
    """
    files, layers = [path.resolve()], [_read_yaml(path)]
    while (base := layers[-1].value.pop("base", None)) is not None:
        path = _find_base(base, path.parent, known, hint_at)
        files.append(path.resolve())
        if files[-1] in files[:-1]:
            cycle = " -> ".join(file.name for file in files)
            raise SpecError([base.problem("a base that does not inherit from this file", cycle)])
        layers.append(_read_yaml(path))
    return reduce(join_layers, reversed(layers), YamlNode({}, str(path)))


def _find_base(base: YamlNode, folder: Path, known: Mapping[str, Path], hint_at: Callable[[str], str]) -> Path:
    name = base.value
    if isinstance(name, str) and name.endswith(".yaml"):
        path = folder / name
    elif isinstance(name, str) and name in known:
        path = known[name]
    else:
        hint = hint_at(name) or did_you_mean(name, known, _ALIKE) if isinstance(name, str) else ""
        raise SpecError([base.problem(f"a path ending in .yaml, or one of {join_names(sorted(known))}", hint=hint)])
    if not os.path.isfile(path):  # unlike pathlib's, it does not raise for a name that no file can have
        received = f"{name[:200]!r}, but there is no file {str(path)[:300]}"
        raise SpecError([base.problem("an existing file", received)])
    return path


def _read_yaml(path: Path) -> YamlNode:
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else TOP
        raise SpecError([SpecProblem(str(path), place, f"invalid YAML ({error.problem})", "valid YAML")]) from error
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:  # integers of 4,301 digits
        reason = str(error).replace(os.path.abspath(path), path.name)  # so that a long path hides nothing
        received = f"an unreadable file ({textwrap.shorten(reason, 200)})"
        raise SpecError([SpecProblem(str(path), TOP, received, "a YAML file")]) from error
    if not isinstance(values, dict) or not values:
        received = "a list" if isinstance(values, list) else "an empty file"
        raise SpecError([SpecProblem(str(path), TOP, received, "a mapping from keys to values")])
    return YamlNode.from_plain(values, str(path))


def apply_overrides(tree: YamlNode, overrides: Iterable[str]) -> tuple[YamlNode, list[SpecProblem]]:
    """Return a tree with some values replaced, each given as `PATH=VALUE`.

    A path is `stages.0.depth` or `stages[0].depth`, and a value is YAML. A key that the schema does not have is added like any
    other: `parse` then reports it, with "override" as its file.

    Returns:
        The new tree, and a problem for every override that is malformed or does not fit the tree (those are left out).
    """
    problems: list[SpecProblem] = []
    for override in [overrides] if isinstance(overrides, str) else overrides:
        try:
            tree = _apply(tree, _read_override(override))
        except SpecError as error:
            problems += error.problems
    return tree, problems


def _read_override(override: str) -> YamlNode:
    match = _OVERRIDE.fullmatch(override)
    if match is None:
        allowed = "a dotted path, '=' and a YAML value, such as stages.0.depth=6"
        raise SpecError([SpecProblem(OVERRIDE, repr(override), "no PATH=VALUE", allowed)])
    path = match[1].replace("[", ".").replace("]", "")
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={match[2]}"]))
    except (ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        values = {"value": _split_overrides(match[2])}
        if not values["value"]:
            allowed = "a YAML value, such as 3, text, [1, 2] or {key: value}"
            raise SpecError([SpecProblem(OVERRIDE, path, repr(match[2][:200]), allowed)]) from error
    return YamlNode.from_plain(values["value"], OVERRIDE, path)


def _split_overrides(text: str) -> list[str]:
    """Return the overrides in a list without quotation marks, which a shell removes: [a=[1,2],b=3]; none if it is not one."""
    items, depth = [""], 0
    for char in text[1:-1]:
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            items.append("")
        else:
            items[-1] += char
    items = [item.strip() for item in items]
    is_list = text.startswith("[") and text.endswith("]") and depth == 0
    return items if is_list and all(_OVERRIDE.fullmatch(item) for item in items) else []


def _apply(base: YamlNode, value: YamlNode, depth: int = 0) -> YamlNode:
    """Merge a value into a tree at the value's own path; `base` is the subtree at the first `depth` keys of that path."""
    keys = value.path.split(".")
    if depth == len(keys):
        return merge(base, value)
    key, here = keys[depth], ".".join(keys[:depth])
    if base.value is None or base.value is MISSING:
        base = YamlNode({}, OVERRIDE, here)
    items = base.value
    if isinstance(items, dict):
        return replace(base, value=items | {key: _apply(items.get(key, base.missing(key)), value, depth + 1)})
    if not isinstance(items, list):
        received = f"{key!r} inside {base.problem('').received}"
        allowed = f"another value for {here}" + (", such as {type: NAME, ...}" if isinstance(items, str) else "")
        raise SpecError([SpecProblem(OVERRIDE, value.path, received, allowed)])
    if not key.isdecimal() or int(key) >= len(items):
        received = f"index {key} into a list of {len(items)}"
        raise SpecError([SpecProblem(OVERRIDE, value.path, received, f"0 to {len(items) - 1}" if items else "none")])
    return replace(base, value=[_apply(n, value, depth + 1) if i == int(key) else n for i, n in enumerate(items)])
