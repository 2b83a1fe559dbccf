import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import revzoo
from revzoo.errors import CheckpointError, InputError, RevzooError, SpecError
from revzoo.training.interrupt import Interrupted, StopSignal
from revzoo.training.loop import DivergedError, resume, train
from revzoo.training.recipe import load_recipe
from revzoo.training.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
FAST = ["data.batch_size=320", "schedule.warmup_epochs=0", "model.overrides=[stages.0.depth=2]"]
MEASURED = {"seconds", "images_per_second", "memory_bytes"}  # what no two runs agree on
# Everything that draws random numbers, two updates an epoch.
RANDOM = ["mixup={mixup_alpha: 0.8, cutmix_alpha: 1.0}", "train.accumulate=2", "train.epochs=3"]

images = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # timm leaves closing them to Python


def records(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in MEASURED} for line in lines]


def assert_same_run(one: Path, other: Path) -> None:
    assert records(one) == records(other)
    for name in ("last.safetensors", "best.safetensors"):
        left, right = load_file(one / name), load_file(other / name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)


@images
def test_overfits_eight_samples(recipe, folder, tmp_path):
    data = [f"data.root={folder}", "data.name=folder", "data.batch_size=8", "data.shift=0"]
    still = ["data.augment={hflip: 0, color_jitter: null, scale: [1, 1], ratio: [1, 1], crop_pct: 1.0}", "ema=null"]
    long = ["schedule.sched=constant", "train.epochs=40", "train.label_smoothing=0.0", "model.overrides=[stages.0.depth=2]"]
    summary = train(recipe(*data, *still, *long), tmp_path / "run")
    assert (summary.top1, summary.best_top1) == (100.0, 100.0)
    assert records(tmp_path / "run")[-1]["train_loss"] < 2e-3
    assert revzoo.load_spec(tmp_path / "run").head.arguments["outputs"] == 2


def test_run_folder(recipe, tmp_path):
    summary = train(recipe(), tmp_path / "run")
    found = records(tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "best.safetensors",
        "config.yaml",
        "curves.png",
        "last.safetensors",
        "metrics.jsonl",
        "spec.yaml",
        "state",
    ]
    assert [path.name for path in (tmp_path / "run" / "state").iterdir()] == ["00002-0000000"]
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [(record["epoch"], record["updates"]) for record in found] == [(1, 4), (2, 8)]
    assert [record["lr"] for record in found] == pytest.approx([(3e-3 + 1e-5) / 2, 1e-5])  # half down the cosine, and down
    tops = [record["top1"] for record in found]
    assert (summary.top1, summary.best_top1, summary.best_epoch) == (tops[-1], max(tops), 1 + tops.index(max(tops)))
    with safe_open(tmp_path / "run" / "last.safetensors", "pt") as file:
        assert file.metadata()["revzoo.top1"] == repr(tops[-1])
    again = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert again.keys() > MEASURED
    assert 0 < again["seconds"] < 60
    assert again["images_per_second"] == pytest.approx(4 * 320 / again["seconds"])


