"""Training steps: the networks, the methods to train them by, and how they are counted, timed and captured."""

from __future__ import annotations  # those that name classes of revzoo would import what may be missing

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import revzoo
from revzoo.runtime import set_tripwire

Step = tuple[nn.Module, tuple[Tensor, ...]]  # a module that returns its loss, and what it is called with
Optimizer = Literal["SGD", "AdamW"]
Make = Callable[[str], Step]  # for a device
WARM_UP, STEPS = 3, 7


@dataclass(frozen=True)
class Method:
    """One way to train a network of the zoo.

    Args:
        schedule: of the network.
        lookahead: of the network.
        checkpointed: whether each reversible step runs under `torch.utils.checkpoint`.
        captured: whether the training step is captured in a CUDA graph, and replayed.
        exact: whether the streams are on a grid.
        kept_bits: of a coupling with momentum; None is the network's own coupling.
        tripwire: whether rebuilt tensors are checked.
        compiled: whether each reversible step is compiled.
    """

    schedule: str
    lookahead: Literal[0, 1] = 0
    checkpointed: bool = False
    captured: bool = False
    exact: bool = False
    kept_bits: int | None = None
    tripwire: bool = True
    compiled: bool = False


METHODS = {
    "store": Method("store"),
    "invert": Method("invert"),
    "checkpoint": Method("store", checkpointed=True),
    "recompute": Method("recompute"),
    "ahead": Method("invert", lookahead=1),
    "graph": Method("invert", captured=True),
    "selective": Method("selective"),
    "exact": Method("invert", exact=True),
    "8 bits": Method("invert", kept_bits=8),
    "no tripwire": Method("invert", tripwire=False),
    "store compiled": Method("store", compiled=True),
    "invert compiled": Method("invert", compiled=True),
}


class Training(nn.Module):
    """A classifier and its loss: what is timed and what is counted is the same step.

    Args:
        network: the classifier.
        mixed: whether it computes in bfloat16, under autocast.
    """

    def __init__(self, network: nn.Module, mixed: bool):
        super().__init__()
        self.network, self.mixed = network, mixed

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.mixed):
            logits = self.network(x)
        return F.cross_entropy(logits.float(), labels)


class Causal(nn.Module):
    """A language model of Transformers and its loss."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.network(input_ids=ids, labels=ids, use_cache=False).loss
        return loss


def make_classifier(network: str, method: Method, batch: int, mixed: bool, device: str) -> Step:
    """Return the training step of a network of the zoo, with a random batch."""
    model = _create(network, method.kept_bits, method.compiled, device)
    model.exact, model.schedule, model.lookahead = method.exact, method.schedule, method.lookahead
    set_tripwire(method.tripwire)
    for step in model.steps:
        vars(step).pop("forward", None)
        if method.checkpointed:
            step.forward = partial(checkpoint, step.forward, use_reentrant=False)
    torch.manual_seed(batch)
    labels = torch.randint(model.num_outputs, (batch,), device=device)
    return Training(model, mixed), (model.example_input(batch, device=device), labels)


@lru_cache(maxsize=1)  # one network at a time is on the device, and the methods share it
def _create(network: str, kept_bits: int | None, compiled: bool, device: str) -> revzoo.Model:
    torch.manual_seed(0)
    overrides = [] if kept_bits is None else [f"block.coupling={{type: momentum, kept_bits: {kept_bits}, gain: 1.0}}"]
    if revzoo.load_spec(network).input.kind == "text":  # with dropout a CPU, as which bytes are counted, has no fused attention
        overrides.append("block.f.attention_dropout=0")
    model = revzoo.create(network, overrides=overrides, device=device)
    if compiled:  # the stub of tests/cuda_stub runs no Triton
        model.compile(backend="aot_eager" if "CUDA_STUB" in os.environ else "inductor")
    return model


_RANDOM_BIT = {"kept_bits": 1, "sign": "random"}
LLAMA_METHODS: dict[str, dict[str, Any]] = {  # options of `revzoo.reversible_`
    "store": {},
    "checkpoint": {},
    "8 bits": {"kept_bits": 8},
    "random bit": _RANDOM_BIT,
    "random bit, 8 tiles": _RANDOM_BIT | {"split": ("attention", "mlp"), "tiles": 8},
}


def make_llama(sizes: dict[str, int], method: str, shape: tuple[int, int], device: str) -> Step:
    """Return the training step of a Llama in bfloat16 with random weights and tokens, by one of `LLAMA_METHODS`."""
    from finetune_llm_memory import enable_checkpointing
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cpu" if "CUDA_STUB" in os.environ else device):  # the stub has no values, which the blocks are tried on
        network = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).train()
        ids = torch.randint(sizes["vocab_size"], shape)
    if method == "checkpoint":
        enable_checkpointing(network)
    elif options := LLAMA_METHODS[method]:
        revzoo.reversible_(network, "model.layers", batch={"input_ids": ids[:1]} if "split" in options else None, **options)
    return Causal(network.to(device)), (ids.to(device),)


def make_optimizer(name: Optimizer, training: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that updates all weights together, which is PyTorch's choice on a GPU and is counted as such."""
    kind = torch.optim.SGD if name == "SGD" else torch.optim.AdamW
    return kind(training.parameters(), lr=1e-4, foreach=True)


def count_training(make: Make, optimizer: Optimizer = "SGD") -> int:
    """Return the counted bytes at the peak of a training step. Nothing is computed, and no device is needed."""
    training, inputs = make("meta")
    return revzoo.measure_memory(training, inputs, make_optimizer(optimizer, training)).peak_bytes


def time_training(make: Make, optimizer: Optimizer = "SGD", captured: bool = False) -> dict[str, Any]:
    """Time training steps; return what `time_calls` does, and the seconds before the first timed one."""
    begin = time.perf_counter()
    training, inputs = make("cuda")
    update = make_optimizer(optimizer, training)

    def step() -> None:
        update.zero_grad()
        training(*inputs).backward()
        update.step()

    run = capture(step) if captured else step
    for _ in range(WARM_UP):
        run()
    torch.cuda.synchronize()
    ready = time.perf_counter() - begin  # compiling and choosing kernels included
    if not captured:  # a graph takes its memory while it is captured
        torch.cuda.reset_peak_memory_stats()
    result = time_calls(run) | {"ready_seconds": ready}
    update.zero_grad()
    return result


def time_calls(call: Callable[[], object]) -> dict[str, Any]:
    """Call a few times in a row; return the time of a call and the allocator's peaks.

    The device's time is that between two events around all calls: an event after each one would hold up the host. The host's
    is that until it has queued all, which includes waiting for the device where the queue is full.
    """
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start = time.perf_counter()
    begin.record()
    for _ in range(STEPS):
        call()
    end.record()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    return {
        "host_ms": 1e3 * host / STEPS,
        "gpu_ms": begin.elapsed_time(end) / STEPS,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "alloc_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) - retries,
    }


def capture(step: Callable[[], object]) -> Callable[[], None]:
    """Capture a training step in a CUDA graph; return what replays it. The allocator's peak is that of the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.reset_peak_memory_stats()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
