"""Bytes of a training step as functions of the batch size: what the page "What fits my card?" computes with.

Every allocation of a step grows evenly with the batch, so a step counted in two batch sizes tells the bytes of all others: at
each time `fixed + each * size`. The page needs few of these lines. Those that are the highest for some size give the peak, to
the byte; the highest in each of a few dozen sections of the step draw its timeline.

A row of `docs/zoo.json` gets a key `card`:

    methods     the model stored, inverted and by plans of the planner, and its ordinary twin with a checkpoint at every block;
                of a language model the inverted one and the twin with a loss in chunks, too:
                how many units are in each mode, FLOPs of a step for an example, and a timeline in each dtype.
    optimizers  bytes of the state, and what an update takes besides; `twin_optimizers` are those of the twin.

It is null for a model whose step allocates otherwise in another batch.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from revzoo.analysis.autocast import leave_autocast
from revzoo.analysis.chains import preserve_schedules
from revzoo.analysis.dry_run import LossFunction, call, compute_cross_entropy, isolated, linear_loss
from revzoo.analysis.flops import FlopCounter
from revzoo.analysis.optimizer_step import count_optimizer
from revzoo.analysis.twin import build_twin
from revzoo.in_place.ways import CHUNKED, SWITCHES, TILES, chunk_loss_of, has_head_of_tokens, in_mode
from revzoo.inplace_abn import backward
from revzoo.model.create import create
from revzoo.model.model import Model
from revzoo.planning.planner import solve
from revzoo.planning.profiling.profile import profile
from revzoo.runtime import chunk_size
from revzoo.runtime.chunked_loss import _Tokens
from revzoo.runtime.drift import ignore_error_growth
from revzoo.runtime.live_bytes import LiveBytes
from revzoo.runtime.mode import Mode
from revzoo.runtime.nested import tensors_in

Changes = NDArray[np.int64]
Timeline = dict[str, list[int]]
Method = dict[str, Any]

# The second is autocast: weights, gradients and optimizer state stay in float32.
DTYPES = {"float32": "float32", "bfloat16": "bfloat16"}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {  # foreach is what PyTorch takes on GPUs unless told otherwise
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}
SIZES = (4, 8)  # batches that are counted; plans are made for the second
# A loss in chunks has more of them in larger batches, and smaller ones in small batches, which is not counted. Two are counted:
# all others add to sums of gradients as the second does.
_CHUNKS, CHUNKED_SIZES = 2, (16, 32)
TILED_SIZES = (16, 31, 32)  # all in eight tiles, the last two of as many examples; a tile of one example may be a view
SHARES = (0.0, 0.2, 0.5)  # of the way from the smallest peak to that of storing: the budgets that are planned for
_SECTIONS, _DRAWN_SIZE = 24, 32  # of a timeline, and the batch whose highest point of each is kept


class UnevenStepError(Exception):
    """A step allocates otherwise in another batch, so that two batches do not tell the bytes of a third."""


def count_card(name: str) -> dict[str, Any] | None:
    """Return what a training step of a model takes, for the key `card` of its row; None where two batches do not tell."""
    model = create(name, device="meta").train()
    try:
        return _count_card(model)
    except UnevenStepError as error:
        print(f"{name}: {error}")
        return None


def _count_card(model: Model) -> dict[str, Any]:
    loss = _compute_token_loss if has_head_of_tokens(model) else linear_loss
    methods = [count_method(model, model, label, schedule, loss) for label, schedule in _choose_schedules(model, loss).items()]
    card = {"methods": methods, "optimizers": count_optimizers(model)}
    networks: dict[str, nn.Module] = {Mode.INVERT: model}
    if (twin := build_checkpointed_twin(model)) is not None:
        networks["twin"] = twin
        methods.append(count_method(twin, model, "twin", loss=loss))
        card["twin_optimizers"] = count_optimizers(twin)
    for name, network in networks.items():
        if has_head_of_tokens(network):
            with in_mode(model, Mode.INVERT), chunk_loss_of(network):
                whole = next(method for method in methods if method["name"] == name)
                methods += count_chunked_loss(network, model.example_input, loss, whole)
    return card


def _compute_token_loss(outputs: Any) -> torch.Tensor:
    return compute_cross_entropy(getattr(outputs, "logits", outputs))


def _choose_schedules(model: Model, loss: LossFunction) -> dict[str, list[Mode]]:
    """Return schedules by name: stored, inverted, and plans for a few budgets, the fastest first."""
    measured = profile(model, model.example_input(SIZES[1]), loss=loss)
    stored = solve(measured, 2**50)
    between = stored.no_recompute_peak_bytes - stored.min_peak_bytes
    plans = [list(solve(measured, stored.min_peak_bytes + int(share * between)).schedule) for share in SHARES]
    schedules: dict[str, list[Mode]] = {Mode.STORE: list(stored.schedule)}
    with preserve_schedules(model):
        model.schedule = Mode.INVERT
        schedules[Mode.INVERT] = list(model.schedule)
    for plan in plans:
        if plan not in schedules.values():
            schedules[f"plan {len(schedules) - 1}"] = plan
    return schedules


def build_checkpointed_twin(model: Model) -> nn.Module | None:
    """Return the ordinary network with its library's checkpoints; None if it has none, or takes another input."""
    twin: Any = build_twin(model.spec)
    enable = next((getattr(twin, name) for name in SWITCHES if hasattr(twin, name)), None)
    if enable is None:
        return None
    enable()
    with suppress(Exception):  # a library's network with the spec's arguments may raise anything
        count_step(twin.train(), model.example_input(1), "float32")
        return twin  # type: ignore[no-any-return]
    return None


