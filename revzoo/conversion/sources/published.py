"""What sources of published reversible networks share: the network is one of the zoo's, unchanged in meaning.

`original` is what `revzoo.load_spec` takes: a model's name, a spec file, or a folder with spec.yaml.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from revzoo.conversion.mapping import Entry, renamed
from revzoo.conversion.sources.base import Choice, Tensors
from revzoo.errors import ConversionError, UnknownNameError, listing
from revzoo.model.builder import build
from revzoo.spec.loading import load_spec
from revzoo.spec.parsing import to_plain
from revzoo.spec.schema import Spec

_STATEMENTS = ("name", "sources", "twin", "expect")


class PublishedSource:
    """One library that publishes reversible networks."""

    name: ClassVar[str]
    published: ClassVar[bool] = True
    families: ClassVar[tuple[str, ...]]  # of the zoo
    rules: ClassVar[Mapping[str, str]]  # from our names, layers counted through, to theirs; the first that matches

    def fits(self, original: Any) -> bool:
        """Return whether this names a spec of one of the families."""
        try:
            return isinstance(original, str | Path) and load_spec(original).family in self.families
        except UnknownNameError:
            return False

    def completed(self, original: Any, tensors: Tensors) -> Any:
        """Return the original: its name tells everything."""
        return original

    def spec(self, original: Any, choice: Choice) -> dict[str, Any]:
        """Return the zoo's own spec as a mapping.

        Raises: ConversionError: a spec of another family, a coupling other than the published one, or parts that the
            source's networks do not have.
        """
        found = _checked(self.name, original, self.families)
        if not choice.additive:
            raise ConversionError(
                f"{self.name} publishes reversible networks, whose coupling is additive; with another one they would not be "
                f"what was trained. Received: coupling={choice.name!r}. Use coupling='additive'."
            )
        return {key: value for key, value in to_plain(found).items() if key not in _STATEMENTS and value is not None}

    def entries(self, original: Any) -> list[Entry]:
        """Return where every tensor goes: our names with the layers of all stages counted through, transitions included.

        Raises: ConversionError: as `spec`.
        """
        found = _checked(self.name, original, self.families)
        with torch.device("meta"):
            model = build(found)
        numbers, count = {}, 0
        for i, stage in enumerate(found.stages):
            if stage.transition is not None:
                numbers[f"stages.{i}.transition"] = f"layers.{count}.transition"
            count += stage.transition is not None
            for j in range(stage.depth):
                numbers[f"stages.{i}.blocks.{j}"] = f"layers.{count + j}"
            count += stage.depth
        made = []
        for key, tensor in model.state_dict().items():
            place = next((place for place in numbers if key.startswith(f"{place}.")), "")
            ours = numbers.get(place, "") + key.removeprefix(place)
            theirs = next(re.sub(rule, name, ours, count=1) for rule, name in self.rules.items() if re.match(rule, ours))
            made.append(self.entry(key, theirs, tensor))
        return made

    def entry(self, ours: str, theirs: str, tensor: Tensor) -> Entry:
        """Return the way of a tensor of ours, which has no values, under its name in the library."""
        return renamed(ours, theirs)

    def ignored(self, key: str) -> bool:
        """Return False: all of their tensors are of use."""
        return False


def _checked(source: str, original: str | Path, families: Sequence[str]) -> Spec:
    found = load_spec(original)
    if found.family not in families:
        raise ConversionError(
            f"{source} has networks of {listing(families)}. Received: {found.name} of {found.family}. Name one of these, "
            "for example rev_vit_b."
        )
    expected = {
        "coupling": (found.coupling.type, "additive"),
        "split": (found.split.type, "duplicate"),
        "fuse": (found.fuse.type, "concat"),
        "head": (found.head.type, "pooled_linear"),
    }
    for part, (received, allowed) in expected.items():
        if received != allowed:
            raise ConversionError(
                f"{source} has networks whose {part} is {allowed}. Received: {found.name}, whose {part} is {received}. Convert "
                "to the published model's own spec, for example rev_vit_b."
            )
    return found
