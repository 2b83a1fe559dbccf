"""Who may import whom, read from the source."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import revzoo

ROOT = Path(revzoo.__file__).parent
# Each row may import the rows above it. Names in one row never import one another.
LAYERS = [
    ("bounds", "device", "dtype", "errors", "file", "format", "metric", "noise"),
    ("plugin",),
    ("bijection", "hub", "invertible", "registry"),
    ("inplace_abn",),
    ("spec", "runtime", "parts"),
    ("block_steps",),
    ("checkpoint",),
    ("model",),
    ("analysis", "data", "sharding"),
    ("planning",),
    ("display",),
    ("graph",),
    ("any_plan",),
    ("conversion", "in_place"),
    ("training", "on_card"),
    ("timm", "commands"),
]
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}
EXCEPTIONS = {("checkpoint", "runtime"), ("checkpoint", "parts")}  # files on disk know specs and tensors, and no network
# Libraries that only these layers may import.
HOMES = {
    "torch": set(RANKS) - {"bounds", "errors", "file", "format", "hub", "plugin", "registry", "spec"},
    "timm": {"parts", "model", "analysis", "graph", "data", "conversion", "in_place", "training", "commands"},
    "onnxruntime": {"conversion"},
    "omegaconf": {"spec", "checkpoint", "training"},
    "yaml": {"spec", "checkpoint"},
    "safetensors": {"checkpoint", "conversion", "training"},
    "accelerate": {"training"},
    "huggingface_hub": {"hub"},
    "sklearn": {"data", "training"},
    "datasets": {"data"},
    "tokenizers": {"data"},
    "transformers": {"graph"},
    "torchvision": {"data"},
    "rich": {"display", "graph"},
    "matplotlib": {"display", "graph"},
}
FACADE = "revzoo"  # revzoo/__init__.py, which no file imports
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
    if path.name != "__main__.py" and "_data" not in path.parts
}
LAYERED = [module for module in MODULES if module != FACADE]


def layer_of(module: str) -> str:
    return module.split(".")[1]


@cache
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


def imported_modules(module: str) -> set[str]:
    """Return our modules that a module imports: of `from a.b import c`, a.b.c where that is a module, else a.b."""
    names = {name for name in imported(MODULES[module]) if f"{name}.".startswith("revzoo.")}
    if module == FACADE:  # its lazy table of homes
        constants = [node.value for node in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(node, ast.Constant)]
        names |= MODULES.keys() & {value for value in constants if isinstance(value, str)}
    return {name if name in MODULES else name.rpartition(".")[0] for name in names} & MODULES.keys()


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the nodes of a cycle, or nothing."""
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_layer_is_in_the_picture():
    assert {layer_of(module) for module in LAYERED} == set(RANKS)
    assert len(MODULES) > 100


def test_imports_point_downwards():
    upwards, strangers = [], []
    for module in LAYERED:
        own, libraries = layer_of(module), {name.split(".")[0] for name in imported(MODULES[module])}
        others = {name: layer_of(name) if name != FACADE else name for name in imported_modules(module)}
        upwards += [(module, name) for name, other in others.items() if not may_import(own, other)]
        strangers += [(module, library) for library in libraries if own not in HOMES.get(library, RANKS)]
        assert "zoo_cli" not in libraries, module
    assert (upwards, strangers) == ([], [])


def may_import(own: str, other: str) -> bool:
    return other == own or (RANKS.get(other, len(LAYERS)) < RANKS[own] and (own, other) not in EXCEPTIONS)


def test_no_file_imports_itself_through_others():
    """Without a cycle, every strongly connected component has one file; the facade is a file like any other."""
    graph = {module: imported_modules(module) for module in MODULES}
    assert graph[FACADE] >= {"revzoo.model.create", "revzoo.planning.planner"}
    assert sum(map(len, graph.values())) > 300
    assert find_cycle(graph) == []


def test_a_plan_of_any_module_needs_no_zoo():
    """Nor what reads specs, weights and the hub."""
    closure, waiting = set[str](), ["revzoo.any_plan"]
    while waiting:
        closure.add(module := waiting.pop())
        waiting += imported_modules(module) - closure
    assert {layer_of(module) for module in closure} & {"checkpoint", "data", "hub", "parts", "spec"} == set()
    assert "timm" not in {name.split(".")[0] for module in closure for name in imported(MODULES[module])}


def test_the_walk_sees_imports_wherever_they_stand(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("import a.b\nfrom revzoo import spec\ndef f():\n    from revzoo.runtime.chain import Step as S\n")
    assert imported(file) == {"a.b", "revzoo.spec", "revzoo.runtime.chain.Step"}


def test_what_is_imported_is_declared():
    import zoo_cli

    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["text"], *extras["onnx"], *extras["heif"]]
    declared = {re.match(r"[\w-]+", line)[0] for line in lines}
    used = {name.split(".")[0] for path in (*MODULES.values(), Path(zoo_cli.__file__)) for name in imported(path)}
    used -= set(sys.stdlib_module_names) | {"revzoo", "zoo_cli"}
    used |= {"onnx", "onnxscript"}  # by torch.onnx
    used -= {"transformers", "peft"}  # who has a folder of a Transformers model to plan has it; adapters are peft's
    published = {"PIL": "pillow", "pillow_heif": "pillow-heif", "sklearn": "scikit-learn", "yaml": "pyyaml"}
    assert {published.get(name, name) for name in used} == declared


@pytest.mark.parametrize(
    "statement",
    [
        "import revzoo; revzoo.list_models(); revzoo.errors",
        "from revzoo.spec import list_models, list_recipes; list_models('rev*'); list_recipes()",
        "from revzoo.metric import CHOSEN; CHOSEN.format(97.5)",  # of the table of revzoo list
    ],
)
def test_listing_needs_no_torch(statement, tmp_path):
    """A new process, because this one has imported torch."""
    code = f"import sys; {statement}; print(sorted({{'torch', 'timm', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_other_peoples_networks_need_nothing_that_draws_or_reads(tmp_path):
    """Nor what only models of the zoo need."""
    code = """
import sys
import revzoo, torch
absent = ("matplotlib", "rich", "sklearn", "timm", "torchvision", "accelerate", "omegaconf", "yaml")
sys.modules.update(dict.fromkeys(absent))  # whoever imports one of them gets an ImportError
revzoo.reversible_, revzoo.runtime.ReversibleChain
network = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
revzoo.plan(network, torch.randn(4, 8), budget="1MiB").apply(network)
network(torch.randn(4, 8)).sum().backward()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT.parent)}
