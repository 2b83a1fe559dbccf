"""What a run is built of: the loss, and what is refused before anything is written."""

import math

import pytest
import torch

import revzoo
from revzoo.errors import InputError, SpecError
from revzoo.runtime.lazy_logits import LazyLogits
from revzoo.training import loop
from revzoo.training.loop import train
from revzoo.training.loss import Loss
from revzoo.training.optimizer import make_optimizer, make_scheduler
from revzoo.training.processes import open_accelerator
from revzoo.training.recipe import load_recipe
from revzoo.training.setup import build_run
from tests.training.runs import make_recipe


@pytest.mark.parametrize("mixup", ["null", "{mixup_alpha: 0.8}", "{cutmix_alpha: 1.0}"])
def test_labels_are_smoothed_once(tmp_path, mixup):
    """With mixup timm smooths the targets, and the loss must not do it again."""
    run = build_run(make_recipe(f"mixup={mixup}", "train.label_smoothing=0.2"), tmp_path / "run", resumed=False)
    torch.manual_seed(0)
    labels, logits = torch.arange(10).repeat(2), torch.randn(20, 10)
    _, targets = run.loss.mix(torch.randn(20, 1, 8, 8), labels)
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


def test_every_tensor_is_averaged_once(tmp_path):
    """Also the embedding, which is the weight of the head, too."""
    run = build_run(load_recipe("text_roberta", ["ema={decay: 0.9}"]), tmp_path / "run", resumed=False)
    run.ema.update(run.model, 1)  # which copies
    before = {key: tensor.clone() for key, tensor in run.model.state_dict().items()}
    for number, tensor in enumerate({id(t): t for t in run.model.state_dict(keep_vars=True).values()}.values(), 1):
        tensor.detach().add_(number)
    run.ema.update(run.model, 2)
    after = run.model.state_dict()
    expected = {key: tensor.lerp(after[key], 0.1) for key, tensor in before.items()}
    torch.testing.assert_close(dict(run.evaluated.state_dict()), expected)


def test_the_loss_of_a_language_model_is_that_of_its_tokens():
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[1, -100, 4], [-100, 0, 2]])
    kept = labels != -100
    expected = torch.nn.functional.cross_entropy(logits[kept], labels[kept], label_smoothing=0.1)
    torch.testing.assert_close(Loss(0.1)(logits, labels), expected)


def test_contradictions_of_recipe_data_and_machine(tmp_path):
    with pytest.raises(SpecError, match="model.num_outputs: found 3; allowed: at least 10, the classes in the data"):
        build_run(make_recipe("model.num_outputs=3"), tmp_path / "run", resumed=False)
    if not torch.accelerator.is_available():
        with pytest.raises(SpecError, match="'fp16' without a GPU"):
            build_run(make_recipe("train.mixed_precision=fp16"), tmp_path / "run", resumed=False)


