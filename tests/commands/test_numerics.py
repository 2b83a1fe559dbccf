"""`revzoo numerics`: text, JSON, picture, and a training."""

import json

import pytest


@pytest.fixture
def tiny():
    """Return the arguments for a hybrid of one block in each stage."""
    return ("numerics", "revnext_digits", "stages.1.depth=1", "--batch", 4)


def test_text(tiny, run):
    text = run(*tiny)
    assert text.startswith("revnext_digits, batch of 4, float32\n")
    for line in ("stages.1.blocks.0.g.act2", "stages.1.transition", "SpaceToDepthTransition", "states rebuilt"):
        assert line in text
    assert "During training" not in text


def test_json_is_the_report_and_the_training(tiny, run):
    printed = json.loads(run(*tiny, "--json", "--updates", 3))
    assert printed["model"] == "revnext_digits"
    assert printed["batch"] == 4
    assert printed["arithmetic"] == "float32"
    assert {"stages.0.blocks.0.g", "stages.1.blocks.0.f.norm2"} < {state["name"] for state in printed["states"]}
    assert all(1e6 < state["snr"] < 1e20 for state in printed["states"])
    assert {layer["kind"] for layer in printed["layers"]} == {
        "CoupledConv2d",
        "InvertibleBatchNorm2d",
        "InvertibleLeakyReLU",
        "SpaceToDepthTransition",
    }
    assert [point["update"] for point in printed["training"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "arithmetic", "least", "most"),
    [
        (("--dtype", "float64"), "float64", 1e20, 1e40),
        (("--dtype", "bfloat16"), "bfloat16", 10, 1e9),
        (("--autocast", "bfloat16"), "float32, autocast bfloat16", 1e9, 1e40),
    ],
)
def test_arithmetic(options, arithmetic, least, most, run):
    printed = json.loads(run("numerics", "rev_vit_digits", "stages.0.depth=2", "--json", *options))
    assert printed["arithmetic"] == arithmetic
    assert len(printed["states"]) == 3
    assert all(least < state["snr"] < most for state in printed["states"])


def test_exact(run):
    text = run("numerics", "rev_vit_digits", "stages.0.depth=2", "--exact")
    assert text.endswith("3 states rebuilt, bit for bit.\n")


def test_the_picture_comes_with_the_text(tiny, run, tmp_path):
    picture = tmp_path / "noise.png"
    assert "During training" in run(*tiny, "--updates", 2, "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", "b"), "Name one model. Received: a, b."),
        (("stages.0.depth=2",), "Name one model. Received: none."),
        (("rev_vit_digits", "--plot", "noise.pdf"), "A picture is written as PNG. Received: --plot noise.pdf."),
        (("rev_roberta_mini", "--updates", "2"), "--updates trains on digits, images of 1 channel and 8x8 pixels. Received: "),
    ],
)
def test_refusals(arguments, message, refused):
    assert refused("numerics", *arguments).startswith(message)