@pytest.mark.parametrize("updates", [1, 2, 3])  # in the first epoch, at its very end, in the second
def test_interrupted_run_goes_on_to_the_same_end(recipe, tmp_path, monkeypatch, updates):
    train(recipe(*RANDOM), tmp_path / "whole")
    asked = iter([0] * (updates - 1) + [signal.SIGTERM])
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "received", lambda self: next(asked))
        with pytest.raises(Interrupted, match=f"revzoo train --resume {tmp_path}/cut") as caught:
            train(recipe(*RANDOM), tmp_path / "cut")
    assert caught.value.signum == signal.SIGTERM
    assert len(list((tmp_path / "cut").glob("metrics.jsonl"))) == (updates > 2)
    resume(tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_killed_processes_go_on_to_the_same_end(recipe, fast, tmp_path, monkeypatch):
    """Ctrl-C, then SIGKILL while going on, then to the end, with the command line and real signals.

    The folder is called as a recipe is, which must not confuse anybody.
    """
    long = [*RANDOM, "train.epochs=12"]
    train(recipe(*long), tmp_path / "whole")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def start(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "zoo_cli", "train", *arguments]
        return subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    def wait_for_epochs(count: int, process: subprocess.Popen) -> None:
        metrics = tmp_path / "digits" / "metrics.jsonl"
        while not metrics.is_file() or len(metrics.read_text().splitlines()) < count:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)

    with start("digits", *fast, *long, "--out", "digits") as process:
        wait_for_epochs(2, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert errors == "\nrevzoo: Stopped, everything is saved. Go on with: revzoo train --resume digits\n"
    assert 2 <= len(records(tmp_path / "digits")) < 12
    with start("--resume", "digits") as process:
        wait_for_epochs(len(records(tmp_path / "digits")) + 2, process)
        process.kill()
    assert len(records(tmp_path / "digits")) < 12
    monkeypatch.chdir(tmp_path)
    resume(Path("digits"))
    assert_same_run(tmp_path / "whole", tmp_path / "digits")


def test_finished_run_stays_as_it_is(recipe, tmp_path):
    summary = train(recipe("train.epochs=1"), tmp_path / "run")
    before = records(tmp_path / "run")
    assert resume(tmp_path / "run") == summary
    assert records(tmp_path / "run") == before


def test_same_loss_in_every_mode(recipe, tmp_path):
    mixed = "[selective,invert,recompute,store,invert,selective,recompute]"  # stem, four steps, fuse, head
    modes = ["store", "invert", "recompute", mixed]
    for mode in modes:
        train(recipe("model.exact=true", f"model.schedule={mode}"), tmp_path / mode)
    for mode in modes[1:]:
        assert_same_run(tmp_path / "store", tmp_path / mode)


def test_loader_processes_change_nothing(recipe, tmp_path):
    for workers in (0, 2):
        train(recipe(f"data.num_workers={workers}", "train.epochs=1"), tmp_path / str(workers))
    assert_same_run(tmp_path / "0", tmp_path / "2")


def test_accumulation_is_a_larger_batch(recipe, tmp_path):
    """Four batches of 320 in one update are one of 1280, but for the order in which gradients are added."""
    plain = ["train.epochs=1", "model.overrides=[stages.0.depth=1]", "optimizer.opt=sgd", "ema=null", "train.clip_grad=null"]
    train(recipe(*plain, "train.accumulate=4"), tmp_path / "parts")
    train(recipe(*plain, "data.batch_size=1280"), tmp_path / "whole")
    parts, whole = (load_file(tmp_path / name / "last.safetensors") for name in ("parts", "whole"))
    assert records(tmp_path / "parts")[0]["updates"] == records(tmp_path / "whole")[0]["updates"] == 1
    for key in whole:
        torch.testing.assert_close(parts[key], whole[key], rtol=0, atol=1e-6)


def test_bf16(recipe, tmp_path):
    train(recipe("train.mixed_precision=bf16", "train.epochs=1"), tmp_path / "run")
    assert records(tmp_path / "run")[0]["train_loss"] < 3
    assert {tensor.dtype for tensor in load_file(tmp_path / "run" / "last.safetensors").values()} == {torch.float32}


@images
def test_fine_tuning_with_another_head(recipe, folder, tmp_path):
    train(recipe("train.epochs=1"), tmp_path / "digits")
    start = tmp_path / "digits" / "last.safetensors"
    data = [f"data.root={folder}", "data.name=folder", "data.batch_size=8", "data.shift=0"]
    train(recipe(f"model.checkpoint={start}", *data, "train.epochs=1"), tmp_path / "tuned")
    assert revzoo.create(tmp_path / "tuned", checkpoint=tmp_path / "tuned" / "best.safetensors").num_outputs == 2


def test_divergence_is_explained(recipe, tmp_path):
    with pytest.raises(DivergedError, match=r"loss is nan in epoch 1, by update 4; .*smaller optimizer.lr \(it is 1e\+30\)"):
        train(recipe("optimizer.opt=sgd", "optimizer.lr=1e30", "schedule.warmup_epochs=0"), tmp_path / "run")
    assert (tmp_path / "run" / "state" / "00000-0000000").is_dir()


def test_refusals(recipe, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text(recipe().to_yaml())
    (tmp_path / "empty" / "spec.yaml").write_text(revzoo.load_spec("rev_vit_digits").to_yaml())
    with pytest.raises(CheckpointError, match="not the folder of a run: there is no state"):
        resume(tmp_path / "empty")
    with pytest.raises(InputError, match="is not empty"):
        train(recipe(), tmp_path / "empty")
    with pytest.raises(SpecError, match="model.num_outputs: found 3; allowed: at least 10"):
        train(recipe("model.num_outputs=3"), tmp_path / "run")
    with pytest.raises(SpecError, match="'fp16' without a GPU"):
        train(recipe("train.mixed_precision=fp16"), tmp_path / "run")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of one epoch, which nobody changes."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(load_recipe("digits", [*FAST, "train.epochs=1"]), folder)
    return folder


STATE = "state/00001-0000000"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("spec.yaml", None, "there is no spec.yaml in it"),
        ("spec.yaml", b"name: [", "invalid YAML"),
        ("spec.yaml", "stages.0.depth=1", f"{STATE} cannot be used (.*model.safetensors does not fit"),
        ("metrics.jsonl", None, "There is no .*metrics.jsonl, the metrics of 1 epochs. Put it back"),
        ("metrics.jsonl", b"[1]\n", "Line 1 of .*metrics.jsonl is not the metrics of an epoch. Delete that line"),
        ("metrics.jsonl", b"\xff{\n", "Line 1 of .*metrics.jsonl"),
        (f"{STATE}/progress.json", None, f"{STATE}/progress.json cannot be used .*There is no state before it: start again"),
        (f"{STATE}/progress.json", b"", f"{STATE}/progress.json cannot be used"),
        (f"{STATE}/progress.json", b"[]", f"{STATE}/progress.json cannot be used"),
        (f"{STATE}/progress.json", b'{"loss_sums": [0.0], "epoch": 7}', f"{STATE}/progress.json cannot be used"),
        (f"{STATE}/progress.json", b'{"loss_sums": 3, "epoch": 1}', f"{STATE}/progress.json cannot be used"),
        (f"{STATE}/model.safetensors", None, "No weights file at .*model.safetensors"),
        (f"{STATE}/model.safetensors", b"half", "model.safetensors cannot be read"),
        (f"{STATE}/ema.safetensors", b"half", "ema.safetensors cannot be read"),
        (f"{STATE}/optimizer.bin", None, f"{STATE}/optimizer.bin cannot be used"),
        (f"{STATE}/optimizer.bin", b"half", f"{STATE}/optimizer.bin cannot be used"),
    ],
)
def test_damaged_folders(finished, tmp_path, file, content, message):
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / file
    if content is None:
        path.unlink()
    elif isinstance(content, str):
        path.write_text(revzoo.load_spec(path, [content]).to_yaml())
    else:
        path.write_bytes(content)
    with pytest.raises((CheckpointError, SpecError), match=message.replace(" (", r" \(")):
        resume(tmp_path / "run")


