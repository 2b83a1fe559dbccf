"""What a run was started with is compared when it is resumed: changes are listed, and refused or accepted."""

import json
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from revzoo.data.base import Data
from revzoo.errors import CheckpointError, InputError
from revzoo.spec.loading import load_spec
from revzoo.spec.parsing import to_plain
from revzoo.training.loop import resume, train
from revzoo.training.options import Recipe
from revzoo.training.origin import Origin, check_changes
from revzoo.training.recipe import load_recipe
from revzoo.training.setup import build_run

CONSTANT = ["schedule.sched=constant", "schedule.warmup_epochs=0"]


def edit(file: Path, **changes: object) -> None:
    """Set values in a YAML file, given by dotted paths with __ for the dots."""
    content = OmegaConf.load(file)
    for path, value in changes.items():
        OmegaConf.update(content, path.replace("__", "."), value)
    OmegaConf.save(content, file)


def refuse(folder: Path, message: str, *overrides: str, accept: bool = False) -> None:
    with pytest.raises(InputError, match=message):
        resume(folder, overrides, accept_changes=accept)


@pytest.mark.parametrize(
    ("file", "change", "line"),
    [
        ("config.yaml", {"optimizer__opt": "sgd"}, "optimizer.opt: adamw at the start, sgd now"),
        ("config.yaml", {"train__seed": 3}, "train.seed: 0 at the start, 3 now"),
        ("config.yaml", {"data__batch_size": 160}, "data.batch_size: 320 at the start, 160 now"),
        ("config.yaml", {"ema__decay": 0.5}, "ema.decay: 0.9.* at the start, 0.5 now"),
        ("spec.yaml", {"head__dropout": 0.2}, "spec.head.dropout: 0.1 at the start, 0.2 now"),
    ],
)
def test_files_that_were_edited(copied, file, change, line):
    edit(copied / file, **change)
    path = line.partition(":")[0]
    for accept in (False, True):
        refuse(
            copied, rf"{copied} was started with something else:\n  {line}\nA resumed run cannot change {path}\.", accept=accept
        )


def test_every_change_is_listed(copied):
    edit(copied / "config.yaml", optimizer__opt="sgd", train__seed=3, train__label_smoothing=0.3)
    refuse(copied, r"(?s)optimizer.opt: .*train.label_smoothing: .*train.seed: .*cannot change optimizer.opt, train.seed\.")


def test_changes_that_make_sense_are_accepted(copied, capsys):
    """Those that were typed at once, others by --accept-changes; afterwards they are the run's."""
    edit(copied / "config.yaml", train__label_smoothing=0.3)
    refuse(copied, "train.label_smoothing: 0.1 at the start, 0.3 now\nPut it back, or accept it with --accept-changes.")
    refuse(copied, "accept it with --accept-changes.", "train.clip_grad=2.0")  # which accepts only itself
    resume(copied, ["train.clip_grad=2.0"], accept_changes=True)
    printed = capsys.readouterr().out
    assert "Changed: train.label_smoothing: 0.1 at the start, 0.3 now." in printed
    assert "Changed: train.clip_grad: 1.0 at the start, 2.0 now." in printed
    assert load_recipe(copied / "config.yaml").train.clip_grad == 2.0
    resume(copied)
    assert "Changed" not in capsys.readouterr().out


def test_a_finished_run_is_extended(tmp_path, recipe, assert_same_run):
    train(recipe(*CONSTANT, "train.epochs=3"), tmp_path / "whole")
    train(recipe(*CONSTANT, "train.epochs=1"), tmp_path / "run")
    resume(tmp_path / "run", ["train.epochs=3"])
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    refuse(
        tmp_path / "run",
        "train.epochs: 3 at the start, 2 now\n3 epochs are done. Use train.epochs=3 or more.",
        "train.epochs=2",
    )


def test_a_schedule_that_ended_is_not_extended_silently(copied, read_records):
    message = (
        r"train.epochs: 1 at the start, 2 now\nschedule.sched=cosine reaches its end in the last epoch, so it would jump. "
        r"Accept the jump with --accept-changes, or start a new run from the weights after the last epoch: revzoo train "
        r".*config.yaml model.checkpoint=.*last.safetensors\.$"
    )
    refuse(copied, message, "train.epochs=2")
    (copied / "last.safetensors").rename(copied / "weights")  # as before the end of the first epoch
    refuse(copied, r"would jump. Accept the jump with --accept-changes, or start a new run\.$", "train.epochs=2")
    (copied / "weights").rename(copied / "last.safetensors")
    # What the message says works:
    train(load_recipe(copied / "config.yaml", [f"model.checkpoint={copied / 'last.safetensors'}"]), copied.parent / "new")
    resume(copied, ["train.epochs=2"], accept_changes=True)
    assert [record["epoch"] for record in read_records(copied)] == [1, 2]
    assert load_recipe(copied / "config.yaml").train.epochs == 2


