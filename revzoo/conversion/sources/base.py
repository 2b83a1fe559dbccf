"""What the converter has to know about a family of networks: the questions that every source answers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.mapping import TensorMapping
from revzoo.conversion.sources.tensors import GridSize
from revzoo.errors import ConversionError

Tensors = Mapping[str, Tensor]
# What ends refusals of architectures.
IN_PLACE = (
    "A module becomes reversible in place, as it is, with revzoo.reversible_(module); revzoo.plan fits any other into less."
)


class Source(ABC):
    """A family of networks in one library, whose networks and weights can be converted.

    The `description` in these methods is the object that defines an original's architecture. For timm it is the model, which
    may be on the meta device; for Transformers the configuration as a mapping; for published reversible networks the name of
    their spec.

    Args:
        name: of the family, for reports and messages, such as "timm ViT".
        published: whether the networks are reversible already, so that there is no coupling to choose.
    """

    name: str
    published: ClassVar[bool] = False

    @abstractmethod
    def handles(self, description: Any) -> bool:
        """Return whether this source may be the one for an original."""

    def make_error(self, key: str, received: object, allowed: str) -> ConversionError:
        """Return the error for a setting of an original that a spec cannot express."""
        return ConversionError(
            f"{self.name}: {key} cannot be converted. Received: {received!r}. Allowed: {allowed.rstrip('.')}. {IN_PLACE}"
        )

    @abstractmethod
    def make_spec(self, description: Any, choice: CouplingChoice) -> dict[str, Any]:
        """Return the spec of the converted network as a plain mapping, without its name, sources and expected values.

        Raises: ConversionError: the original has something that a spec cannot express; the message names it.
        """

    @abstractmethod
    def map_tensors(self, description: Any) -> Sequence[TensorMapping]:
        """Return mappings that contain each of our tensors once, and each of theirs once unless `ignores` drops it."""

    def recognises(self, tensors: Tensors) -> bool:
        """Return whether a file's keys may be this source's; True where the description alone decides."""
        return True

    def complete(self, description: Any, tensors: Tensors) -> Any:
        """Return the description with what only the tensors can tell added to it."""
        return description

    def canonicalise(self, description: Any, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors under the keys that `map_tensors` uses, and notes on what was changed."""
        return dict(tensors), []

    def classify(self, description: Any, outputs: int) -> Any:
        """Return the description of the same network with a classifier; as it is where the head is one."""
        return description

    def ignores(self, key: str) -> bool:
        """Return whether a tensor of theirs is a constant or unused, so that it is dropped without `strict=False`."""
        return False

    def resize(self, key: str, tensor: Tensor, shape: Sequence[int], grid: GridSize | None = None) -> Tensor | None:
        """Return a tensor of theirs interpolated to the shape of another resolution, or None where that is impossible.

        Args:
            key: theirs.
            tensor: with this key.
            shape: of the result.
            grid: of the converted network's tokens; None where it has none.
        """
        return None


def find_mlp_ratio(hidden: int, width: int) -> float:
    """Return the ratio of an MLP in a spec: hidden / width, except where int(width * ratio) would not be `hidden` again."""
    return hidden / width if int(width * (hidden / width)) == hidden else (hidden + 0.5) / width
