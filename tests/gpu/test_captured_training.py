"""`train.cuda_graph`: the first steps of a run are eager, the others replays; what they leave is that of eager steps."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import revzoo
from revzoo.errors import RevzooError
from revzoo.training import divergence, epochs
from revzoo.training.captured_step import CapturedStep
from revzoo.training.evaluation import Scores
from revzoo.training.loop import resume, train
from revzoo.training.recipe import load_recipe
from tests.cuda_stub import stub

SMALL = "stem.width=8,stages.0.width=8,stages.0.depth=2,block.f.heads=2,block.drop_path.max=0.2,head.dropout=0.1"
FAST = ["data.batch_size=320", "schedule.warmup_epochs=1", f"model.overrides=[{SMALL}]", "model.exact=true"]


def make_step(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        return loss

    return step


def batches(model: revzoo.Model, sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    return [(model.example_input(n), torch.arange(n, device="cuda") % 10) for n in sizes]


def test_full_batches_are_replayed_and_others_are_not():
    model = revzoo.create("rev_vit_digits").cuda().train()
    step = CapturedStep(make_step(model), model.parameters(), 8)
    replays = []
    for images, labels in batches(model, [3, 8, 8, 8, 8, 8, 3, 8]):
        before = sum(p.nbytes for p in model.parameters())
        counts = stub.Counts() if stub.is_in_use() else None
        step(images, labels)
        gradients = [p.grad for p in model.parameters()]
        assert all(g is not None for g in gradients)
        assert sum(g.nbytes for g in gradients) == before
        model.zero_grad()
        replays.append(counts is not None and counts.stop()["launch"] == 1)
    assert replays == [False] * 5 + [stub.is_in_use(), False, stub.is_in_use()]


@pytest.mark.skipif(
    not hasattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph"),
    reason="before PyTorch 2.14 no process can draw random numbers any more after a capture that has failed",
)
def test_a_step_that_cannot_be_captured_is_named():
    model = revzoo.create("rev_vit_digits").cuda().train()
    plain = make_step(model)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = plain(images, labels)
        torch.cuda.current_stream().synchronize()
        return loss

    captured, (first, *others) = CapturedStep(step, model.parameters(), 8), batches(model, [8] * 4)
    for images, labels in others:
        captured(images, labels)
        model.zero_grad()
    with pytest.raises(RevzooError, match=r"in a CUDA graph: .*operation not permitted when stream is capturing\. Train with"):
        captured(*first)


def run(folder: Path, *settings: str) -> Path:
    train(load_recipe("digits", [*FAST, *settings]), folder)
    return folder


def test_a_run_is_trained_and_resumed(tmp_path, monkeypatch):
    if stub.is_in_use():  # without values nothing can be evaluated
        monkeypatch.setattr(divergence, "find_not_finite", lambda tensors: [])
        monkeypatch.setattr(epochs, "evaluate", lambda *_: Scores({"top1": 10.0, "top5": 50.0}, 1.0, 355))
    out = run(tmp_path / "run", "train.cuda_graph=true", "train.epochs=2")
    resume(out, ["train.epochs=3"], accept_changes=True)
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.values
def test_weights_are_those_of_eager_training(tmp_path):
    files = [
        run(tmp_path / str(captured), f"train.cuda_graph={captured}", "train.epochs=3") / "last.safetensors"
        for captured in ("true", "false")
    ]
    weights = [revzoo.create("rev_vit_digits", checkpoint=file, overrides=SMALL.split(",")).state_dict() for file in files]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
