"""What benchmarks import is there; each one runs at toy size, and what it counts is within its targets."""

import ast
import json
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
WRITE_A_FILE = (  # the others write into a folder
    *("runtime", "machinery", "lookahead", "tiles", "training_loop", "compiled", "compiled_reversible"),
)
OPTIONS = {"training_loop": ["--epochs", "1"], "tiles": ["--quick", "--only", "memory", "flops"]}
WRITE_A_FOLDER = (
    *("planning", "reforwarding", "published_memory", "pareprop", "bytes_per_pixel", "numerics", "finetune"),
    *("finetune_llm", "random_signs", "peers"),
)


def test_what_benchmarks_import_from_revzoo_is_there():
    """Without running them: importing what they need besides takes seconds."""
    nodes = [node for path in FOLDER.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    imports = [(node.module, alias.name) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    ours = {(module, name) for module, name in imports if module.split(".")[0] == "revzoo"}
    assert len(ours) > 100
    missing = {(module, name) for module, name in ours if not hasattr(import_module(module), name)}
    assert [each for each in missing if find_spec(".".join(each)) is None] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WRITE_A_FILE, *WRITE_A_FOLDER])
def test_a_benchmark_at_toy_size(name, tmp_path):
    if name == "finetune_llm" and (find_spec("peft") is None or shutil.which("apt-cache") is None):
        pytest.skip("LoRA is peft's, and the texts are Debian's")
    options = OPTIONS.get(name, ["--quick"])
    if name == "random_signs" and find_spec("iglm") is None:
        options = [*options, "--only", "digits", "text"]
    file = tmp_path / f"{name}.json"
    command = [sys.executable, str(FOLDER / f"{name}.py"), *options, "--out", str(file if name in WRITE_A_FILE else tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    for part in [result] if "command" in result else result.values():  # says where and how it was measured
        assert part["command"].startswith("python ")
        assert part["versions"].keys() == {"python", "torch", "revzoo"}
    counted = [f for f in result.get("figures", ()) if f.get("target") is not None and not is_time(f["what"])]
    assert [f for f in counted if f["value"] > f["target"]] == []
    if name == "peers":
        failed = {(check, m) for check, row in result["checks"].items() for m in row if any(row[m].values())}
        assert [each for each in failed if each[1].startswith("revzoo")] == []


def is_time(what: str) -> bool:
    """A time at toy size, on a busy machine, says nothing."""
    return "time" in what or "[us]" in what