def test_the_state_before_a_damaged_one(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    newest = tmp_path / "run" / "state" / "00002-0000000"
    newest.mkdir()
    with pytest.raises(CheckpointError, match=f"Delete {newest} to go on from the state before it"):
        resume(tmp_path / "run")
    newest.rmdir()
    for name in ("my-notes", "99999-copy"):  # neither states nor in the way
        (newest.parent / name).mkdir()
    (newest.parent / "00009-0000000").touch()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "tr')
    assert resume(tmp_path / "run").folder == tmp_path / "run"
    assert [record["epoch"] for record in records(tmp_path / "run")] == [1]


def test_a_full_disk(recipe, tmp_path, monkeypatch):
    saved = RunFolder.publish_state

    def publish(self, written, progress):
        if progress.epoch:
            raise OSError(28, "No space left on device")
        saved(self, written, progress)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "publish_state", publish)
        with pytest.raises(RevzooError, match=f"No space left.*go on with revzoo train --resume {tmp_path}/run"):
            train(recipe(), tmp_path / "run")
    resume(tmp_path / "run")
    assert [record["epoch"] for record in records(tmp_path / "run")] == [1, 2]


def test_the_folder_is_looked_at_first(recipe, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("revzoo.training.setup.load_data", None)
    for out in ("file", "file/run", "."):
        with pytest.raises(InputError, match="cannot be made: .*file is a file|is not empty"):
            train(recipe(), tmp_path / out)
