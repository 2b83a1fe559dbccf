"""Models as folders, and on a hub that is a folder here: what is written, what is fetched, what is refused."""

import json
import re
import shutil
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from yaml import safe_load

import revzoo
import zoo_cli
from revzoo.checkpoint.folder import save_folder
from revzoo.errors import CheckpointError, InputError

SAVED = {"README.md", "model.safetensors", "spec.yaml"}


class FakeHub:
    """huggingface_hub's client, with a folder for each repository and revision in place of the network."""

    root: Path
    calls: list[tuple]

    def __init__(self, token=None, library_name=None):
        self.calls.append(("client", token, library_name))

    def _folder(self, repository, revision):
        return self.root / repository / (revision or "main")

    def create_repo(self, repository, *, private, exist_ok):
        self.calls.append(("create", repository, private))
        self._folder(repository, None).mkdir(parents=True, exist_ok=exist_ok)

    def file_exists(self, repository, name, *, revision):
        return (self._folder(repository, revision) / name).is_file()

    def upload_folder(self, *, repo_id, folder_path, revision, commit_message, ignore_patterns, delete_patterns):
        self.calls.append(("commit", commit_message))
        there = self._folder(repo_id, revision)
        for path in there.iterdir():
            if any(fnmatch(path.name, pattern) for pattern in delete_patterns):
                path.unlink()
        for path in folder_path.iterdir():
            if path.name not in (ignore_patterns or ()):
                shutil.copy(path, there)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    def snapshot_download(self, repository, *, revision, allow_patterns, token=None, cache_dir=None, local_files_only=False):
        self.calls.append(("fetch", repository, revision, token, cache_dir, local_files_only))
        there = self._folder(repository, revision)
        if not there.is_dir():
            raise FileNotFoundError(f"404 for {repository}\nand more lines")
        fetched = self.root / "cache" / repository / (revision or "main")
        shutil.rmtree(fetched, ignore_errors=True)
        fetched.mkdir(parents=True)
        for path in there.iterdir():
            if any(fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, fetched)
        return str(fetched)


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(FakeHub, "root", tmp_path / "hub", raising=False)
    monkeypatch.setattr(FakeHub, "calls", [], raising=False)
    monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
    return FakeHub


def check_same(model, other):
    """Check that two models have the same spec and the same values in every tensor."""
    own, others = model.state_dict(), other.state_dict()
    assert list(own) == list(others)
    assert [key for key in own if not torch.equal(own[key], others[key])] == []
    assert (model.spec.digest, model.spec.name) == (other.spec.digest, other.spec.name)


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["revnet_digits", "rev_roberta_mini"])
def test_a_saved_model_is_the_same_again(name, tmp_path):
    model = revzoo.create(name)
    model.save_pretrained(tmp_path / "saved")
    assert names(tmp_path / "saved") == SAVED
    loaded = revzoo.Model.from_pretrained(tmp_path / "saved")
    assert isinstance(loaded, revzoo.Model)
    assert not loaded.training
    check_same(model, loaded)
    check_same(model, revzoo.create(tmp_path / "saved"))


def test_what_was_changed_after_creation_is_saved(tmp_path):
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1", "block.coupling={type: momentum, kept_bits: 8}"])
    model.reset_head(3)
    model.set_coupling(kept_bits=4)
    model.save_pretrained(str(tmp_path / "saved"))
    loaded = revzoo.Model.from_pretrained(str(tmp_path / "saved"))
    check_same(model, loaded)
    assert (loaded.num_outputs, loaded.coupling.kept_bits) == (3, 4)
    other = revzoo.Model.from_pretrained(tmp_path / "saved", num_outputs=7, dtype=torch.float64, device="meta")
    assert (other.num_outputs, other.fuse.norm.weight.dtype, other.fuse.norm.weight.is_meta) == (7, torch.float64, True)


def test_a_model_is_saved_over_another_and_its_card_is_left_alone(tmp_path):
    revzoo.create("rev_vit_digits").save_pretrained(tmp_path)
    assert re.search(r'revzoo\.create\("\w+"\)', (tmp_path / "README.md").read_text())
    (tmp_path / "README.md").write_text("my own words")
    model = revzoo.create("revnet_digits")
    model.save_pretrained(tmp_path)
    assert names(tmp_path) == SAVED
    assert (tmp_path / "README.md").read_text() == "my own words"
    check_same(model, revzoo.create(tmp_path))


