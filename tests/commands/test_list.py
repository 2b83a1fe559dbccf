"""`revzoo list`: names, and the documentation's table."""

from pathlib import Path

from revzoo.analysis import zoo
from revzoo.planning import card
from revzoo.spec import load_spec

DOCS = Path(__file__).parents[2] / "docs"


def test_names_that_match_a_pattern(run):
    assert run("list", "revnet_1*_cifar100").split() == ["revnet_110_cifar100", "revnet_164_cifar100"]


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
    assert refused("list", "--docs", tmp_path / "nowhere").endswith("nowhere/zoo.json: No such file or directory\n")
