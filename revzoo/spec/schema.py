"""The grammar of a spec: every class is a mapping in YAML, and its fields are the keys.

    stem -> split into two streams -> stages of reversible blocks, joined by transitions -> fuse -> head

With `split: none`, `coupling: none` and `fuse: none` (or `pooled_concat`) there is one tensor instead, and a block is y = f(x).
What can be inverted then are those layers of f that have an inverse of their own; all else is stored or recomputed, as in any
ordinary network.

A spec describes the architecture alone. Which arguments a part takes is declared by the part's own signature.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

from omegaconf import OmegaConf

from revzoo import registry
from revzoo.bounds import Bound, NonNegativeInt, PositiveInt, Rate
from revzoo.spec.parsing import NOT_WRITTEN, TEMPLATE, Part, to_plain

BranchPart = Annotated[Part, registry.branches]
Template = Annotated[Part, registry.branches, TEMPLATE]
STATEMENTS = ("name", "sources", "expect", "twin")  # keys that say something about the network, and build nothing


class Citation(TypedDict):
    """The publication or code that some of the spec's numbers are from.

    `of` says which numbers, and `cite` where they are published.
    """

    of: str
    cite: str


class TwinName(TypedDict):
    """The name of an ordinary (not reversible) network, and the library that has it."""

    library: str
    name: str


class Twin(TwinName, total=False):
    """The ordinary network whose reversible version the spec describes.

    `arguments` are arguments of `timm.create_model`, or fields of the Transformers configuration; `parameters` is the number
    of parameters.
    """

    arguments: Annotated[Any, Bound("a mapping", lambda value: isinstance(value, dict))]
    parameters: PositiveInt


class Expect(TypedDict, total=False):
    """Numbers that the built model must have; the tests check them for every shipped spec."""

    parameters: PositiveInt
    stream_shape: tuple[PositiveInt, ...]
    reversible_steps: NonNegativeInt
    flops: PositiveInt | None  # of the forward pass of one example; multiply-adds (MACs), which papers call FLOPs


@dataclass(frozen=True)
class ImageInput:
    """Images of one size: a batch is a floating-point tensor (B, channels, *size)."""

    kind: Literal["image"]
    channels: PositiveInt
    size: Annotated[tuple[PositiveInt, ...], Bound("a list of 2 integers >= 1", lambda size: len(size) == 2)]


@dataclass(frozen=True)
class TextInput:
    """Token ids: a batch is an integer tensor (B, N) with values from 0 to vocabulary - 1.

    Args:
        length: largest N, the number of tokens in an example.
        vocabulary: number of different ids.
        padding: the id that fills up short examples, and that no token attends to. None: there is no such id.
    """

    kind: Literal["text"]
    length: PositiveInt
    vocabulary: PositiveInt
    padding: NonNegativeInt | None = None


Input = ImageInput | TextInput


@dataclass(frozen=True)
class DropPathSpec:
    """Stochastic depth: the probability of dropping a block's branches in training.

    Args:
        max: the largest probability, in [0, 1).
        rule: `linear` grows from 0 in the first block to `max` in the last; `constant` is `max` in all blocks.
        transitions: whether transitions are dropped too; each then counts as one more block.
    """

    max: Rate = 0.0
    rule: Literal["linear", "constant"] = "linear"
    transitions: bool = False


@dataclass(frozen=True)
class BlockSpec:
    """What all blocks have in common.

    Args:
        coupling: how every step's output joins the streams; `none` if there is one tensor.
        f: template of the first branch; a stage's own `f` is merged over it.
        g: likewise of the second branch. None: a block is one step, unless a stage has a `g`. Without coupling there is none.
        drop_path: probabilities of dropping branches in training.
    """

    coupling: Annotated[Part, registry.couplings]
    f: Template
    g: Template | None = None
    drop_path: DropPathSpec = DropPathSpec()


@dataclass(frozen=True)
class StageSpec:
    """Consecutive blocks of one width, and the transition before them.

    Args:
        depth: number of blocks.
        width: channels per stream.
        f: the first branch, complete: the template of `BlockSpec` with the stage's own arguments merged over it.
        g: likewise the second branch. None: a block is one step.
        transition: the part that changes width or size before the first block. None: there is none.
    """

    depth: Annotated[int, Bound("an integer from 1 to 10000", lambda n: 1 <= n <= 10_000)]
    width: PositiveInt
    f: BranchPart
    g: BranchPart | None = None
    transition: Annotated[Part, registry.transitions] | None = None


@dataclass(frozen=True)
class Spec:
    """A checked spec, with inheritance and overrides applied.

    Args:
        name: the model's name; for a shipped spec, the name of its file.
        family: name of the family; for a shipped spec, the name of its folder.
        sources: where the numbers are from.
        twin: the ordinary network whose reversible version this is, if there is one.
        expect: numbers that the built model must have.
        file: the file that the spec was read from.
        places: where each value was written, by its dotted path: the name of a file, or "override".
    """

    name: str
    family: str
    input: Input
    stem: Annotated[Part, registry.stems]
    split: Annotated[Part, registry.splits]
    block: BlockSpec
    stages: Annotated[tuple[StageSpec, ...], Bound("a list of at least one stage", len)]
    fuse: Annotated[Part, registry.fuses]
    head: Annotated[Part, registry.heads]
    init: Annotated[Part, registry.inits] | None = None
    sources: tuple[Citation, ...] = ()
    twin: Twin | None = None
    expect: Expect = field(default_factory=Expect)
    file: str = field(default="", compare=False, metadata=NOT_WRITTEN)
    places: Mapping[str, str] = field(default_factory=dict, compare=False, metadata=NOT_WRITTEN)

    @property
    def coupling(self) -> Part:
        """How every step's output joins the streams."""
        return self.block.coupling

    @property
    def drop_path(self) -> DropPathSpec:
        """The probabilities of dropping branches in training."""
        return self.block.drop_path

    def to_yaml(self) -> str:
        """Return the spec as self-contained YAML: without base and overrides, with the defaults of all but parts' arguments.

        What a stage takes from the block is written there alone, so that an override of the block reaches the stage.
        """
        plain = to_plain(self)
        for stage in plain["stages"]:
            for key in ("f", "g"):
                if (own := _leave_out(plain["block"][key], stage.pop(key))) is not _SHARED:
                    stage[key] = own
        return OmegaConf.to_yaml(OmegaConf.create(plain))

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of the architecture: of everything but name, sources, expect and twin.

        Formatting, key order, inheritance and `4` instead of `4.0` do not change it. Writing out an argument of a part does,
        even with its default.
        """
        facts = {key: value for key, value in to_plain(self).items() if key not in (*STATEMENTS, "block")}
        facts |= {"coupling": to_plain(self.coupling), "drop_path": to_plain(self.drop_path)}
        return hashlib.sha256(json.dumps(_canonical(facts), sort_keys=True).encode()).hexdigest()


_SHARED = object()  # stands for a branch that a stage has from the block, as it is


def _leave_out(shared: Any, branch: Any) -> Any:
    """Return the arguments of a stage's branch that differ from the block's; _SHARED if none do."""
    if shared == branch:
        return _SHARED
    if not shared or not branch or shared["type"] != branch["type"]:
        return branch
    return {key: value for key, value in branch.items() if key not in shared or shared[key] != value}


def _canonical(value: Any) -> Any:
    """Write whole floats as integers, so that 4 and 4.0 give the same digest."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
