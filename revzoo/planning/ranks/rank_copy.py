"""The first of many ranks, in one process: PyTorch's FSDP2 divides a copy of the model that has no values.

The copy is what a rank trains, but its tensors are FakeTensors, and the other ranks are PyTorch's fake process group, whose
collectives send nothing. A training step of the copy therefore gathers, frees and sends what one of many ranks does, and the
planner counts its bytes like those of any other model.

On a CPU and on a card FSDP2 allocates and frees in the same order of calls. What the allocator of a card keeps apart for its
streams is not counted, and neither is what `offload` keeps on the host: shards count as if they were on the card.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._tools.fake_collectives  # collectives of FakeTensors do nothing, in any process group
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from revzoo.analysis.fake_tensors import FakeMode, make_fake
from revzoo.errors import InputError
from revzoo.model.network import Network
from revzoo.planning.ranks.division import Division
from revzoo.runtime.nested import tensors_in
from revzoo.sharding.mesh import make_mesh
from revzoo.sharding.shard import Precision, shard_

_KINDS = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",  # of gradients, by nodes
}


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind in a training step.

    Args:
        calls: how many there are.
        bytes: what one rank sends in all of them: in a ring of n, (n - 1) / n of the whole, twice for an all-reduce.
    """

    calls: int
    bytes: int


class RankMode(FakeMode):
    """A mode of FakeTensors that notes what a rank would have sent.

    Args:
        division: of the ranks.
    """

    def __init__(self, division: Division):
        super().__init__(allow_non_fake_inputs=True)
        self._division = division
        self._steps: list[tuple[Counter[str], Counter[str]]] = []

    def begin_step(self, *_: Any) -> None:
        """Note the collectives from now on as those of another training step."""
        self._steps.append((Counter(), Counter()))

    @property
    def steps(self) -> list[dict[str, Collective]]:
        """The collectives of every training step, by kind."""
        return [{kind: Collective(calls[kind], sent[kind]) for kind in sorted(calls)} for calls, sent in self._steps]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func._opname != "wait_tensor":
            calls, sent = self._steps[-1]
            kind = _KINDS[func._opname]
            calls[kind] += 1
            sent[kind] += self._count_sent(kind, args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _count_sent(self, kind: str, args: Any) -> int:
        if kind == "all-reduce":
            together = self._division.copies
            return sum(2 * (together - 1) * t.nbytes // together for t in tensors_in(args[0]))
        first, second = tensors_in(args[:2])  # the whole, and a rank's part of it
        return abs(first.nbytes - second.nbytes)


@contextmanager
def divide_copy(
    model: Network, division: Division, *, precision: Precision = "no", mesh: DeviceMesh | None = None
) -> Iterator[tuple[Network, RankMode]]:
    """Yield a copy of the model without values, as the first of the ranks holds it, and what notes its collectives.

    Args:
        model: not divided itself; on any device. It is left as it is.
        division: over which ranks.
        precision: of the autocast under which the step will run.
        mesh: of the ranks, where they have been started. Nothing is sent. None pretends that they have.
    Raises:
        InputError: a process group has been started, and no mesh of it is given.
    """
    mode = RankMode(division)
    home = torch.device("cpu" if mesh is None else mesh.device_type)
    tensors: dict[int, Tensor] = {id(p): nn.Parameter(make_fake(p, mode, home), p.requires_grad) for p in model.parameters()}
    tensors |= {id(b): make_fake(b, mode, home) for b in model.buffers()}
    divided = copy.deepcopy(model, dict(tensors))
    with _pretend_ranks(division) if mesh is None else nullcontext(mesh) as ranks, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # which no step changes in place
        shard_(divided, ranks, precision=precision)  # outside of the mode: the mesh has values
        divided.register_forward_pre_hook(mode.begin_step, prepend=True)
        yield divided, mode


@contextmanager
def _pretend_ranks(division: Division) -> Iterator[DeviceMesh]:
    if distributed.is_initialized():
        raise InputError("The ranks have been started: give plan_ranks their mesh. Received: mesh=None.")
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=division.ranks)
    try:
        yield make_mesh(division.ranks, division.shard, division.nodes)
    finally:
        distributed.destroy_process_group()
