"""The blocks of an ordinary network as the steps of a chain, while the network's own code goes on calling them one by one.

    for block in self.layers:                      x is w[k], and the block returns
        x = block(x, mask, rope)                   w[k+1] = a w[k] + b w[k-1] + c f(w[k])        f is the whole block

The function that replaces a block's `forward` looks up w[k-1] by the identity of its input: the tensor that the block before
has returned. So the loop may pass other arguments to every block, take what else the blocks return, collect the states, leave
out blocks, or stop early. A block that is given any other tensor is the first step of a new chain, with w[k-1] = w[k]:
w[k+1] = (a + b) w[k] + c f(w[k]).

States are on a grid, in float32, or in float64 where a network has that or 24 digits cannot hold them. A block is given its
state in the dtype of the tensor that it was called with, and what it returns has the dtype that the block by itself returns.

Hooks of a block are outside of its step: they run once, and see states.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from revzoo.block_steps.chain_position import Position, find_position, is_noted, note_position
from revzoo.block_steps.checkpointing import Checkpoints, is_checkpointed, leave_checkpoint, refuse_second_run
from revzoo.block_steps.conventions import (
    find_place,
    find_state,
    get_state,
    is_cache,
    is_empty_cache,
    leave_out_caches,
    put_state,
    replace_state,
)
from revzoo.block_steps.head_groups import HeadGroup
from revzoo.block_steps.norm_pieces import cut_next_norm, leave_next_norm, norms_in_pieces
from revzoo.block_steps.state_grid import StateGrid, warn_of_lost_rows
from revzoo.device import can_read_now
from revzoo.dtype import HALF
from revzoo.errors import InputError
from revzoo.runtime.chain_link import run_link
from revzoo.runtime.compiling import (
    around,
    call_as_around,
    call_uncompiled,
    exclude_from_compilation,
    is_exporting,
    is_traced,
    warn_of_uncompiled,
)
from revzoo.runtime.coupling import Coupling, Pair
from revzoo.runtime.exact import Grid, attach_graph
from revzoo.runtime.forward import Forward
from revzoo.runtime.inventory import Pattern
from revzoo.runtime.layout import LayoutEntry, get_tiles, set_tiles
from revzoo.runtime.mode import Mode
from revzoo.runtime.nested import tensors_in
from revzoo.runtime.observation import begin_call
from revzoo.runtime.ownership import ModuleReference
from revzoo.runtime.round import Round, begin_round
from revzoo.runtime.schedule import check_schedule
from revzoo.runtime.seams import prepare_compiler
from revzoo.runtime.segment import InvertedSegment
from revzoo.runtime.tiles import Tile, cut_side, find_tiles
from revzoo.runtime.traced_chain import advance, begin
from revzoo.runtime.transforms import must_store, refuse_exact_derivatives
from revzoo.runtime.update import Step, StepUpdate

_USUAL_GRID = StateGrid()
# What to do where states leave the grid.
_COARSER = (
    "call revzoo.ordinary_(model) and reversible_ again: with batch=, a batch like this one, for which it chooses a grid, or "
    "with fewer fraction_bits"
)


class BlockChain:
    """What the steps of one list of blocks share.

    Args:
        path: of the list in the network; with a slice, as in "blocks[2:5]", if the list has several chains.
        owner: the module that has the list.
        blocks: names of the blocks in the network: all of the list, or those of it that follow one another and fit.
        coupling: of every step; it keeps bits.
        branches: the names of the two residual branches, if each is a step of its own.
        keep: names the submodules whose outputs are kept.
        grid: of the states. Usual are states in float64 in a network of that dtype, and in float32 in all others.
    """

    lookahead: Literal[0] = 0  # how many steps are recovered ahead of backward

    def __init__(
        self,
        path: str,
        owner: nn.Module,
        blocks: Sequence[str],
        coupling: Coupling,
        branches: tuple[str, ...] = (),
        keep: Sequence[Pattern] = (),
        grid: StateGrid = _USUAL_GRID,
    ):
        self.path = path
        self.branches = branches
        self._owner = ModuleReference(owner)
        self.blocks = blocks
        self.coupling = coupling
        self.schedule = "invert"
        self._before_plan: tuple[list[Mode], list[int]] | None = None
        self.keep = keep
        self.set_grid(grid)
        self._beginnings = 0
        self.members: list[BlockStep] = []
        self.checkpoints = Checkpoints(self._owner, self.members)
        self.traced: tuple[Any, Any] = None, None  # while a forward is traced: what a block has returned, and the states
        self.restarts: dict[str, None] = {}  # steps that have begun a chain without being the first
        self.end = nn.Identity()  # for observers, it stands for what the network computes after the last step

    @property
    def owner(self) -> nn.Module | None:
        """The module that has the list; None if only its blocks are left."""
        return self._owner()

    @property
    def list_path(self) -> str:
        """The path of the list."""
        return self.blocks[0].rpartition(".")[0]

    @property
    def names(self) -> list[str]:
        """The names of the steps: those of the blocks, and of their branches if blocks are split."""
        if not self.branches:
            return list(self.blocks)
        return [f"{block}.{branch}" for block in self.blocks for branch in self.branches]

    @property
    def state_bytes(self) -> int:
        """Of an element of a state."""
        return self.input_bytes if self.states is None else self.states.itemsize

    @property
    def input_bytes(self) -> int:
        """Of an element of what blocks are given: those of float64 in a network of that dtype, otherwise of float32."""
        blocks = (block for member in self.members if (block := member._block()) is not None)
        return 8 if any(p.dtype is torch.float64 for block in blocks for p in block.parameters()) else 4

    @property
    def schedule(self) -> list[Mode]:
        """The mode of every step. Assign a list, or the name of one mode for all."""
        return list(self._schedule)

    @schedule.setter
    def schedule(self, modes: Sequence[str] | str) -> None:
        self._schedule = check_schedule(modes, self.names)

    @property
    def tiles(self) -> list[int]:
        """Into how many tiles every step is cut: a whole block or a first branch along examples, a second one along tokens."""
        return get_tiles(self.layout())

    @tiles.setter
    def tiles(self, tiles: int | Sequence[int]) -> None:
        set_tiles(self.layout(), tiles)

    def set_grid(self, grid: StateGrid) -> None:
        """Take this grid for the states from now on."""
        self.states, self.smallest_row = grid.states, grid.smallest_row
        self.coupling = replace(self.coupling, fraction_bits=grid.fraction_bits)

    def look_at_rows(self, state: Tensor, scale: float, name: str) -> None:
        """Warn if the grid is too coarse for a first state: any on a CPU, elsewhere the 1st, 2nd, 4th, 8th, ..."""
        self._beginnings += 1
        if can_read_now(state) or not self._beginnings & (self._beginnings - 1):  # other devices have to be waited for
            self.smallest_row = warn_of_lost_rows(state, scale, self.smallest_row, name)

    def begin_plan(self) -> None:
        """Remember schedule and tiles, since a plan brings others. If a plan replaces a plan, the first ones count."""
        self._before_plan = self._before_plan or (self.schedule, self.tiles)

    def end_plan(self) -> None:
        """Go back to the schedule and tiles from before the plan, if there was a plan."""
        if self._before_plan is not None:
            self.schedule, self.tiles = self._before_plan
        self._before_plan = None

    def layout(self) -> list[LayoutEntry]:
        """Return the steps in order, by their names within the list."""
        steps = sorted(self.members, key=attrgetter("index"))
        names = (name.removeprefix(f"{self.list_path}.") for name in self.names)
        return [LayoutEntry(name, step, "step") for name, step in zip(names, steps, strict=True)]


@dataclass
class BlockOutput:
    """What a block has returned in its first run.

    Args:
        value: the whole result.
        dtype: of the state in it.
        place: of the state in it, if it is a tuple.
        extras: what submodules have returned besides the state, by path.
    """

    value: Any = None
    dtype: torch.dtype | None = None
    place: int = 0
    extras: dict[str, Any] = field(default_factory=dict)


class Arguments(NamedTuple):
    """The side input of a step: the arguments that its block was called with, with an empty place for the state.

    Args:
        positional: of the call.
        keywords: of the call.
        key: the keyword of the state; None if it is the first positional argument.
        dtype: of the state that the block is given.
        returned: gets what the block returns, in a first run.
        extras: what submodules have returned in an earlier step of this block, by path.
        examples: how many the state has, or that of which this is a tile.
        group: the heads that run; None for all.
    """

    positional: tuple[Any, ...]
    keywords: dict[str, Any]
    key: str | None
    dtype: torch.dtype
    returned: BlockOutput
    extras: dict[str, Any]
    examples: int
    group: HeadGroup | None = None

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What may be cut."""
        return self.positional, self.keywords

    def cut(self, tile: Tile, x: Tensor, examples: Mapping[str, bool]) -> "Arguments":
        """Return those of a tile of the state x."""
        positional, keywords = cut_side(self.arguments, tile, x, examples)
        return self._replace(positional=positional, keywords=keywords)


