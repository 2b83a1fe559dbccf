"""Files of weights: loaded completely or not at all, and every problem named."""

import logging
import pickle

import pytest
import torch
from safetensors.torch import save_file

import revzoo
from revzoo.checkpoint import files, index, writing
from revzoo.errors import CheckpointError, UnknownNameError


@pytest.fixture
def model():
    torch.manual_seed(0)
    return revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"])


@pytest.fixture
def file(model, tmp_path):
    files.save_weights(model, tmp_path / "w.safetensors", {"top1": "98.9"})
    return tmp_path / "w.safetensors"


def state(model):
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_a_round_trip_keeps_every_tensor_and_the_spec(model, file, tmp_path):
    other = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"], checkpoint=file, schedule="store")
    assert same(state(other), state(model))
    facts = files.read_metadata(file)
    assert facts["top1"] == "98.9"
    assert facts["revzoo.digest"] == model.spec.digest
    (tmp_path / "spec.yaml").write_text(facts["revzoo.spec"])
    assert same(state(revzoo.create(tmp_path, checkpoint=file)), state(model))
    assert not (tmp_path / "w.safetensors.partial").exists()


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module."])
def test_wrappers_prefixes_come_off(prefix, model, tmp_path):
    expected = state(model)
    save_file({prefix + key: tensor for key, tensor in expected.items()}, tmp_path / "w.safetensors")
    model.reset_head(10)
    files.load_weights(model, tmp_path / "w.safetensors")
    assert same(state(model), expected)


def test_a_file_of_another_spec_with_the_same_tensors_is_named(file):
    overrides = ["stages.0.depth=1", "block.f.heads=2", "block.coupling={type: momentum, m: 0.5}"]
    differing = "Differing: block.coupling.type, block.coupling.m, stages.0.f.heads."
    with pytest.warns(UserWarning, match=f"saved from another spec. {differing}"):
        revzoo.create("rev_vit_digits", overrides=overrides, checkpoint=file)


def test_the_content_tells_the_kind_of_file(model, file, tmp_path):
    expected = state(model)
    file.rename(tmp_path / "w.bin")
    torch.save(expected, tmp_path / "pickle.safetensors")
    for name in ("w.bin", "pickle.safetensors"):
        assert same(files.read_tensors(tmp_path / name), expected)


def test_integers_are_no_weights_and_numbers_no_keys(model, tmp_path):
    before = state(model)
    save_file({**before, "stem.pos_embed": before["stem.pos_embed"].int()}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="1 of another kind: stem.pos_embed torch.int32 instead of torch.float32"):
        files.load_weights(model, tmp_path / "w.safetensors")
    torch.save({0: torch.zeros(1), **before}, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="holds no state dict"):
        files.load_weights(model, tmp_path / "w.pth")
    assert same(state(model), before)


def test_every_key_that_does_not_fit_is_listed_and_nothing_is_loaded(model, tmp_path):
    tensors = state(model)
    del tensors["fuse.norm.bias"], tensors["stem.pos_embed"]
    tensors |= {"extra": torch.zeros(1), "head.linear.weight": torch.zeros(5, 128)}
    save_file(tensors, tmp_path / "w.safetensors")
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    before = state(model)
    with pytest.raises(CheckpointError) as error:
        files.load_weights(model, tmp_path / "w.safetensors")
    assert str(error.value) == (
        f"{tmp_path}/w.safetensors does not fit rev_vit_digits, which has 19 tensors; nothing was loaded.\n"
        "  2 missing: stem.pos_embed, fuse.norm.bias\n"
        "  1 unexpected: extra\n"
        "  1 of another shape: head.linear.weight (5, 128) instead of (10, 128)\n"
        "Create the model it was saved from (a run's folder holds its spec.yaml), or pass the same overrides."
    )
    assert same(state(model), before)


class Malicious:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


def test_files_that_are_no_weights(model, file, tmp_path):
    broken = {
        "truncated.safetensors": file.read_bytes()[:-100],
        "short.safetensors": b"\x00",
        "foreign.safetensors": b"these are not tensors, " * 20,
        "text.pth": b"hello",
        "empty.pth": b"",
        "malicious.pth": pickle.dumps(Malicious()),
    }
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{name} cannot be read: .* never executed\. (Copy|Save) "):
            files.load_weights(model, tmp_path / name)
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    with pytest.raises(CheckpointError, match=r"list\.pth holds no state dict \(names to tensors\)\. Received: list"):
        files.load_weights(model, tmp_path / "list.pth")
    with pytest.raises(CheckpointError, match="No weights file at"):
        files.load_weights(model, tmp_path / "absent.safetensors")


def test_pretrained_asks_the_index(monkeypatch, model, file, tmp_path):
    with pytest.raises(UnknownNameError, match="Unknown shipped weights 'rev_vit_l'"):
        revzoo.create("rev_vit_l", pretrained=True, device="meta")
    with pytest.raises(CheckpointError, match=r"Received: pretrained=True and checkpoint"):
        revzoo.create("rev_vit_digits", pretrained=True, checkpoint=file)
    entry = index.WeightsEntry("w.safetensors", "0" * 64, model.spec.digest, {"top1": 1.0}, "revzoo train")
    (tmp_path / "weights").mkdir()
    monkeypatch.setattr(index, "data_root", lambda: tmp_path)
    monkeypatch.setattr(index, "read_index", lambda: {"rev_vit_digits": entry})
    with pytest.raises(CheckpointError, match="which is missing"):
        index.find_shipped_weights("rev_vit_digits")
    (tmp_path / "weights" / "w.safetensors").write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match="its sha256 differs"):
        index.find_shipped_weights("rev_vit_digits")


