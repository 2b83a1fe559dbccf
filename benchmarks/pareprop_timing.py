"""Time training steps of a reversible network and of its ordinary twin, over the batch size."""

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import revzoo
from revzoo.analysis.dry_run import memory_errors
from revzoo.analysis.twin import build_twin


@dataclass(frozen=True)
class Variant:
    """One way to train a network.

    Args:
        label: its name in the tables and pictures.
        schedule: of the reversible network; None: the ordinary twin is trained in its place.
        lookahead: of the reversible network.
    """

    label: str
    schedule: str | None
    lookahead: Literal[0, 1] = 0


VARIANTS = (
    Variant("ordinary twin", None),
    Variant("stored", "store"),
    Variant("inverted", "invert"),
    Variant("look-ahead", "invert", lookahead=1),
)


@dataclass(frozen=True)
class Protocol:
    """How often a training step is run.

    Args:
        turns: how often all variants take their turn.
        warm_up: steps at the start of each turn that are not timed.
        steps: timed steps of each turn.
        together: whether the variants of a network are in memory at once and take turns, so that a busy machine slows all of
            them and the ratio of their times holds. Otherwise one after the other, so that each has the whole memory.
    """

    turns: int
    warm_up: int
    steps: int
    together: bool


def build_network(source: str, overrides: Sequence[str], variant: Variant, device: str) -> nn.Module:
    """Return a reversible network or its twin, in training mode and as a variant asks for.

    Raises:
        LookupError: the twin cannot be built; the text says why.
    """
    if variant.schedule is None:
        twin = build_twin(revzoo.load_spec(source, overrides), device)
        if isinstance(twin, str):
            raise LookupError(twin)
        return twin
    model = revzoo.create(source, overrides=overrides, schedule=variant.schedule, device=device)
    model.lookahead = variant.lookahead
    return model


class Trainer:
    """A network and its optimizer."""

    def __init__(self, label: str, network: nn.Module):
        self.label, self.network = label, network
        self.optimizer = torch.optim.AdamW(network.parameters())

    def time(self, x: Tensor, labels: Tensor) -> float:
        """Train one step; return its seconds."""
        _wait(x.device)
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        outputs = self.network(x)
        logits = getattr(outputs, "logits", outputs)  # Transformers wraps them
        F.cross_entropy(logits, labels).backward()
        self.optimizer.step()
        _wait(x.device)
        return time.perf_counter() - begin


def measure_network(
    source: str, overrides: Sequence[str], batches: Sequence[int], protocol: Protocol, device: str
) -> dict[str, Any]:
    """Time all variants of a network; return a row for each variant and batch size, and why others are missing.

    On a GPU a row has samples per second. On a CPU it has the speed relative to the stored run of the same turn, because
    seconds of a CPU that does other things say little.
    """
    groups = [VARIANTS] if protocol.together else [(variant,) for variant in VARIANTS]
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for group in groups:
        trainers: list[Trainer] = []
        for variant in group:
            torch.manual_seed(0)
            try:
                with memory_errors():
                    trainers.append(Trainer(variant.label, build_network(source, overrides, variant, device)))
            except (LookupError, MemoryError) as error:
                missing[variant.label] = str(error).partition("\n")[0]
        rows += _measure_group(trainers, revzoo.create(source, overrides=overrides, device="meta"), batches, protocol, device)
        del trainers
        _free(device)
    order = [variant.label for variant in VARIANTS]
    rows.sort(key=lambda row: (order.index(row["variant"]), row["batch"]))
    return {"rows": rows, "missing": missing, "unit": "stored run = 1" if protocol.together else "samples per second"}


def _measure_group(
    trainers: list[Trainer], model: revzoo.Model, batches: Sequence[int], protocol: Protocol, device: str
) -> Iterator[dict[str, Any]]:
    outputs = model.spec.head.arguments["outputs"]
    for batch in batches:
        torch.manual_seed(batch)
        x, labels = model.example_input(batch, device=device), torch.randint(outputs, (batch,), device=device)
        _free(device)
        seconds = _take_turns(trainers, x, labels, protocol)
        trainers[:] = [trainer for trainer in trainers if trainer.label in seconds]  # of the others no larger batch fits either
        if not trainers or (protocol.together and "stored" not in seconds):
            return
        base = seconds.get("stored") if protocol.together else None
        for label, times in seconds.items():
            speeds = [s / t for s, t in zip(base, times, strict=True)] if base else [batch / t for t in times]
            yield {
                "variant": label,
                "batch": batch,
                "speed": statistics.median(speeds),
                "deviation": statistics.stdev(speeds),
                "peak_bytes": None if protocol.together else torch.cuda.max_memory_allocated(),
            }


def _take_turns(trainers: Sequence[Trainer], x: Tensor, labels: Tensor, protocol: Protocol) -> dict[str, list[float]]:
    """Return the seconds of the timed steps, for each variant that fits the memory."""
    seconds: dict[str, list[float]] = {trainer.label: [] for trainer in trainers}
    for _ in range(protocol.turns):
        for trainer in trainers:
            if trainer.label in seconds:
                try:
                    with memory_errors():
                        times = [trainer.time(x, labels) for _ in range(protocol.warm_up + protocol.steps)]
                    seconds[trainer.label] += times[protocol.warm_up :]
                except MemoryError:
                    del seconds[trainer.label]
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: str) -> None:
    """Give the memory of what is gone back, since blocks of another size would be in the way, and start a new peak."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
