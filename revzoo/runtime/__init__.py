"""The reversible runtime, usable alone: it knows tensors and callables, no spec and no family."""

from revzoo.bijection import Bijection, SpaceToDepth
from revzoo.runtime.chain import ReversibleChain
from revzoo.runtime.coupling import Coupling
from revzoo.runtime.live_bytes import LiveBytes

__all__ = ["Bijection", "Coupling", "LiveBytes", "ReversibleChain", "SpaceToDepth"]
