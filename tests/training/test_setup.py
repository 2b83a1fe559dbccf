"""What a run is built of: the loss, and what is refused before anything is written."""

import pytest
import torch

from revzoo.errors import InputError, SpecError
from revzoo.training.loop import train
from revzoo.training.setup import Loss, build_run


@pytest.mark.parametrize("mixup", ["null", "{mixup_alpha: 0.8}", "{cutmix_alpha: 1.0}"])
def test_labels_are_smoothed_once(recipe, tmp_path, mixup):
    """With mixup timm smooths the targets, and the loss must not do it again."""
    run = build_run(recipe(f"mixup={mixup}", "train.label_smoothing=0.2"), tmp_path / "run", resumed=False)
    torch.manual_seed(0)
    labels, logits = torch.arange(10).repeat(2), torch.randn(20, 10)
    _, targets = run.mix(torch.randn(20, 1, 8, 8), labels)
    one_hot = torch.nn.functional.one_hot(labels, 10)
    if mixup == "null":
        assert targets is labels
        targets = 0.8 * one_hot + 0.2 / 10
    else:
        pairs = (targets - 0.2 / 10) / 0.8  # mixtures of two labels, by the same weights in the whole batch
        weight = pairs[0, 0].item()
        torch.testing.assert_close(pairs, weight * one_hot + (1 - weight) * one_hot.flip(0))
    expected = -(targets * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(run.loss(logits, labels if mixup == "null" else targets), expected)


def test_the_loss_of_a_language_model_is_that_of_its_tokens():
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[1, -100, 4], [-100, 0, 2]])
    kept = labels != -100
    expected = torch.nn.functional.cross_entropy(logits[kept], labels[kept], label_smoothing=0.1)
    torch.testing.assert_close(Loss(0.1)(logits, labels), expected)


def test_contradictions_of_recipe_data_and_machine(recipe, tmp_path):
    with pytest.raises(SpecError, match="model.num_outputs: found 3; allowed: at least 10, the classes in the data"):
        build_run(recipe("model.num_outputs=3"), tmp_path / "run", resumed=False)
    if not torch.accelerator.is_available():
        with pytest.raises(SpecError, match="'fp16' without a GPU"):
            build_run(recipe("train.mixed_precision=fp16"), tmp_path / "run", resumed=False)


def test_the_folder_is_checked_first(recipe, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("revzoo.training.setup.load_data", None)
    for out in ("file", "file/run", "."):
        with pytest.raises(InputError, match=r"cannot be made: .*file is a file|is not empty\. Resume that run \(--resume "):
            train(recipe(), tmp_path / out)


def test_a_linear_schedule_rises_to_the_end_of_the_warm_up_and_falls_from_there(recipe, tmp_path):
    options = ("sched=linear", "warmup_epochs=2", "warmup_lr=0.2", "min_lr=0.1")
    run = build_run(
        recipe("train.epochs=5", "optimizer.lr=1.0", *(f"schedule.{each}" for each in options)), tmp_path, resumed=False
    )
    rates = []
    for update in range(21):  # four an epoch
        run.scheduler.step_update(update)
        rates.append([group["lr"] for group in run.optimizer.param_groups])
    rising = [0.2 + 0.1 * update for update in range(8)]
    falling = [1.0 - 0.9 * update / 12 for update in range(12)]
    assert rates == [[pytest.approx(rate)] * len(rates[0]) for rate in [*rising, *falling, 0.1]]
