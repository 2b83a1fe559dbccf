"""Reports of models that ship are read from a file, without torch, until anything on which they depend changes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import revzoo
from revzoo import plugin
from revzoo.analysis import report_cache
from revzoo.analysis.counting import report_model
from revzoo.analysis.report import ModelReport
from revzoo.analysis.report_cache import read_or_count

NAMES = {
    "rev_vit_digits": ["stages.0.depth=1"],  # a twin of timm, one stage
    "revnet_digits": ["stages.0.depth=1", "stages.1.depth=1", "stages.2.depth=1"],  # transitions
    "rev_bert_mini": [],  # texts have no pixels
    "irevnet_digits": [],  # bijections, and no twin
}


@pytest.fixture(scope="module")
def reports() -> dict[str, ModelReport]:
    return {name: report_model(revzoo.create(name, overrides=changes, device="meta"), 2) for name, changes in NAMES.items()}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("REVZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def cached(folder, reports) -> ModelReport:
    """Cache the report of another model under this name, to recognise it."""
    return read_or_count("rev_vit_digits", None, lambda: reports["rev_bert_mini"])


def refuse() -> ModelReport:
    raise AssertionError("it is counted anew")


@pytest.mark.parametrize("name", NAMES)
def test_a_report_is_the_same_after_it_was_json(name, reports):
    assert ModelReport.from_dict(json.loads(json.dumps(reports[name].to_dict()))) == reports[name]


def test_a_report_is_counted_once_for_each_model_and_batch(cached, reports):
    assert read_or_count("rev_vit_digits", None, refuse) == cached
    other = reports["revnet_digits"]
    assert read_or_count("rev_vit_digits", 3, lambda: other) == other
    assert read_or_count("rev_vit_s", None, lambda: other) == other
    assert read_or_count("rev_vit_digits", None, refuse) == cached


def test_only_models_that_ship_are_kept(folder, tmp_path, monkeypatch, reports):
    report = reports["rev_vit_digits"]
    (tmp_path / "own").mkdir()
    file = tmp_path / "own" / "mine.yaml"
    file.write_text("base: rev_vit_digits\n")
    monkeypatch.setenv("REVZOO_SPECS", str(tmp_path / "own"))
    for name in ("mine", str(file), str(tmp_path), "no_such_model"):
        assert read_or_count(name, None, lambda: report) is report
    assert not folder.exists()


def test_nothing_is_cached_where_a_package_may_change_anything(cached, reports, monkeypatch):
    monkeypatch.setattr(plugin, "_imported", ["my_parts"])
    other = reports["revnet_digits"]
    assert read_or_count("rev_vit_digits", None, lambda: other) is other
    monkeypatch.setattr(plugin, "_imported", [])
    assert read_or_count("rev_vit_digits", None, refuse) == cached


@pytest.mark.parametrize("library", ["torch", "torchvision", "timm", "transformers"])
def test_another_version_is_counted_anew(library, cached, reports, monkeypatch):
    version = report_cache.version
    monkeypatch.setattr(report_cache, "version", lambda name: "0.0.1" if name == library else version(name))
    other = reports["revnet_digits"]
    assert read_or_count("rev_vit_digits", None, lambda: other) == other
    assert read_or_count("rev_vit_digits", None, refuse) == other


def test_another_setting_of_a_library_is_counted_anew(cached, reports, monkeypatch):
    monkeypatch.setenv("TIMM_FUSED_ATTN", "0")
    other = reports["revnet_digits"]
    assert read_or_count("rev_vit_digits", None, lambda: other) == other
    assert read_or_count("rev_vit_digits", None, refuse) == other
    monkeypatch.delenv("TIMM_FUSED_ATTN")
    assert read_or_count("rev_vit_digits", None, lambda: cached) == cached


def test_a_changed_file_is_counted_anew(tmp_path, folder, reports, monkeypatch):
    root = tmp_path / "root"
    for name in ("specs/models/a/rev_vit_digits.yaml", "weights/index.yaml", "revzoo/analysis/report_cache.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (root / "revzoo" / ".#module.py").symlink_to("gone")
    monkeypatch.setattr(report_cache, "__file__", str(root / "revzoo/analysis/report_cache.py"))
    monkeypatch.setattr("revzoo.spec.names.data_root", lambda: root)
    monkeypatch.setattr(report_cache, "data_root", lambda: root)
    first, second = reports["revnet_digits"], reports["rev_bert_mini"]
    assert read_or_count("rev_vit_digits", None, lambda: first) == first
    files = [file for file in sorted(root.rglob("*.*")) if file.is_file()]
    assert len(files) == 3
    for file in files:
        os.utime(file, ns=(1, 1))
        assert read_or_count("rev_vit_digits", None, lambda: second) == second
        assert read_or_count("rev_vit_digits", None, refuse) == second


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"state": 1}', {"name": "x"}, {"memory": []}, {"pixels": {"stages": None}}]
)
def test_a_damaged_file_is_counted_anew(content, cached, folder, reports):
    file = folder / "rev_vit_digits.default.json"
    found = json.loads(file.read_text())
    if isinstance(content, dict):
        content = json.dumps(found | {"report": content if "name" in content else found["report"] | content})
    file.write_text(content)
    other = reports["revnet_digits"]
    assert read_or_count("rev_vit_digits", None, lambda: other) == other


def test_a_folder_that_cannot_be_written_is_no_problem(reports, monkeypatch):
    monkeypatch.setenv("REVZOO_CACHE", os.path.join(os.devnull, "folder"))
    report = reports["rev_vit_digits"]
    assert read_or_count("rev_vit_digits", None, lambda: report) is report


def test_the_folder_is_that_of_caches(monkeypatch, tmp_path):
    monkeypatch.delenv("REVZOO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert report_cache.find_folder() == tmp_path / "revzoo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("REVZOO_CACHE", "~/x")
    assert report_cache.find_folder() == tmp_path / "x"
    monkeypatch.delenv("REVZOO_CACHE")
    assert report_cache.find_folder() == tmp_path / ".cache" / "revzoo"


PROGRAM = """
import sys
from zoo_cli import main
assert main(sys.argv[1:]) == 0
sys.exit("torch" in sys.modules)
"""


@pytest.mark.parametrize("option", [["--plot", "a.png"], ["--json"]])
def test_a_kept_report_is_shown_without_torch(option, folder, tmp_path):
    report = report_model(revzoo.create("rev_vit_digits", device="meta"))
    read_or_count("rev_vit_digits", None, lambda: report)
    command = [sys.executable, "-c", PROGRAM, "show", "rev_vit_digits", *option]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    if option == ["--json"]:
        assert json.loads(done.stdout) == json.loads(json.dumps(report.to_dict()))
    else:
        assert "What is kept for backward, batch of 32 images" in done.stdout
        assert (tmp_path / "a.png").stat().st_size > 10_000
