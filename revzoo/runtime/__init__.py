"""The reversible runtime, usable alone: it knows tensors and callables, no spec and no family."""

from revzoo.runtime.bijection import Bijection, SpaceToDepth
from revzoo.runtime.chain import ReversibleChain
from revzoo.runtime.coupling import Coupling

__all__ = ["Bijection", "Coupling", "ReversibleChain", "SpaceToDepth"]
