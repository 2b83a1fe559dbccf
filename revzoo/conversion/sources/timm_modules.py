"""What timm's vision networks are made of, read off their modules and said in a spec's words."""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import isclose
from typing import Any

from timm.layers import DropPath
from torch import nn

from revzoo.conversion.mapping import Entry, renamed
from revzoo.errors import ConversionError, listing

_ACTIVATIONS = {"GELU": "gelu", "ReLU": "relu", "SiLU": "silu", "Swish": "silu"}


def refuse(source: str, features: Mapping[str, object]) -> None:
    """Raise ConversionError, which names the features that are there (true), if any is."""
    found = [name for name, there in features.items() if there]
    if found:
        raise ConversionError(
            f"A {source} with {listing(found)} cannot be converted: revzoo's parts express none of these. Convert a variant "
            "without, or, for what only acts in training (dropout, drop path, ...), make the original with it set to 0."
        )


def norm_name(source: str, norm: nn.Module) -> str:
    """Return what a spec calls a norm of tokens: "layer_norm", "layer_norm_1e-5", or "none" for an Identity."""
    if isinstance(norm, nn.Identity):
        return "none"
    names = {1e-6: "layer_norm", 1e-5: "layer_norm_1e-5"}
    if isinstance(norm, nn.LayerNorm) and norm.eps in names and norm.weight is not None and norm.bias is not None:
        return names[norm.eps]
    refuse(source, {f"the norm {norm} (not LayerNorm with weight, bias and an eps of 1e-6 or 1e-5)": True})
    raise AssertionError


def activation_name(source: str, act: nn.Module) -> str:
    """Return what a spec calls an activation."""
    kind = type(act).__name__
    known = kind in _ACTIVATIONS and getattr(act, "approximate", "none") == "none"
    refuse(source, {f"the activation {act} (not GELU, ReLU or SiLU)": not known})
    return _ACTIVATIONS[kind]


def ratio(hidden: int, width: int) -> float:
    """Return r such that int(width * r) is hidden, hidden / width but for rounding."""
    return hidden / width if int(width * (hidden / width)) == hidden else (hidden + 0.5) / width


def rate(layer: nn.Module | None) -> float:
    """Return the probability of a dropout or a drop path; an Identity, or nothing, has none."""
    if isinstance(layer, DropPath):
        return float(layer.drop_prob or 0.0)
    return layer.p if isinstance(layer, nn.Dropout) else 0.0


def drop_path(source: str, rates: Sequence[float], transitions: bool = False) -> dict[str, Any]:
    """Return the spec's rule for the rates of all blocks, the first to the last.

    Args:
        source: what the original is, for the message.
        rates: one a block.
        transitions: whether some of them are of transitions.
    Raises:
        ConversionError: they are neither all alike nor evenly spaced from 0.
    """
    most, last = max(rates), max(len(rates) - 1, 1)
    for rule, expected in (("linear", [most * i / last for i in range(len(rates))]), ("constant", [most] * len(rates))):
        if all(isclose(a, b, rel_tol=1e-5, abs_tol=1e-7) for a, b in zip(rates, expected, strict=True)):
            return {"max": round(most, 6), "rule": rule, "transitions": transitions}
    refuse(source, {f"drop path rates that do not grow evenly from 0 ({', '.join(f'{r:.3g}' for r in rates)})": True})
    raise AssertionError


def same(source: str, what: str, items: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the items, which are equal, as one; or raise ConversionError."""
    first, *others = items
    different = sorted({key for other in others for key in first if other[key] != first[key]})
    refuse(source, {f"{what} that differ in {', '.join(different)}": different})
    return first


def renames(source: str, keys: Iterable[str], rules: Mapping[str, str]) -> list[Entry]:
    """Return one entry for each key of theirs, by the first rule whose pattern is at its beginning.

    Args:
        source: what the original is, for the message.
        keys: of the source's state dict.
        rules: patterns of theirs, and what takes the matched text's place.
    Raises:
        ConversionError: keys that no rule is for.
    """
    entries, unknown = [], []
    for key in keys:
        found = next(((pattern, ours) for pattern, ours in rules.items() if re.match(pattern, key)), None)
        if found is None:
            unknown.append(key)
        else:
            entries.append(renamed(re.sub(*found, key, count=1), key))
    refuse(source, {f"the tensors {listing(unknown)}": unknown})
    return entries
