"""What one forward call leaves behind so that backward can rebuild the tensors it dropped.

The forward of a step runs as ordinary autograd code under `saved_tensors_hooks`: the pack hook drops each tensor that
autograd wants to save and leaves a `Handle`. The first handle that autograd unpacks in backward has the call run again;
that one run refills every handle of the call and, for an inverted step, also yields the state before it. The graph
stays PyTorch's own, so gradients land where they always do: `torch.autograd.grad`, `retain_graph`, hooks, DDP and FSDP
see nothing unusual.

    Call      one call of one function, its dropped tensors, and how to run it again (`replay.py`)
    Kept      recovers a call from its own inputs, which it keeps           (modes `recompute` and `selective`)
    Run       recovers the calls of consecutive inverted steps from one pair of states (mode `invert`)

References point one way, graph -> Handle -> (Kept | Run) -> Call, so everything is freed with the graph, without the
garbage collector. A run of inverted steps holds exactly one pair of states at any time: after forward the last one,
which are the chain's own outputs where the run ends the chain; in backward the newest one recovered.

Known inefficiency: a second backward through a retained graph runs the chain forward again to get back to its end.

Source: the hooks are `torch.autograd.graph.saved_tensors_hooks`, as in non-reentrant `torch.utils.checkpoint`; the
reconstruction is Gomez et al. 2017, Algorithm 1.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from revzoo.errors import RecoveryError
from revzoo.runtime.replay import Replay
from revzoo.runtime.selective import Products

# Around whatever records a Call when somebody compiles the whole model. Backward runs outside the compiled region and calls
# f as it is; a first run that the compiler had traced would have saved other tensors. A step compiled by itself
# (`step.compile()`) runs compiled both times.
not_compiled = torch.compiler.disable(reason="it decides what autograd keeps; compile each step instead: step.compile()")


class _Enough(Exception):
    """Raised inside a second run, by the pack hook, once every dropped tensor has been refilled."""


class Call:
    """One call of `f` under hooks that drop what autograd saves.

    Args:
        f: the step or node.
        name: for messages.
        side: read-only second argument of f, or None for an f without one.
        selective: keep the products of the first run for the second. Compiled code hides them, and keeps nothing.
    """

    def __init__(self, f: Callable[..., Any], name: str, side: Any = None, *, selective: bool = False):
        self._f = f
        self.name = name
        self._side = side
        self._products = Products(name) if selective and not _is_compiled(f) else None
        self._dropped: list[tuple[torch.Size, torch.dtype]] = []
        self._refilled: dict[int, tuple[Tensor, int]] = {}  # with its version
        self._wants_grad: list[bool] = []

    def first(self, source: "Source", *inputs: Tensor) -> Any:
        """Run f on `inputs`, dropping what autograd saves; `source` will be asked to recover this call."""
        self._wants_grad = [x.requires_grad for x in inputs]
        self._replay = Replay(self._f, inputs[0].device, self.name, self._side)

        def pack(tensor: Tensor) -> Handle:
            self._dropped.append((tensor.shape, tensor.dtype))
            if self._products is not None:
                self._products.saved(tensor)
            return Handle(source, self, len(self._dropped) - 1)

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, Handle.unpack),
            nullcontext() if self._products is None else self._products.keeping(),
        ):
            out = self._run(*inputs)
        if self._products is not None:
            self._products.trim()
        self._replay.first_run_ended()
        return out

    def again(self, *inputs: Tensor, refill: bool = True, stop_early: bool = False) -> Any:
        """Run f once more on detached `inputs`, refilling the handles; return its detached output.

        With `stop_early` the run ends when the last dropped tensor has been refilled, and nothing is returned.
        """
        seen = 0

        def pack(tensor: Tensor) -> None:
            nonlocal seen
            if seen >= len(self._dropped) or self._dropped[seen] != (tensor.shape, tensor.dtype):
                raise self._differs(seen, f"a tensor {tuple(tensor.shape)} of {tensor.dtype}")
            if refill:
                self._refilled[seen] = tensor.detach(), tensor._version
            seen += 1
            if stop_early and seen == len(self._dropped):
                raise _Enough

        def unpack(_: None) -> Tensor:
            raise _differentiates(self.name)

        inputs = tuple(x.detach().requires_grad_(wants) for x, wants in zip(inputs, self._wants_grad, strict=True))
        try:
            with (
                self._replay.again(),
                torch.enable_grad(),
                torch.autograd.graph.saved_tensors_hooks(pack, unpack),
                nullcontext() if self._products is None else self._products.returning(),
            ):
                out = self._run(*inputs)
        except _Enough:
            return None
        if seen != len(self._dropped):
            raise self._differs(seen, "nothing")
        return None if stop_early else out.detach()

    def take(self, slot: int, source: "Source") -> Tensor:
        """Return the tensor dropped as number `slot`, recovering the call when it is not at hand."""
        if slot not in self._refilled:
            source.recover(self)
        tensor, version = self._refilled.pop(slot)
        if tensor._version != version:
            raise RecoveryError(
                f"{self.name} modifies a tensor {tuple(tensor.shape)} in place that its gradient needs. Replace the in-place "
                "operation (mul_, +=) by one that returns a new tensor."
            )
        return tensor

    def _run(self, *inputs: Tensor) -> Any:
        return self._f(*inputs) if self._side is None else self._f(*inputs, self._side)

    def forget(self) -> None:
        """Free what was refilled and not taken; it can be recovered again."""
        self._refilled.clear()

    def _differs(self, slot: int, found: str) -> RecoveryError:
        expected = "nothing more"
        if slot < len(self._dropped):
            shape, dtype = self._dropped[slot]
            expected = f"a tensor {tuple(shape)} of {dtype}"
        return RecoveryError(
            f"{self.name} ran differently the second time: as tensor {slot} autograd saved {expected} in forward and {found} "
            f"in recovery. Its function must depend on its input, parameters and torch's random stream alone, and "
            f"requires_grad must not change in between; otherwise set its schedule to 'store'."
        )


def _is_compiled(f: Callable[..., Any]) -> bool:
    """Return whether some of f is compiled: it would write into what is kept, or run uncompiled where a mode looks on."""
    modules = f.modules() if isinstance(f, nn.Module) else ()
    return any(m._compiled_call_impl is not None or isinstance(m, torch._dynamo.OptimizedModule) for m in modules)


class Source(Protocol):
    """Whatever can get a call's inputs back."""

    def recover(self, call: Call) -> None:
        """Refill every handle of `call`."""


