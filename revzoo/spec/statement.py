"""Drop what a spec states about its network once an heir changes the network, since the statement may no longer be true.

Expected numbers and the ordinary twin are left out, and a line after the sources names what is not from them. What the heir
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
_STREAMS = {"split": None, "block": {"coupling", "drop_path"}, "stages": {"transition"}, "fuse": None}  # a twin has none
# What a statement is not about: whole sections, or some of their keys.
_UNRELATED: dict[str, Mapping[str, set[str] | None]] = {
    "expect": {"block": {"drop_path"}},
    "twin": _STREAMS | {"input": {"channels", "size", "length"}, "head": {"outputs"}},  # which a twin takes from the spec
    "twin.parameters": _STREAMS,
}
_MOST = 6  # changes that are named


def merge_specs(base: YamlNode, over: YamlNode) -> YamlNode:
    """Merge two specs as `merge` does, but drop statements of the base about what `over` changes."""
    return end_statements(base, merge(base, over))


def end_statements(before: YamlNode, now: YamlNode) -> YamlNode:
    """Return `now` without the statements that it has from `before` and that are about something that has changed since.

    A statement that was written since stays. So does one of a wrong form: `parse` reports it.
    """
    old, new = before.to_plain(), now.to_plain()
    values = dict(now.value)
    expect, twin = (_find_inherited(key, before, now) for key in ("expect", "twin"))
    if expect and not is_about_same("expect", old, new):
        values["expect"] = _without(values["expect"], *expect)
    if twin and values["twin"] is before.value["twin"] and not is_about_same("twin", old, new):
        del values["twin"]
    elif "parameters" in twin:
        same_twin = _without(before.value["twin"], "parameters").to_plain() == _without(values["twin"], "parameters").to_plain()
        if not (same_twin and is_about_same("twin.parameters", old, new)):
            values["twin"] = _without(values["twin"], "parameters")
    if "expect" in values and values["expect"].value is None:  # it expects nothing, whatever its base does
        del values["expect"]
    sources = values.get("sources")
    changed = list(find_differences(*({k: v for k, v in plain.items() if k not in _STATEMENTS} for plain in (old, new))))
    if changed and sources is not None and sources is before.value.get("sources") and isinstance(sources.value, list):
        place = "an override" if now.file == before.file else Path(now.file).stem
        changes = {"of": join_names(changed, most=_MOST), "cite": f"not from these sources: set by {place}"}
        added = YamlNode.from_plain(changes, now.file, f"sources.{len(sources.value)}")
        values["sources"] = replace(sources, value=[*sources.value, added])
    return replace(now, value=values)


def is_about_same(statement: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether two specs, as plain values, agree in everything that a statement is about.

    Args:
        statement: expect, twin, or twin.parameters.
        before: the first spec.
        now: the second.
    """
    return _list_facts(before, statement) == _list_facts(now, statement)


def _list_facts(spec: Mapping[str, Any], statement: str) -> dict[str, Any]:
    facts = {key: value for key, value in spec.items() if key not in _STATEMENTS | {"init"}}
    for key, names in _UNRELATED[statement].items():
        facts[key] = _leave_out(facts.get(key), names) if names else None
    return facts


def _leave_out(part: Any, names: set[str]) -> Any:
    if isinstance(part, list):
        return [_leave_out(item, names) for item in part]
    return {name: value for name, value in part.items() if name not in names} if isinstance(part, dict) else part


def _find_inherited(key: str, before: YamlNode, now: YamlNode) -> set[str]:
    """Return the entries of a statement that are as they were written before."""
    old, new = (tree.value[key].value if key in tree.value else None for tree in (before, now))
    return {name for name in old if old[name] is new.get(name)} if isinstance(old, dict) and isinstance(new, dict) else set()


def _without(tree: YamlNode, *keys: str) -> YamlNode:
    return replace(tree, value={key: node for key, node in tree.value.items() if key not in keys})