def count_method(
    network: nn.Module, model: Model, name: str, schedule: Sequence[Mode] | None = None, loss: LossFunction = linear_loss
) -> Method:
    """Return a method's modes, its FLOPs for an example, and its timeline in each dtype.

    Args:
        network: the model, or its twin.
        model: whose example inputs the network gets.
        name: of the method.
        schedule: of the model; None for the twin.
        loss: of what the network returns.
    """
    with preserve_schedules(model):
        if schedule is not None:
            model.schedule = schedule
        return {"name": name, "modes": Counter(schedule or ())} | count_timelines(network, model.example_input, loss)


def count_timelines(
    network: nn.Module,
    make_batch: Callable[[int], Any],
    loss: LossFunction,
    dtypes: Mapping[str, str] = DTYPES,
    sizes: Sequence[int] = SIZES,
) -> Method:
    """Return the FLOPs of a step for an example, and its timeline in each dtype by its key."""
    batches = [make_batch(size) for size in sizes]
    steps = {key: [count_step(network, batch, dtype, loss) for batch in batches] for key, dtype in dtypes.items()}
    timelines = {key: fit_timeline([changes for changes, _ in counted], sizes) for key, counted in steps.items()}
    return {"flops": next(iter(steps.values()))[0][1] // sizes[0]} | timelines


def count_chunked_loss(
    network: nn.Module,
    make_batch: Callable[[int], Any],
    loss: LossFunction,
    whole: Method,
    dtypes: Mapping[str, str] = DTYPES,
    sizes: Sequence[int] = CHUNKED_SIZES,
) -> Iterator[Method]:
    """Yield a method with a loss in chunks, whose FLOPs are those of the whole loss; none if a chunk is dozens of texts."""
    with suppress(_FewTokensError):
        counted = count_timelines(network, make_batch, loss, dtypes, sizes)
        yield counted | {"name": whole["name"] + CHUNKED, "modes": whole["modes"], "flops": whole["flops"]}


class _FewTokensError(Exception):
    """A batch has fewer tokens than two chunks."""


def _take_chunks(tokens: _Tokens, own_chunks: Callable[[_Tokens], Iterator[Any]] = _Tokens.__iter__) -> Iterator[Any]:
    for place, x, labels in islice(own_chunks(tokens), _CHUNKS):
        if len(labels) < tokens._chunk:
            raise _FewTokensError
        yield place, x, labels


def count_step(network: nn.Module, batch: Any, dtype: str, loss_function: LossFunction = linear_loss) -> tuple[Changes, int]:
    """Count a forward and backward as `measure_memory` does; return every change of live bytes, and the FLOPs."""
    live, flops = LiveBytes(), FlopCounter()
    # Both batches have as many parts in the backward of in-place ABN.
    same_parts = patch.object(backward, "_PART", int(backward._PART * len(next(tensors_in(batch))) / SIZES[1]))
    same_chunks = patch.object(chunk_size, "_LEAST", 2**60), patch.object(_Tokens, "__iter__", _take_chunks)
    with ExitStack() as stack:
        for each in (autocast(dtype), ignore_error_growth(), same_parts, *same_chunks):
            stack.enter_context(each)
        inputs = stack.enter_context(isolated(network, batch, fake=True))
        live.watch([*network.parameters(), *network.buffers(), inputs])
        start = sum(change for _, change in live.log)
        live.log.clear()
        with flops, live:
            loss = loss_function(call(network, inputs))
            with leave_autocast():
                loss.backward()
        changes = np.array([start, *(change for _, change in live.log)], dtype=np.int64)
    return changes, flops.forward + flops.backward


def autocast(dtype: str) -> torch.autocast:
    """Return the context of a step in one of `DTYPES`."""
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")


def fit_timeline(steps: Sequence[Changes], sizes: Sequence[int] = SIZES) -> Timeline:
    """Return the lines of a step that was counted in all sizes, two or `TILED_SIZES`.

    `at` is a time in thousandths of the step; then `fixed + each * size` bytes are alive, of a step in tiles with
    `tile * ceil(size / 8)`. The last line is that of its end.
    """
    # Autocast frees its casts in any order, so the steps are compared where they have just allocated something.
    grown = steps[0] > 0
    if not all(np.array_equal(grown, step > 0) for step in steps):
        raise UnevenStepError(f"batches of {' and '.join(map(str, sizes))} allocate differently")
    grown[-1] = True
    alive = [changes.cumsum()[grown] for changes in steps]
    cut, span = TILES if len(sizes) > 2 else 1, sizes[-1] - sizes[0]
    each = (alive[-1] - alive[-2]) // (sizes[-1] - sizes[-2])
    tile = (alive[-1] - alive[0] - each * span) * cut // span  # of two sizes nothing is left to it
    fixed = alive[0] - each * sizes[0] - tile * (sizes[0] // cut)
    at_drawn_size = fixed + each * _DRAWN_SIZE + tile * (_DRAWN_SIZE // cut)
    sections = np.array_split(np.arange(len(each)), min(_SECTIONS, len(each)))
    drawn = {int(section[at_drawn_size[section].argmax()]) for section in sections}
    # Batches that miss as many examples to whole tiles have lines of the examples in a tile.
    highest = {line for missing in range(cut) for line in _find_highest(fixed - missing * each, cut * each + tile)}
    kept = sorted(drawn | highest | {len(each) - 1})
    at = np.flatnonzero(grown)[kept] * 1000 // len(grown)
    lines = {"at": at, "fixed": fixed[kept], "each": each[kept]} | ({"tile": tile[kept]} if cut > 1 else {})
    return {key: values.tolist() for key, values in lines.items()}


def _find_highest(fixed: Changes, each: Changes) -> Iterator[int]:
    """Yield the lines that are the highest of all for some size from 1 on, the flattest first."""
    line = int((fixed + each).argmax())
    yield line
    while len(steeper := np.flatnonzero(each > each[line])):
        crossings = (fixed[line] - fixed[steeper]) / (each[steeper] - each[line])
        line = int(steeper[crossings.argmin()])
        yield line


def count_optimizers(network: nn.Module) -> dict[str, list[int]]:
    """Return the bytes of the state and of an update for every optimizer."""
    taken = {name: count_optimizer(network, make(network.parameters())) for name, make in OPTIMIZERS.items()}
    return {name: [each.state, each.update] for name, each in taken.items()}
