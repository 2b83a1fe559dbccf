"""What the blocks of a network do on a batch: which can be steps of a chain, and why others cannot."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from revzoo.analysis.dry_run import call, in_mode, isolated
from revzoo.block_steps.checkpointing import without_checkpoints
from revzoo.block_steps.conventions import get_state, list_results, look_for_state
from revzoo.block_steps.state_grid import StateSizes
from revzoo.in_place.similarity import run_network, run_without_graph
from revzoo.runtime.attributes import Attributes
from revzoo.runtime.inventory import Inventory

_LEAST_FACTOR = 0.1  # of its input in what a residual block returns; norms make it smaller than 1
_NOTHING = torch.empty(0)  # in place of a result that is no tensor


@dataclass
class BlockSurvey:
    """What one block does on a batch.

    Args:
        calls: how often it was called.
        reason: why it cannot be a step, in words that follow its name; None if it can.
        state: shape and dtype of its state.
        place: of the new state among several results.
        is_clear: whether the state is seen in what the block returns; without enough elements it may be there all the same.
        sizes: of its states in eval mode.
        training_sizes: of its states in training mode; none for a network that is not trained.
    """

    calls: int = 0
    reason: str | None = None
    state: tuple[torch.Size, torch.dtype] | None = None
    place: int = 0
    is_clear: bool = False
    sizes: StateSizes = field(default_factory=StateSizes)
    training_sizes: StateSizes = field(default_factory=StateSizes)

    @torch.no_grad()
    def add_call(self, x: Any, state: Any, value: Any) -> None:
        """Consider a call.

        Args:
            x: its first argument, after it.
            state: a copy of that from before; x itself if it is no floating-point tensor.
            value: what the block has returned.
        """
        if isinstance(x, Tensor) and not x.numel():
            return  # an expert without tokens, for example
        self.calls += 1
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            self.reason = f"is given {kind} first, where the state has to be"
            return
        self.state = self.state or (x.shape, x.dtype)
        results = list_results(value)
        fitting = [i for i, t in enumerate(results) if isinstance(t, Tensor) and (t.shape, t.dtype) == (x.shape, x.dtype)]
        fitting = [i for i in fitting if results[i] is not x] or fitting  # x itself may be handed on
        counts = {i: _count_input(state, results[i]) for i in fitting}
        unrelated = [i for i, count in counts.items() if _lacks_state(*count)]
        if not fitting:
            out = get_state(value)
            self.reason = (
                f"changes its state from {tuple(x.shape)}, {x.dtype} to {tuple(out.shape)}, {out.dtype}"
                if isinstance(out, Tensor)
                else f"returns {type(value).__name__}, not a new state alone or among its results"
            )
        elif not torch.equal(x, state):
            self.reason = (
                "writes into what it is given, and a step must leave its state as it is: replace the in-place operation at its "
                "beginning (x += y, ReLU(inplace=True)) by one that returns a new tensor"
            )
        elif len(unrelated) == len(fitting):
            self.reason = _describe_lack(counts[fitting[0]][0])
        else:
            self.place = max(fitting, key=lambda i: counts[i][0] / (counts[i][1] or 1.0))
            factor, noise = counts[self.place]
            self.is_clear = factor > 3 * noise
            self.sizes.add(state)
            self.sizes.add(get_state(value, self.place))


def survey_blocks(
    model: nn.Module, lists: Mapping[str, Mapping[str, nn.Module]], batch: Any
) -> tuple[dict[str, BlockSurvey], Tensor, list[str]]:
    """Return what the blocks of lists do on a batch, by name; the main output of the network; and notes.

    The network is run in eval mode and, if it has parameters to train, in training mode; no trace of either run remains.
    """
    blocks = {name: block for members in lists.values() for name, block in members.items()}
    surveys: dict[str, BlockSurvey] = {}
    returned: dict[str, list[tuple[ReferenceType[Any], int]]] = {}  # the latest results, and how often each was written into

    def begin() -> None:
        surveys.update((name, BlockSurvey()) for name in blocks)
        returned.clear()

    def look_back(x: Any = None) -> None:
        """See what has become of results by now, when x is given to a block."""
        for name, results in returned.items():
            survey = surveys[name]
            for place, (reference, version) in enumerate(results):
                if (result := reference()) is None:
                    continue
                if result is x and survey.reason is None and survey.state == (x.shape, x.dtype):
                    survey.place = place  # what is given to the next block is the state
                if place == survey.place and result._version != version:
                    survey.reason = (
                        "returns a state that something writes into afterwards, and backward begins with it: replace the "
                        "in-place operation behind it (x += y, ReLU(inplace=True)) by one that returns a new tensor"
                    )

    def watch(name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = look_for_state(blocks[name], args, kwargs)[0]
        look_back(x)
        state = x.detach().clone() if isinstance(x, Tensor) else x
        value = forward(*args, **kwargs)
        look_back()  # the block may hold the last reference to what it has written into
        surveys[name].add_call(x, state, value)
        results = [t if isinstance(t, Tensor) and not t.is_inference() else _NOTHING for t in list_results(value)]
        returned[name] = [(ref(t), t._version) for t in results]
        return value

    with without_checkpoints(model):
        with watched_calls(blocks, watch):
            output = run_network(model, batch, begin)
        look_back()
        # A network without parameters to train will not be trained as it is.
        notes = _survey_training(model, blocks, surveys, batch) if any(p.requires_grad for p in model.parameters()) else []
    return surveys, output, notes


def _survey_training(
    model: nn.Module, blocks: Mapping[str, nn.Module], surveys: Mapping[str, BlockSurvey], batch: Any
) -> list[str]:
    """Add to surveys what blocks do in training mode; return a note if the network cannot be run so."""

    def follow(name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        survey, held = surveys[name], Inventory(blocks[name])
        fixed = held.fixed
        versions = [t._version for t in fixed]
        value = forward(*args, **kwargs)
        moved = next((t for t, version in zip(fixed, versions, strict=True) if t._version != version), None)
        if changed := held.find_replaced() if moved is None else held.name(moved):
            survey.reason = survey.reason or (
                f"changes its {changed!r} in forward, so a second run would not repeat the first (if its first call alone does "
                "so, call the network once before)"
            )
        if survey.reason is None and survey.calls:
            state, out = look_for_state(blocks[name], args, kwargs)[0], get_state(value, survey.place)
            for each in filter(torch.is_tensor, (state, out)):
                survey.training_sizes.add(each)
            # Norms that have not been fitted hide in eval mode what a block does.
            if isinstance(state, Tensor) and isinstance(out, Tensor) and state.shape == out.shape and state.numel():
                count = _count_input(state, out)
                survey.reason = _describe_lack(count[0]) if _lacks_state(*count) else None
        return value

    def run(gradients: bool) -> None:
        with isolated(model, batch) as inputs, in_mode(model, training=True), torch.set_grad_enabled(gradients):
            call(model, inputs)

    try:
        with watched_calls(blocks, follow):
            run_without_graph(run)
    except Exception as problem:  # of the network's own code: one that wants targets in training mode, for example
        for survey in surveys.values():
            survey.training_sizes = StateSizes()
        error = f"{type(problem).__name__}: {problem}".splitlines()[0]
        return [f"This batch cannot be run in training mode ({error}): grids fit the states in eval mode alone"]
    return []


@contextmanager
def watched_calls(
    blocks: Mapping[str, nn.Module], watch: Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
) -> Iterator[None]:
    """Let `watch` stand in place of the `forward` of blocks, where a step will stand: some networks call `forward` itself.

    It is given the block's name, its own `forward`, and the arguments; what it returns is what the block returns.
    """

    def stand_in(name: str, block: nn.Module) -> Callable[..., Any]:
        own = block.__dict__.get("forward") or partial(type(block).forward, block)
        return lambda *args, **kwargs: watch(name, own, args, kwargs)

    attributes = Attributes(*blocks.values())
    try:
        for name, block in blocks.items():
            block.__dict__["forward"] = stand_in(name, block)
        yield
    finally:
        attributes.restore()


def _count_input(state: Tensor, out: Tensor) -> tuple[float, float]:
    """Return how often a state is in what a block returned, and the deviation of that if it is not in it at all.

    Means of channels are taken off, if the state has more than them: any two outputs of ReLUs have those in common.
    """
    others = [i for i in range(state.dim()) if i != 1]
    x, y = state.detach().double(), out.detach().double()
    deviations = x - x.mean(others, keepdim=True)
    if float(deviations.norm()) > 1e-6 * float(x.norm()):
        x, y = deviations, y - y.mean(others, keepdim=True)
    size = float(x.norm()) or 1.0
    factor = float((x * y).sum()) / size**2  # by least squares; 1 in x + g(x) where g(x) has nothing to do with x
    return factor, float(y.norm()) / size / x.numel() ** 0.5


def _lacks_state(factor: float, noise: float) -> bool:
    """Return whether nothing of the state is in a result, and not for want of elements to see it in."""
    return factor < _LEAST_FACTOR and factor + 3 * noise < 0.5


def _describe_lack(factor: float) -> str:
    return (
        f"is no residual map: it returns {factor:z.2f} times its input and something unrelated, and a step has to return its "
        "state with something added"
    )
