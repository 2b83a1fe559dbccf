"""YAML files as trees that remember where every value was written.

A `Node` carries its file and path through inheritance and overrides, so a problem found in the merged tree is
reported at the line of YAML (or the override) that a person has to change.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from revzoo.errors import SpecError, SpecProblem, did_you_mean, listing

MISSING = object()  # the value of a node that nobody wrote
TOP = "(top level)"  # the path of a whole file
_OVERRIDE = re.compile(r"(\w+(?:\.\w+|\[\w+\])*)=(.*)", re.DOTALL)
BOOLEAN_HINT = " YAML reads a bare yes, no, on or off as true or false: quote it."


@dataclass(frozen=True, slots=True)
class Node:
    """A YAML value and the place it was written at.

    Args:
        value: a scalar, a list of nodes, or a dict from key to node.
        file: the YAML file, or "override".
        path: dotted place in that file, list indices included; empty for the whole.
    """

    value: Any
    file: str
    path: str = ""

    @classmethod
    def of(cls, plain: Any, file: str, path: str = "") -> "Node":
        """Return plain YAML values as a tree written in `file`."""
        if isinstance(plain, Mapping):
            return cls({key: cls.of(item, file, join(path, key)) for key, item in plain.items()}, file, path)
        if isinstance(plain, list):
            return cls([cls.of(item, file, join(path, index)) for index, item in enumerate(plain)], file, path)
        return cls(plain, file, path)

    def plain(self) -> Any:
        """Return the value as plain dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        return [item.plain() for item in self.value] if isinstance(self.value, list) else self.value

    def missing(self, key: str) -> "Node":
        """Return the node of a key that should have been written in this mapping."""
        return Node(MISSING, self.file, join(self.path, key))

    def problem(self, allowed: str, found: str = "", hint: str = "") -> SpecProblem:
        """Return the problem that what stands here is not what is allowed."""
        if not found:
            found = self._shown()
            hint = hint or (BOOLEAN_HINT if isinstance(self.value, bool) else "")
        return SpecProblem(self.file, self.path or TOP, found, allowed, hint)

    def _shown(self) -> str:
        if self.value is MISSING:
            return "nothing"
        if self.value is None or isinstance(self.value, bool):
            return {None: "null", True: "true", False: "false"}[self.value]
        text = repr(self.plain())
        return text if len(text) <= 60 else f"{text[:57]}..."


def join(path: str, key: object) -> str:
    """Return the dotted path of `key` under `path`."""
    return f"{path}.{key}" if path else str(key)


def merge(below: Node, above: Node) -> Node:
    """Lay one tree over another: maps merge, anything else replaces.

    A map that names a `type` merges over that type only: another part has other arguments.
    """
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    if "type" in above.value and above.value["type"].plain() != below.value.get("type", below.missing("type")).plain():
        return above
    laid = {key: merge(below.value[key], item) if key in below.value else item for key, item in above.value.items()}
    return Node(below.value | laid, above.file, above.path)


def load_tree(path: Path, known: Mapping[str, Path]) -> Node:
    """Read a YAML file and everything it inherits from through its `base` key.

    Nothing in a file is evaluated: a `${...}` stays text.

    Args:
        path: the file.
        known: what a `base` may call by its bare name; a base that ends in .yaml is a path relative to the file.

    Raises:
        SpecError: a file that cannot be read, is not YAML or not a mapping; a missing or cyclic base.
    """
    files, layers = [path.resolve()], [_read_yaml(path)]
    while (base := layers[-1].value.pop("base", None)) is not None:
        path = _base_file(base, path.parent, known)
        files.append(path.resolve())
        if files[-1] in files[:-1]:
            cycle = " -> ".join(file.name for file in files)
            raise SpecError([base.problem("a base that does not inherit from this file", cycle)])
        layers.append(_read_yaml(path))
    return reduce(merge, reversed(layers))


def _base_file(base: Node, folder: Path, known: Mapping[str, Path]) -> Path:
    name = base.value
    if isinstance(name, str) and name.endswith(".yaml"):
        path = folder / name
    elif isinstance(name, str) and name in known:
        path = known[name]
    else:
        hint = did_you_mean(name, known) if isinstance(name, str) else ""
        raise SpecError([base.problem(f"a path ending in .yaml, or one of {listing(sorted(known))}", hint=hint)])
    if not path.is_file():
        raise SpecError([base.problem("an existing file", f"{name!r}, but there is no file {path}")])
    return path


def _read_yaml(path: Path) -> Node:
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else TOP
        raise SpecError([SpecProblem(str(path), place, f"invalid YAML ({error.problem})", "valid YAML")]) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        found = f"an unreadable file ({textwrap.shorten(str(error), 200)})"
        raise SpecError([SpecProblem(str(path), TOP, found, "a YAML file")]) from error
    if not isinstance(values, dict) or not values:
        found = "a list" if isinstance(values, list) else "an empty file"
        raise SpecError([SpecProblem(str(path), TOP, found, "a mapping from keys to values")])
    return Node.of(values, str(path))


def apply_overrides(tree: Node, overrides: Iterable[str]) -> tuple[Node, list[SpecProblem]]:
    """Lay dot-list overrides such as `stages.0.depth=6` or `stages[0].depth=6` over a tree.

    A path that the schema does not know is laid like any other: `parse` then reports it as written in "override".

    Returns:
        The new tree, and a problem for every override that is malformed or leads nowhere (those are left out).
    """
    problems: list[SpecProblem] = []
    for override in [overrides] if isinstance(overrides, str) else overrides:
        try:
            tree = _lay(tree, _read_override(override))
        except SpecError as error:
            problems += error.problems
    return tree, problems


def _read_override(override: str) -> Node:
    match = _OVERRIDE.fullmatch(override)
    if match is None:
        allowed = "a dotted path, '=' and a YAML value, such as stages.0.depth=6"
        raise SpecError([SpecProblem("override", repr(override), "no PATH=VALUE", allowed)])
    path = match[1].replace("[", ".").replace("]", "")
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={match[2]}"]))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise SpecError([SpecProblem("override", path, repr(match[2]), "a YAML value")]) from error
    return Node.of(values["value"], "override", path)


def _lay(below: Node, value: Node, depth: int = 0) -> Node:
    """Lay a value over the tree at the value's own path, of which `below` stands at the first `depth` keys."""
    keys = value.path.split(".")
    if depth == len(keys):
        return merge(below, value)
    key, here = keys[depth], ".".join(keys[:depth])
    if below.value is None or below.value is MISSING:
        below = Node({}, "override", here)
    items = below.value
    if isinstance(items, dict):
        return replace(below, value=items | {key: _lay(items.get(key, below.missing(key)), value, depth + 1)})
    if not isinstance(items, list):
        found, allowed = f"{key!r} inside {below.problem('').found}", f"another value for {here} as a whole"
        raise SpecError([SpecProblem("override", value.path, found, allowed)])
    if not key.isdecimal() or int(key) >= len(items):
        found = f"index {key} into a list of {len(items)}"
        raise SpecError([SpecProblem("override", value.path, found, f"0 to {len(items) - 1}" if items else "none")])
    return replace(below, value=[_lay(n, value, depth + 1) if i == int(key) else n for i, n in enumerate(items)])
