"""Packages of users, named by `--import`, and folders of specs."""

import shutil
import sys
from pathlib import Path

import pytest

import revzoo
from revzoo import plugin, registry
from revzoo.commands.parser import Parser
from revzoo.errors import InputError, SpecError
from revzoo.spec.names import list_recipes, shipped_model_files
from zoo_cli import COMMANDS, load_command

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "docs" / "template"


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"check", "tokenizer"}))  # which take no model
def test_every_command_that_takes_a_model_imports_packages(command):
    parser = Parser(prog="revzoo")
    load_command(command).declare(parser)
    assert "--import" in parser.format_help()


@pytest.fixture
def own(monkeypatch, tmp_path):
    """An empty folder, and nothing imported."""
    for each in vars(registry).values():  # first: what these import stays imported
        if isinstance(each, registry.Registry):
            each._load()
    monkeypatch.setattr(plugin, "_imported", [])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(registry.branches, "_entries", dict(registry.branches._entries))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_imported_package_adds_parts_and_specs(own):
    shutil.copytree(TEMPLATE / "revzoo_template", own / "revzoo_template")
    assert revzoo.list_models("template*") == []
    plugin.import_package("revzoo_template")
    assert "template_mixer" in registry.branches
    assert revzoo.list_models("template*") == ["template_digits"]
    assert len(revzoo.create("template_digits", device="meta").steps) == 12
    with pytest.raises(InputError, match="no_such_parts cannot be imported"):
        plugin.import_package("no_such_parts")


def test_a_run_names_its_packages_which_are_imported_if_installed(own, monkeypatch):
    for folder in ("installed", "run"):
        (own / folder).mkdir()
    (own / "run" / plugin.RECORD).write_text("revzoo_template")
    (own / "run" / "best.safetensors").touch()
    shutil.copytree(TEMPLATE / "revzoo_template", own / "revzoo_template")  # in the present folder
    with pytest.raises(InputError, match=r"run/imports\.txt names revzoo_template\. What a file names has to be"):
        plugin.import_packages_of_runs(["digits", "model=run"])
    assert "revzoo_template" not in sys.modules
    (own / "revzoo_template").rename(own / "installed" / "revzoo_template")
    monkeypatch.setattr(plugin, "INSTALLED", [str(own), str(own / "installed")])
    [line] = plugin.import_packages_of_runs(["run/best.safetensors", "run"])
    assert line == "Imported revzoo_template, with which run/best.safetensors was trained."
    assert revzoo.list_models("template*") == ["template_digits"]
    assert plugin.import_packages_of_runs(["run", "train.epochs=3", "x" * 5000]) == []


def test_folders_of_specs_have_names(own, monkeypatch):
    for path in ("flat.yaml", "models/deep/own.yaml", "recipes/quick.yaml"):
        (own / path).parent.mkdir(parents=True, exist_ok=True)
        (own / path).write_text("base: digits" if "recipes" in path else f"base: rev_vit_digits\nname: {Path(path).stem}")
    monkeypatch.setenv("REVZOO_SPECS", str(own))
    shipped = set(shipped_model_files())
    assert set(revzoo.list_models()) - shipped == {"flat", "own"}
    assert "quick" in list_recipes()
    assert revzoo.load_spec("own").name == "own"
    (own / "rev_vit_digits.yaml").touch()
    with pytest.raises(SpecError, match="a name of its own"):
        revzoo.list_models()
    for missing in (str(own / "nowhere"), "~nobody-has-this-name"):
        monkeypatch.setenv("REVZOO_SPECS", missing)
        message = f"REVZOO_SPECS names folders, separated by ':'. Received: {missing}, which is none."
        with pytest.raises(InputError, match=message):
            revzoo.list_models()
