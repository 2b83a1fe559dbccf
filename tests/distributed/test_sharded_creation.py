"""Divided networks made by two gloo processes: values, gradients and files equal those of one process.

This file is also the program of the two processes. They go through all cases in one process group and write what they saw as
JSON, which the tests read.
"""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import revzoo
from revzoo.checkpoint import files
from revzoo.errors import CheckpointError
from revzoo.sharding.create import create_sharded
from revzoo.sharding.mesh import make_mesh
from revzoo.sharding.shard import shard_

pytestmark = pytest.mark.slow
SECONDS = 300  # the two processes wait for each other no longer than this
OVERRIDES = {"rev_vit_digits": ["stages.0.depth=1"], "rev_bert_mini": [], "rev_swin_digits": []}


def create(name: str) -> revzoo.Model:
    torch.manual_seed(3)
    return revzoo.create(name, overrides=OVERRIDES[name])


# --- one of the two processes


def shard(model: nn.Module) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for module in [*model.steps, model]:
        fully_shard(module, mesh=mesh)


def shard_units(model: nn.Module) -> None:
    shard_(model, make_mesh(2, "full"))


def create_divided(name: str, divide: Callable[[Any], None] = shard, **arguments: Any) -> revzoo.Model:
    torch.manual_seed(3)
    return create_sharded(name, divide, overrides=OVERRIDES[name], **arguments)


def gather(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for key, tensor in tensors.items()}


def compare(name: str) -> dict[str, Any]:
    """Compare values, and gradients of a batch that both processes have."""
    alone, divided = create(name), create_divided(name, shard_units if name == "rev_swin_digits" else shard)
    batch = alone.example_input(2)
    for model in (alone, divided):
        torch.manual_seed(4)  # of dropout
        model(batch).square().mean().backward()
    values, expected = gather(divided.state_dict()), alone.state_dict()
    gradients = gather({key: parameter.grad for key, parameter in divided.named_parameters()})
    # The gradient of the bias of keys is 0 but for rounding.
    errors = [float((gradients[key] - p.grad).norm() / p.grad.norm().clamp(1e-2)) for key, p in alone.named_parameters()]
    return {
        "keys": list(values) == list(expected),
        "values": all(torch.equal(values[key], tensor) for key, tensor in expected.items()),
        "error": max(errors),
    }


def save(folder: Path) -> str:
    """Write files, which the test reads; return the error of a folder that only the first process finds missing."""
    divided = create_divided("rev_bert_mini")
    files.save_weights(divided, folder / "one.safetensors", {"top1": "1"})
    for shard_bytes in (100_000, 150_000):
        files.save_weights(divided, folder / "several.safetensors", shard_bytes=shard_bytes)
    divided.save_pretrained(folder / "folder")
    try:
        files.save_weights(divided, folder / "missing" / "one.safetensors")
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def load(folder: Path) -> dict[str, Any]:
    """Read what was written; and an index of which a file is missing, which no process may wait for."""
    divided = create_divided("rev_bert_mini", checkpoint=folder / "several.safetensors")
    expected = create("rev_bert_mini").state_dict()
    same = all(torch.equal(tensor, expected[key]) for key, tensor in gather(divided.state_dict()).items())
    message = ""
    try:
        create_divided("rev_bert_mini", checkpoint=folder / "lacking.safetensors")
    except CheckpointError as error:
        message = str(error)
    return {"same": same, "message": message}


def work(rank: int, folder: Path) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    (folder / "lacking.safetensors.index.json").write_text('{"weight_map": {"a": "lacking-00001-of-00001.safetensors"}}')
    results: dict[str, Any] = {name: compare(name) for name in OVERRIDES}
    results |= {"save": save(folder), "load": load(folder)}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    from conftest import fork

    sys.exit(fork(2, lambda rank: work(rank, Path(sys.argv[1]))))


# --- the tests


@pytest.fixture
def folder(run_all):
    """Return the folder with the files and reports of the two processes."""
    return run_all(False)


@pytest.fixture(params=[0, 1])
def report(folder, request):
    return json.loads((folder / f"{request.param}.json").read_text())


@pytest.mark.parametrize("name", OVERRIDES)
def test_values_and_gradients_are_those_of_one_process(name, report):
    assert report[name]["keys"]
    assert report[name]["values"]
    assert report[name]["error"] < 1e-5


def test_files_hold_the_whole_network(folder):
    expected = create("rev_bert_mini").state_dict()
    for file in ("one.safetensors", "several.safetensors", "folder/model.safetensors"):
        tensors = files.read_tensors(folder / file)
        assert {key: tensor.tolist() for key, tensor in tensors.items()} == {
            key: tensor.tolist() for key, tensor in expected.items() if key in tensors
        }
        loaded = revzoo.create("rev_bert_mini", checkpoint=folder / file).state_dict()
        assert all(torch.equal(loaded[key], tensor) for key, tensor in expected.items())
    assert files.read_metadata(folder / "one.safetensors")["top1"] == "1"
    assert torch.equal(next(revzoo.create(folder / "folder").parameters()), next(create("rev_bert_mini").parameters()))


def test_a_failed_write_is_raised_in_both_processes(report):
    assert report["save"].startswith("FileNotFoundError")
    assert "missing" in report["save"]


def test_both_processes_read_their_slices_and_name_what_is_missing(report):
    assert report["load"]["same"]
    assert "names 1 shards, of which 1 are missing: lacking-00001-of-00001.safetensors" in report["load"]["message"]
