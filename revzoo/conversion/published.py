"""What sources of published reversible networks share: the network is one of the zoo's, unchanged in meaning.

`original` is what `revzoo.load_spec` takes: a model's name, a spec file, or a folder with spec.yaml.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from revzoo.builder import build
from revzoo.conversion.mapping import Entry
from revzoo.conversion.source import Choice
from revzoo.errors import ConversionError, UnknownNameError, listing
from revzoo.spec.loading import load_spec
from revzoo.spec.parsing import plain
from revzoo.spec.schema import Spec

_STATEMENTS = ("name", "sources", "twin", "expect")


def fits(original: Any, families: Sequence[str]) -> bool:
    """Return whether this names a spec of one of the families."""
    try:
        return isinstance(original, str | Path) and load_spec(original).family in families
    except UnknownNameError:
        return False


def spec(source: str, original: str | Path, families: Sequence[str], choice: Choice) -> dict[str, Any]:
    """Return the zoo's own spec as a mapping.

    Raises: ConversionError: a spec of another family, a coupling other than the published one, or parts that the source's
        networks do not have.
    """
    found = _checked(source, original, families)
    if not choice.additive:
        raise ConversionError(
            f"{source} publishes reversible networks, whose coupling is additive; with another one they would not be what was "
            f"trained. Received: coupling={choice.name!r}. Use coupling='additive'."
        )
    return {key: value for key, value in plain(found).items() if key not in _STATEMENTS and value is not None}


def entries(
    source: str, original: str | Path, families: Sequence[str], entry: Callable[[str, Tensor], Entry]
) -> Iterator[Entry]:
    """Yield what `entry` makes of each key of ours and its tensor, which has no values.

    The key names a step by `layers.{n}.f` or `layers.{n}.g`, and a transition by `layers.{n}.transition`, n counting both
    as the sources do; the entry's own key is put back.
    """
    found = _checked(source, original, families)
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
    for key, tensor in model.state_dict().items():
        place = next((place for place in numbers if key.startswith(f"{place}.")), "")
        made = entry(numbers.get(place, "") + key.removeprefix(place), tensor)
        yield Entry((key,), made.theirs, made.how, made.to_ours, made.to_theirs)


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
