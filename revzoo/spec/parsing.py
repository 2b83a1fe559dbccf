"""Read a tree of YAML values as a dataclass: type annotations declare what may be written.

The annotations are those of a dataclass or of a part's signature. One recursive pass over them converts values (lists to
tuples, integers to floats where a float is declared) and collects all problems instead of stopping at the first.
"""

import inspect
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from revzoo.bounds import Bound
from revzoo.errors import InputError, SpecProblem, did_you_mean, join_names
from revzoo.file import parse_json
from revzoo.registry import Registry
from revzoo.spec.synonym import find_settings
from revzoo.spec.tree import BOOLEAN_HINT, OVERRIDE, YamlNode, join_path

T = TypeVar("T")
NOT_WRITTEN = {"written": False}  # metadata of a dataclass field that the program sets and YAML must not
TEMPLATE = "template"  # marks an annotated Part that others are merged over: required arguments may be left out
_IMPORT_HINT = " A part of your own is known once its package is imported: --import PACKAGE."
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "null", Any: "anything"}


@dataclass(frozen=True)
class Part:
    """A part named by a spec, written as `{type: NAME, ...arguments}`, or as a bare NAME if it has no arguments.

    A field annotated `Annotated[Part, registry]` is checked against the signature registered under that name.

    Args:
        type: a registered name.
        arguments: the arguments that the spec sets; the others keep the signature's defaults.
        path: dotted path in the resolved spec, such as "stages.0.f".
    """

    type: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    path: str = field(default="", compare=False)


@dataclass(frozen=True)
class _Member:
    annotation: Any
    required: bool


class _UnknownKeyProblem(SpecProblem):
    """An unknown key, until all of the tree is read: the setting may be elsewhere."""


def parse(cls: type[T], tree: YamlNode, path: str = "") -> tuple[T | None, list[SpecProblem]]:
    """Read a tree as an instance of a dataclass, and collect every problem in it.

    Fields may be annotated with int (true and false are not integers), float (integers are allowed), bool, str, Literal,
    unions, tuples (lists in YAML), dataclasses, TypedDicts, Any, `Annotated[..., Bound]` and `Part`. A field with a
    default may be left out.

    Args:
        cls: the dataclass.
        tree: the tree, as `load_tree` or `apply_overrides` returns it.
        path: prefix for the `path` of every `Part` in the instance.

    Returns:
        The instance (None if there is any problem), and the problems, each of them once.

    Raises:
        InputError: an annotation is of another type.
    """
    problems: list[SpecProblem] = []
    instance = _read(tree, cls, path, problems)
    if any(isinstance(problem, _UnknownKeyProblem) for problem in problems):
        unknown = {(problem.file, problem.path) for problem in problems if isinstance(problem, _UnknownKeyProblem)}
        known = [*list_paths(cls), *_list_settings(tree, "", unknown)]
        problems = [_point_elsewhere(problem, known) for problem in problems]
    return (None if problems else instance), list(dict.fromkeys(problems))


def list_paths(cls: type) -> list[str]:
    """Return the dotted path of every setting of a dataclass, as an override writes it; of a list its first item.

    Arguments of parts are not among them: each part has its own.
    """
    return [join_path(name, rest) if rest else name for name, m in _members(cls).items() for rest in _list_below(m.annotation)]


def _list_below(annotation: Any) -> list[str]:
    if is_dataclass(annotation) and annotation is not Part:
        return list_paths(cast(type, annotation))
    origin, marks = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _list_below(marks[0])
    if origin is tuple and is_dataclass(marks[0]):
        return [join_path("0", rest) for rest in _list_below(marks[0])]
    members = [member for member in marks if is_dataclass(member)] if origin in (Union, UnionType) else []
    return list(dict.fromkeys(rest for member in members for rest in _list_below(member))) or [""]


def _list_settings(node: YamlNode, path: str, unknown: Container[tuple[str, str]]) -> Iterator[str]:
    """Yield the path of every scalar of a tree, but for those below unknown keys."""
    items = (
        node.value.items() if isinstance(node.value, dict) else enumerate(node.value if isinstance(node.value, list) else ())
    )
    if not isinstance(node.value, dict | list):
        yield path
    for key, item in items:
        if (item.file, item.path) not in unknown:
            yield from _list_settings(item, join_path(path, key), unknown)


def _point_elsewhere(problem: SpecProblem, known: Iterable[str]) -> SpecProblem:
    """Return a problem of an unknown key as an ordinary one, which names the setting that has this key elsewhere."""
    if not isinstance(problem, _UnknownKeyProblem):
        return problem
    others = [path for path in known if path != problem.path]  # which another kind of the same section may have
    settings = find_settings(problem.path, others)
    hint = f" Did you mean {' or '.join(map(repr, settings))}?" if settings else problem.hint
    return SpecProblem(problem.file, problem.path, problem.received, problem.allowed, hint)