class Handle(NamedTuple):
    """What autograd keeps in place of a dropped tensor."""

    source: Source
    call: Call
    slot: int

    def unpack(self) -> Tensor:
        if torch.is_grad_enabled():
            raise RecoveryError(
                f"create_graph=True needs the tensors that {self.call.name} dropped as part of a graph. Set the schedule of "
                "every step and node you differentiate twice to 'store'."
            )
        return self.call.take(self.slot, self.source)


class State:
    """A tensor kept for recovery, watched for changes in place.

    It is detached, so that it holds no graph (a chain's output would otherwise keep itself alive), and shares storage
    and version counter with the original.
    """

    def __init__(self, tensor: Tensor):
        self._tensor = tensor.detach()
        self._version = self._tensor._version

    def get(self) -> Tensor:
        """Return the tensor.

        Raises:
            RecoveryError: it was modified in place since it was kept.
        """
        if self._tensor._version != self._version:
            raise RecoveryError(
                f"A tensor {tuple(self._tensor.shape)} that backward needs (an output of the chain, or the input of a "
                "recomputed step) was modified in place after forward. Replace the in-place operation (x += y, relu_) by "
                "x = x + y, or set the schedule to 'store'."
            )
        return self._tensor


class Kept:
    """Recovers one call from the inputs it keeps, stopping as soon as the last dropped tensor is back.

    Cost: the inputs, and one forward less whatever follows the last saved tensor (for a linear layer, the layer itself).
    """

    def __init__(self, inputs: Sequence[Tensor]):
        self._inputs = [State(x) for x in inputs]

    def recover(self, call: Call) -> None:
        call.again(*(x.get() for x in self._inputs), stop_early=True)


class Link(Protocol):
    """One item of a chain, as a `Run` sees it: pairs of states in, pairs of states out."""

    def advance(self, pair: tuple[Tensor, Tensor], out: Tensor | None) -> tuple[Tensor, Tensor]: ...

    def invert(self, pair: tuple[Tensor, Tensor], out: Tensor | None) -> tuple[Tensor, Tensor]: ...


class Run:
    """Recovers consecutive inverted steps from one pair of states that moves along the chain.

    Position i is the boundary before link i, so `_pair` is (w[i-1], w[i]) there. Recovery of link i moves from boundary
    i + 1 to i. When a call is asked for that lies elsewhere, the pair walks there first, down by inverting and up by
    running forward.

    Cost: one pair of states, one extra forward of each step.
    """

    def __init__(self) -> None:
        self._links: list[tuple[Link, Call | None]] = []  # a bijection has no call
        self._pair: tuple[State, State] | None = None
        self._at = 0
        self._current: Call | None = None

    def append(self, link: Link, call: Call | None) -> None:
        """Note the next link of the run as forward passes it."""
        self._links.append((link, call))

    def end(self, pair: tuple[Tensor, Tensor]) -> None:
        """Note the states after the last link."""
        self._pair, self._at = (State(pair[0]), State(pair[1])), len(self._links)

    def recover(self, call: Call) -> None:
        """Refill `call`, and move to the boundary before it unless it is the first of the run."""
        goal = next((i for i, (_, other) in enumerate(self._links) if other is call), None)
        if goal is None:
            raise _differentiates(call.name)
        if self._current is not None and self._current is not call:
            self._current.forget()
        self._current = call
        while self._at > goal + 1:
            self._down(refill=False)
        while self._at < goal:
            self._up()
        if self._at == goal:
            call.again(self._states()[1], stop_early=True)
        elif goal == 0:
            call.again(self._states()[0], stop_early=True)  # nobody needs the state before the first step
        else:
            self._down(refill=True)

    def _down(self, refill: bool) -> None:
        link, call = self._links[self._at - 1]
        pair = self._states()
        out = None if call is None else call.again(pair[0], refill=refill)
        self._move(link.invert(pair, out), -1)

    def _up(self) -> None:
        link, call = self._links[self._at]
        pair = self._states()
        out = None if call is None else call.again(pair[1], refill=False)
        self._move(link.advance(pair, out), +1)

    def _move(self, pair: tuple[Tensor, Tensor], by: int) -> None:
        self._pair, self._at = (State(pair[0]), State(pair[1])), self._at + by

    def _states(self) -> tuple[Tensor, Tensor]:
        assert self._pair is not None, "recovery before the end of forward"
        return self._pair[0].get(), self._pair[1].get()


def _differentiates(name: str) -> RecoveryError:
    return RecoveryError(
        f"{name} differentiates inside its own forward, before backward can recover anything. Set its schedule to 'store'."
    )
