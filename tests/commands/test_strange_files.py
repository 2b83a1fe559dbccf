"""Files of strangers: each row of the table in SECURITY.md, with a payload that leaves a mark where it is run."""

import gzip
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import Metadata

import zoo_cli
from revzoo.analysis.twin import build_twin
from revzoo.spec import load_spec
from revzoo.training.checksums import seal
from tests.training.runs import FAST

STATE = "state/00001-0000000"
KERNELS = ("attn_implementation", "_attn_implementation")  # may name compiled code of the hub
# A module in the present folder, which leaves the mark when it is imported, and a function that leaves it when it is called.
MODULE = 'from pathlib import Path\n\nPath("MARK").touch()\n\n\ndef load(options, input):\n    return Path("MARK").touch()\n'


SQUARES = """
import torch

class Squares(list):
    classes = ["a", "b"]

def load(options, input):
    return Squares([(torch.ones(1, 8, 8) * i, i % 2) for i in range(4)]), Squares([(torch.ones(1, 8, 8), 1)] * 4)
"""


class Payload:
    """Leaves the mark when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("MARK",)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of one epoch."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert zoo_cli.main(["train", "digits", *FAST, "train.epochs=1", "schedule.warmup_epochs=0", "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def run(trained, tmp_path, monkeypatch) -> Path:
    """A copy of the run in the present folder, in which there are a module and a package of a stranger's, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("shapes", "antigravity"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        Path(f"{name}.py").write_text(MODULE)
    return Path(shutil.copytree(trained, tmp_path / "run")).relative_to(tmp_path)


@pytest.fixture
def strange(capfd) -> Callable[..., str]:
    """Return a function that runs a command, in which nothing of a stranger's may run, and returns what it says."""

    def call(*words: object, status: int | None = 2) -> str:
        capfd.readouterr()
        ended = zoo_cli.main([str(word) for word in words])
        out, err = capfd.readouterr()
        assert not Path("MARK").exists(), words
        assert "Traceback" not in out + err
        assert status is None or ended == status, out + err
        return out + err

    return call


def change_metadata(file: Path, key: str, change: Callable[[str], str]) -> None:
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(file), file, metadata | {key: change(metadata[key])})


def name_function(text: str) -> str:
    assert "name: digits" in text
    return text.replace("name: digits", "name: shapes:load")


def test_weights_that_name_a_function(run, strange):
    """Only evaluating reads the recipe in them; the others do not see it."""
    for file in (run / "best.safetensors", run / "last.safetensors"):
        change_metadata(file, "revzoo.recipe", name_function)
    image = Path("0.png")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(image)
    for what in (run / "best.safetensors", run):
        said = strange("eval", what)
        assert "best.safetensors: config.yaml, data.name, names shapes" in said
        assert "say so: --import shapes" in said
    for command in ("show", "verify", "profile", "fits"):
        strange(command, run, status=0)
    strange("predict", run, image, status=0)
    strange("export", run, "--onnx", "model.onnx", status=0)
    strange("plan", run, "--budget", "100MiB", "--batch", 2, status=0)
    strange("convert", run, "--out", "converted", status=None)
    strange("train", "digits", *FAST, f"model={run}", "--smoke", status=None)


def test_recipes_that_name_a_function(run, strange):
    recipe = run / "config.yaml"
    recipe.write_text(name_function(recipe.read_text()))
    for words in (["--resume", run], [recipe], [recipe, "--dry-run"], [recipe, "--smoke"], [run]):
        said = strange("train", *words)
        assert re.search(r"run/config.yaml, data.name, names shapes\. .* say so: --import shapes", said), words
    strange("train", recipe, "--print-config", status=0)
    for name in ("os:system", "antigravity:geohash", "__main__:run", "json:loads", "test.autotest:x", "IPython.__main__:x"):
        recipe.write_text(recipe.read_text().replace("shapes:load", name))
        assert "which is of Python itself" in strange("train", recipe, "--dry-run"), name
        recipe.write_text(recipe.read_text().replace(name, "shapes:load"))


