"""Weights are read from one file, from shards and from folders; what is damaged or missing is named with its file."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import save_file

from revzoo.checkpoint.foreign import read_config, read_weights
from revzoo.errors import CheckpointError

FIRST, SECOND = {"a.weight": torch.arange(4.0), "b": torch.ones(2)}, {"c.weight": torch.zeros(3)}
TENSORS = FIRST | SECOND
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def check_same(tensors, expected):
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], tensor) for key, tensor in expected.items())


def write_shards(folder, first=FIRST, second=SECOND, **changes):
    """Write two shards and their index; changes are laid over its weight_map."""
    folder.mkdir(exist_ok=True)
    for name, tensors in zip(SHARDS, (first, second), strict=True):
        save_file(tensors, folder / name)
    places = dict.fromkeys(FIRST, SHARDS[0]) | dict.fromkeys(SECOND, SHARDS[1]) | changes
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 36}, "weight_map": places}))
    return index


@pytest.mark.parametrize(("wrapper", "prefix"), [(None, ""), ("state_dict", "module."), ("model_state", "module._orig_mod.")])
def test_a_pickled_state_dict_is_unwrapped(tmp_path, wrapper, prefix):
    tensors = {prefix + key: tensor for key, tensor in TENSORS.items()}
    torch.save({wrapper: tensors, "epoch": 3} if wrapper else tensors, tmp_path / "weights.pth")
    check_same(read_weights(tmp_path / "weights.pth"), TENSORS)
    check_same(read_weights(str(tmp_path)), TENSORS)  # the only file there is


def test_shards_are_read_by_their_index_and_by_their_folder(tmp_path):
    index = write_shards(tmp_path / "plain")
    check_same(read_weights(index), TENSORS)
    check_same(read_weights(index.parent), TENSORS)
    unnamed = {**SECOND, "not in the index": torch.ones(1)}
    check_same(read_weights(write_shards(tmp_path / "more", second=unnamed)), TENSORS | unnamed)
    wrapped = [{f"module.{key}": tensor for key, tensor in half.items()} for half in (FIRST, SECOND)]
    folder = tmp_path / "pickled"
    folder.mkdir()
    places = {}
    for i, half in enumerate(wrapped):
        torch.save(half, folder / f"pytorch_model-0000{i + 1}-of-00002.bin")
        places |= dict.fromkeys(half, f"pytorch_model-0000{i + 1}-of-00002.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    check_same(read_weights(folder), TENSORS)


@pytest.mark.parametrize("shard_size", ["5GB", "2KB"])
def test_a_folder_that_transformers_wrote_is_read(tmp_path, shard_size):
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    network = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
    network.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (shard_size == "2KB")
    check_same(read_weights(tmp_path), network.state_dict())
    for path in (tmp_path, tmp_path / "config.json"):
        config = read_config(path)
        assert (config["model_type"], config["architectures"]) == ("bert", ["BertForSequenceClassification"])
        assert config["hidden_size"] == 8


def test_safetensors_come_before_pickles(tmp_path):
    save_file(FIRST, tmp_path / "model.safetensors")
    torch.save(SECOND, tmp_path / "pytorch_model.bin")
    check_same(read_weights(tmp_path), FIRST)


def refused(path, message, read=read_weights):
    with pytest.raises(CheckpointError, match=message) as error:
        read(path)
    assert str(path.parent) in str(error.value)


def test_shards_that_are_missing_damaged_or_others_are_named(tmp_path):
    index = write_shards(tmp_path / "lacking", d=SHARDS[1])
    refused(index, rf"{SHARDS[1]} lacks 1 tensors that {index.name} says it holds: d\. .*fetch both again")
    index = write_shards(tmp_path / "missing", d="model-00003-of-00002.safetensors")
    refused(index, r"names 3 shards, of which 1 are missing: model-00003-of-00002\.safetensors\. Fetch them into")
    index = write_shards(tmp_path / "damaged")
    shard = index.parent / SHARDS[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    refused(index, rf"{SHARDS[0]} cannot be read")
    index = write_shards(tmp_path / "outside", d="../lacking/" + SHARDS[0])
    refused(index, r"names files outside its own folder\. Received: \.\./lacking/")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"cannot be read as JSON \(.*\)\. Fetch it again"),
        ("[]", "is not an index of shards: a mapping in JSON. Received: list"),
        ('{"weight_map": {"a": 1}}', r"Received: \{'a': 1\}"),
    ],
)
def test_an_index_that_is_none_is_named(tmp_path, text, message):
    index = write_shards(tmp_path)
    index.write_text(text)
    refused(index, message)


def test_one_shard_is_not_the_checkpoint(tmp_path):
    index = write_shards(tmp_path)
    refused(tmp_path / SHARDS[0], rf"is one of several shards\. Give their index, {re.escape(str(index))}, or the folder")
    index.unlink()
    with pytest.raises(CheckpointError, match=r"These are shards without an index: put model.safetensors.index.json next to"):
        read_weights(tmp_path)


def test_a_folder_says_what_it_has(tmp_path):
    with pytest.raises(CheckpointError, match=r"Received: none\. Give a folder with model.safetensors, .*\.index\)"):
        read_weights(tmp_path)
    (tmp_path / "tf_model.h5").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"Received: tf_model\.h5\. Give a folder"):
        read_weights(tmp_path)
    for name in ("best.pth", "last.pth"):
        torch.save(TENSORS, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"Received: best\.pth, last\.pth\. Name one of them"):
        read_weights(tmp_path)


@pytest.mark.parametrize(("content", "message"), [(b"\xff\xfe", "as JSON"), (b"3", "is not a configuration")])
def test_a_configuration_that_is_none_is_named(tmp_path, content, message):
    refused(tmp_path / "config.json", "config.json is missing; it should be a configuration", read_config)
    (tmp_path / "config.json").write_bytes(content)
    refused(tmp_path / "config.json", message, read_config)
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)
