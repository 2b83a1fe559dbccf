"""Packages that add parts and specs: installed ones name themselves, others are named by `--import`.

An installed package has an entry point of the group `revzoo.plugins`, whose value is the module that registers its parts. A
folder `specs` in the package holds models and recipes. So do the folders in the environment variable REVZOO_SPECS.
"""

import logging
import os
import sys
import sysconfig
import traceback
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from revzoo.errors import InputError, RevzooError

GROUP = "revzoo.plugins"
VARIABLE = "REVZOO_SPECS"
_FOLDER = "specs"  # in a package
_MARK = "_registered_by_user"  # an attribute of parts
_logger = logging.getLogger("revzoo")
_imported: list[str] = []  # packages named by --import


def import_package(name: str) -> ModuleType:
    """Import a package that registers parts, seen from the present folder, too; its specs are then found by name.

    Raises:
        InputError: it cannot be imported.
    """
    module = import_from_here(name)
    if name not in _imported:
        _imported.append(name)
    return module


def import_from_here(name: str) -> ModuleType:
    """Import a module that is installed, or in the present folder, which stays on the path behind all others.

    Processes that load data import the module themselves, and start with the path that this process has.

    Raises:
        InputError: it cannot be imported.
    """
    here = os.getcwd()
    sys.path.insert(0, here)  # as `python -m` does
    try:
        module = import_module(name)
    except (Exception, SystemExit) as error:  # of a module of others, which may raise anything
        reason = str(error) if isinstance(error, ImportError) else describe_failure(error)
        raise InputError(f"{name} cannot be imported ({reason}). {_suggest_remedy(name, error)}") from error
    finally:
        sys.path.remove(here)
    if here not in sys.path:
        sys.path.append(here)
    return module


def describe_failure(error: BaseException, since: TracebackType | None = None) -> str:
    """Return what code of a user raised, and in which line of it.

    Args:
        error: the error.
        since: where in its traceback that code begins; None: at the beginning.
    """
    if isinstance(error, RevzooError | SyntaxError):  # which say it themselves
        return str(error)
    frames = traceback.extract_tb(since or error.__traceback__)
    others = [each for each in frames if not _is_inside(each, Path(__file__).parent) and "<" not in each.filename]
    installed = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    own = [each for each in others if not _is_inside(each, *installed)]
    own = own or [each for each in others if "torch" not in Path(each.filename).parts]  # an installed package may be the user's
    place = f", in line {own[-1].lineno} of {own[-1].filename}" if own else ""
    words = f": {_shorten(error)}" if str(error) else ""
    return f"{type(error).__name__}{words}{place}"


def _shorten(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def mark_part(part: Any, place: str, name: str) -> None:
    """Let an error of a part that a user registered be told from one of revzoo.

    Args:
        part: the module.
        place: of the part in the spec.
        name: under which it is registered.
    """
    part.__dict__[_MARK] = f"{place} (type {name})"


def explain_part(error: BaseException) -> str | None:
    """Return which part that a user registered raised an error, and in which line; None if none did."""
    if type(error).__name__ == "OutOfMemoryError":  # nothing is wrong with the part
        return None
    place = error.__traceback__
    while place is not None:
        if (mark := getattr(place.tb_frame.f_locals.get("self"), "__dict__", {}).get(_MARK)) is not None:
            return f"{mark} raises {describe_failure(error, place)}. Correct it there."
        place = place.tb_next
    return None


def _is_inside(frame: traceback.FrameSummary, *folders: Path) -> bool:
    return any(folder in Path(frame.filename).parents for folder in folders)


def _suggest_remedy(name: str, error: BaseException) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and not f"{name}.".startswith(f"{missing}."):
        return f"Install {missing.partition('.')[0]}, or remove its import."
    if missing is None and all(part.isidentifier() for part in name.split(".")):
        return "Correct it there."
    return (
        "It is a module that is installed, or seen from the present folder: my_parts for my_parts.py or my_parts/__init__.py."
    )


@cache
def load_plugins() -> None:
    """Import the installed packages that add parts, once. One that fails is named in a warning, and left out."""
    for point in _list_plugins():
        try:
            point.load()
        except (Exception, SystemExit) as error:  # of a package of others, which may raise anything
            what = f"{type(error).__name__}: {error}"
            _logger.warning("The plugin %s is left out: %s. Correct or uninstall it.", point.value, what)


def list_spec_folders() -> list[Path]:
    """Return the folders with specs of users: of REVZOO_SPECS, and of packages. Nothing is imported.

    Raises:
        InputError: REVZOO_SPECS names what is no folder.
    """
    # Not pathlib's expanduser, which raises for ~NAME if there is no such user.
    folders = [Path(os.path.expanduser(folder)) for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{VARIABLE} names folders, separated by {os.pathsep!r}. Received: {folder}, which is none.")
    folders += [Path(place) / _FOLDER for package in list_packages() for place in _find_places(package)]
    return list(dict.fromkeys(folder.resolve() for folder in folders if folder.is_dir()))


def list_packages() -> list[str]:
    """Return the names of the packages that add parts or specs: installed ones, and those named by `--import`."""
    return list(dict.fromkeys([*(point.module.partition(".")[0] for point in _list_plugins()), *_imported]))


@cache
def _list_plugins() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))


def _find_places(package: str) -> list[str]:
    """Return the folders of a package; none of a module that is one file, or is not there."""
    spec = find_spec(package)
    return [] if spec is None else list(spec.submodule_search_locations or [])