class BlockStep(nn.Module):
    """A step of a chain whose f is a block of a network; it stands in place of the block's `forward`.

    The network does not know it: it is no submodule, and changes no keys.

    Args:
        block: the block.
        chain: what it shares with the other blocks of its list.
        index: its place in the list.
        place: of the state among what the block returns; None if its shape tells it in every call.
    """

    compiles_inside = True  # `call_as_around` is for the block's own code

    def __init__(self, block: nn.Module, chain: BlockChain, index: int, place: int | None = None):
        self._block = ModuleReference(block)
        super().__init__()
        self.chain = chain
        self.index = index
        self.place = place
        self._own_forward = block.__dict__.get("forward")
        chain.members.append(self)

    @property
    def block(self) -> nn.Module:
        """The block. While backward may call it again, what is recorded of its first call keeps it alive."""
        return cast(nn.Module, self._block())

    @property
    def stands_for(self) -> nn.Module:
        """The module whose tensors are those of this step."""
        return self.block

    @property
    def _modules(self) -> dict[str, nn.Module | None]:  # what makes the block a submodule, for whoever walks through modules
        return {"block": self._block()}

    @_modules.setter
    def _modules(self, modules: dict[str, nn.Module | None]) -> None:
        pass  # nn.Module begins with none

    def install(self) -> None:
        """Stand in place of the block's `forward`."""
        self.block.__dict__["forward"] = self.call
        if self.index == 0:
            self.chain.checkpoints.watch()

    def remove(self) -> None:
        """Give the block its own `forward` back."""
        if self.index == 0:
            self.chain.checkpoints.end_watch()
            leave_next_norm(self.chain.owner)
        if self._own_forward is None:
            self.block.__dict__.pop("forward", None)
        else:
            self.block.__dict__["forward"] = self._own_forward

    @property
    def name(self) -> str:
        """The block's name in the network, and that of the branch if it is split."""
        return self.chain.names[self.index]

    @property
    def is_ordinary(self) -> bool:
        """Whether the block is no step in its present mode: in evaluation, with a sign that is random in training."""
        return not self.block.training and self.chain.coupling.in_evaluation.b == 0

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in place of the block's `forward`."""
        if self.is_ordinary:
            return self.call_block(*args, **kwargs)
        if is_traced() and not self._can_be_traced():
            return call_uncompiled(self.advance, args, kwargs)
        return self.advance(args, kwargs)

    def advance(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the block returns for these arguments, with a later state of the chain in place of its own."""
        return self.run(args, kwargs, BlockOutput(), {})

    def call_block(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block's own `forward`."""
        call = call_as_around
        if not torch.compiler.is_compiling() and around.get() is not None and not self._is_whole:
            call = call_uncompiled  # what is cut or silenced is so for a while
            warn_of_uncompiled()
        if self._own_forward is None:
            return call(type(self.block).forward, self.block, *args, **kwargs)
        return call(self._own_forward, *args, **kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], returned: BlockOutput, extras: dict[str, Any]) -> Any:
        """Call the block with these arguments; see `Arguments` for the others."""
        x, key = find_state(self.block, self.name, args, kwargs)
        arguments = Arguments(*put_state(None, key, args, kwargs), key, x.dtype, returned, extras, x.shape[0])
        if is_exporting():
            raise InputError(
                f"{self.name} is a step of a reversible chain, whose older state torch.export cannot follow. Export the "
                "ordinary network: revzoo.ordinary_(model)."
            )
        if is_traced():
            return self._trace(x, arguments)
        if torch.is_grad_enabled():
            return self._run_recorded(x, arguments)
        return self._run_plain(x, arguments)

    def forward(self, state: Tensor, arguments: Arguments) -> Tensor:
        """Return f(w[k]): what the block returns in place of the state that it is given."""
        if is_checkpointed(self.block):  # switched on since forward, or the owner was not called as a module
            self.chain.checkpoints.pass_by(self.block)
        returned = arguments.returned
        x = state.to(arguments.dtype)
        positional, keywords = put_state(x, arguments.key, arguments.positional, arguments.keywords)
        with norms_in_pieces(self, arguments.examples, state, x):
            value = self.call_block(*positional, **keywords)
        place = find_place(value, state) if self.place is None else self.place
        out = get_state(value, place)
        if not isinstance(out, Tensor):
            raise InputError(
                f"{self.name} must return its new state, alone or among its results. Received: "
                f"{type(value).__name__}{'' if out is value else f' with {type(out).__name__} in place {place}'}."
            )
        if out.shape != state.shape:
            raise InputError(
                f"{self.name} changes its state from {tuple(state.shape)} to {tuple(out.shape)}, and a step returns one of the "
                "same shape. Call revzoo.ordinary_(model), then reversible_ with batch=: such blocks then stay ordinary."
            )
        if returned.dtype is None:
            returned.value, returned.dtype, returned.place = replace_state(value, None, place), out.dtype, place
        return out

    @exclude_from_compilation
    def _run_plain(self, x: Tensor, arguments: Arguments) -> Any:
        return self._run(x, arguments, Mode.STORE)

    @exclude_from_compilation
    def _run_recorded(self, x: Tensor, arguments: Arguments) -> Any:
        if must_store():
            return self._run_plain(x, arguments)
        mode = self.chain._schedule[self.index]
        arguments, may_repeat = self._leave_out_caches(arguments)
        if not may_repeat:
            mode = Mode.STORE
        with leave_checkpoint():
            return self._run(x, arguments, mode)

    @property
    def _is_whole(self) -> bool:
        """Whether nothing is done to the block's own code."""
        return type(self) is BlockStep and find_tiles(self) is None and not self.chain.keep

    def _can_be_traced(self) -> bool:
        """Return whether the whole block can be a part of a graph that is traced."""
        return self._is_whole and self.block._compiled_call_impl is None and prepare_compiler() > 1

    def _trace(self, x: Tensor, arguments: Arguments) -> Any:
        chain, returned = self.chain, arguments.returned
        arguments, may_repeat = self._leave_out_caches(arguments)
        mode = chain._schedule[self.index] if may_repeat and torch.is_grad_enabled() else Mode.STORE
        dtype = chain.states or (torch.float32 if x.dtype in HALF else x.dtype)
        grid = Grid(dtype, chain.coupling.fraction_bits)
        y, pair = chain.traced
        if y is not x:
            first = grid.round(x)
            pair = begin(first), begin(first)
        update = StepUpdate(chain.coupling.bind(pair), grid, pair[0], mode.inverts)
        pair = advance(update, pair, self.forward(pair[1], arguments), mode, is_exact=True)
        y = pair[1].to(cast(torch.dtype, returned.dtype))
        chain.traced = (y, pair) if self.index + 1 < len(chain._schedule) else (None, None)
        return replace_state(returned.value, y, returned.place)

    def _run(self, x: Tensor, arguments: Arguments, mode: Mode) -> Any:
        pair, segment, grid, round = self._find_states(x)
        forward = Forward(x, side=arguments, grid=grid, keep=self.chain.keep)  # settings may differ from block to block
        forward.round = round
        has_cache = any(map(is_cache, (*arguments.positional, *arguments.keywords.values())))
        # What hooks inside collect, such as attentions, is to be of the whole state.
        collects = any(key.startswith("output_") and value is True for key, value in arguments.keywords.items())
        is_whole = has_cache or collects or not (torch.is_grad_enabled() or self.block.training)
        try:
            with forward:
                step = Step(self, self.name, self.chain.coupling, mode, is_whole)
                pair, segment = run_link(step, pair, segment, forward)
        finally:  # the graph holds it
            value, arguments.returned.value = arguments.returned.value, None
        if not is_whole and find_tiles(self) is not None and next(tensors_in(value), None) is not None:
            raise InputError(f"{self.name} is cut into tiles, and may return nothing but its state. Leave tiles out.")
        if segment is not None:
            segment.end(pair)
        is_last = self.index + 1 == len(self.chain._schedule)
        if is_last:
            begin_call(self.chain.end, pair[1:], pair)
            cut_next_norm(self, self.chain.owner, len(x))
        y = pair[1].to(cast(torch.dtype, arguments.returned.dtype))
        if not is_last:
            note_position(y, Position(self.chain, pair[0], None if y is pair[1] else pair[1], segment, grid, round))
        return replace_state(value, y, arguments.returned.place)

    def _find_states(self, x: Tensor) -> tuple[Pair, InvertedSegment | None, Grid, Round | None]:
        """Return the states before this step, the inverted steps that it may go on with, and what all steps share."""
        refuse_exact_derivatives("Call revzoo.ordinary_(model) first.")
        dtype = self.chain.states or (torch.float32 if x.dtype in HALF else x.dtype)
        position = find_position(x, self.chain)
        if position is None or position.grid.dtype != dtype:
            if self.index:
                refuse_second_run(self.name)
                self.chain.restarts[self.name] = None
            schedule = self.chain._schedule
            will_invert = any(mode.inverts for mode in schedule)
            grid = Grid(dtype, self.chain.coupling.fraction_bits, will_invert, remedy=_COARSER)
            first = grid.round(x)
            grid.watch(first, f"as the input of {self.name}")
            self.chain.look_at_rows(x, grid.scale, self.name)
            return (first, first), None, grid, begin_round(self, x, tuple(schedule))
        current, segment = position.current, position.segment
        if current is None:
            current = _rename(x)
        elif not is_noted(x):  # FSDP's node of the graph has to see the gradient
            current = attach_graph(current, (1.0,), x)
        if segment is not None and not segment.ends_with(position.length):
            segment = None  # another block has been called with x, too, or there has been a backward
        return (position.previous, current), segment, position.grid, position.round

    def _leave_out_caches(self, arguments: Arguments) -> tuple[Arguments, bool]:
        """Return the arguments without a cache of keys and values, and whether the block may run a second time.

        A block writes into its cache, which a second run must not repeat. Nobody reads the empty cache that a network makes in
        training, so that one stays empty in every mode. With any other cache, the block runs only once.
        """
        caches = [x for x in (*arguments.positional, *arguments.keywords.values()) if is_cache(x)]
        if not caches:
            return arguments, True
        if not self.block.training or not all(map(is_empty_cache, caches)):
            return arguments, False
        positional, keywords = leave_out_caches(arguments.positional, arguments.keywords)
        return arguments._replace(positional=positional, keywords=keywords), True


def get_step(block: nn.Module) -> BlockStep | None:
    """Return the step that stands in place of a block's `forward`, if one does."""
    step = getattr(block.__dict__.get("forward"), "__self__", None)
    return step if isinstance(step, BlockStep) else None


def _rename(x: Tensor) -> Tensor:
    """Return another tensor with the memory and the gradient of x.

    The position of a tensor that a block has returned lives as long as this tensor, and holds the state before it. What
    autograd saves lives as long as the graph. So autograd must save another tensor than the one that was returned.
    """
    return attach_graph(x.detach(), (1.0,), x)
