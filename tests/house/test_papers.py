"""Every table and figure of the five papers has an entry that leads somewhere, and the page says what the entries say."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ITEMS = {  # what the papers have, by counting
    "jiang": {"Figure": 5, "Table": 2},
    "revnext": {"Figure": 12, "Table": 2},
    "revnet": {"Figure": 4, "Table": 5},
    "reforwarding": {"Figure": 5, "Table": 1},
    "pareprop": {"Figure": 7, "Table": 0},
}


@pytest.fixture
def papers(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("papers")


def test_every_table_and_figure_has_an_entry(papers):
    assert papers.PAPERS.keys() == ITEMS.keys()
    for name, counts in ITEMS.items():
        entries = {" ".join(item["item"].split()[:2]) for item in papers.PAPERS[name]["items"]}
        demanded = {f"{kind} {i + 1}" for kind, count in counts.items() for i in range(count)}
        assert {entry for entry in entries if not entry.startswith("Section")} == demanded


def test_every_entry_leads_somewhere(papers):
    items = [item for paper in papers.PAPERS.values() for item in paper["items"]]
    assert len(items) > 45
    for item in items:
        (kind,) = [each for each in ("figures", "code", "missing", "needs") if each in item][:1]
        assert item["shows"]
        if kind == "code":
            assert (ROOT / item["code"]).is_file(), item["item"]
        elif kind == "figures":
            assert len(list(papers.list_figures(item))) == len(item["figures"])
            assert item["command"].startswith("python benchmarks/")
            assert (ROOT / item["command"].split()[1]).is_file()
        else:
            assert kind == "missing" or item["needs"] == "gpu"


def test_the_page_is_what_the_entries_say(papers):
    assert (ROOT / "docs" / "papers.md").read_text() == papers.write_page(), "run python benchmarks/papers.py"


@pytest.mark.parametrize(
    ("value", "printed", "better", "verdict"),
    [
        (104, 100, "lower", "equal"),
        (106, 100, "lower", "worse"),
        (94, 100, "lower", "better"),
        (106, 100, "higher", "better"),
        (94, 100, "same", "worse"),
        (8, "<= 20", "same", "equal"),
        (21, "<= 20", "higher", "worse"),
        (1, None, "same", "not printed"),
    ],
)
def test_a_verdict_is_computed(papers, value, printed, better, verdict):
    assert papers.judge(value, printed, better, 0.05) == verdict


def test_a_pointer_selects_rows_and_adds(papers):
    data = {
        "rows": [{"name": "a", "at": 1, "bytes": 3}, {"name": "a", "at": 2, "bytes": 5}, {"name": "b", "at": 1, "bytes": None}]
    }
    assert papers.resolve(data, "rows/name=a&at=2/bytes") == 5
    assert papers.resolve(data, "rows/*/bytes") == 5
    assert papers.resolve(data, "10 * rows/0/bytes + rows/1/bytes") == 35
    for wrong in ("rows/name=c/bytes", "rows/name=b/bytes", "row/0/bytes", "rows/9/bytes"):
        with pytest.raises(LookupError):
            papers.resolve(data, wrong)