def test_large_weights_are_in_several_files_until_they_are_small_again(tmp_path):
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"])
    state = model.state_dict()
    sizes = {key: tensor.nbytes for key, tensor in state.items()}
    most = max(sizes.values())
    assert most == 4 * 4 * 64 * 64  # the MLP's matrices are the largest tensors
    save_folder(model, tmp_path, most)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(names(tmp_path) - {"spec.yaml", "model.safetensors.index.json"})
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert index["metadata"] == {"total_size": sum(sizes.values())}
    assert set(index["weight_map"]) == set(state)
    held = [sum(sizes[key] for key, place in index["weight_map"].items() if place == file) for file in files]
    assert max(held) <= most
    assert all(a + b > most for a, b in pairwise(held)), "the next tensor would have fitted"
    check_same(model, revzoo.create(tmp_path))
    save_folder(model, tmp_path)
    assert names(tmp_path) == {"spec.yaml", "model.safetensors"}
    check_same(model, revzoo.create(tmp_path))


def test_the_card_says_what_the_model_is(tmp_path):
    revzoo.create("rev_vit_digits").save_pretrained(tmp_path / "mine")
    card = (tmp_path / "mine" / "README.md").read_text()
    assert safe_load(card.split("---")[1]) == {
        "library_name": "revzoo",
        "tags": ["revzoo", "reversible", "rev_vit"],
        "pipeline_tag": "image-classification",
    }
    assert 'model = revzoo.create("mine")' in card
    assert "It has 303 k parameters and takes images, 1 x 8 x 8." in card
    assert "- everything: a small member for scikit-learn's 8x8 digits; no paper" in card


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(InputError, match="A model on the meta device has no values to save"):
        revzoo.create("rev_vit_digits", device="meta").save_pretrained(tmp_path / "meta")
    assert names(tmp_path) == set()
    model = revzoo.create("rev_vit_digits")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"No folder can be made at .*file"):
        model.save_pretrained(tmp_path / "file")
    (tmp_path / "best.safetensors").touch()
    with pytest.raises(InputError, match="is the folder of a run, which keeps its own spec and weights. Name another"):
        model.save_pretrained(tmp_path)
    assert names(tmp_path) == {"best.safetensors", "file"}


def test_a_pushed_model_is_created_from_the_hub(fake_hub):
    model = revzoo.create("rev_vit_digits")
    assert model.push_to_hub("me/digits", private=True, token="secret") == "https://hub/me/digits/commit/1"
    assert fake_hub.calls == [
        ("client", "secret", "revzoo"),
        ("create", "me/digits", True),
        ("commit", "Upload rev_vit_digits"),
    ]
    there = fake_hub.root / "me" / "digits" / "main"
    assert names(there) == SAVED
    assert 'revzoo.create("hf-hub:me/digits")' in (there / "README.md").read_text()
    del fake_hub.calls[:]
    check_same(model, revzoo.create("hf-hub:me/digits"))
    assert fake_hub.calls == [("client", None, "revzoo"), ("fetch", "me/digits", None, None, None, False)], "one look is enough"
    assert revzoo.create("hf-hub:me/digits", num_outputs=3).num_outputs == 3
    assert revzoo.load_spec("hf-hub:me/digits").digest == model.spec.digest


def test_a_pushed_tokenizer_is_fetched(fake_hub, tmp_path):
    model = revzoo.create("rev_bert_mini", overrides=["stages.0.depth=1"])
    (tmp_path / "made.json").write_text("{the tokenizer}")
    model.data_config = {"tokenizer": str(tmp_path / "made.json")}
    model.push_to_hub("me/texts")
    fetched = revzoo.create("hf-hub:me/texts").data_config["tokenizer"]
    assert fetched == str(fake_hub.root / "cache" / "me" / "texts" / "main" / "tokenizer.json")
    assert Path(fetched).read_text() == "{the tokenizer}"


