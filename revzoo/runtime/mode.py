"""The modes of backward: what a step, layer or node keeps for it (`chain.py`)."""

from enum import StrEnum


class Mode(StrEnum):
    """What is kept of the tensors that autograd saves: everything in the first mode, and less in each that follows.

    A mode is equal to its name. The order matters: the last one needs an inverse (`LayoutEntry.modes`).

    Attributes:
        drops: whether anything that autograd saves is dropped.
        is_selective: whether products are kept, and the cheap rest is computed again.
        keeps_input: whether the input is kept, from which the forward runs again.
        inverts: whether the input is rebuilt from the output.
    """

    drops: bool
    is_selective: bool
    keeps_input: bool
    inverts: bool

    STORE = "store"
    SELECTIVE = "selective"
    RECOMPUTE = "recompute"
    INVERT = "invert"

    __repr__ = str.__repr__


for _mode in Mode:  # no cached properties, which change while the compiler looks at them
    _mode.drops, _mode.is_selective, _mode.inverts = _mode != "store", _mode == "selective", _mode == "invert"
    _mode.keeps_input = _mode.drops and not _mode.inverts

MODES = tuple(Mode)
