"""Typed reading of a tree: what a dataclass or a part's signature declares is what YAML may say.

One recursive walk over the annotations converts (lists to tuples, integers to floats where a float is declared) and
collects every problem instead of stopping at the first.
"""

import inspect
from collections.abc import Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from revzoo.bounds import Bound as Bound
from revzoo.bounds import PositiveInt as PositiveInt
from revzoo.bounds import Rate as Rate
from revzoo.errors import SpecProblem, did_you_mean, listing, nearest
from revzoo.registry import Registry
from revzoo.spec.tree import BOOLEAN_HINT, Node, join

T = TypeVar("T")
NOT_WRITTEN = {"written": False}  # metadata of a dataclass field that the program sets and YAML may not
TEMPLATE = "template"  # mark of a part that others complete: arguments may be left out
_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "null", Any: "anything"}


@dataclass(frozen=True)
class Part:
    """One `{type: NAME, ...arguments}` of a spec; a bare NAME is a part without arguments.

    A field annotated `Annotated[Part, registry]` is checked against the registered signature; with an empty registry
    (the parts are not imported) nothing is checked.

    Args:
        type: a registered name.
        arguments: what the spec sets; the rest keeps the signature's defaults.
        path: dotted place in the resolved spec, such as "stages.0.f".
    """

    type: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    path: str = field(default="", compare=False)


@dataclass(frozen=True)
class _Member:
    annotation: Any
    required: bool


def parse(cls: type[T], tree: Node, path: str = "") -> tuple[T | None, list[SpecProblem]]:
    """Read a tree as a dataclass, with every problem it has.

    Understands int (true is none), float (integers too), bool, str, Literal, unions, tuples (YAML lists), nested
    dataclasses and TypedDicts, Any, `Annotated[..., Bound]` and `Part`. A field with a default may be left out.

    Args:
        cls: the dataclass.
        tree: what `load_tree` and `apply_overrides` returned.
        path: dotted path of the tree, put before the `path` of every `Part` in it.

    Returns:
        The instance (None if there is any problem), and the problems, each once.
    """
    problems: list[SpecProblem] = []
    instance = _read(tree, cls, path, problems)
    return (None if problems else instance), list(dict.fromkeys(problems))


def plain(value: Any) -> Any:
    """Return what `parse` read as dicts, lists and scalars again, defaults filled in."""
    if isinstance(value, Part):
        return {"type": value.type, **plain(value.arguments)}
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.metadata != NOT_WRITTEN}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def fits(value: object, annotation: Any) -> bool:
    """Whether a scalar is what a plain type or a Literal declares: true is no integer, an integer is a number."""
    if get_origin(annotation) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(annotation))
    return type(value) is annotation or (annotation is float and type(value) is int)


def misfit(value: object, annotation: Any) -> str:
    """Return what an annotation allows, in words, or "" where a plain value is that."""
    problems: list[SpecProblem] = []
    _read(Node.of(value, ""), annotation, "", problems)
    return problems[0].allowed if problems else ""


def describe(annotation: Any) -> str:
    """Say in words what an annotation allows."""
    origin, marks = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return next((mark.allowed for mark in marks if isinstance(mark, Bound)), describe(marks[0]))
    if origin in (Union, UnionType):
        return " or ".join(map(describe, sorted(marks, key=lambda mark: mark is not NoneType)))
    if origin is Literal:
        return " or ".join(map(repr, marks))
    if origin is tuple and marks[-1] is Ellipsis:
        return f"a list (each item {describe(marks[0])})"
    if origin is tuple:
        return f"a list of {len(marks)} ({', '.join(map(describe, marks))})"
    if annotation is Part:
        return "{type: NAME, ...} or a bare NAME"
    return _NAMES.get(annotation) or f"a mapping with the keys {_keys(_members(annotation))}"


def _read(node: Node, annotation: Any, path: str, problems: list[SpecProblem]) -> Any:
    """Return the node's value as the annotation wants it; after adding to `problems`, anything at all."""
    origin, marks = get_origin(annotation), get_args(annotation)
    if origin is Annotated and marks[0] is Part:
        return _read_part(node, marks[1], TEMPLATE in marks, path, problems)
    if origin is Annotated:
        return _read_bounded(node, annotation, path, problems)
    if origin in (Union, UnionType):
        return _read_union(node, annotation, path, problems)
    if origin is tuple:
        return _read_tuple(node, annotation, path, problems)
    if annotation in (Any, inspect.Parameter.empty):
        return node.plain()
    if is_dataclass(annotation) or is_typeddict(annotation):
        if isinstance(node.value, dict):
            return _read_mapping(node, annotation, path, problems)
    elif fits(node.value, annotation):
        return float(node.value) if annotation is float else node.value
    hint = did_you_mean(node.value, filter(_is_text, marks)) if _is_text(node.value) else ""
    problems.append(node.problem(describe(annotation), hint=hint))
    return None


