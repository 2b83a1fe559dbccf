"""Divided networks: the second of three processes, of which only this one exists, makes its own part alone."""

import warnings
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import revzoo
from revzoo.checkpoint import files
from revzoo.errors import CheckpointError, InputError
from revzoo.sharding.create import allocate_, create_sharded
from revzoo.sharding.shard import ignore_view_warnings

PROCESSES, RANK = 3, 1
ONE_BLOCK = ["stages.0.depth=1"]
NETWORKS = {  # what their initialisations and buffers have of their own
    "rev_vit_digits": ONE_BLOCK,
    "revnet_digits": ["stages.1.depth=1", "stages.2.depth=1"],  # statistics of BatchNorm
    "rev_swin_digits": [],  # tables of windows
    "rev_bert_mini": [],  # a tied embedding, whose row of padding is 0
    "reformer_mini": [],  # constant rotations
}


@pytest.fixture(scope="module")
def mesh():
    torch.distributed.init_process_group("fake", rank=RANK, world_size=PROCESSES, store=FakeStore())
    yield torch.distributed.init_device_mesh("cpu", (PROCESSES,))
    torch.distributed.destroy_process_group()


@pytest.fixture
def shard(mesh):
    def divide(model: nn.Module) -> None:
        for module in [*model.steps, model]:
            fully_shard(module, mesh=mesh)

    return divide


def values(model: nn.Module) -> dict[str, Tensor]:
    """Return all values that this process has of a model."""
    tensors = model.state_dict() | dict(model.named_buffers())
    return {key: tensor.to_local() if hasattr(tensor, "to_local") else tensor for key, tensor in tensors.items()}


def own_part(model: nn.Module) -> dict[str, Tensor]:
    """Return what this process should have of a model: of parameters the second of three parts of the first dimension."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors = model.state_dict() | dict(model.named_buffers())
    return {key: part(tensor) if key in parameters else tensor for key, tensor in tensors.items()}


def part(tensor: Tensor) -> Tensor:
    chunks = tensor.chunk(PROCESSES)
    return chunks[RANK] if len(chunks) > RANK else tensor[:0]


def memory_changes(function: Callable[[], None]) -> list[int]:
    """Return the bytes on the host that a function takes and gives back, one after the other."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        function()
    return [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]


def assert_same(received: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert received.keys() == expected.keys()
    assert [key for key, tensor in expected.items() if received[key].dtype != tensor.dtype] == []
    assert [key for key, tensor in expected.items() if not torch.equal(received[key], tensor)] == []


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in NETWORKS), ("rev_vit_digits", torch.bfloat16)], ids=str
)
def test_every_part_is_that_of_the_whole_network_of_the_seed(name, dtype, shard):
    overrides = NETWORKS[name]
    torch.manual_seed(3)
    whole = revzoo.create(name, overrides=overrides, dtype=dtype)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    model = create_sharded(name, shard, overrides=overrides, dtype=dtype)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(values(model), own_part(whole))


def test_the_settings_of_a_run_are_those_of_create(shard):
    model = create_sharded(
        "rev_vit_digits", shard, overrides=ONE_BLOCK, schedule="recompute", lookahead=1, exact=True, num_outputs=4
    )
    assert set(model.schedule) == {"recompute", "store"}
    assert (model.lookahead, model.exact, model.num_outputs) == (1, True, 4)


def test_weights_are_read_slice_by_slice(shard, tmp_path):
    """A file, several with an index, a folder and a pickle give the parts of the network that was saved."""
    torch.manual_seed(5)
    saved = revzoo.create("rev_bert_mini")
    files.save_weights(saved, tmp_path / "one.safetensors")
    files.save_weights(saved, tmp_path / "several.safetensors", shard_bytes=100_000)
    assert len(list(tmp_path.glob("several-*"))) > 3
    saved.save_pretrained(tmp_path / "folder")
    torch.save(saved.state_dict(), tmp_path / "pickle.pt")
    for name in ("one.safetensors", "several.safetensors", "pickle.pt"):
        assert_same(values(create_sharded("rev_bert_mini", shard, checkpoint=tmp_path / name)), own_part(saved))
    assert_same(values(create_sharded(tmp_path / "folder", shard)), own_part(saved))


def test_constant_tables_are_made_where_weights_are_read(shard, tmp_path):
    saved = revzoo.create("rev_swin_digits")
    files.save_weights(saved, tmp_path / "w.safetensors")
    assert any(key not in saved.state_dict() for key, _ in saved.named_buffers())
    assert_same(values(create_sharded("rev_swin_digits", shard, checkpoint=tmp_path / "w.safetensors")), own_part(saved))


