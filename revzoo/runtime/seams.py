"""Where the axes of the runtime attach to its core. Each axis has its file, and fills a slot here when it is imported.

The core runs steps, drops what autograd saves in them, and runs them again in backward: `chain.py`, `chain_link.py`,
`recorded_call.py`, `segment.py`, and `conditions.py` with what a second run must have as the first. It knows no more of the
axes than stands here.

    slot                filled by              asked
    begin_forward       round.py, drift.py     at the beginning of the recorded forward of a chain
    make_grid           exact.py               for exact arithmetic
    make_lookahead      lookahead_setting.py   for the setting of a chain
    record_layerwise    layerwise.py           for a step whose f is made of layers with an inverse
    keep_products       selective.py           before the first run of a call in mode `selective`
    keep_regions        kept_regions.py        before the first run of a call that has or may have regions to keep
    follower            complete_gradients.py  told which calls will run again, and which will not

A coupling is asked for its coefficients in every forward (`Coupling.bind`), and may return others for each example.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from revzoo.runtime.exact import Grid

begin_forward: list[Callable[..., None]] = []  # called with the forward, an input, the steps, and the segment before them
make_grid: "Callable[..., Grid]"
make_lookahead: Callable[[Any], Any]  # called with the option
record_layerwise: Callable[..., Any]  # called with step, forward and whether it is watched; returns a call, or None
keep_products: Callable[[], Any]  # returns a `Keeper`
keep_regions: Callable[..., Any]  # called with f, its name, the forward and the conditions; returns a `Keeper`, or None
follower: Any = None  # has `announce` and `dismiss`, called with a call and the tensors that it runs with
