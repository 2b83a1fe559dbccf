"""What PyTorch offers by itself for the same blocks: plain autograd, checkpointing, and AOTAutograd's memory budget."""

from collections.abc import Sequence
from typing import Any

import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_module
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import checkpoint

from comparison.net import Pair


class Loop(nn.Module):
    """The blocks one after another, every activation stored.

    Shapes: x1, x2: any that the steps take; returns y1, y2 likewise.
    Args:
        steps: F and G of every block.
    """

    def __init__(self, steps: Sequence[nn.Module]):
        super().__init__()
        self.steps = nn.ModuleList(steps)

    def forward(self, x1: Tensor, x2: Tensor) -> Pair:
        return self.run(0, len(self.steps), x1, x2)

    def run(self, start: int, stop: int, x1: Tensor, x2: Tensor) -> Pair:
        """Run the steps from start up to stop."""
        for i in range(start, stop, 2):
            x1 = x1 + self.steps[i](x2)
            x2 = x2 + self.steps[i + 1](x1)
        return x1, x2


class Checkpointed(Loop):
    """The same under `torch.utils.checkpoint`, in segments of equally many blocks.

    Args:
        steps: F and G of every block.
        square_root: about sqrt(n) segments for n blocks, the last of them stored; else one segment for every block.
    """

    def __init__(self, steps: Sequence[nn.Module], square_root: bool = False):
        super().__init__(steps)
        self.square_root = square_root

    def forward(self, x1: Tensor, x2: Tensor) -> Pair:
        blocks = len(self.steps) // 2
        size = blocks // max(round(blocks**0.5), 1) if self.square_root else 1
        starts = range(0, blocks, size)
        for first in starts:
            segment = 2 * first, min(2 * (first + size), len(self.steps))
            if self.square_root and first == starts[-1]:
                return self.run(*segment, x1, x2)
            x1, x2 = checkpoint(self.run, *segment, x1, x2, use_reentrant=False)
        return x1, x2


class Compiled(nn.Module):
    """The loop under `torch.compile`, with a budget for what the partitioner of its graph may save.

    Shapes: x1, x2: any that the steps take; returns y1, y2 likewise.
    Args:
        steps: F and G of every block.
        budget: from 0, where only the inputs of the graph are saved, to 1, the partitioner's default.
        backend: of `torch.compile`; the default cuts the graph as inductor does and runs the halves operation by operation.
    """

    def __init__(self, steps: Sequence[nn.Module], budget: float, backend: str = "aot_eager_decomp_partition"):
        super().__init__()
        self.loop = Loop(steps)
        self.loop.compile(backend=backend)
        self.budget = budget

    def forward(self, x1: Tensor, x2: Tensor) -> Pair:
        with functorch_config.patch(activation_memory_budget=self.budget):
            out: Pair = self.loop(x1, x2)
        return out


class Partitioned(nn.Module):
    """What `Compiled` runs, without the layer that steps aside where operations are counted.

    Shapes: x1, x2: any that the steps take; returns y1, y2 likewise.
    Args:
        steps: F and G of every block.
        budget: as for `Compiled`.
    """

    def __init__(self, steps: Sequence[nn.Module], budget: float):
        super().__init__()
        self.budget = budget
        self.traced = aot_module(
            Loop(steps),
            fw_compiler=_run_as_it_is,
            bw_compiler=_run_as_it_is,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )

    def forward(self, x1: Tensor, x2: Tensor) -> Pair:
        with functorch_config.patch(activation_memory_budget=self.budget):
            y1, y2 = self.traced(x1, x2)
        return y1, y2


def _run_as_it_is(graph: Any, _: Any) -> Any:
    return make_boxed_func(graph)
