"""What all calls of one forward share, found once when it begins."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from revzoo.runtime.nested import tensors_in
from revzoo.runtime.random_state import find_generators
from revzoo.runtime.settings import Settings
from revzoo.runtime.tripwire import Round

if TYPE_CHECKING:
    from revzoo.runtime.drift import Drift
    from revzoo.runtime.exact import Grid
    from revzoo.runtime.lookahead import Lookahead


def processes_communicate() -> bool:
    """Return whether this process is one of several that torch.distributed connects."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


class Forward:
    """The surroundings of the calls of one forward: settings, side input, random streams, who looks on.

    Args:
        x: an input of the forward, which tells the device.
        round: counts that the second runs of this forward are compared with the first; None if they are not.
        side: read-only second argument of every call.
        lookahead: recovers calls ahead of backward.
        grid: of the states; None in floating point.

    Attributes:
        drift: measures what rounding loses, if not None.
    """

    def __init__(
        self,
        x: Tensor,
        round: Round | None,
        *,
        side: Any = None,
        lookahead: "Lookahead | None" = None,
        grid: "Grid | None" = None,
    ):
        self.device = x.device
        self.devices = frozenset((x.device, torch.device("cpu")))
        self.settings = Settings(x.device)
        self.spacing = self.settings.spacing
        self.generators = find_generators((x.device,))
        self.lookahead = lookahead
        self.grid = grid
        self.round = round
        self.drift: Drift | None = None
        self.is_one_of_several = processes_communicate()
        self.side = side
        self.side_tensors = [] if side is None else [t for t in tensors_in(side) if not t.is_inference()]
