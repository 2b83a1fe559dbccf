"""Figures of the README and of pages in docs/ are what the results say."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{name}.md" for name in ("benchmark", "numerics", "reversible"))])
def test_they_are_what_the_results_say(page, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    readme = importlib.import_module("readme")
    text = (ROOT / page).read_text()
    assert readme.write_section(text, readme.PAGES[page]()) == text, "run python benchmarks/readme.py"
    assert text.count(readme.BEGIN) == text.count(readme.END) == 1
