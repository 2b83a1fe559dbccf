"""The methods that are compared: one line each."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch
from torch import Tensor, nn

from comparison import packages
from comparison.net import Net, Pair
from comparison.torch_only import Checkpointed, Compiled, Loop, Partitioned
from revzoo.analysis.step_memory import measure_memory
from revzoo.errors import InputError
from revzoo.planning.planner import solve
from revzoo.planning.profiling.profile import profile
from revzoo.runtime import ReversibleChain
from revzoo.runtime.mode import MODES, Mode

Make = Callable[[list[nn.Module], Net], nn.Module]


@dataclass(frozen=True)
class Method:
    """One way to run the same blocks.

    Args:
        name: name in the tables.
        make: function that makes a module of F and G of every block.
        package: what has to be installed from PyPI; its modules take one tensor that holds both streams. None: torch and revzoo
            are enough, and the streams are two tensors.
        dim: dimension along which a package splits its tensor whatever it holds; None: it can be told to split the features.
        install: arguments of `pip install`, if they are not the name of the package.
        make_counted: makes the module whose memory and FLOPs are counted, where it cannot be that of `make`.
        make_timed: makes the module that is timed, likewise; None is `make`.
        make_stored: makes the module whose results are the right ones, where the arithmetic is not that of plain autograd.
    """

    name: str
    make: Make
    package: str | None = None
    dim: int | None = None
    install: str | None = None
    make_counted: Make | None = None
    make_timed: Make | None = None
    make_stored: Make | None = None

    def join(self, net: Net, pair: Pair) -> tuple[Tensor, ...]:
        """Return what the module takes for these streams: tensors of their own that require a gradient."""
        tensors = pair if self.package is None else (torch.cat(pair, self._get_dim(net)),)
        return tuple(t.detach().clone().requires_grad_() for t in tensors)

    def split(self, net: Net, tensors: Tensor | tuple[Tensor, ...]) -> Pair:
        """Return the two streams of what the module takes or returns."""
        parts = tensors if isinstance(tensors, tuple) else (tensors,)
        y1, y2 = parts if len(parts) == 2 else parts[0].chunk(2, self._get_dim(net))
        return y1, y2

    def require(self) -> None:
        """Raise InputError if the package is missing or cannot run the blocks."""
        if self.package is None:
            return
        try:
            installed = version(self.package)
        except PackageNotFoundError:
            raise InputError(f"not installed: pip install {self.install or self.package}") from None
        try:
            with warnings.catch_warnings(action="ignore"):
                self.make([nn.Identity(), nn.Identity()], _TINY)
        except ImportError as error:
            raise InputError(f"version {installed}: {error}. Try: pip install {self.install or self.package}") from error

    def _get_dim(self, net: Net) -> int:
        return net.features if self.dim is None else self.dim


def make_chain(
    steps: list[nn.Module], net: Net, mode: str = Mode.INVERT, exact: bool = False, lookahead: Literal[0, 1] = 0
) -> nn.Module:
    """Return the steps as revzoo's chain, all in one mode."""
    chain = ReversibleChain(steps, exact=exact, lookahead=lookahead)
    chain.schedule = mode
    return chain


def make_compiled_chain(steps: list[nn.Module], net: Net) -> nn.Module:
    """Return revzoo's chain with every step compiled."""
    chain = ReversibleChain(steps)
    for step in steps:
        step.compile()
    return chain


def make_planned_chain(steps: list[nn.Module], net: Net) -> nn.Module:
    """Return revzoo's chain with the schedule of fewest FLOPs in the memory that checkpointing of every block takes."""
    chain = ReversibleChain(steps)
    chain.schedule = _plan_in_memory_of_checkpointing(net, len(steps) // 2)
    return chain


@cache
def _plan_in_memory_of_checkpointing(net: Net, blocks: int) -> tuple[str, ...]:
    steps, pair = net.make_steps(blocks), net.make_pair()
    budget = measure_memory(Checkpointed(steps), pair).peak_bytes
    return solve(profile(ReversibleChain(steps), pair, run=False), budget).schedule


def _ignore_net(make: Callable[..., nn.Module], **options: object) -> Make:
    return lambda steps, net: make(steps, **options)


_TINY = Net("tiny", lambda **_: [], (1, 1, 2), features=-1)
METHODS = (
    Method("plain autograd", _ignore_net(Loop)),
    Method("checkpoint per block", _ignore_net(Checkpointed)),
    Method("checkpoint sqrt(n)", _ignore_net(Checkpointed, square_root=True)),
    *(
        Method(
            f"torch.compile, budget {budget}",
            _ignore_net(Compiled, budget=budget),
            make_counted=_ignore_net(Partitioned, budget=budget),
            make_timed=_ignore_net(Compiled, budget=budget, backend="inductor"),
        )
        for budget in (0.5, 0.1)
    ),
    Method("memcnn", packages.make_memcnn, "memcnn"),
    Method("RevTorch", packages.make_revtorch, "revtorch"),
    Method("revlib", packages.make_revlib, "revlib"),
    Method("reformer_pytorch", packages.make_reformer_pytorch, "reformer_pytorch", dim=2),
    Method("xformers", packages.make_xformers, "xformers", dim=-1, install="--no-deps xformers==0.0.22"),
    Method("FrEIA", packages.make_freia, "FrEIA", dim=1),
    *(Method(f"revzoo {mode}", partial(make_chain, mode=mode)) for mode in MODES),
    Method("revzoo exact", partial(make_chain, exact=True), make_stored=partial(make_chain, mode=Mode.STORE, exact=True)),
    Method("revzoo planned", make_planned_chain),
    Method("revzoo look-ahead", partial(make_chain, lookahead=1)),
    Method("revzoo compiled", make_chain, make_timed=make_compiled_chain),
)