def test_only_the_slices_of_a_file_become_memory(shard, tmp_path):
    """Pages of the file itself are shared and may leave memory again; they are not counted."""
    saved = revzoo.create("rev_vit_digits")
    files.save_weights(saved, tmp_path / "w.safetensors")
    model = revzoo.create("rev_vit_digits", device="meta")
    shard(model)
    allocate_(model)
    changes = memory_changes(partial(files.load_weights, model, tmp_path / "w.safetensors"))
    file_bytes = (tmp_path / "w.safetensors").stat().st_size
    held = list(accumulate(change for change in changes if abs(change) != file_bytes))
    assert 0 < max(held) < 0.05 * file_bytes


def test_a_new_head_starts_with_the_random_values_of_create(shard):
    torch.manual_seed(3)
    whole = revzoo.create("rev_vit_digits", pretrained=True, num_outputs=4)
    torch.manual_seed(3)
    model = create_sharded("rev_vit_digits", shard, pretrained=True, num_outputs=4)
    assert_same(values(model), own_part(whole))
    assert model.num_outputs == 4


@pytest.mark.parametrize("num_outputs", [4, 7])
def test_a_file_may_have_the_head_of_other_classes(shard, tmp_path, num_outputs):
    """It is kept where it has the number that is asked for, and new otherwise."""
    saved = revzoo.create("rev_vit_digits", num_outputs=7)
    files.save_weights(saved, tmp_path / "w.safetensors")
    arguments = {"checkpoint": tmp_path / "w.safetensors", "num_outputs": num_outputs}
    torch.manual_seed(3)
    whole = revzoo.create("rev_vit_digits", **arguments)
    torch.manual_seed(3)
    assert_same(values(create_sharded("rev_vit_digits", shard, **arguments)), own_part(whole))
    with pytest.raises(CheckpointError, match=r"head.linear.weight \(7, 128\) instead of \(10, 128\)"):
        revzoo.create("rev_vit_digits", checkpoint=tmp_path / "w.safetensors")
    kept = [name for name, tensor in whole.state_dict().items() if torch.equal(tensor, saved.state_dict()[name][: len(tensor)])]
    assert len(whole.state_dict()) - len(kept) == (0 if num_outputs == 7 else 2)


@pytest.fixture
def lacking(tmp_path):
    """An index whose second shard is missing."""
    files.save_weights(revzoo.create("rev_vit_digits", overrides=ONE_BLOCK), tmp_path / "w.safetensors", shard_bytes=100_000)
    next(tmp_path.glob("w-00002-of-*")).unlink()
    return tmp_path / "w.safetensors"


def test_missing_shards_and_other_shapes_are_named(shard, lacking, tmp_path):
    with pytest.raises(CheckpointError, match=r"names \d+ shards, of which 1 are missing: w-00002-of-\d+\.safetensors"):
        create_sharded("rev_vit_digits", shard, overrides=ONE_BLOCK, checkpoint=lacking)
    files.save_weights(revzoo.create("rev_vit_digits", overrides=ONE_BLOCK, num_outputs=4), tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"2 of another shape: head.linear.weight \(4, 128\) instead of \(10, 128\)"):
        create_sharded("rev_vit_digits", shard, overrides=ONE_BLOCK, checkpoint=tmp_path / "other.safetensors")


@pytest.mark.parametrize("override", ["input.size=[16,16]", "head.outputs=3"])
def test_weights_for_another_input_or_head_are_refused(override, shard):
    with pytest.raises(InputError, match=r"in one process\. Received: .* Save the adapted network"):
        create_sharded("rev_vit_digits", shard, pretrained=True, overrides=[override])


def test_warnings_of_views_stay_only_for_what_the_head_returns(mesh):
    model = revzoo.create("rev_vit_digits", device="meta")
    for module in [*model.steps, model.head, model]:
        fully_shard(module, mesh=mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ignore_view_warnings(model)
        for step in model.steps:
            warnings.warn(f"FSDP2-wrapped module ({type(step).__name__}) returned a view tensor.", stacklevel=1)
        for module in (model.head, model):
            with pytest.raises(UserWarning):
                warnings.warn(f"FSDP2-wrapped module ({type(module).__name__}) returned a view tensor.", stacklevel=1)
