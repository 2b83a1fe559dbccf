"""What every source of weights answers, and how a coupling changes what is built from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from revzoo.conversion.mapping import Entry

Tensors = Mapping[str, Tensor]
STRENGTHS = {"momentum": "m", "dual_residual": "beta"}  # what couplings call b
CouplingName = Literal["additive", "dual_residual", "momentum"]


@dataclass(frozen=True)
class Choice:
    """The coupling that a network is converted to.

    Args:
        name: "momentum" and "dual_residual" start as (nearly) the source's function, "additive" as another one.
        kept_bits: s, of b = 2^-s on the grid; None: floating point.
        strength: m or beta where kept_bits is None; 0 is the source's function itself, which cannot be inverted.
    """

    name: CouplingName = "momentum"
    kept_bits: int | None = 8
    strength: float = 0.0

    @property
    def additive(self) -> bool:
        """Whether steps add to the older stream and know nothing of a residual of their own."""
        return self.name == "additive"

    def part(self, residual: bool) -> dict[str, Any]:
        """Return the coupling as a spec has it.

        Args:
            residual: whether the coupling adds the current state to f (f is a branch), or f itself contains its residual
                (whole sub-blocks of post-norm networks, blocks of a ResNet).
        """
        if self.additive:
            return {"type": "additive"}
        amount = {STRENGTHS[self.name]: self.strength} if self.kept_bits is None else {"kept_bits": self.kept_bits}
        if self.name == "momentum":
            return {"type": "momentum", **amount, "gain": 1.0, "residual": residual}
        return {"type": "dual_residual", **amount, "alpha": 1.0 if residual else 0.0}

    @property
    def fuse(self) -> Literal["mean", "last"]:
        """How the streams become one: with a faithful coupling the newer one is the source's only stream."""
        return "mean" if self.additive else "last"


class Source(Protocol):
    """A family of networks in one library.

    `original` is whatever tells the architecture: for timm a model, perhaps on the meta device; for Transformers a
    configuration as a mapping; for published reversible networks the name of our spec.
    """

    @property
    def name(self) -> str:
        """How a report says it, for example "timm ViT"."""

    @property
    def published(self) -> bool:
        """Whether its networks are reversible already, and there is no coupling to choose."""

    def fits(self, original: Any) -> bool:
        """Return whether this source may be the one for an original."""

    def recognises(self, tensors: Tensors) -> bool:
        """Return whether a file's keys may be this source's."""

    def completed(self, original: Any, tensors: Tensors) -> Any:
        """Return the original with what its tensors alone can tell."""

    def canonical(self, original: Any, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors under the names that `entries` has, and what was done to them, in words."""

    def spec(self, original: Any, choice: Choice) -> dict[str, Any]:
        """Return the converted network's spec as a plain mapping, without name, sources and expect.

        Raises: ConversionError: something in the original that cannot be expressed; names it.
        """

    def entries(self, original: Any) -> Sequence[Entry]:
        """Return where every tensor goes: all of ours, once each, and all of theirs but `ignored` ones."""

    def ignored(self, key: str) -> bool:
        """Return whether a key of theirs holds a constant or nothing of use, and is dropped without asking."""

    def resized(self, key: str, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return a tensor of theirs interpolated to another resolution, or None where it is not of that kind."""
