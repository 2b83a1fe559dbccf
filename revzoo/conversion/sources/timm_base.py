"""What the sources from timm share: how their modules are read, and what is refused."""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import isclose
from typing import Any, ClassVar

from timm.layers import DropPath
from torch import Tensor, nn

from revzoo.conversion.mapping import TensorMapping, rename
from revzoo.conversion.sources.base import IN_PLACE, Source, Tensors
from revzoo.conversion.sources.tensors import merge_qkv
from revzoo.errors import ConversionError, join_names

_ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "ReLU": "relu", "SiLU": "silu", "Swish": "silu"}
_NORMS = {1e-6: "layer_norm", 1e-5: "layer_norm_1e-5"}  # by eps


class TimmSource(Source):
    """One family of timm's networks; a description is a model, whose tensors may be on the meta device."""

    network_class: ClassVar[type[nn.Module]]

    def handles(self, description: Any) -> bool:
        """Return whether this is a model of the family's class, or of a subclass, which `make_spec` then refuses."""
        return isinstance(description, self.network_class)

    def canonicalise(self, description: Any, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors under timm's names, and notes on what was changed."""
        return merge_qkv(tensors)

    def _refuse(self, features: Mapping[str, object]) -> None:
        """Raise ConversionError if any feature is true, with the names of those that are."""
        present = [name for name, value in features.items() if value]
        if present:
            raise ConversionError(
                f"A {self.name} with {join_names(present)} cannot be converted: revzoo has no part for it. Convert a variant "
                "without it. If it acts in training only (dropout, drop path, ...), make the original with it set to 0. "
                f"{IN_PLACE}"
            )

    def _name_norm(self, norm: nn.Module) -> str:
        """Return the name of a token norm in a spec: "layer_norm", "layer_norm_1e-5", or "none" for an Identity."""
        if isinstance(norm, nn.Identity):
            return "none"
        if isinstance(norm, nn.LayerNorm) and norm.eps in _NORMS and norm.weight is not None and norm.bias is not None:
            return _NORMS[norm.eps]
        self._refuse({f"the norm {norm} (not LayerNorm with weight, bias and an eps of 1e-6 or 1e-5)": True})
        raise AssertionError

    def _name_activation(self, act: nn.Module) -> str:
        """Return the name of an activation in a spec."""
        kind = type(act).__name__
        self._refuse({f"the activation {act} (not GELU, ReLU or SiLU)": kind not in _ACTIVATIONS})
        return "gelu_tanh" if getattr(act, "approximate", "none") == "tanh" else _ACTIVATIONS[kind]

    def _describe_drop_path(self, rates: Sequence[float], transitions: bool = False) -> dict[str, Any]:
        """Return the rule of a spec that gives these drop path rates.

        Args:
            rates: of all blocks, the first to the last.
            transitions: whether some of the blocks become transitions.
        Raises:
            ConversionError: they are neither all equal nor evenly spaced from 0.
        """
        largest, last = max(rates), max(len(rates) - 1, 1)
        rules = {"linear": [largest * i / last for i in range(len(rates))], "constant": [largest] * len(rates)}
        for rule, expected in rules.items():
            if all(isclose(a, b, rel_tol=1e-5, abs_tol=1e-7) for a, b in zip(rates, expected, strict=True)):
                return {"max": round(largest, 6), "rule": rule, "transitions": transitions}
        listed = ", ".join(f"{rate:.3g}" for rate in rates)
        self._refuse({f"drop path rates that do not grow evenly from 0 ({listed})": True})
        raise AssertionError

    def _require_same(self, what: str, descriptions: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Return the first of these descriptions; raise ConversionError if another differs from it."""
        first, *others = descriptions
        different = sorted({key for other in others for key in first if other[key] != first[key]})
        self._refuse({f"{what} that differ in {', '.join(different)}": different})
        return first

    def _rename_keys(self, keys: Iterable[str], rules: Mapping[str, str]) -> list[TensorMapping]:
        """Return one mapping for each key of the original, by the first rule whose pattern matches the key's beginning.

        Args:
            keys: of the original's state dict.
            rules: from a pattern for the beginning of their key to what replaces it in ours.
        Raises:
            ConversionError: some keys match no rule.
        """
        mappings, unknown = [], []
        for key in keys:
            rule = next(((pattern, ours) for pattern, ours in rules.items() if re.match(pattern, key)), None)
            if rule is None:
                unknown.append(key)
            else:
                mappings.append(rename(re.sub(*rule, key, count=1), key))
        self._refuse({f"the tensors {join_names(unknown)}": unknown})
        return mappings


def read_rate(layer: nn.Module | None) -> float:
    """Return the probability of a dropout or drop path layer; 0 for an Identity or None."""
    if isinstance(layer, DropPath):
        return float(layer.drop_prob or 0.0)
    return layer.p if isinstance(layer, nn.Dropout) else 0.0
