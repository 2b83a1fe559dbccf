"""A newcomer with the README: looks around, and then trains on a folder of photographs."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_looking_around(user):
    """The commands after the installation."""
    seen = {command.split("  ")[0]: user.type(command) for command in user.read("docs/start.md", "revzoo list")}
    listed, shown, verified, planned, evaluated = seen.values()
    assert all(f"rev_vit_{size} " in listed for size in ("ti", "s", "b", "l", "h"))
    assert all(word in shown for word in ("store", "invert", "vit_base_patch16"))
    assert "Safe to train in float32" in verified
    assert "8.0 MiB" in planned
    assert "the same." in evaluated


def test_own_photographs_take_three_commands(user, photos):
    train, evaluate, predict = user.read("README.md", "revzoo train finetune")
    small = train.replace("vit_small_patch16_224", "test_vit")  # without the weights, which would be fetched
    printed = user.type(f"{small} model.pretrained=false model.size=64 optimizer.lr=2e-3 optimizer.layer_decay=null")
    assert "32 images for training, 8 for testing, 2 classes" in printed
    assert "every fifth of each class is held out, 8 in all" in printed
    assert {"best.safetensors", "curves.png", "metrics.jsonl"} <= {path.name for path in Path("runs/finetune").iterdir()}
    scores = user.type(evaluate)
    assert float(scores.partition("top-1 ")[2].split()[0]) >= 75, scores
    predicted = user.type(predict)
    assert "photo.jpg" in predicted
    assert predicted.index("cat") < predicted.index("dog"), predicted
