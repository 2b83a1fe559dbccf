"""A chain of reversible steps: an ordinary forward, and a backward that rebuilds activations.

    for k in range(n):   w[k+1] = a w[k] + b w[k-1] + c f_k(w[k])

Inputs are (w[-1], w[0]) = (x1, x2), outputs (w[n-1], w[n]) = (y1, y2). A block of RevNet or Reformer,
y1 = x1 + F(x2); y2 = x2 + G(y1), is two additive steps; a block of i-RevNet is one.

The forward is a plain loop of autograd operations. The mode of a step (`schedule.py`) only decides what happens to the tensors
that autograd saves inside its f (`segment.py`):

    mode        keeps in forward                                      computes again in backward
    store       what autograd saves in f                              nothing
    selective   w[k] and the compute-intensive outputs in f           what is cheap in f
    recompute   w[k]                                                  f, up to the last saved tensor
    invert      nothing, only one pair of states per run of steps     f

A call stores nothing on modules, so any number of forwards may precede a backward.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn

from revzoo.bijection import Bijection
from revzoo.dtype import HALF
from revzoo.errors import InputError, ScheduleError
from revzoo.registry import couplings
from revzoo.runtime import seams
from revzoo.runtime.chain_link import call_step, run_link, watch_range
from revzoo.runtime.compiling import exclude_from_compilation, is_exporting, is_traced
from revzoo.runtime.coupling import Coupling, Pair
from revzoo.runtime.forward import Forward
from revzoo.runtime.inventory import Pattern, check_patterns
from revzoo.runtime.layout import LayoutEntry, Scheduled
from revzoo.runtime.lookahead import LookaheadOption, begin_lookahead
from revzoo.runtime.mode import Mode
from revzoo.runtime.segment import InvertedSegment
from revzoo.runtime.traced_chain import trace_chain
from revzoo.runtime.transforms import must_store, refuse_exact_derivatives
from revzoo.runtime.update import Step, StepUpdate, is_dense, make_step

# What to do where states leave the grid, with couplings that keep bits and with others.
_WITH_BITS = "take a coarser grid (the coupling's fraction_bits), or compute in floating point: m or beta instead of kept_bits"
_WITHOUT_BITS = "normalise f's output, or compute in floating point: exact=False"


class ReversibleChain(Scheduled, nn.Module):
    """Run reversible steps on two streams and rebuild their activations in backward.

    Use it on your own modules: `ReversibleChain([f1, g1, f2, g2])(x1, x2)`. It is not worth it for a handful of cheap steps,
    or where weights rather than activations fill the memory.

    Shapes: x1, x2: any floating shape, same dtype and device; f_k(w[k]) has the shape of w[k-1]. Returns y1, y2 shaped like
        x1, x2 for an even number of steps.
    Args:
        steps: modules f_k, called as f(w), or as f(w, side) when `side` is given; `Bijection`s may stand between them.
        coupling: a registered name, a `Coupling`, or a sequence of couplings, one per step.
        exact: whether to round the streams to a grid, so that inversion is exact and gradients are bit-identical in every
            mode. Needs float32 or float64 streams and |b| = 1. A coupling with kept bits is exact whatever is given here.
        lookahead: how many steps are recovered ahead of backward, 0 or 1.
        keep: submodules of the steps whose outputs are kept in forward and take the place of those of a second run, in every
            mode: names ("*.router"), classes, or functions of a module. Those that return integers are kept anyway
            (`kept_regions.py`).
    Raises:
        InputError: a step is not a module, or the coupling cannot be exact.
        UnknownNameError: no such coupling.
    Cost: `invert` keeps one pair of streams for the whole chain and runs one extra forward of each step.
    Source: RevNet, Gomez et al. 2017, Algorithm 1, in the form of one recurrence (`coupling.py`).
    """

    def __init__(
        self,
        steps: Sequence[nn.Module],
        coupling: str | Coupling | Sequence[Coupling] = "additive",
        exact: bool = False,
        lookahead: LookaheadOption = 0,
        keep: Iterable[Pattern] = (),
    ):
        super().__init__()
        steps = list(steps)
        if not steps:
            raise InputError("A chain needs at least one step. Received: none.")
        for i, step in enumerate(steps):
            if not isinstance(step, nn.Module):
                raise InputError(f"Step {i} must be a torch.nn.Module. Received: {type(step).__name__}.")
        self.steps = nn.ModuleList(steps)
        self.couplings = _per_step(coupling, len(self._names()))
        self.exact = exact
        self.schedule = "invert"
        self.lookahead = lookahead
        self.keep = check_patterns(keep)

    @property
    def exact(self) -> bool:
        """Whether exact arithmetic was asked for. A coupling with kept bits puts the streams on a grid in any case."""
        return self._exact

    @exact.setter
    def exact(self, exact: bool) -> None:
        if not isinstance(exact, bool):
            raise InputError(f"exact is True or False. Received: {exact!r}.")
        for coupling in self.couplings if exact or any(coupling.is_exact for coupling in self.couplings) else ():
            coupling.require_exact()
        self._exact = exact

    def forward(self, x1: Tensor, x2: Tensor, side: Any = None) -> Pair:
        lookahead = begin_lookahead(self._lookahead)
        return run_chain(self._links(), x1, x2, side=side, exact=self.exact, lookahead=lookahead, keep=self.keep)

    @torch.no_grad()
    def inverse(self, y1: Tensor, y2: Tensor, side: Any = None) -> Pair:
        """Return (x1, x2) from (y1, y2), up to rounding, or exactly with `exact=True`.

        Exactly only if every f_k(w) has the strides of the streams: those that the states had in forward are not known here.
        Call it in eval mode: dropout and BatchNorm's batch statistics are not those of the forward.

        Raises:
            InputError: the coupling keeps bits, which are available in backward only.
        """
        return invert_chain(self._links(), y1, y2, side=side, exact=self.exact)

    def layout(self) -> list[LayoutEntry]:
        """Return the steps and bijections in order."""
        kinds: list[Literal["bijection", "step"]] = ["bijection" if isinstance(f, Bijection) else "step" for f in self.steps]
        return [LayoutEntry(f"steps.{i}", f, kind) for i, (f, kind) in enumerate(zip(self.steps, kinds, strict=True))]

    def _links(self) -> list["Step | Bijection"]:
        layout = self.layout()
        if (count := sum(entry.is_unit for entry in layout)) != len(self._schedule):
            raise ScheduleError(
                f"This chain was made of {len(self._schedule)} steps. Received: {count}. Make a new chain instead of changing "
                "its list of steps."
            )
        settings = zip(self.couplings, self._schedule, strict=True)
        return [
            e.module if isinstance(e.module, Bijection) else make_step(e.module, e.name, *next(settings), self.training)
            for e in layout
        ]


def run_chain(
    links: Sequence[Step | Bijection],
    x1: Tensor,
    x2: Tensor,
    *,
    side: Any = None,
    exact: bool = False,
    lookahead: Any = None,
    segment: InvertedSegment | None = None,
    keep: Sequence[Pattern] = (),
) -> Pair:
    """Run a chain given as a list of steps and bijections; `ReversibleChain` is this function as a module.

    Args:
        links: the steps and bijections.
        x1: the first stream.
        x2: the second stream.
        side: read-only second argument of every step.
        exact: whether to round the streams to a grid.
        lookahead: recovers steps ahead of backward. One for all chains and nodes of a forward.
        segment: inverted layers before the streams, which the first steps go on with if they are inverted; not on a grid.
        keep: names the submodules of steps whose outputs are kept.

    Raises:
        InputError: streams of different dtype or device, or an f whose output does not fit the stream it is added to.
        RecoveryError: exact=True and a state has left the grid, or an f that cannot be repeated.
    """
    if not (isinstance(x1, Tensor) and isinstance(x2, Tensor)):
        hint = ""
        if isinstance(x1, fx.Proxy):
            hint = " torch.fx.symbolic_trace gets past a chain with a Tracer whose is_leaf_module is True for its module."
        raise InputError(f"A chain takes two tensors. Received: {type(x1).__name__} and {type(x2).__name__}.{hint}")
    if x1.is_nested and x1.layout is torch.strided:
        raise InputError("A chain takes nested tensors of layout=torch.jagged. Received: torch.strided.")
    if not x1.is_meta and torch.is_autocast_enabled(x1.device.type):
        # Under autocast, a convolution before the chain returns half precision, in which inversion loses too much.
        x1, x2 = (x.float() if x.dtype in HALF else x for x in (x1, x2))
    if x1.dtype != x2.dtype or x1.device != x2.device or not x1.is_floating_point():
        raise InputError(
            "The two streams must be floating tensors of one dtype and device. "
            f"Received: {x1.dtype} on {x1.device} and {x2.dtype} on {x2.device}."
        )
    steps = [link for link in links if isinstance(link, Step)]
    drops = torch.is_grad_enabled() and any(step.mode.drops for step in steps)
    is_traced_whole = drops and is_traced() and segment is None and not keep and all(step.tiles is None for step in steps)
    if is_traced_whole and seams.prepare_compiler() > (exact or any(step.coupling.is_exact for step in steps)):
        grid, pair = _start(links, x1, x2, exact)
        return trace_chain(links, pair, side, grid)
    if segment is not None or ((drops or any(step.tiles is not None for step in steps)) and not is_exporting()):
        return _run_recorded(links, x1, x2, side, exact, lookahead, segment, keep)
    return _run_plain(links, x1, x2, side, exact)


def invert_chain(links: Sequence[Step | Bijection], y1: Tensor, y2: Tensor, *, side: Any = None, exact: bool = False) -> Pair:
    """Undo `run_chain` without gradients.

    Raises:
        InputError: a coupling keeps bits, which are available in backward only, or has b = 0.
    """
    if any(isinstance(link, Step) and link.coupling.kept_bits for link in links):
        raise InputError("The inverse needs the bits that forward kept, which are available in backward only.")
    if any(isinstance(link, Step) and type(link.coupling).bind is not Coupling.bind for link in links):
        raise InputError("The inverse needs the coefficients that forward drew, which are available in backward only.")
    if any(isinstance(link, Step) and link.coupling.b == 0 for link in links):
        raise InputError(
            "A coupling with b = 0 has no inverse: it forgets the older stream. Random signs have b = 0 in evaluation."
        )
    grid, pair = _start(links, y1, y2, exact)
    for link in reversed(links):
        if isinstance(link, Step):
            pair = StepUpdate(link.coupling, grid).invert(pair, call_step(link, (pair[1], pair[0]), side))
        else:
            pair = link.inverse(pair[0]), link.inverse(pair[1])
    return pair


def _run_plain(links: Sequence[Step | Bijection], x1: Tensor, x2: Tensor, side: Any, exact: bool) -> Pair:
    grid, pair = _start(links, x1, x2, exact)
    for link in links:
        if isinstance(link, Step):
            pair = StepUpdate(link.coupling.bind(pair), grid).advance(pair, call_step(link, pair, side))
        else:
            pair = link(pair[0]), link(pair[1])
        if grid is not None:
            watch_range(grid, pair, link)
    return pair


@exclude_from_compilation
def _run_recorded(
    links: Sequence[Step | Bijection],
    x1: Tensor,
    x2: Tensor,
    side: Any,
    exact: bool,
    lookahead: Any,
    segment: InvertedSegment | None,
    keep: Sequence[Pattern],
) -> Pair:
    """Run forward, recording what backward needs to rebuild the tensors that are dropped."""
    if must_store() and segment is None:
        return _run_plain(links, x1, x2, side, exact)
    if not torch.is_grad_enabled():
        links = [replace(link, mode=Mode.STORE) if isinstance(link, Step) else link for link in links]
    steps = [link for link in links if isinstance(link, Step)]
    grid, pair = _start(links, x1, x2, exact, will_invert=any(step.mode.inverts for step in steps))
    forward = Forward(x1, side=side, lookahead=lookahead, grid=grid, keep=keep)
    for begin in seams.begin_forward:
        begin(forward, x1, steps, segment)
    with forward:
        for link in links:
            pair, segment = run_link(link, pair, segment, forward)
    if segment is not None:
        segment.end(pair)
    return pair


def _start(
    links: Sequence[Step | Bijection], x1: Tensor, x2: Tensor, exact: bool, will_invert: bool = False
) -> tuple[Any, Pair]:
    couplings = [link.coupling for link in links if isinstance(link, Step)]
    keeps_bits = not {coupling.kept_bits for coupling in couplings} <= {None}
    is_ordinary = len(couplings) > 0 and not any(coupling.b for coupling in couplings)  # random signs in evaluation
    if is_ordinary or (not exact and not keeps_bits):
        return None, (x1, _dense(x2) if couplings else x2)
    refuse_exact_derivatives()
    fraction_bits = [coupling.fraction_bits for coupling in couplings if coupling.fraction_bits is not None]
    bits = min(fraction_bits) if fraction_bits else None
    grid = seams.make_grid(x1.dtype, bits, will_invert, _WITH_BITS if keeps_bits else _WITHOUT_BITS)
    pair = grid.round(x1), grid.round(x2)
    for state in pair:
        grid.watch(state, "as an input of the chain")
    return grid, pair


def _dense(x: Tensor) -> Tensor:
    """Return x without gaps in memory, as inversion will return it: a compiled step relies on the strides of its first run."""
    return x if is_dense(x) else x.clone()


def _per_step(coupling: str | Coupling | Sequence[Coupling], count: int) -> tuple[Coupling, ...]:
    if isinstance(coupling, str):
        return (cast(Coupling, couplings[coupling]()),) * count
    if isinstance(coupling, Coupling):
        return (coupling,) * count
    if not isinstance(coupling, Sequence) or not all(isinstance(each, Coupling) for each in coupling):
        raise InputError(f"A coupling is a name, a Coupling, or a list of Couplings, one per step. Received: {coupling!r}.")
    if len(coupling) != count:
        raise InputError(f"One coupling for each of {count} steps is needed. Received: {len(coupling)}.")
    return tuple(cast(Sequence[Coupling], coupling))
