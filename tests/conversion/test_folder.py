"""The folder that `revzoo convert` writes: every command takes it, and `revzoo export` gives the source's tensors back."""

import json
import os
import resource
import signal
import sys
from functools import partial

import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file

import revzoo
import zoo_cli
from revzoo.checkpoint.folder import save_folder
from revzoo.conversion import convert as convert_module
from revzoo.errors import InputError
from tests.conversion.conftest import check_export


def test_a_folder_that_every_command_takes_and_the_way_back(file, tmp_path, capsys):
    out = tmp_path / "rev"
    assert zoo_cli.main(["convert", "test_vit", "--weights", str(file), "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"spec.yaml", "model.safetensors", "report.json", "report.txt"}
    assert f"revzoo train finetune model={out}" in capsys.readouterr().out
    report = json.loads((out / "report.json").read_text())
    assert report["counts"] == {"renamed": len(load_file(file))}
    assert report["comparisons"][0]["largest_difference"] <= 1e-5
    model = revzoo.create(out)
    assert (model.num_outputs, model.coupling.kept_bits, model.spec.name) == (5, 8, "test_vit_momentum")
    original = timm.get_pretrained_cfg("test_vit")
    assert (model.data_config["mean"], model.data_config["crop_pct"]) == (original.mean, original.crop_pct)
    assert zoo_cli.main(["show", str(out)]) == 0
    assert zoo_cli.main(["export", str(out), "--out", str(tmp_path / "back.safetensors")]) == 0
    expected, back = load_file(file), load_file(tmp_path / "back.safetensors")
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in expected.items())


def test_large_weights_are_in_several_files_and_the_way_back_reads_them(file, tmp_path, monkeypatch):
    """Here with at most 20 kB in a file; colleagues may read the folder and all of its files."""
    out = tmp_path / "rev"
    monkeypatch.setattr(convert_module, "save_folder", partial(save_folder, shard_bytes=20_000))
    model = revzoo.convert("test_vit", file, out=out).model
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    assert len(shards) > 10
    assert (out / "model.safetensors.index.json").is_file()
    loaded, state = revzoo.create(out).state_dict(), model.state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())
    check_export(out, load_file(file))
    for name in (shards[0], "unused.safetensors"):
        with pytest.raises(InputError, match="is the converted network itself"):
            revzoo.export(out, out / name)


def test_colleagues_can_read_a_converted_network(file, tmp_path):
    umask = 0o027
    before = os.umask(umask)
    try:
        revzoo.convert("test_vit", file, out=tmp_path / "new" / "rev")
        revzoo.export(tmp_path / "new" / "rev", tmp_path / "new" / "back.safetensors")
    finally:
        os.umask(before)
    modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in (tmp_path / "new").rglob("*")}
    assert modes == {(True, 0o777 & ~umask), (False, 0o666 & ~umask)}


def test_a_full_disk_is_explained_and_nothing_is_left(file, tmp_path, capsys):
    """No file can grow beyond a few bytes while the folder is written; safetensors has an error of its own for that."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "out").mkdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        code = zoo_cli.main(["convert", "test_vit", "--weights", str(file), "--out", str(tmp_path / "out" / "rev")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    assert "rev cannot be written (" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_a_conversion_that_is_terminated_leaves_nothing(file, tmp_path, capsys, monkeypatch):
    """SIGTERM while the folder is written."""
    (tmp_path / "out").mkdir()
    before = signal.getsignal(signal.SIGTERM)

    def terminate(*_):
        assert [path.name[:5] for path in (tmp_path / "out").iterdir()] == [".rev-"]
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(revzoo.ConvertReport, "save", terminate)
    out = tmp_path / "out" / "rev"
    monkeypatch.setattr(sys, "argv", ["revzoo", "convert", "test_vit", "--weights", str(file), "--out", str(out)])
    try:
        assert zoo_cli.run() == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "\nrevzoo: stopped\n"
    assert list((tmp_path / "out").iterdir()) == []


def test_the_tokenizer_of_the_original_stays_next_to_its_weights(tmp_path):
    config = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 8, "vocab_size": 9}
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**config, max_position_embeddings=8))
    bert.save_pretrained(tmp_path / "bert")
    assert revzoo.convert(tmp_path / "bert").model.data_config == {}
    (tmp_path / "bert" / "tokenizer.json").write_text("{}")
    revzoo.convert(tmp_path / "bert", out=tmp_path / "rev")
    assert revzoo.create(tmp_path / "rev").data_config == {"tokenizer": str(tmp_path / "rev" / "tokenizer.json")}
