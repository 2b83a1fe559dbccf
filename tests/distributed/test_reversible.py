"""DDP and FSDP2 around networks made reversible in place: two gloo processes, every gradient equal to that of storing.

This file is also the program of the two processes.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import revzoo
from revzoo.runtime import LiveBytes

WRAPPERS = ("DDP", "FSDP blocks + root, bf16")
SIZES = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
IDS = torch.arange(48).view(4, 12) % 20
SECONDS = 300  # two processes wait for each other no longer than this


def wrap(model, wrapper):
    if wrapper == "DDP":
        return DistributedDataParallel(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.model.layers:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def compute_gradients(wrapper, schedule, rank):
    """Return the gradients of one step, and the bytes kept between forward and backward."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    chain = revzoo.reversible_(model).chains[0]
    chain.schedule = schedule
    ids = IDS if wrapper is None else IDS[2 * rank : 2 * rank + 2]
    wrapped = (model if wrapper is None else wrap(model, wrapper)).train()
    live = LiveBytes()
    known = live.watch([*(p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()), ids])
    with live:
        loss = wrapped(input_ids=ids, labels=ids, use_cache=False).loss
        kept = live.alive(without=known, at=live.now())
    loss.backward()
    gradients = {}
    for name, p in model.named_parameters():
        gradients[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return gradients, kept


def run_process(rank, folder):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    single, _ = compute_gradients(None, "store", rank)
    results = {}
    for wrapper in WRAPPERS:
        stored, stored_bytes = compute_gradients(wrapper, "store", rank)
        inverted, kept = compute_gradients(wrapper, "invert", rank)
        errors = {name: float((g - single[name]).norm() / single[name].norm()) for name, g in stored.items()}
        results[wrapper] = {
            "different": [name for name, g in stored.items() if not torch.equal(g, inverted[name])],
            "unlike one process": max(errors.values()),
            "kept": kept / stored_bytes,
        }
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


@pytest.fixture
def results(run_all):
    return json.loads((run_all(False) / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_are_those_of_storing(results, wrapper):
    result = results[wrapper]
    assert result["different"] == []
    assert result["unlike one process"] < (0.05 if "bf16" in wrapper else 1e-5)
    assert result["kept"] < 0.5


if __name__ == "__main__":
    from conftest import fork

    sys.exit(fork(2, lambda rank: run_process(rank, sys.argv[1])))
