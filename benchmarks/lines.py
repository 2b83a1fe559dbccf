"""Count code, and what a file imports: the size of the house.

Lines of code are those that hold something besides blanks, comments and docstrings. A closure is all files of the package that
a file imports, directly or through others, wherever that stands in it, except for types. Before and after a change:

    python benchmarks/lines.py revzoo tests benchmarks --closure revzoo.training.loop --closure revzoo.any_plan
"""

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count_code(path: Path) -> int:
    """Return the lines of code in a file."""
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def find_closure(start: str) -> set[Path]:
    """Return the files of the package that a module imports, itself included."""
    seen: set[Path] = set()
    waiting = [start]
    while waiting:
        path = _find_file(waiting.pop())
        if path is None or path in seen:
            continue
        seen.add(path)
        waiting += _list_imports(ast.parse(path.read_text()))
    return seen


def _list_imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{each.name}" for each in node.names]
        yield from (name if _find_file(name) else node.module for name in names)
    for child in ast.iter_child_nodes(node):
        yield from _list_imports(child)


def _find_file(module: str) -> Path | None:
    place = ROOT.joinpath(*module.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((file for file in files if module.startswith("revzoo.") and file.is_file()), None)


def main() -> None:
    """Print code by folder, and the closures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=["revzoo", "tests"], help="folders of the checkout")
    parser.add_argument("--closure", action="append", default=[], metavar="MODULE", help="count what this module imports")
    arguments = parser.parse_args()
    for folder in arguments.folders:
        files = sorted((ROOT / folder).rglob("*.py"))
        parts: dict[str, int] = {}
        for path in files:
            parts.setdefault(path.relative_to(ROOT / folder).parts[0], 0)
            parts[path.relative_to(ROOT / folder).parts[0]] += count_code(path)
        print(f"{folder}: {sum(parts.values())} lines of code in {len(files)} files")
        for name, lines in sorted(parts.items(), key=lambda row: -row[1]):
            print(f"  {lines:6} {name}")
    for module in arguments.closure:
        found = find_closure(module)
        print(f"{module}: imports {len(found)} files, {sum(map(count_code, found))} lines of code")


if __name__ == "__main__":
    main()
