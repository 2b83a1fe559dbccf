"""What the sources from timm answer alike."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from revzoo.conversion.sources.base import Tensors
from revzoo.conversion.sources.qkv import fused
from revzoo.conversion.sources.timm_modules import refuse


class TimmSource:
    """One family of timm's networks; an original is a model, whose tensors may be on the meta device."""

    name: ClassVar[str]
    kind: ClassVar[type[nn.Module]]
    published: ClassVar[bool] = False  # ordinary networks, not reversible ones

    def fits(self, original: Any) -> bool:
        """Return whether the original is of the family's class, or of a subclass, which `spec` then refuses."""
        return isinstance(original, self.kind)

    def recognises(self, tensors: Tensors) -> bool:
        """Return True: the model alone says what its tensors are called."""
        return True

    def completed(self, original: Any, tensors: Tensors) -> Any:
        """Return the original, which says everything."""
        return original

    def canonical(self, original: Any, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors under timm's names, and what was done to them, in words."""
        return fused(tensors)

    def ignored(self, key: str) -> bool:
        """Return False: every tensor counts."""
        return False

    def resized(self, key: str, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return None: no tensor depends on the resolution."""
        return None

    def _refuse(self, features: dict[str, object]) -> None:
        refuse(self.name, features)
