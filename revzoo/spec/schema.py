"""The grammar of a spec: every class here is a mapping in YAML, every field a key.

    stem -> split into two streams -> stages of reversible blocks, joined by transitions -> fuse -> head

A spec is architecture only. What a part's arguments may be is declared by the part's own signature.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

from omegaconf import OmegaConf

from revzoo import registry
from revzoo.bounds import Bound, PositiveInt, Rate
from revzoo.spec.parsing import NOT_WRITTEN, TEMPLATE, Part, plain

Branch = Annotated[Part, registry.branches]
Template = Annotated[Part, registry.branches, TEMPLATE]
_NOT_ARCHITECTURE = {"name", "sources", "expect", "twin", "block"}


class Source(TypedDict):
    """Which numbers of the spec come from where."""

    of: str
    cite: str


class TwinName(TypedDict):
    """Where to find an ordinary network."""

    library: str
    name: str


class Twin(TwinName, total=False):
    """The ordinary network that this one is the reversible version of.

    `arguments` are those of `timm.create_model`, or fields of the Transformers configuration.
    """

    arguments: Annotated[Any, Bound("a mapping", lambda value: isinstance(value, dict))]
    parameters: PositiveInt


class Expect(TypedDict, total=False):
    """Facts that the tests check for every shipped spec."""

    parameters: PositiveInt
    stream_shape: tuple[PositiveInt, ...]
    reversible_steps: PositiveInt
    flops: PositiveInt | None  # of a forward pass of one example, a multiply-add counted once, as papers do


@dataclass(frozen=True)
class ImageInput:
    """Images of one size: a batch is (B, channels, *size), floating."""

    kind: Literal["image"]
    channels: PositiveInt
    size: Annotated[tuple[PositiveInt, ...], Bound("a list of 2 integers >= 1", lambda size: len(size) == 2)]


@dataclass(frozen=True)
class TextInput:
    """Token ids: a batch is (B, N) integers from 0 to vocabulary - 1, N up to `length`.

    Args:
        padding: the id that fills up short examples; nothing attends to it. None is no such id.
    """

    kind: Literal["text"]
    length: PositiveInt
    vocabulary: PositiveInt
    padding: Annotated[int, Bound("an integer >= 0", lambda n: n >= 0)] | None = None


Input = ImageInput | TextInput


@dataclass(frozen=True)
class DropPath:
    """Stochastic depth: `linear` grows from 0 in the first block to `max` in the last, `constant` is `max` in all.

    Args:
        transitions: whether transitions count as blocks, and are given their probability.
    """

    max: Rate = 0.0
    rule: Literal["linear", "constant"] = "linear"
    transitions: bool = False


@dataclass(frozen=True)
class Block:
    """What all blocks share. `f` and `g` are templates: a stage's own are merged over them."""

    coupling: Annotated[Part, registry.couplings]
    f: Template
    g: Template | None = None
    drop_path: DropPath = DropPath()


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks of one width [channels per stream], and the node before them.

    `f` and `g` are complete: the block's templates with what the stage changes. Without `g` a block is one step.
    """

    depth: Annotated[int, Bound("an integer from 1 to 10000", lambda n: 1 <= n <= 10_000)]
    width: PositiveInt
    f: Branch
    g: Branch | None = None
    transition: Annotated[Part, registry.transitions] | None = None


@dataclass(frozen=True)
class Spec:
    """A checked, resolved spec.

    Args:
        name: the model's name; shipped specs are named as their file.
        file: where the spec was read from.
    """

    name: str
    family: str
    input: Input
    stem: Annotated[Part, registry.stems]
    split: Annotated[Part, registry.splits]
    block: Block
    stages: Annotated[tuple[Stage, ...], Bound("a list of at least one stage", len)]
    fuse: Annotated[Part, registry.fuses]
    head: Annotated[Part, registry.heads]
    init: Annotated[Part, registry.inits] | None = None
    sources: tuple[Source, ...] = ()
    twin: Twin | None = None
    expect: Expect = field(default_factory=Expect)
    file: str = field(default="", compare=False, metadata=NOT_WRITTEN)

    @property
    def coupling(self) -> Part:
        """How every step's output joins the streams."""
        return self.block.coupling

    @property
    def drop_path(self) -> DropPath:
        """How likely branches are left out in training, over the depth of the model."""
        return self.block.drop_path

    def to_yaml(self) -> str:
        """Return the spec as self-contained YAML: no base, no overrides, every default written."""
        return OmegaConf.to_yaml(OmegaConf.create(plain(self)))

    @property
    def digest(self) -> str:
        """Identify the architecture: SHA-256, in hex, of everything but the name and the statements about it.

        Formatting, key order, inheritance, and `4` for `4.0` make no difference; an argument left to its default does.
        """
        facts = {key: value for key, value in plain(self).items() if key not in _NOT_ARCHITECTURE}
        facts |= {"coupling": plain(self.coupling), "drop_path": plain(self.drop_path)}
        return hashlib.sha256(json.dumps(_canonical(facts), sort_keys=True).encode()).hexdigest()


def _canonical(value: Any) -> Any:
    """Write whole floats as integers: an argument is converted only once the parts have been imported."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