def test_what_an_installed_module_imports_later(run, strange):
    """Not from the present folder either: SciPy's `datasets` looks for pooch when it is asked for."""
    Path("pooch.py").write_text(MODULE)
    recipe = run / "config.yaml"
    recipe.write_text(name_function(recipe.read_text()).replace("shapes:load", "scipy:datasets"))
    assert "scipy:datasets should be a function" in strange("train", recipe, "--dry-run")


def test_programs_that_libraries_start(run, monkeypatch):
    """They do not look into the present folder, as Python does by itself."""
    program = [sys.executable, "-c", "import shapes"]
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.delenv("PYTHONSAFEPATH")
    monkeypatch.setattr(signal, "signal", lambda *words: None)
    monkeypatch.setattr(zoo_cli, "main", lambda: subprocess.run(program, capture_output=True, check=False).returncode)
    assert zoo_cli.run() == 1
    assert not Path("MARK").exists()


def test_what_is_typed_goes_on_after_a_restart(run, capfd, monkeypatch):
    Path("squares.py").write_text(SQUARES)
    own = ["data.name=squares:load", "data.batch_size=2"]
    command = ["train", "digits", *FAST, *own, "schedule.warmup_epochs=0", "--out", "own"]
    assert zoo_cli.main(command) == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert zoo_cli.main(command) == 0
    assert "Resuming after" in capfd.readouterr().out


def test_what_is_typed_runs(run, capsys):
    assert zoo_cli.main(["train", "digits", "data.name=shapes:load", "--dry-run"]) == 2
    assert "shapes:load has to return two data sets" in capsys.readouterr().err
    assert Path("MARK").exists()


NAMES = (b"antigravity\n", b"test.autotest\n", b"IPython.__main__", b"shapes\n")


@pytest.mark.parametrize("content", [*NAMES, "shapes\n".encode("utf-16"), b"\xff\xfe\x00shapes\n", b""])
def test_packages_that_a_run_names(run, strange, content):
    (run / "imports.txt").write_bytes(content)
    names = content in NAMES
    for command in ("eval", "show", "verify", "predict", "export", "fits", "profile", "numerics"):
        said = strange(command, run, status=2 if names else None)
        assert ("run/imports.txt names" in said) == names


def test_pickles_in_a_state(run, strange):
    """A payload in each of its files, with checksums of whoever has put it there."""
    whole = Path(shutil.copytree(run, "whole"))
    for name in sorted(path.name for path in (whole / STATE).iterdir()):
        shutil.rmtree(run)
        shutil.copytree(whole, run)
        (run / STATE / name).write_bytes(pickle.dumps(Payload()))
        if name != "checksums.sha256":
            seal(run / STATE)
        said = strange("train", "--resume", run, status=None if name == "checksums.sha256" else 2)
        assert STATE in said
    shutil.rmtree(run)
    whole.rename(run)
    (run / STATE / ".metadata").write_bytes(pickle.dumps(Metadata({}, planner_data=Payload())))
    seal(run / STATE)
    said = strange("train", "--resume", run)
    assert f"{STATE} cannot be used (UnpicklingError: .metadata names posix.mkdir" in said


