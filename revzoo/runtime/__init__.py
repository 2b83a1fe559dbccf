"""The reversible runtime. It can be used without the rest of revzoo: it knows tensors and modules, no specs and no families."""

from revzoo.bijection import Bijection, PixelUnshuffle, SpaceToBatch, SpaceToDepth
from revzoo.inplace_abn.layer import InPlaceABN2d
from revzoo.invertible import Coupled, CoupledConv2d, InvertibleBatchNorm2d, InvertibleLeakyReLU
from revzoo.runtime import drift, exact, kept_regions, layerwise, round, selective, tiled_step  # noqa: F401  they fill `seams.py`
from revzoo.runtime.chain import ReversibleChain
from revzoo.runtime.coupling import Coupling
from revzoo.runtime.layer_chain import LayerChain
from revzoo.runtime.live_bytes import LiveBytes
from revzoo.runtime.tiles import tiled
from revzoo.runtime.tripwire import set_tripwire

__all__ = [
    "Bijection",
    "Coupled",
    "CoupledConv2d",
    "Coupling",
    "InPlaceABN2d",
    "InvertibleBatchNorm2d",
    "InvertibleLeakyReLU",
    "LayerChain",
    "LiveBytes",
    "PixelUnshuffle",
    "ReversibleChain",
    "SpaceToBatch",
    "SpaceToDepth",
    "set_tripwire",
    "tiled",
]
