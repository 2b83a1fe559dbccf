"""An inherited expectation ends where what it is about is changed: another network need not have the same numbers."""

from dataclasses import replace

from revzoo.spec.tree import YamlNode, merge

_STATEMENTS = {"name", "family", "sources", "twin", "expect"}  # they build nothing


def merge_specs(base: YamlNode, over: YamlNode) -> YamlNode:
    """Merge two specs as `merge` does; of what the base expects, only that stays which `over` leaves as it is."""
    return end_expectations(base, merge(base, over))


def end_expectations(before: YamlNode, now: YamlNode) -> YamlNode:
    """Return a spec without those expectations of an earlier state of it that are about something that has changed since.

    An expectation that was written since stays, and so does whatever is not a mapping, which `parse` reports.
    """
    old, new = before.value.get("expect"), now.value.get("expect")
    if old is None or new is None or not isinstance(old.value, dict) or not isinstance(new.value, dict):
        return now
    ended = {key for key, node in old.value.items() if new.value.get(key) is node and _read(before, key) != _read(now, key)}
    left = {key: node for key, node in new.value.items() if key not in ended}
    return replace(now, value=now.value | {"expect": replace(new, value=left)})


def drop_null(tree: YamlNode) -> YamlNode:
    """Return a spec without its `expect` if that is null: it expects nothing, whatever its base does."""
    expect = tree.value.get("expect")
    if expect is None or expect.value is not None:
        return tree
    return replace(tree, value={key: node for key, node in tree.value.items() if key != "expect"})


def _read(tree: YamlNode, expectation: str) -> object:
    """Return, as plain values, what an expectation is about."""
    plain = {key: node.to_plain() for key, node in tree.value.items() if key not in _STATEMENTS}
    block, stages = plain.get("block"), plain.get("stages")
    if not isinstance(block, dict) or not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        return plain  # `parse` reports it
    if expectation == "stream_shape":
        shapes = [(stage.get("width"), stage.get("transition")) for stage in stages]
        return [shapes, *(plain.get(key) for key in ("input", "stem", "split"))]
    if expectation == "reversible_steps":
        steps = [(stage.get("depth"), stage.get("g", block.get("g")) is None) for stage in stages]
        return [steps, plain.get("split"), block.get("coupling") == "none"]
    return {key: value for key, value in plain.items() if key != "init"} | {"block": block | {"drop_path": None}}
