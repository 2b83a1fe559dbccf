"""`revzoo numerics`: text and JSON."""

import json

import pytest


@pytest.fixture
def tiny():
    """Return the arguments for a hybrid of one block in each stage."""
    return ("numerics", "revnext_digits", "stages.1.depth=1", "--batch", 4)


def test_text(tiny, run):
    text = run(*tiny)
    assert text.startswith("revnext_digits, batch of 4, float32\n")
    for line in ("stages.1.blocks.0.g.act2", "states rebuilt"):
        assert line in text


def test_json_is_the_report(tiny, run):
    printed = json.loads(run(*tiny, "--json"))
    assert printed["model"] == "revnext_digits"
    assert printed["batch"] == 4
    assert printed["arithmetic"] == "float32"
    assert {"stages.0.blocks.0.g", "stages.1.blocks.0.f.norm2"} < {state["name"] for state in printed["states"]}
    assert all(1e6 < state["snr"] < 1e20 for state in printed["states"])


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
