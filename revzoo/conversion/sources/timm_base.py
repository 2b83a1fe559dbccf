"""What the sources from timm share: how their modules are read, and what is refused."""

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from math import isclose
from typing import Any, ClassVar

from timm.layers import DropPath, PatchEmbed
from torch import Tensor, nn

from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.mapping import TensorMapping, rename
from revzoo.conversion.sources.base import IN_PLACE, Source, Tensors
from revzoo.conversion.sources.tensors import merge_qkv
from revzoo.errors import ConversionError, join_names

_ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "ReLU": "relu", "SiLU": "silu", "Swish": "silu"}
_NORMS = {1e-6: "layer_norm", 1e-5: "layer_norm_1e-5"}  # by eps


class TimmSource(Source):
    """One family of timm's networks; a description is a model, whose tensors may be on the meta device."""

    network_class: ClassVar[type[nn.Module]]
    block_classes: ClassVar[tuple[type[nn.Module], ...]]
    family: ClassVar[str]  # of the converted network
    has_branches: ClassVar[bool] = True  # False: f is a block with its own residual
    drops_transitions: ClassVar[bool] = False  # whether blocks with a rate of drop path become transitions

    @abstractmethod
    def list_blocks(self, network: Any) -> list[Any]:
        """Return every block, the first to the last."""

    @abstractmethod
    def check(self, network: Any) -> None:
        """Raise ConversionError if the network as a whole has something that a spec cannot express; its blocks are known."""

    def list_rates(self, network: Any) -> list[float]:
        """Return the rate of drop path of every block."""
        return [read_rate(block.drop_path1) for block in self.list_blocks(network)]

    @abstractmethod
    def find_input(self, network: Any) -> tuple[nn.Conv2d, Sequence[int]]:
        """Return the first convolution, and height and width of images."""

    @abstractmethod
    def describe_stem(self, network: Any) -> dict[str, Any]:
        """Return the spec of the stem."""

    @abstractmethod
    def describe_stages(self, network: Any, choice: CouplingChoice) -> list[dict[str, Any]]:
        """Return the spec of every stage, with f and g."""

    @abstractmethod
    def describe_head(self, network: Any) -> dict[str, Any]:
        """Return the spec of the head."""

    def make_spec(self, network: Any, choice: CouplingChoice) -> dict[str, Any]:
        """Return the converted network's spec.

        Raises: ConversionError: the original has something that a spec cannot express; the message names it.
        """
        self._refuse({f"the class {type(network).__name__}": type(network) is not self.network_class})
        kinds = {type(block).__name__ for block in self.list_blocks(network) if type(block) not in self.block_classes}
        self._refuse({f"blocks of class {join_names(sorted(kinds))}": kinds})
        self.check(network)
        (conv, size), stages = self.find_input(network), self.describe_stages(network, choice)
        return {
            "family": self.family,
            "input": {"kind": "image", "channels": conv.in_channels, "size": list(size)},
            "stem": {"width": conv.out_channels, **self.describe_stem(network)},
            "split": "duplicate",
            "block": {
                "coupling": choice.describe(residual=self.has_branches),
                **{part: stages[0][part] for part in ("f", "g") if part in stages[0]},
                "drop_path": self._describe_drop_path(self.list_rates(network), self.drops_transitions),
            },
            "stages": stages,
            "fuse": {"type": choice.fuse, "norm": self._name_norm(getattr(network, "norm", nn.Identity()))},
            "head": self.describe_head(network),
        }

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

    def _require_classifier(self, layer: nn.Module) -> None:
        absent = not isinstance(layer, nn.Linear)
        self._refuse({"no classifier (num_classes=0; num_classes=N makes one, initialised at random)": absent})

    def _require_patches(self, embed: Any) -> None:
        """Raise ConversionError unless square patches cover images of one size."""
        self._refuse({f"the patch embedding {type(embed).__name__}": type(embed) is not PatchEmbed})
        sizes, patch = embed.img_size or (), embed.patch_size
        self._refuse(
            {
                "no image size": not sizes,
                "padded images (dynamic_img_pad)": embed.dynamic_img_pad,
                f"oblong patches (patch_size {patch})": patch[0] != patch[1],
                f"an image that patches do not cover (img_size {sizes})": any(side % patch[0] for side in sizes),
            }
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

    def _describe_drop_path(self, rates: Sequence[float], transitions: bool) -> dict[str, Any]:
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
