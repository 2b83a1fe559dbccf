"""Weights of classes in the loss, and training that ends when it does not become better."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from revzoo.errors import SpecError
from revzoo.training import epochs
from revzoo.training.loop import resume, train
from revzoo.training.loss import Loss, weigh_classes
from revzoo.training.setup import build_run
from tests.training.runs import CONSTANT, make_recipe, read_records


def test_balanced_weights_are_those_of_scikit_learn(image_folder, tmp_path):
    from sklearn.utils.class_weight import compute_class_weight

    for number in range(3):
        (image_folder / "train" / "cat" / f"{number}.png").unlink()
    data = [f"data.root={image_folder}", "data.name=folder", "data.batch_size=4", "data.shift=0"]
    run = build_run(make_recipe(*data, "train.class_weights=balanced"), tmp_path / "run", resumed=False)
    labels = [0] * 1 + [1] * 4
    expected = torch.tensor(compute_class_weight("balanced", classes=np.array([0, 1]), y=labels), dtype=torch.float32)
    torch.testing.assert_close(run.loss.weights, expected)
    with pytest.raises(
        SpecError, match=r"override: train.class_weights: found \[1.0\]; allowed: a list of 2 numbers, for .*: cat, dog;"
    ):
        build_run(make_recipe(*data, "train.class_weights=[1]"), tmp_path / "run", resumed=False)


def test_a_class_without_examples_has_no_balanced_weight():
    data = SimpleNamespace(num_classes=3, class_names=["cat", "dog", "owl"], train_labels=[0, 2, 0])
    with pytest.raises(SpecError, match="a list of numbers: there are no training examples of dog"):
        weigh_classes(make_recipe("train.class_weights=balanced"), data, outputs=3)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_weight_is_that_of_an_example_wherever_its_batch_is_cut(smoothing):
    logits, labels = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    loss = Loss(smoothing, torch.tensor([1.0, 2.0, 4.0]))
    torch.testing.assert_close(loss(logits, labels), (loss(logits[:2], labels[:2]) + 2 * loss(logits[2:], labels[2:])) / 3)
    targets = torch.nn.functional.one_hot(labels, 3).float()
    torch.testing.assert_close(loss(logits, labels), loss(logits, targets))
    if not smoothing:
        weighted = torch.tensor([1.0, 2.0, 4.0])[labels] * -logits.log_softmax(1)[range(6), labels]
        torch.testing.assert_close(loss(logits, labels), weighted.mean())


def test_training_ends_when_patience_does(tmp_path, monkeypatch, capsys):
    tops = iter([50.0, 40.0, 60.0])
    evaluate = epochs.evaluate
    monkeypatch.setattr(
        epochs, "evaluate", lambda *a, **k: replace(evaluate(*a, **k), metrics={"top1": next(tops), "top5": 100.0})
    )
    run = tmp_path / "run"
    constant = [*CONSTANT, "train.patience=1", "train.epochs=9", "train.class_weights=balanced"]
    summary = train(make_recipe(*constant), run)
    assert [record["top1"] for record in read_records(run)] == [50.0, 40.0]
    assert (summary.best_epoch, summary.best_score) == (1, 50.0)
    assert "Stopping early: no better top-1 in the last 1 epoch." in capsys.readouterr().out
    assert resume(run) == summary  # it is still as bad
    assert resume(run, ["train.patience=3", "train.epochs=3"]).best_epoch == 3
