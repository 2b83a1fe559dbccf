"""What all calls of one forward share, found once when it begins."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from revzoo.runtime.nested import tensors_in
from revzoo.runtime.random_state import Snapshot, find_generators
from revzoo.runtime.settings import Settings
from revzoo.runtime.tripwire import Round
from revzoo.runtime.turn import processes_communicate, take_turn

if TYPE_CHECKING:
    from revzoo.runtime.drift import Drift
    from revzoo.runtime.exact import Grid
    from revzoo.runtime.kept_regions import Pattern
    from revzoo.runtime.lookahead import Lookahead


class Forward:
    """The surroundings of the calls of one forward: settings, side input, random streams, who looks on.

    Its calls are made inside a `with` statement, during which no other thread runs steps on the device.

    Args:
        x: an input of the forward, which tells the device.
        round: counts that the second runs of this forward are compared with the first; None if they are not.
        side: read-only second argument of every call.
        lookahead: recovers calls ahead of backward.
        grid: of the states; None in floating point.
        keep: names the submodules whose outputs are kept (`kept_regions.py`).

    Attributes:
        snapshots: the states of the random streams behind the latest call, if it was a recorded one.
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
        keep: "Sequence[Pattern]" = (),
    ):
        self.device = x.device
        self.devices = frozenset((x.device, torch.device("cpu")))
        self.settings = Settings(x.device)
        self.spacing = self.settings.spacing
        self.generators = find_generators((x.device,))
        self.snapshots: list[Snapshot] | None = None
        self.lookahead = lookahead
        self.grid = grid
        self.keep = keep
        self.round = round
        self.drift: Drift | None = None
        self.is_one_of_several = processes_communicate()
        self.side = side
        self.side_tensors = [] if side is None else [t for t in tensors_in(side) if not t.is_inference()]

    def __enter__(self) -> "Forward":
        self._turn = take_turn(self.device)
        return self

    def __exit__(self, *error: object) -> None:
        self._turn.release()
