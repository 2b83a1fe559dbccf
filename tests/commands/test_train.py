"""`revzoo train` and `revzoo eval`, for a recipe that trains in a second."""

import pytest
from omegaconf import OmegaConf

import zoo_cli
from revzoo.errors import MissingValueError
from revzoo.spec.names import recipe_files
from revzoo.training.evaluation import Scores
from revzoo.training.planned_step import PlannedStep

SMALL = "stem.width=8,stages.0.width=8,stages.0.depth=1,block.f.heads=2"
FAST = ["data.batch_size=512", "train.epochs=1", "schedule.warmup_epochs=0", f"model.overrides=[{SMALL}]"]


def test_train_eval_resume(run, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = result_of(run("train", *FAST))
    assert first.endswith("runs/digits")
    assert first in run("train", "--resume", "runs/digits")
    top1 = first.split(" after")[0]
    assert f"runs/digits/last.safetensors: {top1}, top-5 " in run("eval", "runs/digits/last.safetensors", "data.batch_size=50")
    message = refused("train", *FAST, "--out", "runs/digits")
    assert message.startswith("The run folder runs/digits is not empty. Resume that run (--resume runs/digits)")
    message = refused("eval", "runs/digits", "train.epochs=3")
    assert "Received: train.epochs=3. Evaluation takes data.... and train.mixed_precision" in message


def test_a_folder_with_brackets_is_printed_as_it_is(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "a[/b]"
    assert result_of(run("train", *FAST, "--out", name)).endswith(name)
    resumed = run("train", "--resume", name, "train.epochs=2", "--accept-changes")
    assert f"Resuming after 1 epoch and 0 batches: {name}\n" in resumed
    assert "Changed: train.epochs: " in resumed
    assert result_of(resumed).endswith(name)


def test_a_dry_run_stops_before_the_first_step(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = run("train", *FAST, "--dry-run").splitlines()
    assert lines[0].endswith(" parameters on cpu; 1,442 images for training, 355 for testing, 10 classes")
    assert any("peak of everything" in line for line in lines)
    assert lines[-1] == "Dry run: nothing was trained, and nothing is written."
    assert list(tmp_path.iterdir()) == []


def test_a_network_that_cannot_be_counted_is_trained(run, tmp_path, monkeypatch):
    def fail(step, modes):
        raise MissingValueError("Bytes are counted without values.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PlannedStep, "measure_modes", fail)
    printed = run("train", *FAST)
    assert "Note: memory is not counted. Bytes are counted without values.\n" in printed
    assert result_of(printed).endswith("runs/digits")


def test_the_recipe_that_is_printed_is_a_recipe(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = run("train", "digits", "train.epochs=7", "--print-config")
    (tmp_path / "mine.yaml").write_text(printed)
    assert "  epochs: 7\n" in printed
    assert run("train", "mine.yaml", "--print-config") == printed


@pytest.mark.parametrize("recipe", recipe_files())
def test_every_recipe_is_printed(recipe, run, refused):
    """What is left to the command line, too: the folder of the data, and the model that finetune starts from."""
    printed = run("train", recipe, "--print-config")
    settings = OmegaConf.to_container(OmegaConf.create(printed))
    assert (settings["model"]["name"] == "???") == (recipe == "finetune")
    message = refused("train", recipe, "--print-config", "train.epochs=none")
    assert message.startswith("1 problem found:\n  override: train.epochs: found 'none'; allowed: ")


def test_a_printed_recipe_without_a_model_asks_for_one(run, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(run("train", "finetune", "--print-config"))
    message = refused("train", "mine.yaml", "data.root=photos")
    assert "mine.yaml: model.name: found '???'; allowed: the name of a model or its folder, such as model=runs" in message
    assert run("train", "mine.yaml", "model=rev_vit_digits", "--print-config").count("???") == 0


def result_of(printed: str) -> str:
    (line,) = (line for line in printed.splitlines() if line.startswith("top-1"))
    return line


def test_an_override_may_be_longer_than_the_name_of_a_file(run):
    """Its words are looked for among the files."""
    assert "num_outputs: 10" in run("train", "digits", "model.num_outputs=10" + " " * 300, "--print-config")


def test_a_loss_that_is_not_finite_is_status_1(capsys, monkeypatch):
    scores = Scores({"top1": 10.0, "top5": 50.0}, float("nan"), 355)
    monkeypatch.setattr("revzoo.training.evaluate_checkpoint.evaluate_checkpoint", lambda path, overrides, **options: scores)
    assert zoo_cli.main(["eval", "."]) == 1
    assert "the loss is not finite" in capsys.readouterr().err
