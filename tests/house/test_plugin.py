"""Packages of users: installed with an entry point, or imported; and folders of specs."""

import copy
import inspect
import logging
import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

import pytest
import torch

import revzoo
from revzoo import plugin, registry
from revzoo.commands.parser import Parser
from revzoo.errors import InputError, SpecError
from revzoo.spec.names import list_recipes, shipped_model_files
from zoo_cli import COMMANDS, load_command

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "docs" / "template"
USE_TEMPLATE = """
import revzoo
model = revzoo.create("template_digits", device="meta")
print(revzoo.list_models("template*"), type(model.stages[0].blocks[0].f).__name__)
"""


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"tokenizer"}))  # which takes no model
def test_every_command_that_takes_a_model_imports_packages(command):
    parser = Parser(prog="revzoo")
    load_command(command).declare(parser)
    assert "--import" in parser.options


@pytest.mark.slow
def test_an_installed_package_adds_parts_and_specs(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(TEMPLATE, source)
    has_pip = any(package.name == "pip" for package in distributions())  # looking for its module would import setuptools' hack
    pip = [sys.executable, "-m", "pip"] if has_pip else ["uv", "pip"]
    own = [] if has_pip else ["--python", sys.executable]
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(site)]
    subprocess.run([*pip, "install", *own, *options, str(source)], check=True)
    path = os.pathsep.join([str(site), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", USE_TEMPLATE],
        env=os.environ | {"PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "['template_digits'] TemplateMixer\n", done.stderr


def raised_in(part: torch.nn.Module) -> BaseException:
    try:
        part(torch.zeros(2, 3))
    except Exception as error:
        return error
    raise AssertionError


def test_an_error_names_the_part_that_a_user_registered():
    part = torch.nn.Sequential(torch.nn.Linear(5, 5))
    error = raised_in(part)
    words = f"RuntimeError: {error}"
    assert plugin.explain_part(error) is None
    plugin.mark_part(part, "head", "mine")
    for each in (part, copy.deepcopy(part), torch.nn.Sequential(part)):
        assert plugin.explain_part(raised_in(each)) == f"head (type mine) raises {words}. Correct it there."


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), None),  # with the part nothing is wrong
        (KeyError("x\ny"), "head (type mine) raises KeyError: 'x\\ny', in line {line} of {file}. Correct it there."),
        (ValueError("first\nsecond"), "head (type mine) raises ValueError: first, in line {line} of {file}. Correct it there."),
    ],
)
def test_what_is_said_of_an_error(error, reason):
    class Failing(torch.nn.Module):
        def forward(self, x):
            raise error

    part = Failing()
    plugin.mark_part(part, "head", "mine")
    line = inspect.getsourcelines(Failing)[1] + 2
    assert plugin.explain_part(raised_in(part)) == (reason and reason.format(line=line, file=__file__))


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
    with pytest.raises(InputError, match=r"no_such_parts cannot be imported \(No module named 'no_such_parts'\)"):
        plugin.import_package("no_such_parts")


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


def test_a_plugin_that_fails_is_left_out(tmp_path, monkeypatch, caplog):
    (tmp_path / "ending_parts.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    broken = [EntryPoint("broken", name, plugin.GROUP) for name in ("no_such_parts", "ending_parts")]
    monkeypatch.setattr(plugin, "_list_plugins", lambda: broken)
    with caplog.at_level(logging.WARNING):
        plugin.load_plugins.__wrapped__()
    assert caplog.messages == [
        "The plugin no_such_parts is left out: ModuleNotFoundError: No module named 'no_such_parts'. Correct or uninstall it.",
        "The plugin ending_parts is left out: SystemExit: 3. Correct or uninstall it.",
    ]