def _read_bounded(node: Node, annotation: Any, path: str, problems: list[SpecProblem]) -> Any:
    inner, *marks = get_args(annotation)
    found: list[SpecProblem] = []
    value = _read(node, inner, path, found)
    if not found and not all(mark.holds(value) for mark in marks if isinstance(mark, Bound)):
        found = [node.problem(describe(annotation))]
    problems += [replace(p, allowed=describe(annotation)) if p.path == node.path else p for p in found]
    return value


def _read_union(node: Node, annotation: Any, path: str, problems: list[SpecProblem]) -> Any:
    members = [member for member in get_args(annotation) if member is not NoneType]
    if node.value is None and NoneType in get_args(annotation):
        return None
    if len(members) > 1 and all(map(is_dataclass, members)):
        return _read_kind(node, members, path, problems)
    found: list[SpecProblem] = []
    for member in members:
        found.clear()
        value = _read(node, member, path, found)
        if not found:
            return value
    if len(members) == 1:
        problems += [replace(p, allowed=f"null or {p.allowed}") if p.path == node.path else p for p in found]
    else:
        problems.append(node.problem(describe(annotation)))
    return None


def _read_kind(node: Node, members: list[Any], path: str, problems: list[SpecProblem]) -> Any:
    """Read one of several dataclasses: the one whose `kind` is written."""
    kinds = {get_args(_members(member)["kind"].annotation)[0]: member for member in members}
    if not isinstance(node.value, dict):
        problems.append(node.problem(f"a mapping with the key kind: {' or '.join(map(repr, kinds))}"))
        return None
    kind = node.value.get("kind", node.missing("kind"))
    if not _is_text(kind.value) or kind.value not in kinds:
        meant = nearest(kind.value, kinds) if _is_text(kind.value) else None
        hint = did_you_mean(kind.value, kinds) if meant else ""
        problems.append(kind.problem(" or ".join(map(repr, kinds)), hint=hint))
        if meant is None:
            return None
        kind = replace(kind, value=meant)  # the other keys are probably meant for it
    return _read(replace(node, value=node.value | {"kind": kind}), kinds[kind.value], path, problems)


def _read_tuple(node: Node, annotation: Any, path: str, problems: list[SpecProblem]) -> Any:
    kinds: tuple[Any, ...] = get_args(annotation)
    items = node.value
    if isinstance(items, list) and kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(items)
    if not isinstance(items, list) or len(items) != len(kinds):
        problems.append(node.problem(describe(annotation)))
        return None
    return tuple(_read(items[i], kind, join(path, i), problems) for i, kind in enumerate(kinds))


def _read_mapping(node: Node, cls: Any, path: str, problems: list[SpecProblem]) -> Any:
    before = len(problems)
    values = _read_members(node, node.value, _members(cls), path, problems)
    return cls(**values) if len(problems) == before else None


def _read_part(node: Node, registry: Registry, template: bool, path: str, problems: list[SpecProblem]) -> Any:
    names = list(registry)
    arguments = dict(node.value) if isinstance(node.value, dict) else {"type": node}
    kind = arguments.pop("type", node.missing("type"))
    if not _is_text(kind.value) or (names and kind.value not in registry):
        allowed = f"one of {listing(names)}" if names else "a name"
        if not _is_text(node.value) and kind is node:
            allowed = f"{{type: NAME, ...}} or NAME, with NAME {allowed}"
        hint = did_you_mean(kind.value, names) if _is_text(kind.value) else ""
        problems.append(kind.problem(allowed, hint=hint))
        return None
    if not names:
        return Part(kind.value, {key: item.plain() for key, item in arguments.items()}, path)
    members = {
        name: _Member(parameter.annotation, parameter.default is parameter.empty and not template)
        for name, parameter in registry.arguments(kind.value).items()
    }
    return Part(kind.value, _read_members(node, arguments, members, path, problems), path)


def _read_members(
    node: Node, written: Mapping[Any, Node], members: Mapping[str, _Member], path: str, problems: list[SpecProblem]
) -> dict[str, Any]:
    """Read a mapping key by key: the unknown, the missing and the wrong ones are all reported."""
    for key, item in written.items():
        if key not in members:
            # At the top a misspelled `base` is known too, though `load_tree` has taken the right ones out.
            near = {*members} if node.path else {*members, "base"} - {key}
            hint = BOOLEAN_HINT if isinstance(key, bool) else did_you_mean(str(key), near)
            problems.append(item.problem(_keys(members), f"the unknown key {key!r}", hint))
    values = {}
    for name, member in members.items():
        if name in written or member.required:
            child = written.get(name) or node.missing(name)
            values[name] = _read(child, member.annotation, join(path, name), problems)
    return values


@cache
def _members(cls: Any) -> dict[str, _Member]:
    hints = get_type_hints(cls, include_extras=True)
    if is_typeddict(cls):
        return {name: _Member(hint, name in cls.__required_keys__) for name, hint in hints.items()}
    return {
        f.name: _Member(hints[f.name], f.default is NO_DEFAULT and f.default_factory is NO_DEFAULT)
        for f in fields(cls)
        if f.metadata != NOT_WRITTEN
    }


def _keys(members: Mapping[str, _Member]) -> str:
    return listing(list(members), most=20)


def _is_text(value: object) -> bool:
    return isinstance(value, str)