def to_plain(value: Any) -> Any:
    """Turn what `parse` returned back into dicts, lists and scalars, with the defaults of all but parts' arguments."""
    if isinstance(value, Part):
        return {"type": value.type, **to_plain(value.arguments)}
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value) if f.metadata != NOT_WRITTEN}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, tuple | list) else value


_TOO_LARGE = 10**308  # for a float


def has_type(value: object, annotation: Any) -> bool:
    """Return whether a scalar has a plain type or is among a Literal's values; a bool is no int, an int is also a float."""
    if get_origin(annotation) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(annotation))
    return type(value) is annotation or (annotation is float and type(value) is int and abs(value) < _TOO_LARGE)


def check_value(value: object, annotation: Any) -> str | None:
    """Return None if a plain value fits an annotation, else a description of what the annotation allows.

    Raises:
        InputError: the annotation is none that `parse` reads.
    """
    problems: list[SpecProblem] = []
    _read(YamlNode.from_plain(value, ""), annotation, "", problems)
    return problems[0].allowed if problems else None


def parse_json_as(annotation: Any, text: str | bytes) -> Any:
    """Return what a text in JSON says, as the annotated type.

    Raises:
        ValueError: it is not JSON, or not what the annotation allows.
        InputError: the annotation is none that `parse` reads.
    """
    problems: list[SpecProblem] = []
    value = _read(YamlNode.from_plain(parse_json(text), ""), annotation, "", problems)
    for problem in problems:
        raise ValueError(f"{problem.path or 'it'} is {problem.received}, allowed: {problem.allowed}")
    return value


def describe(annotation: Any) -> str:
    """Describe in words which values an annotation allows."""
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
    if is_dataclass(annotation) or is_typeddict(annotation):
        return f"a mapping with the keys {_keys(_members(annotation))}"
    return _TYPE_NAMES.get(annotation) or inspect.formatannotation(annotation)


def _read(node: YamlNode, annotation: Any, path: str, problems: list[SpecProblem]) -> Any:
    """Return the node's value converted to the annotated type; if it has problems, add them and return any value."""
    annotation = NoneType if annotation is None else annotation
    origin, marks = get_origin(annotation), get_args(annotation)
    if origin is Annotated and marks[0] is Part:
        return _read_part(node, marks[1], TEMPLATE in marks, path, problems)
    if origin is Annotated:
        return _read_bounded(node, annotation, path, problems)
    if origin in (Union, UnionType):
        return _read_union(node, annotation, path, problems)
    if origin is tuple and marks:
        return _read_tuple(node, annotation, path, problems)
    if annotation is Any or annotation is inspect.Parameter.empty:
        return node.to_plain()
    if is_dataclass(annotation) or is_typeddict(annotation):
        if isinstance(node.value, dict):
            return _read_mapping(node, annotation, path, problems)
    elif origin is not Literal and not any(annotation is known for known in _TYPE_NAMES):
        raise InputError(
            f"{node.path or 'The argument'} is annotated with {inspect.formatannotation(annotation)}, which no spec can set. "
            "Allowed: int, float, bool, str, None, Any, Literal, tuple[int, ...] for a list, unions of these, Annotated ones "
            "with a Bound (revzoo.bounds), dataclasses and TypedDicts."
        )
    elif has_type(node.value, annotation):
        return float(node.value) if annotation is float else node.value
    elif origin is Literal and node.value is False and "no" in marks:  # which is what YAML makes of a bare no
        return "no"
    hint = did_you_mean(node.value, filter(_is_text, marks)) if _is_text(node.value) else ""
    problems.append(node.problem(describe(annotation), hint=hint))
    return None


def _read_bounded(node: YamlNode, annotation: Any, path: str, problems: list[SpecProblem]) -> Any:
    inner, *marks = get_args(annotation)
    own: list[SpecProblem] = []
    value = _read(node, inner, path, own)
    if not own and not all(mark.holds(value) for mark in marks if isinstance(mark, Bound)):
        own = [node.problem(describe(annotation))]
    problems += [replace(p, allowed=describe(annotation)) if p.path == node.path else p for p in own]
    return value


def _read_union(node: YamlNode, annotation: Any, path: str, problems: list[SpecProblem]) -> Any:
    members = [member for member in get_args(annotation) if member is not NoneType]
    if node.value is None and NoneType in get_args(annotation):
        return None
    if len(members) > 1 and all(map(is_dataclass, members)) and all("kind" in _members(member) for member in members):
        return _read_tagged(node, members, path, problems)
    own: list[SpecProblem] = []
    for member in members:
        own.clear()
        value = _read(node, member, path, own)
        if not own:
            return value
    if len(members) == 1:
        problems += [replace(p, allowed=f"null or {p.allowed}") if p.path == node.path else p for p in own]
    else:
        choices = [mark for member in members for mark in get_args(member) if _is_text(mark)]
        hint = did_you_mean(node.value, choices) if _is_text(node.value) else ""
        problems.append(node.problem(describe(annotation), hint=hint))
    return None


