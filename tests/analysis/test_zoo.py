"""The zoo table: one row a model, of today's specs, and the page is what the rows say."""

import copy
from pathlib import Path

import pytest

import revzoo
from revzoo.analysis import zoo
from revzoo.errors import InputError

DOCS = Path(__file__).parents[2] / "docs"
COMMAND = "Run `revzoo list --docs docs` in the checkout."
SMALL = ["rev_bert_mini", pytest.param("revnet_38", marks=pytest.mark.slow)]  # the second has a twin
FEW = ("irevnet_digits", "revnet_38", "revnet_digits", "rev_vit_digits")


@pytest.fixture(scope="module")
def specs() -> dict[str, revzoo.Spec]:
    return zoo.load_shipped_specs()


@pytest.fixture(scope="module")
def few(specs) -> dict[str, revzoo.Spec]:
    return {name: specs[name] for name in FEW}


@pytest.fixture
def table() -> dict[str, zoo.Row]:
    return zoo.read_table(DOCS / "zoo.json")


@pytest.fixture
def rows(table) -> dict[str, zoo.Row]:
    """Return the rows of a few models."""
    return {name: table[name] for name in FEW}


@pytest.fixture
def measured(monkeypatch, few, rows) -> list[str]:
    """Return the list of models that are measured; their rows are those of the documentation, but with 0 FLOPs."""
    names = []

    def measure(name):
        names.append(name)
        return rows[name] | {"flops": 0}

    monkeypatch.setattr(zoo, "_measure", measure)
    monkeypatch.setattr(zoo, "load_shipped_specs", lambda: few)
    return names


def test_the_table_is_up_to_date(table, specs):
    assert zoo.find_outdated(table, specs) == {}, COMMAND
    assert set(table) == set(specs) == set(revzoo.list_models()), COMMAND


def test_the_page_is_what_the_rows_say(table):
    assert (DOCS / "zoo.md").read_text() == zoo.format_page(table), COMMAND
    assert (DOCS / "zoo.md").read_text().count("\n| [") == len(table)


@pytest.mark.parametrize("name", SMALL)
def test_measuring_again_gives_the_same_row(name, table):
    assert zoo._measure(name) == {key: value for key, value in table[name].items() if key != "card"}, COMMAND


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"digest": "0" * 64}, "was measured with another spec"),
        ({"twin": {"library": "timm", "name": "resnet18"}}, "was measured with another twin"),
        ({"source": "hearsay"}, "has another source, family, input or weights now"),
        ({"weights": {"top1": 100.0}}, "has another source, family, input or weights now"),
    ],
)
def test_a_stale_row_is_found(change, problem, rows, few):
    rows["revnet_digits"] |= change
    assert zoo.find_outdated(rows, few) == {"revnet_digits": problem}


def test_missing_and_surplus_rows_are_found(rows, few):
    rows["revnet_9"] = rows.pop("revnet_digits")
    assert zoo.find_outdated(rows, few) == {"revnet_digits": "has no row", "revnet_9": "has a row, but is no model"}


@pytest.mark.parametrize("content", ["{", "[1]", '{"rev_swin_digits": 3}', '{"rev_swin_digits": {}}'])
def test_a_damaged_table_is_named(content, measured, tmp_path):
    (tmp_path / "zoo.json").write_text(content)
    with pytest.raises(InputError, match=r"zoo\.json is damaged: .* Delete it"):
        zoo.update(tmp_path, ["rev_swin_digits"])
    assert (tmp_path / "zoo.json").read_text() == content


def test_only_what_is_outdated_is_measured(rows, measured, tmp_path):
    changed = copy.deepcopy(rows)
    changed["revnet_digits"]["digest"] = "0"
    changed["revnet_38"]["source"] = "hearsay"
    changed["revnet_9"] = changed.pop("rev_vit_digits")
    zoo.write_table(tmp_path / "zoo.json", changed)
    announced = []
    zoo.update(tmp_path, ["rev_vit_digits", "revnet_38", "revnet_digits"], announced.append)
    assert measured == announced == ["rev_vit_digits", "revnet_digits"]
    table = zoo.read_table(tmp_path / "zoo.json")
    assert {name for name in table if table[name] != rows[name]} == set(measured)
    assert set(table) == set(rows)
    assert (tmp_path / "zoo.md").read_text() == zoo.format_page(table)


def test_a_stopped_run_keeps_what_it_has_measured(measured, tmp_path, monkeypatch):
    def stop(name):
        if name == "revnet_digits":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        zoo.update(tmp_path, ["rev_vit_digits", "revnet_digits"], stop)
    assert list(zoo.read_table(tmp_path / "zoo.json")) == ["rev_vit_digits"]


def test_a_row_reads_well(table):
    row = table["rev_vit_digits"] | {
        "source": "a paper | its code",
        "twin": {"library": "timm", "name": "vit"},
        "twin_parameters": 1234567,
        "twin_activation_bytes": 3 * 2**20,
        "parameters": 302794,
        "flops": 4_917_888,
        "activation_bytes": {"store": 2**24, "invert": 2**20, "recompute": 2**21},
    }
    assert zoo.format_page({"rev_vit_digits": row}).splitlines()[-1] == (
        "| [rev_vit_digits](../specs/models/rev_vit/rev_vit_digits.yaml) | 1 x 8 x 8 | 302,794 | 4.92 MFLOP | 16.0 MiB "
        "| 2.0 MiB | 1.0 MiB | timm vit: 1,234,567, 3.0 MiB | a paper \\| its code | top1 98.87 |"
    )
    unknown = row | {"twin_parameters": None, "twin_activation_bytes": None}
    assert "| timm vit: not measured |" in zoo.format_page({"rev_vit_digits": unknown})
