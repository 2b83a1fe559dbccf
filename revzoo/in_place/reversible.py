"""Make a network reversible where it stands: its blocks become the steps of a chain, and it stays what it is.

Class, parameters, state-dict keys and configuration are those of the network; only the `forward` of each block is another one
(`block_steps/block_chain.py`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from revzoo.analysis.dry_run import in_mode
from revzoo.analysis.flops import FEW_FLOPS, FlopCounter
from revzoo.analysis.likeness import on_grid_of_training, warn_of_another_function
from revzoo.analysis.tiles import choose_tiles
from revzoo.block_steps.block_chain import BlockChain, BlockStep, get_step
from revzoo.block_steps.branch import BranchStep
from revzoo.block_steps.saved_setting import drop_setting, keep_setting, take_saved_grid
from revzoo.block_steps.state_grid import FRACTION_BITS, StateGrid, StateSizes, choose_grid
from revzoo.bounds import MOST_KEPT_BITS, Sign
from revzoo.device import has_float64, has_value
from revzoo.dtype import HALF
from revzoo.errors import InputError, UnknownNameError, join_names
from revzoo.in_place.block_lists import choose_chains, find_lists
from revzoo.in_place.chunk_loss import ChunkedHead, get_chunked_head
from revzoo.in_place.peaks import Peaks, count_peaks
from revzoo.in_place.similarity import Similarity, measure_similarity, run_network
from revzoo.in_place.split import Branches, Split, find_branches
from revzoo.in_place.survey import BlockSurvey, survey_blocks
from revzoo.runtime.coupling import Coupling, dual_residual, momentum
from revzoo.runtime.exact import GRIDS
from revzoo.runtime.inventory import Pattern, check_patterns
from revzoo.runtime.nested import tensors_in

BlockCoupling = Literal["momentum", "dual_residual"]
_KEEP_NEARER = (
    "More kept_bits keep it nearer to the original; or more fraction_bits, where states are small; or another list of blocks "
    "(its path). revzoo.plan(model, batch, budget) changes no function."
)


_ORDINARY = ", with a random sign for each example and step in training; in evaluation it is the ordinary network"


@dataclass(frozen=True)
class ReversibleReport:
    """What `reversible_` did with a network. Printed, it also says what the batch has shown.

    Args:
        chains: the lists of blocks that are chains now. Each has a `schedule`, the mode of every block.
        similarity: of the outputs on the batch, before and after; None without a batch.
        peaks: of a training step on the batch, stored, checkpointed and reversible; None without a batch. A text says why they
            could not be counted.
        restarts: the blocks on the batch that were given another tensor than the block before them returned, so that they began
            a chain of their own.
        ordinary: the blocks of the lists that are no steps, each with the reason.
        left: paths of the other lists of such blocks.
        notes: of each chain what its steps are and keep, and what there is to say about the choice of the grids.
    """

    chains: tuple[BlockChain, ...] = field(repr=False, compare=False)
    similarity: Similarity | None
    peaks: Peaks | str | None
    restarts: tuple[str, ...]
    ordinary: tuple[str, ...]
    left: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def steps(self) -> int:
        """The number of steps of all chains."""
        return sum(len(chain.names) for chain in self.chains)

    @property
    def kept_bytes_per_element(self) -> tuple[float, ...]:
        """What each chain keeps from forward to backward: bytes for every element of its state, all steps together."""
        return tuple(map(_count_kept_bytes, self.chains))

    def __str__(self) -> str:
        lines = [*self.notes, *(str(each) for each in (self.similarity, self.peaks) if each is not None)]
        if self.restarts:
            lines.append(
                f"{len(self.restarts)} of {sum(len(chain.blocks) for chain in self.chains)} blocks begin a chain of their own, "
                f"with two more states: {join_names(self.restarts, most=3)}. The network's code changes the state before them. "
                "Move that code into the forward of the blocks, or make lists reversible that it does not reach into."
            )
        if self.ordinary:
            lines.append(f"ordinary blocks: {join_names(self.ordinary, most=3)}")
        if self.left:
            lines.append(f"left as they are: {join_names(self.left)}; name them to make them reversible, too")
        return "\n".join(lines)


def reversible_(
    model: nn.Module,
    *paths: str,
    batch: Any = None,
    coupling: BlockCoupling = "momentum",
    kept_bits: int = 8,
    sign: Sign = "fixed",
    fraction_bits: int | None = None,
    split: Split | None = None,
    tiles: int | Literal["auto"] = 1,
    keep: Iterable[Pattern] = (),
) -> ReversibleReport:
    """Change a network in place so that its blocks are the steps of reversible chains, rebuilt in backward.

    Class, parameters and state-dict keys stay, so the network goes on with its Trainer, peft, `generate` and `save_pretrained`.
    Grid, bits and sign are saved with the weights, in a state dict's metadata and as the entry `revzoo` of a configuration of
    Transformers, and taken from there again. Its function becomes w[k+1] = f(w[k]) + 2^-kept_bits (w[k] - w[k-1]), where f is a
    whole block: with 8 bits very nearly the original one. With a random sign of 2^-kept_bits in training, one bit is enough,
    and in evaluation it is the original one. Gradients are exact. Not worth it for few blocks, or where weights fill the
    memory.

    Args:
        model: an ordinary network, before it is compiled.
        paths: of lists of blocks (ModuleList or Sequential) in it, such as "model.layers". None: the list with the most blocks
            that can be steps, and those whose paths differ from it only in numbers, such as all "stages.*.blocks". In a list,
            every run of two or more such blocks is a chain; the others stay ordinary, and the report says why.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments. With one, the network is
            run on it before and after: it shows which blocks can be steps, and each chain has a grid that fits its states, also
            those of training. The report says how much the outputs differ (with a warning if their cosine is below 0.99), and
            whether a training step takes less than with gradient checkpointing. Without one, blocks of one class and size are
            taken.
        coupling: "momentum", or "dual_residual", w[k+1] = f(w[k]) + 2^-kept_bits w[k-1].
        kept_bits: from 1 to 15: fewer keep less, and change the function more.
        sign: "random": w[k+1] = f(w[k]) + g (w[k-1] - w[k]), where g is 2^-kept_bits or its negative, drawn in training for
            each example (place along dimension 0 of the state) and step. Blocks in eval mode are the ordinary ones, to the bit,
            and keep what those keep. Take kept_bits=1. Needs the momentum coupling.
        fraction_bits: binary digits of the states after the point; states stay below 2^(24 - fraction_bits). None: those that
            were saved with the network, or what fits the batch, or 16.
        split: the two residual branches of a block, each to be a step of its own: ("attention", "mlp") for what timm and
            Transformers call so, or the submodules that compute them, such as ("attn", ("fc1", "fc2")). Keeps twice the bits;
            in backward one branch at a time keeps what autograd saves in it. Needs a batch, to see that the two are the block.
        tiles: into how many pieces every step is cut, so that backward holds what autograd saves in one of them: a whole block,
            and the first branch of a split one, along examples, the second branch along tokens. The first forward tests it.
            "auto": as few as bring the peak down to that of something else (`revzoo.choose_tiles`); needs a batch.
        keep: submodules of blocks whose outputs are kept for backward: names ("*.router"), classes, or functions of a module.
            Those that return integers, as routers of mixtures of experts do, are kept anyway.
    Raises:
        UnknownNameError: no list of blocks of this path, or no such coupling.
        InputError: a network that is compiled, planned or reversible already; a path or number that is none.
        ConversionError: no two blocks of a list can be steps, with the reasons; or a training step on the batch fails. The
            network is then as it was.
    Cost: two states for each chain, kept_bits for each element and step (and a byte for each example, if signs are random), and
        one extra forward of each block.
    """
    lists = find_lists(model, paths, has_batch=batch is not None)
    _require_numbers(coupling, kept_bits, fraction_bits)
    _require_sign(sign, coupling)
    if split is not None:
        _require_split(split, batch)
    if tiles == "auto" and batch is None:
        raise InputError("tiles='auto' counts training steps. Give it one: reversible_(model, batch=batch, tiles='auto').")
    has_values = batch is not None and all(map(has_value, (*model.parameters(), *tensors_in(batch))))
    surveys, before, notes = survey_blocks(model, lists, batch) if has_values else (None, None, [])
    chosen, ordinary, left = choose_chains(model, lists, surveys, is_named=bool(paths))
    branches = {} if split is None else find_branches(model, chosen, split, batch)
    names = () if split is None else tuple(name if isinstance(name, str) else name[0] for name in split)
    chains, steps = list[BlockChain](), list[BlockStep]()
    for path, blocks in chosen.items():
        owner = model.get_submodule(next(iter(blocks)).rpartition(".")[0].rpartition(".")[0])
        grid, recurrence = StateGrid(fraction_bits=fraction_bits), _make_coupling(coupling, kept_bits, sign, fraction_bits)
        chain = BlockChain(path, owner, list(blocks), recurrence, names, check_patterns(keep), grid)
        if fraction_bits is None and not take_saved_grid(model, chain) and surveys is not None:
            grid, note = _choose_grid(model, [surveys[name] for name in blocks])
            chain.set_grid(grid)
            notes += [f"{path}: {note}"] if note else []
        chains.append(chain)
        for i, (name, block) in enumerate(blocks.items()):
            if split is None:
                steps.append(BlockStep(block, chain, i, place=None if surveys is None else surveys[name].place))
            else:
                first, second = branches[block]
                steps.append(BranchStep(block, chain, 2 * i, first, BranchStep(block, chain, 2 * i + 1, second)))
        chain.tiles = 1 if tiles == "auto" else tiles
    similarity, peaks = None, None
    try:
        for step in steps:
            step.install()
        if tiles == "auto":
            with in_mode(model, training=True):
                choose_tiles(model, batch)
        if before is not None:
            with FlopCounter() as flops:
                similarity = measure_similarity(before, run_network(model, batch), batch)
            peaks = count_peaks(model, batch, steps, fake=flops.forward * 4 > FEW_FLOPS)
            remedy = " ".join([*(f"{note}." for note in notes), _KEEP_NEARER])
            name, cosine = type(model).__name__, similarity.cosine
            if sign == "random":  # only training is on the grid
                with on_grid_of_training(chains):
                    name, cosine = f"{name} in training", measure_similarity(before, run_network(model, batch), batch).cosine
            warn_of_another_function(name, cosine, remedy)
        report = ReversibleReport(
            tuple(chains),
            similarity,
            peaks,
            tuple(name for chain in chains for name in chain.restarts),
            tuple(f"{name} {reason}" for name, reason in ordinary.items()),
            left,
            (
                f"{type(model).__name__}: {coupling} coupling, {kept_bits} bit{'s' * (kept_bits > 1)} kept of every element "
                f"and step{_ORDINARY if sign == 'random' else ''}",
                *(_describe(chain, blocks.values(), branches) for chain, blocks in zip(chains, chosen.values(), strict=True)),
                *notes,
            ),
        )
    except BaseException:
        for step in steps:
            step.remove()
        raise
    keep_setting(model, chains)
    return report


def ordinary_(model: nn.Module) -> None:
    """Undo `reversible_` and `chunk_loss_`: the network computes and keeps what it did before. Its weights stay.

    Args:
        model: a network that one of them changed, or both.
    Raises:
        InputError: it has no reversible blocks, and its loss is not in chunks.
    """
    steps: list[BlockStep | ChunkedHead] = []
    for module in model.modules():
        steps += [step for step in (get_step(module), get_chunked_head(module)) if step is not None]
    if not steps:
        raise InputError(
            f"No block of this {type(model).__name__} was made reversible by reversible_, nor was its loss changed by "
            "chunk_loss_, so nothing can be undone."
        )
    chains = {step.chain.path: step.chain for step in steps if isinstance(step, BlockStep)}.values()
    try:
        for step in steps:
            step.remove()
        drop_setting(model, chains)
    except BaseException:  # half of a chain would be another function
        for step in steps:
            step.install()
        raise


def _choose_grid(model: nn.Module, surveys: Iterable[BlockSurvey]) -> tuple[StateGrid, str]:
    """Return the grid of a chain of these blocks, and what to say of it."""
    evaluation, training = StateSizes(), StateSizes()
    dtype = torch.float32
    for survey in surveys:
        evaluation, training = evaluation | survey.sizes, training | survey.training_sizes
        dtype = dtype if survey.state is None or survey.state[1] in HALF else survey.state[1]
    return choose_grid(evaluation, training, dtype, all(has_float64(p.device) for p in model.parameters()))


def _describe(chain: BlockChain, blocks: Iterable[nn.Module], branches: Mapping[nn.Module, Branches]) -> str:
    """Return what the steps of a chain are and keep, in words."""
    classes = " or ".join(dict.fromkeys(type(block).__name__ for block in blocks))
    each = f"each a {classes}"
    if branches:
        parts = dict.fromkeys(", then ".join(join_names(branch.parts) for branch in branches[block]) for block in blocks)
        each = f"two of each {classes} ({' or '.join(parts)})"
    stored, digits = chain.input_bytes * len(chain.blocks), chain.coupling.fraction_bits
    dtypes = f"{stored} in float64" if chain.input_bytes == 8 else f"{stored} in float32, {stored // 2} in half precision"
    cut = sorted({*chain.tiles} - {1})
    tiles = f", cut into {join_names([str(each) for each in cut])} tiles" if cut else ""
    usual = GRIDS[torch.float64 if chain.state_bytes == 8 else torch.float32][0]
    return (
        f"{chain.path}: {len(chain.names)} steps, {each}; they keep {_count_kept_bytes(chain):g} bytes for every element "
        f"of the state (their inputs alone would be {dtypes}), on a grid of 2^-{usual if digits is None else digits}{tiles}"
    )


def _count_kept_bytes(chain: BlockChain) -> float:
    # Two states, and the bits of every step but the first: the state before that one is not needed again.
    return 2 * chain.state_bytes + (len(chain.names) - 1) * cast(int, chain.coupling.kept_bits) / 8


def _make_coupling(name: BlockCoupling, kept_bits: int, sign: Sign, fraction_bits: int | None) -> Coupling:
    """Return the coupling of steps whose f contains its own residual."""
    if name == "momentum":
        return momentum(gain=1.0, residual=False, kept_bits=kept_bits, fraction_bits=fraction_bits, sign=sign)
    return dual_residual(alpha=0.0, kept_bits=kept_bits, fraction_bits=fraction_bits)


def _require_numbers(coupling: str, kept_bits: int, fraction_bits: int | None) -> None:
    if coupling not in get_args(BlockCoupling):
        raise UnknownNameError("coupling of blocks", coupling, get_args(BlockCoupling))
    if type(kept_bits) is not int or not 1 <= kept_bits <= MOST_KEPT_BITS:
        raise InputError(f"kept_bits is an integer from 1 to {MOST_KEPT_BITS}. Received: {kept_bits!r}.")
    least, most = FRACTION_BITS
    if fraction_bits is not None and not (type(fraction_bits) is int and least <= fraction_bits <= most):
        raise InputError(f"fraction_bits is an integer from {least} to {most}. Received: {fraction_bits!r}.")


def _require_sign(sign: str, coupling: str) -> None:
    if sign not in get_args(Sign):
        raise UnknownNameError("sign", sign, get_args(Sign))
    if sign == "random" and coupling != "momentum":
        raise InputError(f"A random sign is one of the momentum coupling. Received: {coupling}. Use coupling='momentum'.")


def _require_split(split: Any, batch: Any) -> None:
    names = list(split) if isinstance(split, tuple | list) else []
    parts = [[name] if isinstance(name, str) else name for name in names]
    if len(parts) != 2 or not all(isinstance(p, tuple | list) and p and all(isinstance(x, str) for x in p) for p in parts):
        raise InputError(
            "split is a pair of branches, each a name or several submodules: ('attention', 'mlp') or ('attn', ('fc1', 'fc2')). "
            f"Received: {split!r}."
        )
    if batch is None:
        raise InputError(
            "split runs the branches of a block one by one, and needs a batch to check them against the block. Received: none. "
            f"Give one: reversible_(model, batch=batch, split={split!r})."
        )
