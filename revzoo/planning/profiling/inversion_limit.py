"""How many steps in a row may be inverted: any number, unless the dtype or the coupling loses too much precision.

Rounding errors of inversion add up along a run of inverted steps. An anchor, a step that keeps its input, ends the run and
with it the growth of the error. Where `revzoo.verify` finds that inverting everything is not safe in this dtype, the limit is
halved until it is.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from revzoo.analysis.chains import find_block_chains, preserve_schedules
from revzoo.analysis.verify import verify
from revzoo.errors import RecoveryError
from revzoo.model.network import Network
from revzoo.planning.profiling.hooks import assign_schedule, list_units
from revzoo.runtime.chain import ReversibleChain
from revzoo.runtime.coupling import Coupling
from revzoo.runtime.drift import count_invertible_steps
from revzoo.runtime.layer_chain import LayerChain
from revzoo.runtime.layout import LayoutEntry
from revzoo.runtime.mode import Mode
from revzoo.runtime.nested import map_tensors, tensors_in
from revzoo.runtime.schedule import limit_inverted_runs

_EXAMPLES = 4  # whether a step can be inverted does not depend on the size of the batch


def measure_inversion_limit(model: nn.Module, batch: Any) -> int | None:
    """Return how many consecutive steps can be inverted safely; None is any number, 0 is none.

    Compares the gradients of a few examples with those of the step that stores everything.

    Raises:
        RecoveryError: not even recomputing everything gives the gradients of storing, because some step does not return the
            same output when it runs again.
    """
    entries = list_units(model)
    is_chain = isinstance(model, ReversibleChain | LayerChain)  # whose streams may have no batch dimension
    examples = batch if is_chain else _first_examples(model, batch)
    limit = predict_inversion_limit(model)
    with preserve_schedules(model):
        while True:
            assign_schedule(model, place_anchors(entries, limit))
            report = verify(model, examples)
            if report.ok:
                return limit
            if limit == 0:
                raise RecoveryError(f"No plan can be made. {' '.join(report.problems)}")
            limit = (sum(entry.can_invert for entry in entries) if limit is None else limit) // 2


def predict_inversion_limit(model: nn.Module) -> int | None:
    """Return the longest run of inverted steps that the couplings allow in the model's dtype; None is any number.

    Layers have no couplings: how far errors grow there is predicted from their statistics, and warned of.
    """
    if isinstance(model, LayerChain):
        return None
    if isinstance(model, Network):
        couplings: Sequence[Coupling] = [model.coupling] * len(model.steps)
    elif isinstance(model, ReversibleChain):
        couplings = model.couplings
    else:
        couplings = [chain.coupling for chain in find_block_chains(model).values() for _ in chain.names]
    return count_invertible_steps(couplings, next(model.parameters()).dtype)


def place_anchors(entries: list[LayoutEntry], limit: int | None) -> list[Mode]:
    """Return the schedule that inverts steps in runs of at most `limit`, with one recomputed step after each; nodes store."""
    return limit_inverted_runs([Mode.INVERT if entry.can_invert else Mode.STORE for entry in entries], limit)


def _first_examples(model: nn.Module, batch: Any) -> Any:
    first, *others = tensors_in(batch)
    if any(t.layout is not torch.strided for t in (first, *others, *model.buffers())):  # the edges of a graph, for example
        return batch
    return map_tensors(lambda t: t[:_EXAMPLES] if t.dim() and len(t) == len(first) else t, batch)
