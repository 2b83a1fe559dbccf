"""Errors that are addressed to the user: something in the input, not in the program, has to change.

Every error says what was received, where, what is allowed and what to type instead. The command line prints any
`RevzooError` without a traceback and exits with its status.
"""

import difflib
import errno
import os
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_LONGEST_NAME, _LONGEST_PATH = 80, 300  # characters that a message repeats


class RevzooError(Exception):
    """Base of every error that is addressed to the user."""

    exit_status = 2  # of the command line

    def __reduce__(self) -> tuple[Any, ...]:  # the message is there already, wherever else the error is raised again
        return _copy_error, (type(self), self.args, self.__dict__)


def _copy_error(kind: type[RevzooError], args: tuple[Any, ...], attributes: dict[str, Any]) -> RevzooError:
    """Return an error as it was, without calling its `__init__`, which takes what the message is made of."""
    error = kind.__new__(kind, *args)
    error.__dict__ |= attributes
    return error


class UnknownNameError(RevzooError, LookupError):
    """A name (model, part, recipe, command) that revzoo does not have.

    Args:
        kind: what the name should have been one of.
        received: the name.
        allowed: the names that there are.
        hint: a sentence with what to type instead, with a leading blank; empty: the allowed name that is nearest.
    """

    def __init__(self, kind: str, received: str, allowed: Iterable[str], hint: str = ""):
        allowed = sorted(allowed)
        hint = hint or did_you_mean(str(received), allowed, 0.6)
        super().__init__(f"Unknown {kind} {str(received)[:_LONGEST_NAME]!r}.{hint} Allowed: {join_names(allowed)}.")


class MissingFileError(UnknownNameError):
    """A path at which nothing is, or a folder without the file that is looked for in it.

    Args:
        path: the path as it was written.
        wanted: what the file should be, such as "a model's spec".
        hint: a sentence with what to type instead, with a leading blank; or empty.
        missing: name of the file that is not in the folder; empty where `path` is no folder.
    """

    def __init__(self, path: str, wanted: str, hint: str = "", missing: str = ""):
        kind = "file" if os.path.splitext(path)[1] else "file or folder"
        there = f"no {missing} in the folder {path}" if missing else f"no {kind} {path[:_LONGEST_PATH]}"
        Exception.__init__(self, f"There is {there}; {wanted} was expected.{hint}")


@dataclass(frozen=True)
class SpecProblem:
    """One mistake in a spec or a recipe.

    Args:
        file: the file it was written in, or "override".
        path: dotted path of the value, such as "stages.0.depth".
        received: the value as it was written.
        allowed: which values are allowed there.
        hint: a sentence with what to type instead, with a leading blank; or empty.
    """

    file: str
    path: str
    received: str
    allowed: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.path}: found {self.received}; allowed: {self.allowed}.{self.hint}"


class SpecError(RevzooError, ValueError):
    """A spec or recipe with mistakes; all of them are listed in one message and in `problems`."""

    def __init__(self, problems: Sequence[SpecProblem]):
        self.problems = tuple(problems)
        count = len(self.problems)
        header = f"{count} problem{'s' if count != 1 else ''} found:"
        super().__init__("\n  ".join([header, *map(str, self.problems)]))


class PartArgumentError(RevzooError, ValueError):
    """An argument of a part that does not fit the parts around it.

    A part raises it while it is built; the builder turns it into a `SpecProblem` by adding file and path.
    """

    def __init__(self, argument: str, received: object, allowed: str):
        self.argument, self.received, self.allowed = argument, received, allowed
        super().__init__(f"{argument}: found {received!r}; allowed: {allowed}.")


class InputError(RevzooError, ValueError):
    """A tensor or an argument that the called function, model or chain does not accept."""


class MissingValueError(InputError):
    """A model or a loss that asks for the value of a tensor where only shapes and bytes are known."""


@contextmanager
def put_name_in_front(name: str) -> Iterator[None]:
    """Say in an InputError that is raised inside in which layer it was.

    Raises:
        InputError: the message begins with the name.
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


@contextmanager
def explain_missing(package: str, users: str, install: str = "") -> Iterator[None]:
    """Turn an ImportError inside the block into an error that names the package to install.

    Args:
        package: the one that is imported; what is missing may also be a dependency of it, such as pyarrow.
        users: what needs it, in the plural.
        install: arguments of `pip install`; empty: the name of what is missing.

    Raises:
        RevzooError: something is missing, or cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        # An ImportError that a package raises itself has no name, such as that of a module built against another NumPy.
        names = [e.name for e in (error, error.__cause__, error.__context__) if isinstance(e, ImportError) and e.name]
        missing = names[0].partition(".")[0] if names else package
        reason = "" if names else f", which cannot be imported ({textwrap.shorten(str(error), 200)})"
        raise RevzooError(
            f"{users} need the package {missing}{reason}. Install it: pip install {install or missing}"
        ) from error


class ScheduleError(RevzooError, ValueError):
    """A schedule that does not fit the model or chain it is assigned to."""


class RecoveryError(RevzooError, RuntimeError):
    """A step whose input cannot be reconstructed in backward, or only with other values than in forward."""


class BudgetError(RevzooError, ValueError):
    """A memory budget that is too small for every schedule."""


class PlanError(RevzooError, ValueError):
    """A plan that is damaged, or was made for another model, batch or setting."""


class ConversionError(RevzooError, ValueError):
    """A network that cannot be converted, or weights that do not belong to the given network."""


class CheckpointError(RevzooError, ValueError):
    """A weights file that is damaged, in an unknown format, or of another model."""


class DataError(RevzooError, ValueError):
    """Training data that is missing, empty or malformed."""


def quote(word: object) -> str:
    """Return a path, or a setting with one, as it is typed in a shell: in quotation marks if it has blanks."""
    return shlex.quote(str(word))


def explain_os_error(error: OSError) -> str:
    """Return what the system could not do, and what to change."""
    path = str(error.filename or "a file")
    remedy = {
        errno.EACCES: "Change its permissions, or name another place",
        errno.EPERM: "Change its permissions, or name another place",
        errno.EROFS: "Name another place",
        errno.ENOTDIR: "Name another place: a folder in it is a file",
        errno.EISDIR: "Name a file",
        errno.ENAMETOOLONG: "Name a shorter one",
        **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Make room, or name another place"),
    }.get(error.errno or 0, "Check that it is there")
    folder = os.path.dirname(path)
    if error.errno == errno.ENOENT and folder and not os.path.isdir(folder):
        remedy = f"There is no folder {folder}: make it first"
    return f"cannot read or write {path[:_LONGEST_PATH]}: {error.strerror or error}. {remedy}."


def find_nearest(received: str, allowed: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the allowed name that is spelled most like `received`, in capitals or not; None if none is similar to `cutoff`."""
    names = {name.lower(): name for name in allowed}
    return next((names[key] for key in difflib.get_close_matches(received.lower(), list(names), n=1, cutoff=cutoff)), None)


def did_you_mean(received: str, allowed: Iterable[str], cutoff: float = 0.5) -> str:
    """Return " Did you mean 'x'?" (with the leading blank) for the nearest name, or an empty string if none is similar."""
    match = find_nearest(received, allowed, cutoff)
    return f" Did you mean {match!r}?" if match else ""


def join_names(names: Sequence[str], most: int = 12) -> str:
    """Return the names joined by commas: all of them, or the first `most` and their total number."""
    shown = ", ".join(names[:most])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > most else shown or "none"
