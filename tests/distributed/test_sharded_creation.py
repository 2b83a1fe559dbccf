"""Divided networks of two gloo processes: their files equal those of one process.

This file is also the program of the two processes. They go through all cases in one process group and write what they saw as
JSON, which the tests read.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import revzoo
from revzoo.checkpoint import files
from revzoo.errors import CheckpointError
from revzoo.sharding.create import create_sharded

pytestmark = pytest.mark.slow
SECONDS = 300  # the two processes wait for each other no longer than this


# --- one of the two processes


def shard(model: nn.Module) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for module in [*model.steps, model]:
        fully_shard(module, mesh=mesh)


def create() -> revzoo.Model:
    torch.manual_seed(3)
    return revzoo.create("rev_bert_mini")


def create_divided(**arguments: Any) -> revzoo.Model:
    torch.manual_seed(3)
    return create_sharded("rev_bert_mini", shard, **arguments)


def save(folder: Path) -> str:
    """Write files, which the test reads; return the error of a folder that only the first process finds missing."""
    divided = create_divided()
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
    values, expected = create_divided(checkpoint=folder / "several.safetensors").state_dict(), create().state_dict()
    whole = {key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for key, tensor in values.items()}
    same = all(torch.equal(whole[key], tensor) for key, tensor in expected.items())
    message = ""
    try:
        create_divided(checkpoint=folder / "lacking.safetensors")
    except CheckpointError as error:
        message = str(error)
    return {"same": same, "message": message}


def work(rank: int, folder: Path) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    (folder / "lacking.safetensors.index.json").write_text('{"weight_map": {"a": "lacking-00001-of-00001.safetensors"}}')
    (folder / f"{rank}.json").write_text(json.dumps({"save": save(folder), "load": load(folder)}))
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


def test_files_hold_the_whole_network(folder):
    expected = create().state_dict()
    for file in ("one.safetensors", "several.safetensors", "folder/model.safetensors"):
        loaded = revzoo.create("rev_bert_mini", checkpoint=folder / file).state_dict()
        assert all(torch.equal(loaded[key], tensor) for key, tensor in expected.items())
    assert files.read_metadata(folder / "one.safetensors")["top1"] == "1"
    assert torch.equal(next(revzoo.create(folder / "folder").parameters()), next(create().parameters()))


def test_a_failed_write_is_raised_in_both_processes(report):
    assert report["save"].startswith("FileNotFoundError")
    assert "missing" in report["save"]


def test_both_processes_read_their_slices_and_name_what_is_missing(report):
    assert report["load"]["same"]
    assert "names 1 shards, of which 1 are missing: lacking-00001-of-00001.safetensors" in report["load"]["message"]
