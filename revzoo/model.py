"""The assembled network: stem, split, stages of reversible blocks joined by transitions, fuse, head."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from revzoo.errors import InputError
from revzoo.parts.head import PooledLinear
from revzoo.runtime.chain import Mode, Step, checked_schedule, run_chain
from revzoo.runtime.coupling import Coupling
from revzoo.runtime.exact import Grid, require_exact
from revzoo.runtime.node import run_node
from revzoo.spec.schema import Spec


class Block(nn.Module):
    """One reversible block: the step f and, unless the coupling works with one step a block, the step g.

    The chain calls the steps; a block only gives them their names.
    """

    def __init__(self, f: nn.Module, g: nn.Module | None):
        super().__init__()
        self.f = f
        if g is not None:
            self.g = g


class Stage(nn.Module):
    """Blocks of one width and, in front of them, the ordinary module that changes width or size."""

    def __init__(self, transition: nn.Module | None, blocks: Sequence[Block]):
        super().__init__()
        if transition is not None:
            self.transition = transition
        self.blocks = nn.ModuleList(blocks)


class Model(nn.Module):
    """A reversible network built from a spec; make one with `revzoo.create` or `revzoo.build`.

    The reversible steps between two transitions form one chain. Everything else is a node: stem, transitions, fuse and
    head keep their activations unless their mode is `recompute`. State-dict keys depend on the architecture alone.

    Shapes: images (B, C, H, W) of the spec's channels and size -> logits (B, outputs).
    """

    def __init__(
        self,
        spec: Spec,
        coupling: Coupling,
        stem: nn.Module,
        split: nn.Module,
        stages: Sequence[Stage],
        fuse: nn.Module,
        head: PooledLinear,
    ):
        super().__init__()
        self.spec = spec
        self.coupling = coupling
        self.stem = stem
        self.split = split
        self.stages = nn.ModuleList(stages)
        self.fuse = fuse
        self.head = head
        self._exact = False
        for name, step in self._named_steps():
            step.name = name
        self.schedule = "invert"

    @property
    def steps(self) -> list[nn.Module]:
        """The reversible steps, in order; each has a `.name` and is called like a module."""
        return [step for _, step in self._named_steps()]

    @property
    def units(self) -> tuple[str, ...]:
        """Names of all nodes and steps, in order: what `schedule` has one mode for."""
        names = ["stem"]
        for i, stage in enumerate(self.stages):
            names += [f"stages.{i}.transition"] if hasattr(stage, "transition") else []
            names += [name for name, _ in self._stage_steps(i)]
        return (*names, "fuse", "head")

    @property
    def schedule(self) -> list[Mode]:
        """The mode of every unit. Assign a list, one mode a unit, or one name: every step's mode, nodes then `store`.

        Raises:
            ScheduleError: wrong length, unknown mode, or `invert` for a node.
        """
        return list(self._schedule)

    @schedule.setter
    def schedule(self, modes: Sequence[str] | str) -> None:
        units = self.units
        steps = {name for name, _ in self._named_steps()}
        if isinstance(modes, str):
            modes = [modes if name in steps else "store" for name in units]
        checked = checked_schedule(modes, units)
        nodes = [(mode, name) for mode, name in zip(checked, units, strict=True) if name not in steps]
        checked_schedule([mode for mode, _ in nodes], [name for _, name in nodes], ("store", "recompute"))
        self._schedule = checked

    @property
    def exact(self) -> bool:
        """Whether the streams are kept on a grid, which makes inversion exact; see `revzoo.runtime.exact`."""
        return self._exact

    @exact.setter
    def exact(self, exact: bool) -> None:
        if not isinstance(exact, bool):
            raise InputError(f"exact is True or False. Received: {exact!r}.")
        if exact:
            require_exact(self.coupling)
            Grid(next(self.parameters()).dtype)  # refuses a dtype that has none
        self._exact = exact

    @property
    def num_outputs(self) -> int:
        """Number of classes of the head."""
        return self.head.outputs

    def reset_head(self, num_outputs: int) -> None:
        """Replace the last linear layer by a fresh one with `num_outputs` outputs, in the spec too.

        Raises:
            InputError: no integer >= 1.
        """
        self.head.reset(checked_outputs(num_outputs))
        head = replace(self.spec.head, arguments={**self.spec.head.arguments, "outputs": num_outputs})
        self.spec = replace(self.spec, head=head)

    def example_input(self, batch_size: int = 1, device: torch.device | str | None = None) -> Tensor:
        """Return random images of the spec's shape, (batch_size, C, H, W)."""
        channels, size = self.spec.input.channels, self.spec.input.size
        reference = next(self.parameters())
        return torch.randn(batch_size, channels, *size, device=device or reference.device, dtype=reference.dtype)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return what the head receives: the fused, normalised streams before pooling.

        Shapes: (B, C, H, W) -> (B, N, D) or (B, C', H', W'), as the fuse gives it.
        Raises:
            InputError: x is not a batch of the spec's images, of the parameters' dtype (autocast aside) and device.
        """
        if not torch.compiler.is_compiling():
            self._require_like_parameters(x)
        expected = (self.spec.input.channels, *self.spec.input.size)
        if tuple(x.shape[1:]) != expected:
            raise InputError(
                f"{self.spec.name} takes images (B, {', '.join(map(str, expected))}). Received: {tuple(x.shape)}. "
                "Another size is set with overrides=['input.size=[H,W]']."
            )
        modes = dict(zip(self.units, self._schedule, strict=True))
        pair = self.split(run_node(self.stem, "stem", modes["stem"], x))
        del x
        chain: list[Step] = []
        for i, stage in enumerate(self.stages):
            if isinstance(transition := getattr(stage, "transition", None), nn.Module):
                pair = run_chain(chain, *pair, exact=self.exact)
                name = f"stages.{i}.transition"
                pair = run_node(transition, name, modes[name], *pair)
                chain = []
            chain += [Step(step, name, self.coupling, modes[name]) for name, step in self._stage_steps(i)]
        pair = run_chain(chain, *pair, exact=self.exact)
        return cast(Tensor, run_node(self.fuse, "fuse", modes["fuse"], *pair))

    def forward(self, x: Tensor) -> Tensor:
        head_mode = self._schedule[-1]
        return cast(Tensor, run_node(self.head, "head", head_mode, self.forward_features(x)))

    def _require_like_parameters(self, x: object) -> None:
        """Raise InputError unless the stem can take x as what its parameters are."""
        name, own = self.spec.name, next(self.parameters())
        if not isinstance(x, Tensor) or not x.is_floating_point():
            received = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"{name} takes a tensor of floating-point images. Received: {received}.")
        if isinstance(own, DTensor) or own.is_meta:  # FSDP and Accelerate's offloading bring parameters when they are used
            return
        if x.device != own.device:
            raise InputError(f"{name} is on {own.device}. Received: images on {x.device}. Move them with x.to('{own.device}').")
        mixed = not x.is_meta and torch.is_autocast_enabled(x.device.type)  # meta has no autocast
        if x.dtype != own.dtype and not mixed:
            raise InputError(
                f"{name} has {own.dtype} parameters. Received: {x.dtype} images. Use x.to({own.dtype}) or autocast."
            )

    def _named_steps(self) -> Iterator[tuple[str, Any]]:
        for i in range(len(self.stages)):
            yield from self._stage_steps(i)

    def _stage_steps(self, i: int) -> Iterator[tuple[str, Any]]:
        for j, block in enumerate(cast(Stage, self.stages[i]).blocks):
            for branch, step in block.named_children():
                yield f"stages.{i}.blocks.{j}.{branch}", step


def checked_outputs(num_outputs: object) -> int:
    """Return a number of outputs, or raise InputError unless it is an integer >= 1."""
    if not isinstance(num_outputs, int) or isinstance(num_outputs, bool) or num_outputs < 1:
        raise InputError(f"num_outputs is an integer >= 1. Received: {num_outputs!r}.")
    return num_outputs
