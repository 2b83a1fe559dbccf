"""DDP and FSDP2 around language models with a loss in chunks: two gloo processes, gradients of the ordinary loss, and bytes.

This file is also the program of the two processes.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import revzoo
from revzoo.errors import InputError
from revzoo.runtime import LiveBytes

SIZES = {"vocab_size": 53, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
HALVES = (slice(0, 2), slice(2, 4))
MODELS = ("Llama", "tied Llama", "own")
FSDP = ("FSDP blocks + root", "FSDP root", "FSDP norm and head + root")  # the last is torchtitan's
WRAPPERS = ("DDP", "DDP unused", "DDP static", "DDP accumulated", *FSDP, "FSDP root, bf16")
OUTSIDE = tuple(f"{wrapper}, loss outside" for wrapper in ("DDP", "DDP unused", "DDP static", "FSDP blocks + root"))
CASES = [(name, wrapper) for name in MODELS for wrapper in WRAPPERS if name == "Llama" or "head" not in wrapper]
CASES += [("Llama", wrapper) for wrapper in OUTSIDE]
LARGE = {"vocab_size": 5003, "max_position_embeddings": 256}  # 5 MB of logits
CHUNK = 5  # tokens, of 22 that count
SECONDS = 300  # two processes wait for each other no longer than this


class Own(nn.Module):
    """Calls `chunked_loss` in its forward."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(53, 16), nn.ModuleList([nn.Linear(16, 16)]), nn.Linear(16, 53)
        self.chunk = None

    def forward(self, input_ids, labels):
        hidden = self.layers[0](self.embed(input_ids))[:, :-1]
        if self.chunk is None:
            return cross_entropy(self.head(hidden).flatten(0, 1), labels[:, 1:].flatten())
        return revzoo.chunked_loss(self.head, hidden, labels[:, 1:], chunk=self.chunk)


def make(name: str, chunked: bool, **sizes: int) -> nn.Module:
    """Return the same model in every process."""
    torch.manual_seed(0)
    if name == "own":
        model = Own()
        model.chunk = CHUNK if chunked else None
    else:
        config = transformers.LlamaConfig(**SIZES | sizes, tie_word_embeddings=name != "Llama", use_cache=False)
        model = transformers.LlamaForCausalLM(config)
        if chunked:
            revzoo.chunk_loss_(model, chunk=CHUNK)
    return model.double().train()


def wrap(model: nn.Module, wrapper: str) -> nn.Module:
    if "DDP" in wrapper:
        return DistributedDataParallel(model, find_unused_parameters="unused" in wrapper, static_graph="static" in wrapper)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for layer in getattr(model, "model", model).layers if "blocks" in wrapper else ():
        fully_shard(layer, mesh=mesh)
    if "head" in wrapper:
        parts = [model.model.norm, model.lm_head] if "norm" in wrapper else model.lm_head
        fully_shard(parts, mesh=mesh, reshard_after_forward="norm" not in wrapper)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "bf16" in wrapper else MixedPrecisionPolicy()
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def differentiate(model: nn.Module, half: slice, wrapper: str = "") -> dict[str, torch.Tensor]:
    """Return the gradients of a step of half of the batch, or of two such steps."""
    ids, accumulated = (torch.arange(48).view(4, 12) * 7 % 53)[half], "accumulated" in wrapper
    for number in range(1 + (accumulated or "static" in wrapper)):  # of a static graph, the first step shows all others
        if not accumulated:
            model.zero_grad()
        with model.no_sync() if number < accumulated and hasattr(model, "no_sync") else nullcontext():
            if "outside" in wrapper:
                loss = cross_entropy(model(input_ids=ids).logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
            else:
                outputs = model(input_ids=ids, labels=ids)
                loss = getattr(outputs, "loss", outputs)
            loss.backward()
    gradients = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def count_bytes(wrapper: str, chunked: bool) -> int:
    """Return the peak of a step of 256 tokens beyond parameters, of which this process has a part."""
    model = make("Llama", chunked, **LARGE)
    model = wrap(model, wrapper) if wrapper else model
    ids = torch.arange(256)[None]
    with LiveBytes() as live:
        given = live.watch([p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()])
        model(input_ids=ids, labels=ids).loss.backward()
    return live.peak(without=given)


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for name in MODELS:
        single = [differentiate(make(name, chunked=False), half) for half in HALVES]
        for wrapper in (each for model, each in CASES if model == name):
            accumulated = "accumulated" in wrapper
            gradients = differentiate(wrap(make(name, chunked=True), wrapper), HALVES[rank], wrapper)
            mean = {key: (1 + accumulated) * (single[0][key] + single[1][key]) / 2 for key in gradients}
            errors = [float((g - mean[key]).norm() / mean[key].norm()) for key, g in gradients.items()]
            results[f"{name}, {wrapper}"] = {"names": sorted(gradients) == sorted(single[0]), "errors": errors}
    with pytest.raises(InputError) as refusal:
        differentiate(wrap(make("Llama", chunked=True), "FSDP head + root"), HALVES[rank])
    results["refusal"] = str(refusal.value)
    results["bytes"] = {wrapper: [count_bytes(wrapper, chunked) for chunked in (False, True)] for wrapper in ("", "DDP", *FSDP)}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    from conftest import fork

    sys.exit(fork(2, lambda rank: work(rank, Path(sys.argv[1]))))


# --- the tests


@pytest.fixture
def results(run_all):
    return [json.loads((run_all(True) / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("name", "wrapper"), CASES)
def test_gradients_are_those_of_the_ordinary_loss(results, name, wrapper):
    for result in (each[f"{name}, {wrapper}"] for each in results):
        assert result["names"]
        tolerance = 0.05 if "bf16" in wrapper else 1e-6  # Transformers computes the ordinary loss in float32
        assert all(error < tolerance for error in result["errors"])


@pytest.mark.parametrize("wrapper", ["", "DDP", *FSDP])
def test_the_logits_never_exist(results, wrapper):
    logits_bytes = 8 * 256 * 5003
    for ordinary, chunked in (each["bytes"][wrapper] for each in results):
        assert ordinary > 2 * logits_bytes  # and those in float32
        assert chunked < 0.6 * logits_bytes


def test_a_head_that_is_a_unit_of_its_own_is_refused(results):
    for result in results:
        assert "Leave the head to fully_shard of the whole model" in result["refusal"]
