"""Who may import whom, read from the source."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import revzoo

ROOT = Path(revzoo.__file__).parent
BASE = {"bijection", "bounds", "errors", "registry"}
PARTS = {"spec", "runtime", "parts"}
MODEL = {"builder", "inputs", "model"}
ALLOWED = {
    "bijection": set(),
    "bounds": set(),
    "errors": set(),
    "registry": {"errors"},
    "spec": BASE | {"spec"},
    "runtime": BASE | {"runtime"},
    "parts": BASE | {"parts"},
    "inputs": BASE | {"spec"},
    "model": BASE | PARTS | {"inputs"},
    "builder": BASE | PARTS | {"model"},
    "weights": BASE | PARTS | MODEL,
    "analysis": BASE | PARTS | MODEL | {"analysis", "weights"},
    "planning": BASE | PARTS | MODEL | {"analysis", "planning"},
    "conversion": BASE | PARTS | MODEL | {"analysis", "weights", "conversion"},
    "training": BASE | PARTS | MODEL | {"analysis", "weights", "planning", "training"},
}
FORBIDDEN_OUTSIDERS = {  # what a layer must not know of
    "bijection": {"omegaconf", "timm", "rich"},
    "bounds": {"torch", "omegaconf", "timm", "rich"},
    "errors": {"torch", "omegaconf", "timm", "rich"},
    "registry": {"torch", "omegaconf", "timm", "rich"},
    "spec": {"torch", "timm", "safetensors"},
    "runtime": {"omegaconf", "yaml", "timm", "rich", "accelerate"},
    "parts": {"omegaconf", "yaml", "rich", "accelerate"},
    "inputs": {"omegaconf", "yaml", "timm", "rich", "accelerate"},
    "model": {"omegaconf", "yaml", "rich", "accelerate"},
    "builder": {"omegaconf", "yaml", "rich", "accelerate"},
    "weights": {"rich", "accelerate"},
    "analysis": {"accelerate", "sklearn"},
    "planning": {"omegaconf", "yaml", "timm", "accelerate"},
    "conversion": {"accelerate", "sklearn"},
    "training": set(),
}
MODULES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py" and "_data" not in path.parts]


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    """Return the dotted names of everything imported anywhere in a file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides the layer"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_layer_is_in_the_picture():
    assert {layer_of(path) for path in MODULES} == set(ALLOWED) == set(FORBIDDEN_OUTSIDERS)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path):
    own = {name.split(".")[1] for name in imported(path) if name.startswith("revzoo.")}
    others = {name.split(".")[0] for name in imported(path)}
    assert own <= ALLOWED[layer_of(path)]
    assert not others & FORBIDDEN_OUTSIDERS[layer_of(path)]
    assert "zoo_cli" not in others


def test_the_walk_sees_imports_wherever_they_stand(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("import a.b\nfrom revzoo import spec\ndef f():\n    from revzoo.runtime.chain import Step as S\n")
    assert imported(file) == {"a.b", "revzoo.spec", "revzoo.runtime.chain.Step"}


def test_the_command_line_uses_public_names_only():
    import zoo_cli

    ours = [name for name in imported(Path(zoo_cli.__file__)) if name.startswith("revzoo")]
    assert ours
    assert not [name for name in ours if any(part.startswith("_") for part in name.split("."))]


def test_what_is_imported_is_declared():
    import zoo_cli

    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["text"]]
    declared = {re.match(r"[\w-]+", line)[0] for line in lines}
    used = {name.split(".")[0] for path in (*MODULES, Path(zoo_cli.__file__)) for name in imported(path)}
    used -= set(sys.stdlib_module_names) | {"revzoo", "zoo_cli"}
    assert {{"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}.get(name, name) for name in used} == declared


@pytest.mark.parametrize(
    "statement",
    [
        "import revzoo; revzoo.list_models(); revzoo.errors",
        "import revzoo.spec as spec; spec.load_spec('rev_vit_b'); spec.load_spec('revnet_104')",
        "import zoo_cli; status = zoo_cli.main(['list'])",
    ],
)
def test_listing_needs_no_torch(statement, tmp_path):
    """A new process, because this one has imported torch."""
    code = f"import sys; {statement}; print(sorted({{'torch', 'timm', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_spec_is_checked_in_full_whatever_was_imported_before(tmp_path):
    code = """
import revzoo
try:
    revzoo.load_spec("rev_vit_b", ["block.coupling=additiv", "block.f.head=2"])
except revzoo.errors.SpecError as error:
    print(*(problem.path for problem in error.problems))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=tmp_path)
    assert (done.stderr, done.stdout) == ("", "block.coupling block.f.head\n")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT.parent)}