def test_settings_of_a_state_are_plain(run, strange):
    """The part of the tensors' file that is no tensor."""
    [file] = (run / STATE).glob("*.distcp")
    with (run / STATE / ".metadata").open("rb") as opened:
        metadata = pickle.load(opened)
    [place] = [place for index, place in metadata.storage_data.items() if index.fqn == "settings"]
    torch.save(Payload(), "payload.pt")
    content = Path("payload.pt").read_bytes()
    place.offset, place.length = file.stat().st_size, len(content)
    file.write_bytes(file.read_bytes() + content)
    with (run / STATE / ".metadata").open("wb") as opened:
        pickle.dump(metadata, opened)
    seal(run / STATE)
    assert "hold more than numbers and texts, which was not run" in strange("train", "--resume", run)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("origin", {"classes": 5}),
        ("origin", {"classes": [1]}),
        ("origin", {"batch_size": 0}),
        ("progress", {"batch": 5}),
        ("progress", {"epoch": 3}),
        ("progress", {"loss_sum": 10**400}),
        ("progress", {"seconds": float("inf")}),
    ],
)
def test_numbers_of_a_state(run, strange, name, change):
    file = run / STATE / f"{name}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    seal(run / STATE)
    assert f"{name}.json cannot be used" in strange("train", "--resume", run, "--accept-changes")


def test_a_state_by_another_name(run, strange):
    (run / STATE).rename(run / "state/00009-0000000")
    assert "progress.json cannot be used (it is that of another state)" in strange("train", "--resume", run)
    (run / "state/00009-0000000").rename(run / STATE)
    shutil.rmtree(run / "state/00000-0000000")
    for line in ("", f"0  {'x' * 5000}\n"):
        (run / STATE / "checksums.sha256").write_text(line)
        assert "No state in run/state can be used" in strange("train", "--resume", run)


@pytest.mark.parametrize(("key", "text"), [("revzoo.classes", "5"), ("revzoo.examples", "{"), ("revzoo.data_config", "[1]")])
def test_metadata_of_weights(run, strange, key, text):
    change_metadata(run / "best.safetensors", key, lambda _: text)
    assert "The metadata of run/best.safetensors are damaged" in strange("eval", run)


FACTS = [("mean", "x"), ("mean", 5), ("mean", [1, 2]), ("std", [0]), ("interpolation", 5), ("crop_pct", -1), ("crop_mode", "x")]


@pytest.mark.parametrize(("name", "value"), FACTS)
def test_how_weights_say_that_images_are_prepared(run, strange, name, value):
    change_metadata(run / "best.safetensors", "revzoo.data_config", lambda text: json.dumps(json.loads(text) | {name: value}))
    Image.new("L", (8, 8)).save("0.png")
    assert f"model.data_config['{name}'] of rev_vit_digits is" in strange("predict", run, "0.png")


def test_links_in_a_run(run, strange):
    (run / "log").mkdir(exist_ok=True)
    Path("mine.txt").touch()
    (run / "log/unreadable.txt").symlink_to(Path("mine.txt").absolute())
    assert "run/log/unreadable.txt is a link" in strange("train", "--resume", run)


def test_states_elsewhere(run, strange):
    """What is in a link's folder stays."""
    (run / "state").rename("mine")
    Path("mine/deleted-x").mkdir()
    (run / "state").symlink_to(Path("mine").absolute())
    assert "state is a link" in strange("train", "--resume", run)
    assert Path("mine/deleted-x").is_dir()
    (run / "state").unlink()
    shutil.copytree("mine", run / "state")
    Path("mine/file").touch()
    (run / "state" / "writing").symlink_to(Path("mine").absolute())
    strange("train", "--resume", run, status=None)
    assert Path("mine/file").is_file()


@pytest.mark.parametrize("name", ["weights.pt", "weights.bin", "weights.safetensors", "model.ckpt.index"])
def test_pickled_weights(run, strange, name):
    torch.save({"a": torch.zeros(1), "b": Payload()}, name)
    Path("plain").write_bytes(pickle.dumps(Payload()))
    for file in (name, "plain"):
        strange("train", "digits", *FAST, f"model.checkpoint={file}", "--dry-run")
        strange("convert", "vit_tiny_patch16_224", "--weights", file, "--out", "converted")
        strange("eval", file)
        (run / "best.safetensors").write_bytes(Path(file).read_bytes())
        for command in ("eval", "verify", "predict"):
            strange(command, run, *(["0.png"] if command == "predict" else []))


