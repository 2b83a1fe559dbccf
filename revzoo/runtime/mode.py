"""The modes of backward: what a step, layer or node keeps for it (`chain.py`)."""

from enum import StrEnum
from functools import cached_property


class Mode(StrEnum):
    """What is kept of the tensors that autograd saves: everything in the first mode, and less in each that follows.

    A mode is equal to its name. The order matters: the last one needs an inverse (`LayoutEntry.modes`).
    """

    STORE = "store"
    SELECTIVE = "selective"
    RECOMPUTE = "recompute"
    INVERT = "invert"

    __repr__ = str.__repr__

    @cached_property
    def drops(self) -> bool:
        """Whether anything that autograd saves is dropped."""
        return self is not Mode.STORE

    @cached_property
    def is_selective(self) -> bool:
        """Whether products are kept, and the cheap rest is computed again."""
        return self is Mode.SELECTIVE

    @cached_property
    def keeps_input(self) -> bool:
        """Whether the input is kept, from which the forward runs again."""
        return self in (Mode.SELECTIVE, Mode.RECOMPUTE)

    @cached_property
    def inverts(self) -> bool:
        """Whether the input is rebuilt from the output."""
        return self is Mode.INVERT


MODES = tuple(Mode)