def test_the_folder_is_checked_first(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("revzoo.training.setup.load_data", None)
    for out in ("file", "file/run", "."):
        with pytest.raises(InputError, match=r"cannot be made: .*file is a file|is not empty\. Resume that run \(--resume "):
            train(make_recipe(), tmp_path / out)


def test_a_linear_schedule_rises_to_the_end_of_the_warm_up_and_falls_from_there(tmp_path):
    options = ("sched=linear", "warmup_epochs=2", "warmup_lr=0.2", "min_lr=0.1")
    run = build_run(
        make_recipe("train.epochs=5", "optimizer.lr=1.0", *(f"schedule.{each}" for each in options)), tmp_path, resumed=False
    )
    rates = []
    for update in range(21):  # four an epoch
        run.scheduler.step_update(update)
        rates.append([group["lr"] for group in run.optimizer.param_groups])
    rising = [0.2 + 0.1 * update for update in range(8)]
    falling = [1.0 - 0.9 * update / 12 for update in range(12)]
    assert rates == [[pytest.approx(rate)] * len(rates[0]) for rate in [*rising, *falling, 0.1]]


def lr_of_pyslowfast(epoch, epochs=300, warm_up=70, base=5e-4, first=1e-8, last=1e-6):
    """`get_lr_at_epoch` of slowfast/utils/lr_policy.py with COSINE_AFTER_WARMUP."""
    if epoch < warm_up:
        return first + epoch * (base - first) / warm_up
    return last + (base - last) * 0.5 * (1 + math.cos(math.pi * (epoch - warm_up) / (epochs - warm_up)))


def test_the_schedule_of_rev_vit_is_pyslowfasts():
    """The published recipe's own schedule, with four updates an epoch."""
    recipe = load_recipe("rev_vit_s_imagenet", ["data.root=images"])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=recipe.optimizer.lr)
    scheduler = make_scheduler(recipe, optimizer, updates_per_epoch=4)
    for update in range(1200):
        scheduler.step_update(update)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(lr_of_pyslowfast(update / 4), rel=1e-9)
    assert lr_of_pyslowfast(70) == 5e-4


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_what_weight_decay_applies_to(layer_decay):
    model = revzoo.create("rev_vit_digits")

    def decayed(of):
        optimizer = make_optimizer(model, "adamw", 1.0, 0.1, weight_decay_of=of, layer_decay=layer_decay)
        names = {id(p): name for name, p in model.named_parameters()}
        groups = optimizer.param_groups
        assert sorted(names[id(p)] for group in groups for p in group["params"]) == sorted(names.values())
        assert {group["weight_decay"] for group in groups} <= {0.0, 0.1}
        return {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}

    matrices = {name for name, p in model.named_parameters() if p.dim() > 1}
    positions = {"stem.pos_embed"}
    assert positions < matrices
    assert decayed("weights") == matrices - positions
    assert decayed("weights_and_positions") == matrices
    if layer_decay is None:
        assert decayed("all") == {name for name, _ in model.named_parameters()}


def test_reformer_clips_the_sum_of_gradients_as_its_source():
    """Averages clipped at a quarter of the norm, with a quarter of eps, make the updates of sums clipped at 0.5."""
    recipe = load_recipe("reformer_enwik8", ["data.root=text"])
    torch.manual_seed(0)
    gradients = torch.randn(5, 4, 7, dtype=torch.float64) * torch.tensor([1e-9, 1e-3, 0.1, 1, 10])[:, None, None]
    ends = []
    for clip, eps, reduce in ((0.5, 1e-8, torch.sum), (recipe.train.clip_grad, recipe.optimizer.eps, torch.mean)):
        weight = torch.zeros(7, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([weight], lr=recipe.optimizer.lr, eps=eps)
        for batches in gradients:
            weight.grad = reduce(batches, 0)
            torch.nn.utils.clip_grad_norm_([weight], clip)
            optimizer.step()
        ends.append(weight.detach())
    assert recipe.train.accumulate == 4
    torch.testing.assert_close(*ends, rtol=1e-5, atol=0)


def test_each_run_of_a_process_has_its_own_precision():
    """Accelerate alone would refuse the second."""
    precisions = ["no", "bf16", "no"]
    assert [open_accelerator(precision).mixed_precision for precision in precisions] == precisions


def test_a_language_model_has_its_loss_in_chunks(tmp_path, shown):
    """Its logits are lazy in training alone; the check of gradients, which sums them, says nothing of it."""
    small = "model.overrides=[stages.0.depth=1,input.length=16]"
    run = build_run(load_recipe("lm", [small, "ema={decay: 0.9}"]), tmp_path / "run", resumed=False)
    ids = run.model.example_input(2)
    assert isinstance(run.model(ids), LazyLogits)
    assert loop.describe_gradients(run).startswith("Gradients verified")
    for model in (run.model.eval(), run.evaluated.eval()):
        assert type(model(ids)) is torch.Tensor