def write_config(folder: Path, **changes: Any) -> None:
    llama = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 99}
    folder.mkdir(exist_ok=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **llama, **changes}
    (folder / "config.json").write_text(json.dumps(config))


def test_a_folder_of_transformers(run, strange, monkeypatch):
    """Its own code, kernels that it names, and other functions of Transformers."""
    folder = Path("network")
    (folder / "x").mkdir(parents=True)
    own = {"AutoConfig": "shapes.Config", "AutoModel": "shapes.Model", "AutoModelForCausalLM": "shapes.Model"}
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("asked"))
    for changes in (
        {"auto_map": own},
        {"auto_map": own, "model_type": "strange", "architectures": ["Strange"]},
        {"architectures": ["pipeline"]},
        dict.fromkeys(KERNELS, "stranger/kernel"),
    ):
        write_config(folder, **changes)
        shutil.copy("shapes.py", folder / "shapes.py")
        for words in (
            ["fits", folder],
            ["plan", folder, "--budget", "1GiB", "--batch", 1],
            ["convert", folder, "--out", "converted"],
        ):
            said = strange(*words, status=None)
            assert "kernels" not in said, said
    torch.save({"b": Payload()}, folder / "pytorch_model.bin")
    strange("convert", folder, "--out", "converted")


def test_code_that_parts_of_a_configuration_name(run, strange, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("asked"))
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}
    own = {"name_or_path": "network", "auto_map": {"AutoModelForCausalLM": "shapes.Model"}}
    parts = {"encoder": {"model_type": "bert", **small}, "decoder": {"model_type": "vit", **small, **own}}
    write_config(Path("network"), model_type="encoder-decoder", architectures=["EncoderDecoderModel"], **parts)
    shutil.copy("shapes.py", "network")
    strange("fits", "network", "--batch", 1, status=None)
    asked = {"model_type": "bert", **small, KERNELS[0]: "kernels-community/strange"}
    parts = {"question_encoder": asked, "generator": {"model_type": "bart", "d_model": 32, "vocab_size": 99}}
    write_config(Path("network"), model_type="rag", architectures=["RagModel"], **parts)
    assert "kernels" not in strange("fits", "network", "--batch", 1, status=None)


def test_kernels_that_files_name(run, strange):
    """Networks of Transformers that are built to compare with have the attention that is installed."""
    transformers = pytest.importorskip("transformers")
    write_config(Path("network"))
    network = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained("network"))
    network.save_pretrained("network")
    write_config(Path("network"), **network.config.to_dict() | dict.fromkeys(KERNELS, "stranger/kernel"))
    assert "was not run" not in strange("convert", "network", "--out", "converted", status=0)
    twin = {"library": "transformers", "name": "LlamaForCausalLM", "arguments": {KERNELS[0]: "stranger/kernel"}}
    twin["arguments"] |= {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 99, "num_attention_heads": 2}
    assert isinstance(build_twin(replace(load_spec("rev_gpt_mini"), twin=twin)), transformers.LlamaForCausalLM)


def test_images_by_another_name(run, strange, monkeypatch):
    """PostScript would go to Ghostscript, a program."""
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *words, **more: pytest.fail("Ghostscript"))
    monkeypatch.setattr("PIL.EpsImagePlugin.has_ghostscript", lambda: True)
    for split in ("train", "val"):
        for label in ("a", "b"):
            folder = Path("photos", split, label)
            folder.mkdir(parents=True)
            for i in range(2):
                Image.fromarray(np.full((8, 8), 90 * i, np.uint8)).save(folder / f"{i}.png")
    eps = Path("photos/train/a/0.png")
    Image.new("RGB", (8, 8)).save(eps, format="EPS")
    Image.new("RGB", (8, 8)).save("photos/train/b/0.png", format="PCX")
    said = strange("check", "photos", status=1)
    assert "2 images of no use (the first: cannot identify image file" in said
    strange("predict", run, eps, status=None)
    folder = ["data.name=folder", "data.root=photos", "data.batch_size=2"]
    strange("train", "digits", *FAST, *folder, "data.shift=0", "train.epochs=1", "schedule.warmup_epochs=0", status=0)


