"""What sources of published reversible networks share: the network is one of the zoo's, and only keys and shapes change.

A description is what `revzoo.load_spec` takes: a model's name, a spec file, or a folder with spec.yaml. With what only a file's
tensors can tell it becomes a `PublishedNetwork`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.mapping import TensorMapping, rename
from revzoo.conversion.sources.base import Source, Tensors
from revzoo.errors import ConversionError, UnknownNameError
from revzoo.model.builder import build
from revzoo.model.model import Model
from revzoo.spec.edit import with_outputs
from revzoo.spec.loading import load_spec
from revzoo.spec.parsing import to_plain
from revzoo.spec.schema import STATEMENTS, Spec

_PARTS = {"coupling": "additive", "fuse": "concat", "head": "pooled_linear"}


@dataclass(frozen=True)
class PublishedNetwork:
    """A network as one file has it.

    Args:
        spec: the zoo's spec, with the file's number of outputs.
        notes: what differs from the zoo's spec.
        has_class_token: whether the first row of positions belongs to a class token (mmpretrain).
        pretrained_cfg: how images were prepared, in timm's words; what is not in it is timm's default.
    """

    spec: Spec
    notes: tuple[str, ...] = ()
    has_class_token: bool = True
    pretrained_cfg: Mapping[str, Any] = field(default_factory=dict)


class PublishedSource(Source):
    """One library that publishes reversible networks."""

    published: ClassVar[bool] = True
    families: ClassVar[tuple[str, ...]]  # families of the zoo whose networks the library publishes
    head: ClassVar[str]  # their key of the classifier's bias
    rules: ClassVar[Mapping[str, str]]  # from our keys, layers numbered through, to theirs; the first match counts
    parts: ClassVar[Mapping[str, str]] = {"split": "duplicate"}  # what their networks have, beyond `_PARTS`

    def handles(self, description: Any) -> bool:
        """Return whether this names a spec of one of the families."""
        try:
            return isinstance(description, str | Path) and load_spec(description).family in self.families
        except UnknownNameError:
            return False

    def complete(self, description: Any, tensors: Tensors) -> PublishedNetwork:
        """Return the network that a file has: that of the spec, with the outputs of the file, which may be fine-tuned.

        Raises: ConversionError: as `map_tensors`.
        """
        spec = self._load_spec(description)
        own, head = spec.head.arguments["outputs"], tensors.get(self.head)
        if head is None or head.dim() != 1 or len(head) == own:
            return PublishedNetwork(spec)
        note = f"The head has {len(head)} outputs, as in the file; {spec.name} has {own}."
        return PublishedNetwork(with_outputs(spec, len(head)), (note,))

    def canonicalise(self, description: Any, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors and what `complete` has noted."""
        return dict(tensors), list(description.notes) if isinstance(description, PublishedNetwork) else []

    def make_spec(self, description: Any, choice: CouplingChoice) -> dict[str, Any]:
        """Return the zoo's own spec as a mapping.

        Raises: ConversionError: the spec has parts that the source's networks do not have.
        """
        spec = self._load_spec(description)
        return {key: value for key, value in to_plain(spec).items() if key not in STATEMENTS and value is not None}

    def map_tensors(self, description: Any) -> list[TensorMapping]:
        """Return the mapping of every tensor.

        Raises: ConversionError: as `make_spec`.
        """
        spec = self._load_spec(description)
        with torch.device("meta"):
            model = build(spec)
        layers, mappings = self.name_layers(model), []
        for key, tensor in model.state_dict().items():
            place = next((place for place in layers if key.startswith(f"{place}.")), "")
            ours = layers.get(place, "") + key.removeprefix(place)
            theirs = next(re.sub(rule, name, ours, count=1) for rule, name in self.rules.items() if re.match(rule, ours))
            mappings.append(self.map_tensor(key, theirs, tensor, description))
        return mappings

    def name_layers(self, model: Model) -> dict[str, str]:
        """Return what our blocks and transitions are called in `rules`: their numbers through the network."""
        layers: dict[str, str] = {}
        for entry in model.layout():
            if entry.kind == "step":
                layers.setdefault(entry.name.rpartition(".")[0], f"layers.{len(layers)}")
            elif entry.stage is not None:
                layers[entry.name] = f"layers.{len(layers)}.transition"
        return layers

    def map_tensor(self, ours: str, theirs: str, tensor: Tensor, description: Any) -> TensorMapping:
        """Return the mapping of one tensor.

        Args:
            ours: its key in the converted network.
            theirs: its key in the library, after `rules`.
            tensor: ours, on the meta device.
            description: of the network.
        """
        return rename(ours, theirs)

    def _load_spec(self, description: str | Path | PublishedNetwork) -> Spec:
        """Return the spec, or raise ConversionError if the library has no such network."""
        spec = description.spec if isinstance(description, PublishedNetwork) else load_spec(description)
        for part, allowed in {**_PARTS, **self.parts}.items():
            if (received := getattr(spec, part).type) != allowed:
                raise ConversionError(
                    f"{self.name} has networks whose {part} is {allowed}. Received: {spec.name}, whose {part} is {received}. "
                    "Convert to the published model's own spec."
                )
        return spec
