"""The training loop: what it learns and writes, and settings that must not change the result."""

import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import zoo_cli
from revzoo.errors import RecoveryError
from revzoo.training import epochs, loop
from revzoo.training.divergence import DivergedError
from revzoo.training.epochs import train_batch
from revzoo.training.loop import train
from revzoo.training.run_folder import name_run
from revzoo.training.setup import build_run
from tests.training.runs import CONSTANT, FAST, MEASURED, assert_same_run, make_image_recipe, make_recipe, read_records


def test_overfits_eight_samples(image_folder, tmp_path):
    still = ["data.augment={hflip: 0, color_jitter: null, scale: [1, 1], ratio: [1, 1], crop_pct: 1.0}", "data.batch_size=8"]
    plain = [*CONSTANT, "train.label_smoothing=0.0", "model.overrides=[stages.0.depth=1]"]
    run = build_run(make_image_recipe(image_folder, *still, *plain), tmp_path / "run", resumed=False)
    [(images, labels)] = run.data.train
    losses = [train_batch(run, images, labels, (0, 0, number)).item() for number in range(30)]
    assert losses[0] > 0.5
    assert losses[-1] < 2e-3


def test_run_folder(tmp_path, shown, capsys):
    summary = train(make_recipe(), tmp_path / "run")
    out = capsys.readouterr().out
    assert out.count("\nMemory: a step takes ") == out.count("epoch 1/2 ") == out.count("epoch 2/2 ") == 1
    assert f"{summary}\n0:00:" in out
    parameters = sum(tensor.numel() for tensor in load_file(tmp_path / "run" / "last.safetensors").values())
    start = f"rev_vit_digits: {parameters:,} parameters on cpu; 1,442 images for training, 355 for testing, 10 classes\n"
    assert out.startswith(start)
    assert json.loads((tmp_path / "run" / "classes.json").read_text()) == list("0123456789")
    records = read_records(tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "best.safetensors",
        "classes.json",
        "config.yaml",
        "curves.png",
        "last.safetensors",
        "metrics.jsonl",
        "spec.yaml",
        "state",
    ]
    states = sorted(path.name for path in (tmp_path / "run" / "state").iterdir())
    assert states == ["00001-0000000", "00002-0000000", "lock"]
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [(record["epoch"], record["updates"]) for record in records] == [(1, 4), (2, 8)]
    assert [record["lr"] for record in records] == pytest.approx([(3e-3 + 1e-5) / 2, 1e-5])  # half down the cosine, and down
    assert records[1]["loss"] < records[0]["loss"]  # of averaged weights, which move
    tops = [record["top1"] for record in records]
    assert (summary.score, summary.best_score, summary.best_epoch) == (tops[-1], max(tops), 1 + tops.index(max(tops)))
    with safe_open(tmp_path / "run" / "last.safetensors", "pt") as file:
        assert file.metadata()["revzoo.top1"] == repr(tops[-1])
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first.keys() > MEASURED - {"texts_per_second", "bytes_per_second"}
    assert 0 < first["seconds"] < 60
    assert first["images_per_second"] == pytest.approx(4 * 320 / first["seconds"])


def test_the_start_names_frozen_parts_and_remarks_on_the_data(image_folder, tmp_path, capsys):
    (image_folder / "train" / "notes.txt").touch()
    run = build_run(make_image_recipe(image_folder, "train.freeze=[stem]"), tmp_path / "run", resumed=False)
    loop._print_start(run)
    out = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r".*: ([\d,]+) parameters \([\d,]+ of them trained\) on cpu; 8 images for training, 8 for testing, 2 classes", out[0]
    )
    assert out[1:] == [f"Note: skipped in {image_folder}/train: 1 .txt."]


def test_same_loss_in_every_mode(tmp_path):
    """Of the stem, two steps, what fuses them and the head."""
    for name, modes in (("store", "store"), ("invert", "invert"), ("mixed", "[selective,invert,recompute,store,selective]")):
        exact = ["model.exact=true", f"model.schedule={modes}", "train.epochs=1"]
        train(make_recipe(*CONSTANT, *exact), tmp_path / name)
    for name in ("invert", "mixed"):
        assert_same_run(tmp_path / "store", tmp_path / name)


def test_accumulation_is_a_larger_batch(tmp_path):
    """Four batches of 320 in one update are one of 1280, but for the order in which gradients are added."""
    model = "model.overrides=[stem.width=8,stages.0.width=8,stages.0.depth=1,block.f.heads=2]"  # nothing random
    plain = ["train.epochs=1", model, "optimizer.opt=sgd", "ema=null", "train.clip_grad=null"]
    train(make_recipe(*plain, "train.accumulate=4"), tmp_path / "parts")
    train(make_recipe(*plain, "data.batch_size=1280"), tmp_path / "whole")
    parts, whole = (load_file(tmp_path / name / "last.safetensors") for name in ("parts", "whole"))
    assert read_records(tmp_path / "parts")[0]["updates"] == read_records(tmp_path / "whole")[0]["updates"] == 1
    for key in whole:
        torch.testing.assert_close(parts[key], whole[key], rtol=0, atol=1e-6)


def test_bf16(tmp_path):
    train(make_recipe("train.mixed_precision=bf16", "train.epochs=1"), tmp_path / "run")
    assert read_records(tmp_path / "run")[0]["train_loss"] < 3
    assert {tensor.dtype for tensor in load_file(tmp_path / "run" / "last.safetensors").values()} == {torch.float32}


def test_divergence_is_explained_and_has_a_status_of_its_own(tmp_path, capsys):
    far = ["optimizer.opt=sgd", "optimizer.lr=1e30", "schedule.warmup_epochs=0"]
    assert zoo_cli.main(["train", "digits", *FAST, *far, "--out", str(tmp_path / "run")]) == DivergedError.exit_status == 3
    assert re.search(r"loss is nan in epoch 1, by update 2; .*smaller optimizer.lr \(it is 1e\+30\)", capsys.readouterr().err)
    assert (tmp_path / "run" / "state" / "00000-0000000").is_dir()


@pytest.mark.filterwarnings("ignore:Rounding takes")
def test_states_that_are_lost_in_a_divergence_are_no_other_error(tmp_path):
    """The loss is finite, 1e8, and the states are too large for their digits."""
    with pytest.raises(
        DivergedError, match=r"loss is [\d.e+]+, and states are lost to rounding, in epoch 1, by update \d; .*lr"
    ):
        train(make_recipe("optimizer.lr=1e4", "schedule.warmup_epochs=0"), tmp_path / "run")


@pytest.mark.parametrize("batches", [0, 1])
def test_a_step_that_ran_differently_is_no_divergence(batches, tmp_path, monkeypatch):
    """Neither in the first batch nor after one with an ordinary loss."""

    def fail(run, *arguments):
        if run.progress.batch == batches:
            raise RecoveryError("ran differently")
        return train_batch(run, *arguments)

    monkeypatch.setattr(epochs, "train_batch", fail)
    with pytest.raises(RecoveryError, match="ran differently"):
        train(make_recipe(), tmp_path / "run")


@pytest.mark.parametrize(("file", "name"), [("mine.yaml", "mine"), ("runs/vit/config.yaml", "vit"), ("config.yaml", "config")])
def test_a_run_has_the_name_of_its_recipe(file, name):
    assert name_run(file) == name