def test_from_pretrained_passes_on_what_the_hub_needs(fake_hub, tmp_path):
    model = revzoo.create("rev_vit_digits")
    model.push_to_hub("me/digits")
    shutil.copytree(fake_hub.root / "me" / "digits" / "main", fake_hub.root / "me" / "digits" / "v2")
    del fake_hub.calls[:]
    loaded = revzoo.Model.from_pretrained("me/digits", revision="v2", token="t", cache_dir=tmp_path, local_files_only=True)
    check_same(model, loaded)
    assert fake_hub.calls == [("client", None, "revzoo"), ("fetch", "me/digits", "v2", "t", tmp_path, True)]
    check_same(model, revzoo.create("hf-hub:me/digits"))
    check_same(model, revzoo.Model.from_pretrained("hf-hub:me/digits@v2"))
    assert fake_hub.calls[-1] == ("fetch", "me/digits", "v2", None, None, False)


def test_pushing_again_replaces_weights_and_keeps_the_card(fake_hub):
    revzoo.create("revnet_digits").push_to_hub("me/digits")
    there = fake_hub.root / "me" / "digits" / "main"
    (there / "README.md").write_text("my own words")
    (there / "model-00001-of-00002.safetensors").touch()
    (there / "model.safetensors.index.json").touch()
    (there / "notes.txt").touch()
    model = revzoo.create("rev_vit_digits")
    model.push_to_hub("me/digits", commit_message="Better")
    assert fake_hub.calls[-1] == ("commit", "Better")
    assert names(there) == {*SAVED, "notes.txt"}
    assert (there / "README.md").read_text() == "my own words"
    check_same(model, revzoo.create("hf-hub:me/digits"))


def test_only_specs_and_safetensors_are_fetched(fake_hub):
    revzoo.create("rev_vit_digits").push_to_hub("me/digits")
    there = fake_hub.root / "me" / "digits" / "main"
    for name in ("pytorch_model.bin", "modeling.py", "training.pt"):
        (there / name).touch()
    revzoo.create("hf-hub:me/digits")
    assert names(fake_hub.root / "cache" / "me" / "digits" / "main") == {"spec.yaml", "model.safetensors"}


def test_what_the_hub_does_not_have(fake_hub):
    with pytest.raises(
        CheckpointError, match=r"hf-hub:me/none cannot be fetched \(FileNotFoundError: 404 for me/none\)\. Check"
    ):
        revzoo.create("hf-hub:me/none")
    (fake_hub.root / "you" / "other" / "main").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"hf-hub:you/other holds no spec\.yaml: .*revzoo convert hf:you/other"):
        revzoo.create("hf-hub:you/other")


def test_a_hub_that_refuses_is_named(fake_hub, monkeypatch):
    def refuse(*arguments, **more):
        raise PermissionError("403 Forbidden")

    monkeypatch.setattr(fake_hub, "create_repo", refuse)
    with pytest.raises(
        CheckpointError, match=r"hf-hub:you/digits cannot be written \(PermissionError: 403 Forbidden\)\. Log in"
    ):
        revzoo.create("rev_vit_digits").push_to_hub("you/digits")


@pytest.mark.parametrize("repository", ["digits", "a/b/c", "me/"])
def test_a_repository_is_an_owner_and_a_name(repository, fake_hub):
    with pytest.raises(InputError, match=r"OWNER/NAME on the hub\. Received: "):
        revzoo.create(f"hf-hub:{repository}")
    with pytest.raises(InputError, match=r"OWNER/NAME on the hub\. Received: "):
        revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"]).push_to_hub(repository)
    with pytest.raises(InputError, match=r"OWNER/NAME on the hub\. Received: 'rev_vit_digits'"):
        revzoo.Model.from_pretrained("rev_vit_digits")
    assert fake_hub.calls == []


def test_commands_take_models_of_the_hub(fake_hub, capsys):
    revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"]).push_to_hub("me/digits")
    assert zoo_cli.main(["show", "hf-hub:me/digits", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "rev_vit_digits"
    assert zoo_cli.main(["show", "hf-hub:me/none"]) == 2
    assert "hf-hub:me/none cannot be fetched" in capsys.readouterr().err
