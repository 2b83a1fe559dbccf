"""The reversible runtime. It can be used without the rest of revzoo: it knows tensors and modules, no specs and no families."""

from revzoo.bijection import Bijection, SpaceToDepth
from revzoo.runtime.chain import ReversibleChain
from revzoo.runtime.coupling import Coupling
from revzoo.runtime.live_bytes import LiveBytes
from revzoo.runtime.tripwire import set_tripwire

__all__ = ["Bijection", "Coupling", "LiveBytes", "ReversibleChain", "SpaceToDepth", "set_tripwire"]
