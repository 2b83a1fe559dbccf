"""`revzoo convert` and `revzoo export`: what the options stand for. tests/conversion runs both for a network."""

from types import SimpleNamespace

import pytest

DEFAULTS = {"coupling": "momentum", "kept_bits": 8, "m": None, "beta": None, "strict": True, "num_outputs": None}


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, object]]:
    """Return the list of arguments that `convert` receives."""
    received = []

    def convert(source, weights, *, out, **settings):
        received.append(settings)
        return SimpleNamespace(coupling={"kept_bits": settings["kept_bits"]}, to_dict=lambda: {"source": source})

    monkeypatch.setattr("revzoo.conversion.convert.convert", convert)
    return received


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ("", {}),
        ("--kept-bits 12", {"kept_bits": 12}),
        ("--m 0.5", {"m": 0.5, "kept_bits": None}),
        ("--m 0", {"m": 0.0, "kept_bits": None}),
        ("--coupling dual_residual --beta 0.25", {"coupling": "dual_residual", "beta": 0.25, "kept_bits": None}),
        ("--no-strict", {"strict": False}),
        ("--outputs 5", {"num_outputs": 5}),
    ],
)
def test_options(options, changed, calls, run):
    printed = run("convert", "test_vit", "--out", "rev_test_vit", *options.split())
    assert calls == [DEFAULTS | changed]
    assert "finetune model=rev_test_vit data.root=IMAGES\n" in printed  # the recipe leaves every coupling as it is


def test_json(calls, run):
    assert run("convert", "test_vit", "--out", "rev_test_vit", "--json") == '{\n  "source": "test_vit"\n}\n'


@pytest.mark.parametrize("option", ["--strength", "--partial"])
def test_former_options_are_refused(option, refused):
    assert refused("convert", "test_vit", "--out", "rev_test_vit", option).startswith(
        f"Unknown option of revzoo convert '{option}'."
    )
