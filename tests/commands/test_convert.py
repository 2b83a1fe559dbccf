"""`revzoo convert` and `revzoo export`: what the options stand for. tests/conversion runs both for a network."""

from types import SimpleNamespace

import pytest

from revzoo.spec.schema import ImageInput, TextInput

DEFAULTS = {
    "coupling": "momentum",
    "kept_bits": 8,
    "sign": "fixed",
    "m": None,
    "beta": None,
    "strict": True,
    "num_outputs": None,
}


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, object]]:
    """Return the list of arguments that `convert` receives."""
    received = []

    def convert(source, weights, *, out, **settings):
        received.append(settings)
        input = TextInput("text", length=5, vocabulary=9) if "bert" in source else ImageInput("image", channels=1, size=(4, 4))
        return SimpleNamespace(to_dict=lambda: {"source": source}, model=SimpleNamespace(spec=SimpleNamespace(input=input)))

    monkeypatch.setattr("revzoo.conversion.convert.convert", convert)
    return received


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ("", {}),
        ("--kept-bits 12", {"kept_bits": 12}),
        ("--kept-bits 1 --sign random", {"kept_bits": 1, "sign": "random"}),
        ("--m 0.5", {"m": 0.5, "kept_bits": None}),
        ("--coupling dual_residual --beta 0.25", {"coupling": "dual_residual", "beta": 0.25, "kept_bits": None}),
        ("--no-strict", {"strict": False}),
        ("--outputs 5", {"num_outputs": 5}),
    ],
)
def test_options(options, changed, calls, run):
    printed = run("convert", "test_vit", "--out", "rev_test_vit", *options.split())
    assert calls == [DEFAULTS | changed]
    assert "finetune model=rev_test_vit data.root=IMAGES\n" in printed  # the recipe leaves every coupling as it is


def test_what_to_type_for_texts(calls, run):
    data = "finetune 'model=my folder' data.name=text_classification data.root=TABLE.csv"
    assert f"{data}\n" in run("convert", "bert", "--out", "my folder")


def test_json(calls, run):
    assert run("convert", "test_vit", "--out", "rev_test_vit", "--json") == '{\n  "source": "test_vit"\n}\n'