@pytest.mark.parametrize("depth", [300, 100_000])
def test_what_is_nested_too_deep(run, strange, write_tar, depth):
    deep = "[" * depth + "]" * depth
    Path("rows.jsonl").write_text(f'{{"text": {deep}}}\n')
    said = strange("check", "rows.jsonl")
    assert "rows.jsonl cannot be read: row 1: lists and mappings are nested more than 100 deep" in said
    strange("train", "texts", "data.root=rows.jsonl", "--dry-run")
    folder = Path("network")
    write_config(folder)
    (folder / "config.json").write_text(f'{{"model_type": {deep}}}')
    for words in (["convert", folder, "--out", "converted"], ["fits", folder]):
        assert "network/config.json" in strange(*words)
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {deep}}}')
    assert "model.safetensors.index.json cannot be read as JSON" in strange("eval", folder / "model.safetensors.index.json")
    image = Path("0.png")
    Image.new("L", (8, 8)).save(image)
    for split in ("train", "val"):
        write_tar(Path("tars", f"{split}.tar"), {"a.png": image.read_bytes(), "a.json": f'{{"label": {deep}}}'.encode()})
    assert "has no label" in strange("train", "images", "data.name=wds", "data.root=tars", "--dry-run")
    Path("saved/folder.json").mkdir(parents=True)
    Path("saved/train.jsonl").write_text(f'{{"label": 0, "image": {deep}}}\n')
    said = strange("train", "images", "data.name=hfds", "data.root=saved", "--dry-run")
    assert "saved/train.jsonl: lists and mappings are nested more than 100 deep" in said
    with gzip.open("saved/train.jsonl.gz", "wt") as file:
        file.write(Path("saved/train.jsonl").read_text())
    Path("saved/train.jsonl").write_text("[\n" * depth + '"\\"]"' + "]\n" * depth)
    assert "saved/train.jsonl: lists" in strange("train", "images", "data.name=hfds", "data.root=saved", "--dry-run")
    Path("saved/train.jsonl").unlink()
    assert "saved/train.jsonl.gz: lists" in strange("train", "images", "data.name=hfds", "data.root=saved", "--dry-run")
    (run / "tokenizer.json").write_text(deep)
    strange("train", "lm", "data.text.tokenizer=run/tokenizer.json", "--dry-run")
    for file in ("metrics.jsonl", f"{STATE}/progress.json", f"{STATE}/origin.json", "plan.json"):
        before = (run / file).read_bytes() if (run / file).is_file() else None
        (run / file).write_text(f'{{"epoch": {deep}}}\n')
        seal(run / STATE)
        said = strange("train", "--resume", run, status=None if before is None else 2)
        assert before is None or file.rpartition("/")[2] in said
        (run / file).unlink() if before is None else (run / file).write_bytes(before)
    change_metadata(run / "best.safetensors", "revzoo.classes", lambda text: deep)
    assert "The metadata of run/best.safetensors are damaged" in strange("eval", run)


def test_specs_hold_nothing_that_runs(run, strange):
    Path("spec.yaml").write_text((run / "spec.yaml").read_text() + "notes: !!python/object/apply:os.mkdir [MARK]\n")
    strange("show", "spec.yaml")
    Path("spec.yaml").write_text((run / "spec.yaml").read_text().replace("patch_embed", "shapes.load"))
    strange("show", "spec.yaml")
    Path("recipe.yaml").write_text("base: digits\noptimizer: {opt: !!python/object/apply:os.mkdir [MARK]}\n")
    strange("train", "recipe.yaml", "--dry-run")
