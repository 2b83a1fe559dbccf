"""DDP and FSDP2 around language models with a loss in chunks: two gloo processes, gradients of the ordinary loss.

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

SIZES = {"vocab_size": 53, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
HALVES = (slice(0, 2), slice(2, 4))
WRAPPERS = ("DDP", "DDP unused", "DDP accumulated", "FSDP blocks + root", "FSDP root", "FSDP root, bf16")
MODELS = ("Llama", "tied Llama", "own")
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


def make(name: str, chunked: bool) -> nn.Module:
    """Return the same model in every process."""
    torch.manual_seed(0)
    if name == "own":
        model = Own()
        model.chunk = CHUNK if chunked else None
    else:
        config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=name != "Llama", use_cache=False)
        model = transformers.LlamaForCausalLM(config)
        if chunked:
            revzoo.chunk_loss_(model, chunk=CHUNK)
    return model.double().train()


def wrap(model: nn.Module, wrapper: str) -> nn.Module:
    if "DDP" in wrapper:
        return DistributedDataParallel(model, find_unused_parameters="unused" in wrapper)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for layer in getattr(model, "model", model).layers if "blocks" in wrapper else ():
        fully_shard(layer, mesh=mesh)
    if "head" in wrapper:
        fully_shard(model.lm_head, mesh=mesh)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "bf16" in wrapper else MixedPrecisionPolicy()
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def differentiate(model: nn.Module, half: slice, accumulated: bool = False) -> dict[str, torch.Tensor]:
    """Return the gradients of a step of half of the batch, or of two such steps."""
    ids = (torch.arange(48).view(4, 12) * 7 % 53)[half]
    for number in range(1 + accumulated):
        with model.no_sync() if number < accumulated and hasattr(model, "no_sync") else nullcontext():
            outputs = model(input_ids=ids, labels=ids)
            getattr(outputs, "loss", outputs).backward()
    gradients = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for name in MODELS:
        single = [differentiate(make(name, chunked=False), half) for half in HALVES]
        for wrapper in WRAPPERS:
            accumulated = "accumulated" in wrapper
            gradients = differentiate(wrap(make(name, chunked=True), wrapper), HALVES[rank], accumulated)
            mean = {key: (1 + accumulated) * (single[0][key] + single[1][key]) / 2 for key in gradients}
            errors = [float((g - mean[key]).norm() / mean[key].norm()) for key, g in gradients.items()]
            results[f"{name}, {wrapper}"] = {"names": sorted(gradients) == sorted(single[0]), "errors": errors}
    with pytest.raises(InputError) as refusal:
        differentiate(wrap(make("Llama", chunked=True), "FSDP head + root"), HALVES[rank])
    results["refusal"] = str(refusal.value)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    from conftest import fork

    sys.exit(fork(2, lambda rank: work(rank, Path(sys.argv[1]))))


# --- the tests


@pytest.fixture
def results(run_all):
    return [json.loads((run_all(True) / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_ordinary_loss(results, name, wrapper):
    for result in (each[f"{name}, {wrapper}"] for each in results):
        assert result["names"]
        tolerance = 0.05 if "bf16" in wrapper else 1e-6  # Transformers computes the ordinary loss in float32
        assert all(error < tolerance for error in result["errors"])


def test_a_head_that_is_a_unit_of_its_own_is_refused(results):
    for result in results:
        assert "Leave the head to fully_shard of the whole model" in result["refusal"]
