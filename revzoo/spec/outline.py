"""Check the names in a spec in a tenth of a second: importing the parts, which know them, takes torch and seconds."""

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from revzoo import registry
from revzoo.spec.loading import load_spec
from revzoo.spec.names import shipped_model_files

_PACKAGE = Path(__file__).parents[1]


def check_names(source: str | Path, overrides: Iterable[str] = ()) -> None:
    """Raise what `load_spec` raises about a spec, but for values of the parts' arguments, whose types are not known here.

    Nothing is checked where torch is imported, and `load_spec` as fast: parts of users, who import it, are not known here.
    """
    overrides = list(overrides)
    if "torch" not in sys.modules and (overrides or str(source) not in shipped_model_files()):
        with _outline_parts():
            load_spec(source, overrides)


@contextmanager
def _outline_parts() -> Iterator[None]:
    """Let registries know their entries from the source until the end of the block."""
    files = [*(_PACKAGE / "parts").rglob("*.py"), _PACKAGE / "runtime" / "coupling.py"]
    nodes = [node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    tables = [table for table in vars(registry).values() if isinstance(table, registry.Registry)]
    before = [(table, table._home, table._entries) for table in tables]
    for table in tables:
        table._home, table._entries = registry.__name__, {}
    try:
        for node in nodes:
            for mark in getattr(node, "decorator_list", ()):
                match mark:
                    case ast.Call(ast.Attribute(ast.Name(kind), "register"), [ast.Constant(name)]):
                        getattr(registry, kind).register(name)(_outline(_find_arguments(node, classes)))
        yield
    finally:
        for table, home, entries in before:
            table._home, table._entries = home, entries


def _find_arguments(node: Any, classes: dict[str, ast.ClassDef]) -> ast.arguments | None:
    """Return the arguments of a function, or of the constructor that a class has or inherits; None: it has none."""
    if isinstance(node, ast.FunctionDef):
        return node.args
    own = [item.args for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    bases = [classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
    return next((found for found in [*own, *(_find_arguments(base, classes) for base in bases)] if found), None)


def _outline(arguments: ast.arguments | None) -> Callable[..., None]:
    """Return a function with the same keyword-only parameters, without types."""

    def outline() -> None: ...

    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if arguments else ()
    parameters = [
        Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=default or Parameter.empty) for argument, default in pairs
    ]
    vars(outline)["__signature__"] = Signature(parameters)
    return outline