@pytest.fixture
def trained(recipe, image_folder, tmp_path) -> Path:
    train(recipe("data.name=folder", f"data.root={image_folder}", "data.batch_size=4", "train.epochs=1"), tmp_path / "run")
    return tmp_path / "run"


def rename_class(images: Path) -> None:
    for split in ("train", "val"):
        (images / split / "cat").rename(images / split / "zebra")


def add_class(images: Path) -> None:
    for split in ("train", "val"):
        shutil.copytree(images / split / "cat", images / split / "bird")


def remove_image(images: Path) -> None:
    (images / "train" / "cat" / "0.png").unlink()


def rename_image(images: Path) -> None:
    (images / "train" / "cat" / "0.png").rename(images / "train" / "cat" / "9.png")


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (rename_class, "classes: cat only at the start, zebra only now\n  training examples: others than then"),
        (add_class, "classes: bird only now\n  training examples: 8 at the start, 12 now"),
        (remove_image, "training examples: 8 at the start, 7 now\n"),
        (rename_image, "training examples: others than then\n"),
    ],
)
def test_other_examples_are_refused(trained, image_folder, change, lines):
    change(image_folder)
    refuse(trained, f"was started with something else:\n  {lines}", accept=True)


def test_the_same_examples_may_be_elsewhere(trained, image_folder, tmp_path):
    image_folder.rename(tmp_path / "elsewhere")
    original = (trained / "config.yaml").read_text()
    edit(trained / "config.yaml", data__root=str(tmp_path / "elsewhere"))
    refuse(
        trained, rf"data.root: {image_folder} at the start, .*elsewhere now\nPut it back, or accept it with --accept-changes"
    )
    (trained / "config.yaml").write_text(original)
    resume(trained, [f"data.root={tmp_path / 'elsewhere'}"])
    resume(trained)


def test_more_outputs_than_classes_are_resumed(recipe, tmp_path):
    train(recipe("model.num_outputs=12", "train.epochs=1"), tmp_path / "run")
    resume(tmp_path / "run")
    assert load_spec(tmp_path / "run").head.arguments["outputs"] == 12


def test_one_class_of_many():
    names = [f"n{i:04d}" for i in range(1000)]
    now = [*names[:500], "other", *names[501:]]
    before, after, turned = (Origin({}, {}, classes, {}, 64) for classes in (names, now, names[::-1]))
    assert before.list_changes(after) == {"classes": "n0500 only at the start, other only now"}
    assert before.list_changes(turned) == {"classes": "the same names, in another order"}


@pytest.mark.parametrize("content", ["[]", "{", None])
def test_a_state_without_an_origin(finished, copied, content):
    """The state before it is named only where there is one."""
    run = build_run(load_recipe(finished), copied, resumed=True)
    earlier, newest = run.folder.list_states()
    (newest / "origin.json").unlink()
    if content:
        (newest / "origin.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"origin.json cannot be used \(.*\). Delete {newest} to resume from the state"):
        check_changes(run.folder, run.origin, run.recipe, 1, [], accept=False)
    shutil.rmtree(earlier)
    with pytest.raises(CheckpointError, match="There is no state before it: start again"):
        check_changes(run.folder, run.origin, run.recipe, 1, [], accept=False)


class NoData(Data):
    def __init__(self) -> None:
        self.class_names = None

    def describe_examples(self) -> dict:
        return {}


def test_what_is_saved_reads_as_what_it_was(recipe, tmp_path):
    """For a recipe and a spec with every kind of value, through the files of a run and of a state."""
    source: Recipe = recipe(
        "mixup={mixup_alpha: 0.8}", "train.freeze=[stem]", "optimizer.betas=[0.9,0.95]", "optimizer.lr=1e-4"
    )
    spec = load_spec("rev_swin_t")
    (tmp_path / "config.yaml").write_text(source.to_yaml())
    (tmp_path / "spec.yaml").write_text(spec.to_yaml())
    Origin.of(source, spec, NoData(), 64).save(tmp_path)
    now = Origin.of(load_recipe(tmp_path / "config.yaml"), load_spec(tmp_path / "spec.yaml"), NoData(), 64)
    assert Origin.load(tmp_path).list_changes(now) == {}
    assert json.loads((tmp_path / "origin.json").read_text())["spec"].keys() == to_plain(spec).keys()
