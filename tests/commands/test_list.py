"""`revzoo list`: names, and the documentation's table."""

from pathlib import Path

from revzoo.analysis import zoo
from revzoo.planning import card
from revzoo.spec import load_spec

DOCS = Path(__file__).parents[2] / "docs"


def test_names_that_match_a_pattern(run):
    assert run("list", "revnet_1*_cifar100").split() == ["revnet_110_cifar100", "revnet_164_cifar100"]


def test_long_lists_what_was_measured_and_dashes_for_own_models(run, monkeypatch, tmp_path):
    (tmp_path / "rev_vit_own.yaml").write_text("base: rev_vit_digits")
    monkeypatch.setenv("REVZOO_SPECS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("list", "rev_vit_[dow]*", "--long").splitlines()
    rows = [words for line in lines if (words := line.replace("│", " ").split()) and words[0].startswith("rev_vit_")]
    assert rows == [
        ["rev_vit_digits", "302,794", "4.92", "MFLOP", "12.8", "MiB", "2.1", "MiB", "98.87", "%"],
        ["rev_vit_own", *"-----"],
    ]
    assert max(map(len, lines)) <= 80


def test_recipes_and_what_they_do(run, refused):
    assert run("list", "--recipes", "digits_irev*") == "digits_irevnet\n"
    printed = run("list", "--recipes", "--long", "*i*t")
    sentences = " ".join(printed.split())
    assert "digits_irevnet A small injective i-RevNet on scikit-learn's 8x8 digits. " in sentences
    assert "revnet_imagenet RevNet on ImageNet with the numbers of Gomez et al. 2017 (renmengye/revnet-public, " in sentences
    assert refused("list", "--recipes", "digts").startswith("Unknown recipe 'digts'. Did you mean 'digits'? ")
    assert refused("list", "--recipes", "--docs", "x") == "--docs is for models. Received: --recipes. Leave one out.\n"
    assert refused("list", "--long", "--docs", "x").startswith("Received: --long and --docs, which each print something else.")


def test_docs_are_updated_for_the_models_that_match(run, refused, tmp_path, monkeypatch):
    names, rows = [], zoo.read_table(DOCS / "zoo.json")

    def measure(name):
        names.append(name)
        return rows[name]

    monkeypatch.setattr(zoo, "_measure", measure)
    monkeypatch.setattr(card, "count_card", lambda name: {"methods": [name]})
    specs = {name: load_spec(name) for name in ("irevnet_digits", "revnet_digits", "rev_vit_digits")}
    monkeypatch.setattr(zoo, "load_shipped_specs", lambda: specs)  # all of them take seconds
    assert run("list", "*net_digits", "--docs", tmp_path).split() == names == ["irevnet_digits", "revnet_digits"]
    table = zoo.read_table(tmp_path / "zoo.json")
    assert sorted(table) == names
    assert all("card" in row for row in table.values())
    assert refused("list", "--docs", tmp_path / "nowhere").endswith("/nowhere: make it first.\n")
