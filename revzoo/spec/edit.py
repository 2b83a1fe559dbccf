"""Change a spec along with a model that was already built from it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from revzoo.errors import InputError, did_you_mean, join_names
from revzoo.registry import couplings
from revzoo.spec.parsing import check_value, to_plain
from revzoo.spec.schema import Spec, Twin
from revzoo.spec.statement import is_about_same


def with_coupling(spec: Spec, arguments: Mapping[str, object]) -> Spec:
    """Return a copy of the spec whose coupling has other arguments.

    Args:
        spec: the spec; it stays as it is.
        arguments: new values by name; None resets an argument to its default. Arguments not named here keep their values.

    Raises:
        InputError: an argument that the coupling does not have, or a value that it does not allow.
    """
    part, known = spec.coupling, couplings.arguments(spec.coupling.type)
    for name, value in arguments.items():
        if name not in known:
            raise InputError(
                f"The coupling {part.type} has no {name!r}.{did_you_mean(name, known)} It has: {join_names(list(known))}."
            )
        if allowed := check_value(value, known[name].annotation):
            raise InputError(f"{name} of the coupling {part.type} is {allowed}. Received: {value!r}.")
    merged = {key: value for key, value in {**part.arguments, **arguments}.items() if value is not None}
    return replace(spec, block=replace(spec.block, coupling=replace(part, arguments=merged)))


def with_head(spec: Spec, arguments: Mapping[str, object]) -> Spec:
    """Return a copy of the spec whose head has these arguments instead of its own, and that states nothing of the former."""
    changed = replace(spec, head=replace(spec.head, arguments={**spec.head.arguments, **arguments}))
    return changed if changed == spec else _end_statements(spec, changed)


def _end_statements(before: Spec, now: Spec) -> Spec:
    """Return a spec without the expectations, and what is said of the twin, that a change has ended."""
    old, new = to_plain(before), to_plain(now)
    expect = now.expect if is_about_same("expect", old, new) else {}
    twin = now.twin if is_about_same("twin", old, new) else None
    if twin is not None and not is_about_same("twin.parameters", old, new):
        twin = cast(Twin, {key: value for key, value in twin.items() if key != "parameters"})
    return replace(now, expect=expect, twin=twin)


def with_outputs(spec: Spec, num_outputs: int) -> Spec:
    """Return a copy of the spec whose head has `num_outputs` outputs."""
    return with_head(spec, {"outputs": num_outputs})
