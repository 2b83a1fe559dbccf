"""What a run was started with is compared when it is resumed: changes are listed, and refused or accepted."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from revzoo.errors import InputError
from revzoo.spec.loading import load_spec
from revzoo.spec.parsing import to_plain
from revzoo.training.loop import resume, train
from revzoo.training.options import Recipe
from revzoo.training.origin import Origin
from revzoo.training.recipe import load_recipe
from tests.training.runs import CONSTANT, assert_same_run, make_image_recipe, make_recipe, read_records


def edit(file: Path, **changes: object) -> None:
    """Set values in a YAML file, given by dotted paths with __ for the dots."""
    content = OmegaConf.load(file)
    for path, value in changes.items():
        OmegaConf.update(content, path.replace("__", "."), value)
    OmegaConf.save(content, file)


def refuse(folder: Path, message: str, *overrides: str, accept: bool = False) -> None:
    with pytest.raises(InputError, match=message):
        resume(folder, overrides, accept_changes=accept)


def test_every_change_is_listed_and_some_are_refused(copied):
    edit(copied / "config.yaml", optimizer__opt="sgd", train__seed=3, train__label_smoothing=0.3)
    edit(copied / "spec.yaml", head__dropout=0.2)
    listed = r"(?s)\n  optimizer.opt: adamw at the start, sgd now\n.*train.label_smoothing: .*train.seed: .*spec.head.dropout: "
    message = listed + r"0.1 at the start, 0.2 now\nA resumed run cannot change optimizer.opt, train.seed, spec.head.dropout\."
    for accept in (False, True):
        refuse(copied, message, accept=accept)


def test_changes_that_make_sense_are_accepted(copied, capsys):
    """Those that were typed at once, others by --accept-changes; afterwards they are the run's."""
    edit(copied / "config.yaml", train__label_smoothing=0.3)
    refuse(copied, "train.label_smoothing: 0.1 at the start, 0.3 now\nPut it back, or accept it with --accept-changes.")
    refuse(copied, "accept it with --accept-changes.", "train.clip_grad=2.0")  # which accepts only itself
    resume(copied, ["train.clip_grad=2.0", "model.tiles=2"], accept_changes=True)
    printed = capsys.readouterr().out
    assert "Changed: train.label_smoothing: 0.1 at the start, 0.3 now." in printed
    assert "Changed: train.clip_grad: 1.0 at the start, 2.0 now." in printed
    recipe = load_recipe(copied / "config.yaml")
    assert (recipe.train.clip_grad, recipe.model.tiles) == (2.0, 2)
    resume(copied)
    assert "Changed" not in capsys.readouterr().out


def test_a_finished_run_is_extended(tmp_path):
    train(make_recipe(*CONSTANT, "train.epochs=2"), tmp_path / "whole")
    train(make_recipe(*CONSTANT, "train.epochs=1"), tmp_path / "run")
    resume(tmp_path / "run", ["train.epochs=2"])
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    refuse(
        tmp_path / "run",
        "train.epochs: 2 at the start, 1 now\n2 epochs are done. Use train.epochs=2 or more.",
        "train.epochs=1",
    )


def test_a_schedule_that_ended_is_not_extended_silently(copied):
    message = (
        r"train.epochs: 1 at the start, 2 now\nschedule.sched=cosine reaches its end with the run, so it would jump. "
        r"Accept the jump with --accept-changes, or start a new run from the weights after the last epoch: revzoo train "
        r".*config.yaml model.checkpoint=.*last.safetensors\.$"
    )
    refuse(copied, message, "train.epochs=2")
    resume(copied, ["train.epochs=2"], accept_changes=True)
    assert [record["epoch"] for record in read_records(copied)] == [1, 2]
    assert load_recipe(copied / "config.yaml").train.epochs == 2


def test_other_examples_are_refused_and_the_same_may_be_elsewhere(image_folder, tmp_path):
    run, images = tmp_path / "run", image_folder / "train"
    train(make_image_recipe(image_folder), run)
    started = f"{run} was started with something else:\n  "

    (images / "cat").rename(images / "zebra")
    (image_folder / "val" / "cat").rename(image_folder / "val" / "zebra")
    lines = "classes: cat only at the start, zebra only now\n  training examples: others than then"
    refuse(run, started + lines, accept=True)
    (images / "zebra").rename(images / "cat")
    (image_folder / "val" / "zebra").rename(image_folder / "val" / "cat")

    (images / "cat" / "0.png").rename(images / "cat" / "9.png")
    refuse(run, started + "training examples: others than then\n", accept=True)
    (images / "cat" / "9.png").rename(tmp_path / "0.png")
    refuse(run, started + "training examples: 8 at the start, 7 now\n", accept=True)
    (tmp_path / "0.png").rename(images / "cat" / "0.png")

    image_folder.rename(tmp_path / "elsewhere")
    original = (run / "config.yaml").read_text()
    edit(run / "config.yaml", data__root=str(tmp_path / "elsewhere"))
    refuse(run, rf"data.root: {image_folder} at the start, .*elsewhere now\nPut it back, or accept it with --accept-changes")
    (run / "config.yaml").write_text(original)
    resume(run, [f"data.root={tmp_path / 'elsewhere'}"])
    resume(run)


def test_more_outputs_than_classes_are_resumed(image_folder, tmp_path):
    train(make_image_recipe(image_folder, "model.num_outputs=12"), tmp_path / "run")
    resume(tmp_path / "run")
    assert load_spec(tmp_path / "run").head.arguments["outputs"] == 12


def test_one_class_of_many():
    names = [f"n{i:04d}" for i in range(1000)]
    now = [*names[:500], "other", *names[501:]]
    before, after, turned = (Origin({}, {}, classes, {}, 64) for classes in (names, now, names[::-1]))
    assert before.list_changes(after) == {"classes": "n0500 only at the start, other only now"}
    assert before.list_changes(turned) == {"classes": "the same names, in another order"}


def test_what_is_saved_reads_as_what_it_was(tmp_path):
    """For a recipe and a spec with every kind of value, through the files of a run and of a state."""
    source: Recipe = make_recipe(
        "mixup={mixup_alpha: 0.8}", "train.freeze=[stem]", "optimizer.betas=[0.9,0.95]", "optimizer.lr=1e-4"
    )
    spec, data = load_spec("rev_swin_t"), SimpleNamespace(class_names=None, describe_examples=dict)
    (tmp_path / "config.yaml").write_text(source.to_yaml())
    (tmp_path / "spec.yaml").write_text(spec.to_yaml())
    Origin.of(source, spec, data, 64).save(tmp_path)
    now = Origin.of(load_recipe(tmp_path / "config.yaml"), load_spec(tmp_path / "spec.yaml"), data, 64)
    assert Origin.load(tmp_path).list_changes(now) == {}
    assert json.loads((tmp_path / "origin.json").read_text())["spec"].keys() == to_plain(spec).keys()
