"""Code and specs of users: packages named by `--import`, functions of data, and what their code raises.

What is typed may be anywhere, also in the present folder. A file may be a stranger's: what it names is imported only if it is
installed, and not from Python's standard library, some of whose modules do things when they are imported.

A folder `specs` in such a package holds models and recipes. So do the folders in the environment variable REVZOO_SPECS.
"""

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from revzoo.errors import InputError, RevzooError

VARIABLE = "REVZOO_SPECS"
RECORD = "imports.txt"  # in the folder of a run: the packages that were named by --import
INSTALLED = sys.path[not sys.flags.safe_path :]  # the first one is the present folder, or that of the program
_imported: list[str] = []  # packages named by --import


def import_package(name: str) -> ModuleType:
    """Import a package that registers parts, seen from the present folder, too; its specs are then found by name.

    Raises:
        InputError: it cannot be imported.
    """
    module = import_from_here(name)
    _imported.append(name)
    return module


def import_packages_of_runs(words: Iterable[str]) -> list[str]:
    """Import what the runs among some words were trained with, if it is installed, and return a line for each package.

    Args:
        words: as typed: the folder of a run, a file in it, or a setting such as model=FOLDER.
    Raises:
        InputError: a package cannot be imported.
    """
    lines = []
    for word in words:
        path = word if os.path.exists(word) else word.partition("=")[2]
        record = os.path.join(path if os.path.isdir(path) else os.path.dirname(path), RECORD)
        text = Path(record).read_text(encoding="utf-8", errors="replace") if path and os.path.isfile(record) else ""
        for name in re.findall(r"^\w+(?:\.\w+)*$", text, re.MULTILINE):
            if name not in _imported:
                import_if_installed(name, record)
                _imported.append(name)
                lines.append(f"Imported {name}, with which {path} was trained.")
    return lines


def import_if_installed(name: str, source: str) -> ModuleType:
    """Import a module that a file names: it has to be installed, or imported already, such as by `--import`.

    Args:
        name: of the module.
        source: the file, and the place in it, for messages.

    Raises:
        InputError: it cannot be imported, or is of Python itself.
    """
    parts = name.split(".")
    if parts[0] in (*sys.stdlib_module_names, "test") or "__main__" in parts:
        raise InputError(f"{source} names {name}, which is of Python itself. A file names only what is of others.")
    before, here = sys.path[:], os.path.realpath(os.getcwd())
    sys.path[:] = [folder for folder in INSTALLED if os.path.realpath(folder) != here]
    try:
        remedy = f"What a file names has to be installed. If you trust it, say so: --import {name}."
        return _import(name, f"{source} names {name}. {remedy}")
    finally:
        sys.path[:] = before


def import_from_here(name: str) -> ModuleType:
    """Import a module that is installed, or in the present folder, which stays on the path after all others.

    Processes that load data import the module themselves, and start with the path that this process has.

    Raises:
        InputError: it cannot be imported.
    """
    if name in sys.modules:  # also what a file names: nothing else is then found in the present folder
        return sys.modules[name]
    here = os.getcwd()
    sys.path.insert(0, here)  # as `python -m` does
    try:
        return _import(
            name,
            "Correct it there. A name is that of a module which is installed, or seen from the present folder: my_parts for "
            "my_parts.py or my_parts/__init__.py.",
        )
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)


def _import(name: str, remedy: str) -> ModuleType:
    try:
        return import_module(name)
    except (Exception, SystemExit) as error:  # of a module of others, which may raise anything
        raise InputError(f"{name} cannot be imported ({describe_failure(error)}). {remedy}") from error


def describe_failure(error: BaseException) -> str:
    """Return what code of a user raised, and in which line of it: the last one that is neither ours nor installed."""
    if isinstance(error, RevzooError | SyntaxError):  # which say it themselves
        return str(error)
    others = (str(Path(__file__).parent), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), "<")
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    place = f", in line {lines[-1].lineno} of {lines[-1].filename}" if lines else ""
    words = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}{f': {words}' if words else ''}{place}"


def list_spec_folders() -> list[Path]:
    """Return the folders with specs of users: of REVZOO_SPECS, and `specs` in packages. Nothing is imported.

    Raises:
        InputError: REVZOO_SPECS names what is no folder.
    """
    # Not pathlib's expanduser, which raises for ~NAME if there is no such user.
    folders = [Path(os.path.expanduser(folder)) for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{VARIABLE} names folders, separated by {os.pathsep!r}. Received: {folder}, which is none.")
    for package in list_packages():
        spec = find_spec(package)
        folders += [Path(place, "specs") for place in (spec and spec.submodule_search_locations) or ()]
    return list(dict.fromkeys(folder.resolve() for folder in folders if folder.is_dir()))


def list_packages() -> list[str]:
    """Return the names of the packages named by `--import`."""
    return list(dict.fromkeys(_imported))