def _read_tagged(node: YamlNode, members: list[Any], path: str, problems: list[SpecProblem]) -> Any:
    """Read one of several dataclasses, chosen by the value of its key `kind`."""
    kinds = {get_args(_members(member)["kind"].annotation)[0]: member for member in members}
    if not isinstance(node.value, dict):
        problems.append(node.problem(f"a mapping with the key kind: {' or '.join(map(repr, kinds))}"))
        return None
    kind = node.value.get("kind", node.missing("kind"))
    if not _is_text(kind.value) or kind.value not in kinds:
        hint = did_you_mean(kind.value, kinds) if _is_text(kind.value) else ""
        problems.append(kind.problem(" or ".join(map(repr, kinds)), hint=hint))
        return None
    return _read(node, kinds[kind.value], path, problems)


def _read_tuple(node: YamlNode, annotation: Any, path: str, problems: list[SpecProblem]) -> Any:
    types: tuple[Any, ...] = get_args(annotation)
    items = node.value
    if isinstance(items, list) and types[-1] is Ellipsis:
        types = (types[0],) * len(items)
    if not isinstance(items, list) or len(items) != len(types):
        problems.append(node.problem(describe(annotation)))
        return None
    return tuple(_read(items[i], item_type, join_path(path, i), problems) for i, item_type in enumerate(types))


def _read_mapping(node: YamlNode, cls: Any, path: str, problems: list[SpecProblem]) -> Any:
    before = len(problems)
    others = () if node.path else ("base",)  # which `load_tree` has removed
    values = _read_members(node, node.value, _members(cls), path, problems, others)
    return cls(**values) if len(problems) == before else None


def _read_part(node: YamlNode, registry: Registry, template: bool, path: str, problems: list[SpecProblem]) -> Any:
    names = list(registry)
    arguments = dict(node.value) if isinstance(node.value, dict) else {"type": node}
    name = arguments.pop("type", node.missing("type"))
    if not _is_text(name.value) or name.value not in registry:
        allowed = f"one of {join_names(names)}"
        if not _is_text(node.value) and name is node:
            allowed = f"{{type: NAME, ...}} or NAME, with NAME {allowed}"
        hint = (did_you_mean(name.value, names) or _IMPORT_HINT) if _is_text(name.value) else ""
        problems.append(name.problem(allowed, hint=hint))
        return None
    members = {
        argument: _Member(parameter.annotation, parameter.default is parameter.empty and not template)
        for argument, parameter in registry.arguments(name.value).items()
    }
    return Part(name.value, _read_members(node, arguments, members, path, problems, ("type",)), path)


def _read_members(
    node: YamlNode,
    written: Mapping[Any, YamlNode],
    members: Mapping[str, _Member],
    path: str,
    problems: list[SpecProblem],
    others: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Read a mapping key by key, and report all unknown keys, missing keys and wrong values.

    Args:
        others: keys that are read elsewhere; an unknown key may be a misspelling of one.
    """
    for key, item in written.items():
        if key not in members:
            replacement = _hint_at_replacement(node, item)
            hint = replacement or _hint_at_key(key, {*members, *others} - {key})
            problem = item.problem(_keys(members), f"the unknown key {key!r}", hint)
            problems.append(problem if replacement else _UnknownKeyProblem(**vars(problem)))
    values = {}
    for name, member in members.items():
        if name in written or member.required:
            child = written.get(name) or node.missing(name)
            values[name] = _read(child, member.annotation, join_path(path, name), problems)
    return values


def _hint_at_replacement(node: YamlNode, item: YamlNode) -> str:
    """Return how to replace a section whose type or kind an override changed, if an unknown key is of the former one."""
    for key in ("type", "kind"):
        chosen = node.value.get(key)
        if chosen is not None and chosen.file == OVERRIDE != item.file:
            return f" It was written for another {key}. Replace all of it: {node.path}={{{key}: {chosen.value}, ...}}."
    return ""


def _hint_at_key(key: object, known: Collection[str]) -> str:
    """Return what to type instead of an unknown key, with a leading blank; or an empty string."""
    name, colon, _ = str(key).partition(":")
    if colon and name in known:
        return f" YAML wants a blank after the colon: {str(key).replace(':', ': ', 1)}."
    return BOOLEAN_HINT if isinstance(key, bool) else did_you_mean(str(key), known)


@cache
def _members(cls: Any) -> dict[str, _Member]:
    hints = get_type_hints(cls, include_extras=True)
    if is_typeddict(cls):
        inner = {
            name: get_args(hint)[0] if get_origin(hint) in (Required, NotRequired) else hint for name, hint in hints.items()
        }
        return {name: _Member(hint, name in cls.__required_keys__) for name, hint in inner.items()}
    return {
        f.name: _Member(hints[f.name], f.default is NO_DEFAULT and f.default_factory is NO_DEFAULT)
        for f in fields(cls)
        if f.metadata != NOT_WRITTEN
    }


def _keys(members: Mapping[str, _Member]) -> str:
    return join_names(list(members), most=20)


def _is_text(value: object) -> bool:
    return isinstance(value, str)
