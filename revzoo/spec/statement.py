"""What a spec inherits about its network ends where the network is changed: another one need not be what the first was.

Expected numbers and the ordinary twin are left out, and a line after the sources names what is not from them. What the change
states itself stays.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from revzoo.errors import join_names
from revzoo.spec.schema import STATEMENTS
from revzoo.spec.tree import YamlNode, find_differences, merge

_STATEMENTS = {*STATEMENTS, "family"}  # they build nothing
_ADAPTED = {"input": {"channels", "size", "length"}, "head": {"outputs"}}  # what a twin that is built takes from the spec
_MOST = 6  # changes that are named


def merge_specs(base: YamlNode, over: YamlNode) -> YamlNode:
    """Merge two specs as `merge` does; of what the base states, only that stays which `over` leaves as it is."""
    return end_statements(base, merge(base, over))


def end_statements(before: YamlNode, now: YamlNode) -> YamlNode:
    """Return a spec without those statements of an earlier state of it that are about something that has changed since.

    A statement that was written since stays, and so does whatever has another form than it should, which `parse` reports.
    """
    old, new = _list_plain(before), _list_plain(now)
    now = _end_expectations(before, now, old, new)
    now = _end_twin(before, now, old, new)
    return _limit_sources(before, now, old, new)


def drop_null(tree: YamlNode) -> YamlNode:
    """Return a spec without its `expect` if that is null: it expects nothing, whatever its base does."""
    expect = tree.value.get("expect")
    return _without(tree, "expect") if expect is not None and expect.value is None else tree


def is_about_same(statement: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether two specs, as plain values, agree in everything that a statement is about.

    Args:
        statement: a key of `expect`, or twin: what the twin has, too, whatever joins the streams.
        before: the first spec.
        now: the second.
    """
    return _read(before, statement) == _read(now, statement)


def _end_expectations(before: YamlNode, now: YamlNode, old: dict[str, Any], new: dict[str, Any]) -> YamlNode:
    stated, expect = before.value.get("expect"), now.value.get("expect")
    if stated is None or expect is None or not isinstance(stated.value, dict) or not isinstance(expect.value, dict):
        return now
    ended = {key for key, node in stated.value.items() if expect.value.get(key) is node and not is_about_same(key, old, new)}
    return replace(now, value=now.value | {"expect": _without(expect, *ended)})


def _end_twin(before: YamlNode, now: YamlNode, old: dict[str, Any], new: dict[str, Any]) -> YamlNode:
    """Leave out a twin that is another network than the ordinary one now, and parameters that are those of another twin."""
    stated, twin = before.value.get("twin"), now.value.get("twin")
    if stated is None or twin is None or not isinstance(stated.value, dict) or not isinstance(twin.value, dict):
        return now
    if twin is stated and not is_about_same("twin", old, new):
        return _without(now, "twin")
    parameters = twin.value.get("parameters")
    same = all(old.get(key) == new.get(key) for key in _ADAPTED) and _name_twin(stated) == _name_twin(twin)
    if same or parameters is not stated.value.get("parameters"):
        return now
    return replace(now, value=now.value | {"twin": _without(twin, "parameters")})


def _name_twin(twin: YamlNode) -> object:
    return _without(twin, "parameters").to_plain()


def _limit_sources(before: YamlNode, now: YamlNode, old: dict[str, Any], new: dict[str, Any]) -> YamlNode:
    """Add to inherited sources which settings are not from them."""
    sources = now.value.get("sources")
    if (
        sources is None
        or sources is not before.value.get("sources")
        or not isinstance(sources.value, list)
        or not sources.value
    ):
        return now
    changed = list(find_differences(old, new))
    if not changed:
        return now
    place = "an override" if now.file == before.file else Path(now.file).stem
    changes = {"of": join_names(changed, most=_MOST), "cite": f"not from these sources: set by {place}"}
    added = YamlNode.from_plain(changes, now.file, f"sources.{len(sources.value)}")
    return replace(now, value=now.value | {"sources": replace(sources, value=[*sources.value, added])})


def _without(tree: YamlNode, *keys: str) -> YamlNode:
    return replace(tree, value={key: node for key, node in tree.value.items() if key not in keys})


def _list_plain(tree: YamlNode) -> dict[str, Any]:
    return {key: node.to_plain() for key, node in tree.value.items() if key not in _STATEMENTS}


def _read(spec: Mapping[str, Any], statement: str) -> object:
    """Return what a statement is about."""
    plain = {key: value for key, value in spec.items() if key not in _STATEMENTS}
    block, stages = plain.get("block"), plain.get("stages")
    if not isinstance(block, dict) or not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        return plain  # `parse` reports it
    if statement == "twin":
        branches = [[each.get(key) for key in ("f", "g")] for each in (block, *stages)]
        shapes = [(stage.get("depth"), stage.get("width")) for stage in stages]
        return [branches, shapes, plain.get("stem"), *(_leave_out(plain.get(key), names) for key, names in _ADAPTED.items())]
    if statement == "stream_shape":
        shapes = [(stage.get("width"), stage.get("transition")) for stage in stages]
        return [shapes, *(plain.get(key) for key in ("input", "stem", "split"))]
    if statement == "reversible_steps":
        steps = [(stage.get("depth"), stage.get("g", block.get("g")) is None) for stage in stages]
        return [steps, plain.get("split"), block.get("coupling") == "none"]
    return {key: value for key, value in plain.items() if key != "init"} | {"block": block | {"drop_path": None}}


def _leave_out(part: Any, names: set[str]) -> Any:
    return {key: value for key, value in part.items() if key not in names} if isinstance(part, dict) else part