@pytest.mark.parametrize("name", ["rev_swin_digits", "reformer_mini", "rev_roberta_mini"])
def test_a_model_on_meta_computes_once_it_has_weights(name, tmp_path):
    model = revzoo.create(name).eval()
    files.save_weights(model, tmp_path / "w.safetensors")
    loaded = revzoo.create(name, device="meta", checkpoint=tmp_path / "w.safetensors").eval()
    batch = model.example_input(2)
    assert torch.equal(loaded(batch), model(batch))


@pytest.mark.parametrize("copy", [torch.zeros(260, 64), torch.zeros(3, 3)])
def test_a_copy_of_a_tied_tensor_must_be_one(copy, tmp_path):
    model = revzoo.create("rev_roberta_mini")
    torch.save(model.state_dict(), tmp_path / "both.pth")
    files.load_weights(model, tmp_path / "both.pth")
    torch.save(model.state_dict() | {"head.weight": copy}, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=r"1 of other values: head\.weight, which is stem\.word_embeddings\.weight"):
        files.load_weights(model, tmp_path / "other.pth")


def test_the_folder_of_a_run_gives_its_best_weights_and_says_so(model, tmp_path, caplog):
    caplog.set_level(logging.INFO, "revzoo")
    (tmp_path / "spec.yaml").write_text(model.spec.to_yaml())
    with pytest.raises(CheckpointError, match=rf"no weights.*checkpoint=.*{tmp_path}/spec.yaml"):
        revzoo.create(tmp_path)
    assert revzoo.create(tmp_path, device="meta").spec == model.spec
    revzoo.create(tmp_path / "spec.yaml")
    for name in ("last", "best"):
        files.save_weights(model, tmp_path / f"{name}.safetensors")
        next(model.parameters()).data.add_(1.0)
    best = state(revzoo.create(tmp_path))
    [message] = caplog.messages
    assert message.startswith(f"{tmp_path} is the folder of a run: loading its best weights, {tmp_path}/best.safetensors;")
    last = state(revzoo.create(tmp_path, checkpoint=tmp_path / "last.safetensors"))
    first = next(iter(best))
    assert torch.equal(best[first], last[first] + 1.0)
    assert len(caplog.messages) == 1


def test_weights_that_are_not_finite_are_said(model, tmp_path):
    next(model.parameters()).data[0] = float("nan")
    files.save_weights(model, tmp_path / "w.safetensors")
    with pytest.warns(UserWarning, match=f"w.safetensors holds infinities or NaN in 1 tensors: {next(iter(state(model)))}."):
        files.load_weights(model, tmp_path / "w.safetensors")


@pytest.mark.parametrize("text", ["{", "- 1"])
def test_a_strange_spec_in_the_metadata_is_a_warning(model, tmp_path, text):
    files.save_weights(model, tmp_path / "w.safetensors", {"revzoo.digest": "0", "revzoo.spec": text})
    with pytest.warns(UserWarning, match="was saved from another spec"):
        files.load_weights(model, tmp_path / "w.safetensors")


def test_names_that_no_file_can_have():
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(UnknownNameError, match="Unknown model or spec file"):
            revzoo.create(name)
        with pytest.raises(CheckpointError, match="No weights file at"):
            revzoo.create("rev_vit_digits", checkpoint=name)


@pytest.mark.parametrize("name", ["last.safetensors", "weights.bin"])
def test_large_weights_are_in_several_files_and_read_by_the_name_of_one(name, model, tmp_path):
    path = tmp_path / name
    files.save_weights(model, path, {"top1": "98.9"}, shard_bytes=100_000)
    stem, _, suffix = name.partition(".")
    shards = [f"{stem}-{i:05d}-of-00003.{suffix}" for i in (1, 2, 3)]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*shards, f"{name}.index.json"])
    assert same(files.read_tensors(path), state(model))
    assert files.read_metadata(path)["top1"] == "98.9"
    other = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"], checkpoint=path)
    assert same(state(other), state(model))


def test_several_files_are_replaced_when_the_new_ones_are_complete(model, tmp_path, monkeypatch):
    path = tmp_path / "last.safetensors"
    files.save_weights(model, path, shard_bytes=100_000)
    old, names = state(model), {file.name for file in tmp_path.iterdir()}
    torch.nn.init.ones_(model.stem.pos_embed)
    written = []

    def fill_disk(tensors, file, metadata):
        written.append(file)
        if len(written) == 3:
            raise OSError("no space left")
        save_file(tensors, file, metadata)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "save_file", fill_disk)
        with pytest.raises(OSError, match="no space left"):
            files.save_weights(model, path, shard_bytes=100_000)
    assert same(files.read_tensors(path), old)
    files.save_weights(model, path, shard_bytes=100_000)
    assert same(files.read_tensors(path), state(model))
    assert {file.name for file in tmp_path.iterdir()} == {name.replace("last-0", "last-b-0") for name in names}
    files.save_weights(model, path, shard_bytes=100_000)
    assert {file.name for file in tmp_path.iterdir()} == names
    files.save_weights(model, path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.safetensors"]


def test_the_best_weights_of_a_run_may_be_several_files(model, tmp_path):
    (tmp_path / "spec.yaml").write_text(model.spec.to_yaml())
    files.save_weights(model, tmp_path / "best.safetensors", shard_bytes=100_000)
    assert same(state(revzoo.create(tmp_path)), state(model))
    next(tmp_path.glob("best-00002-of-*")).unlink()
    with pytest.raises(CheckpointError, match=r"names 3 shards, of which 1 are missing: best-00002-of-00003\.safetensors"):
        revzoo.create(tmp_path)
