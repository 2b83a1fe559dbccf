"""The author of a new model, who reads docs/specs.md: a variant in YAML, and a part in a package of its own."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from revzoo import plugin, registry

pytestmark = pytest.mark.slow

PAGE = "docs/specs.md"


def count_lines(*files: Path) -> int:
    """Return the number of lines that are not blank."""
    return sum(bool(line.strip()) for file in files for line in file.read_text().splitlines())


@pytest.fixture
def _fresh_plugins(monkeypatch):
    """What a walk registers is gone after it."""
    monkeypatch.setattr(plugin, "_imported", [])
    monkeypatch.setattr(registry.branches, "_entries", dict(registry.branches._load()))
    yield
    sys.modules.pop("revzoo_template", None)


def test_a_variant_takes_ten_lines(user, photos, monkeypatch):
    specs = Path("specs")
    specs.mkdir()
    for name in ("my_vit.yaml", "my_deep_vit.yaml"):
        [block] = re.findall(rf"^```yaml\n(# {name}\n.*?)^```$", user.open(PAGE), flags=re.M | re.S)
        (specs / name).write_text(block)
    assert count_lines(specs / "my_deep_vit.yaml") <= 10
    assert "the environment variable `REVZOO_SPECS`" in " ".join(user.open(PAGE).split())
    monkeypatch.setenv("REVZOO_SPECS", "specs")
    assert user.type("revzoo list my_*") == "my_deep_vit\nmy_vit\n"
    show, verify = (command.replace("my_vit.yaml", "my_deep_vit") for command in user.read(PAGE, "revzoo show my_vit.yaml"))
    assert "momentum" in user.type(show)
    user.type(verify)
    user.type("revzoo train images data.root=photos model=my_deep_vit train.epochs=3 schedule.warmup_epochs=1")
    assert "top-1 " in user.type("revzoo eval runs/images")


@pytest.mark.usefixtures("_fresh_plugins")
def test_a_part_in_a_package_takes_thirty_lines(user, photos):
    package = Path("revzoo_template")
    text = " ".join(user.open(PAGE).split())
    assert "Every command that takes a model takes `--import my_parts`" in text
    assert "`docs/template/` is such a package, to be copied" in text
    shutil.copytree(user.root / "docs" / "template" / package, package)
    assert count_lines(package / "__init__.py", package / "specs" / "template_digits.yaml") <= 30
    own = "--import revzoo_template"
    assert user.type(f"revzoo list template* {own}") == "template_digits\n"
    assert "template_mixer" in user.type(f"revzoo show template_digits {own}")
    user.type(f"revzoo verify template_digits {own}")
    user.type(f"revzoo train digits model=template_digits train.epochs=1 {own}")
    assert "top-1 " in user.type(f"revzoo eval runs/digits {own}")
