"""revzoo: reversible networks, whose activations are reconstructed in backward instead of stored."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from revzoo.analysis.numerics import NumericsReport as NumericsReport
    from revzoo.analysis.numerics import measure_numerics as measure_numerics
    from revzoo.analysis.report import MemoryReport as MemoryReport
    from revzoo.analysis.step_memory import measure_memory as measure_memory
    from revzoo.analysis.tiles import choose_tiles as choose_tiles
    from revzoo.analysis.verify import VerifyReport as VerifyReport
    from revzoo.analysis.verify import verify as verify
    from revzoo.any_plan import plan as plan
    from revzoo.conversion.convert import convert as convert
    from revzoo.conversion.export import export as export
    from revzoo.conversion.report import ConvertReport as ConvertReport
    from revzoo.data.generate import generate as generate
    from revzoo.data.transform import transform as transform
    from revzoo.graph import ModulePlan as ModulePlan
    from revzoo.graph import reforward as reforward
    from revzoo.graph import release as release
    from revzoo.in_place.chunk_loss import ChunkReport as ChunkReport
    from revzoo.in_place.chunk_loss import chunk_loss_ as chunk_loss_
    from revzoo.in_place.reversible import ReversibleReport as ReversibleReport
    from revzoo.in_place.reversible import ordinary_ as ordinary_
    from revzoo.in_place.reversible import reversible_ as reversible_
    from revzoo.model.builder import build as build
    from revzoo.model.create import create as create
    from revzoo.model.model import Model as Model
    from revzoo.on_card import fits as fits
    from revzoo.planning.card import Fits as Fits
    from revzoo.planning.plan import Plan as Plan
    from revzoo.planning.planner import solve as solve
    from revzoo.planning.profiling.profile import Profile as Profile
    from revzoo.planning.profiling.profile import profile as profile
    from revzoo.runtime.chunked_loss import chunked_loss as chunked_loss
    from revzoo.spec import Spec as Spec
    from revzoo.spec import list_models as list_models
    from revzoo.spec import load_spec as load_spec

__version__ = "0.1.0"

# Public names, and the modules that define them. Each is imported on first use: listing models does not import torch.
_HOMES = {
    "ChunkReport": "revzoo.in_place.chunk_loss",
    "ConvertReport": "revzoo.conversion.report",
    "Fits": "revzoo.planning.card",
    "MemoryReport": "revzoo.analysis.report",
    "Model": "revzoo.model.create",
    "ModulePlan": "revzoo.graph",
    "NumericsReport": "revzoo.analysis.numerics",
    "Plan": "revzoo.planning.plan",
    "Profile": "revzoo.planning.profiling.profile",
    "ReversibleReport": "revzoo.in_place.reversible",
    "Spec": "revzoo.spec",
    "VerifyReport": "revzoo.analysis.verify",
    "build": "revzoo.model.builder",
    "choose_tiles": "revzoo.analysis.tiles",
    "chunk_loss_": "revzoo.in_place.chunk_loss",
    "chunked_loss": "revzoo.runtime.chunked_loss",
    "convert": "revzoo.conversion.convert",
    "create": "revzoo.model.create",
    "export": "revzoo.conversion.export",
    "fits": "revzoo.on_card",
    "generate": "revzoo.data.generate",
    "list_models": "revzoo.spec",
    "load_spec": "revzoo.spec",
    "measure_memory": "revzoo.analysis.step_memory",
    "measure_numerics": "revzoo.analysis.numerics",
    "ordinary_": "revzoo.in_place.reversible",
    "plan": "revzoo.any_plan",
    "profile": "revzoo.planning.profiling.profile",
    "reforward": "revzoo.graph",
    "release": "revzoo.graph",
    "reversible_": "revzoo.in_place.reversible",
    "solve": "revzoo.planning.planner",
    "transform": "revzoo.data.transform",
    "verify": "revzoo.analysis.verify",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in ("errors", "runtime"):
        return import_module(f"revzoo.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'revzoo' has no attribute {name!r}. Public names: {', '.join(__all__)}.")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
