"""What revzoo raises when a person, not the program, has to change something.

Every error says what was received, where, what is allowed and what to type instead. The command line prints any
`RevzooError` without a traceback and exits with status 2.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class RevzooError(Exception):
    """Base of every error that is addressed to the user."""


class UnknownNameError(RevzooError, LookupError):
    """A name (model, part, recipe, command) that revzoo does not have."""

    def __init__(self, kind: str, received: str, allowed: Iterable[str]):
        allowed = sorted(allowed)
        super().__init__(f"Unknown {kind} {received!r}.{did_you_mean(str(received), allowed)} Allowed: {listing(allowed)}.")


@dataclass(frozen=True)
class SpecProblem:
    """One thing wrong in a spec or a recipe: where it stands, what was found, what is allowed."""

    file: str
    path: str
    found: str
    allowed: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.path}: found {self.found}; allowed: {self.allowed}.{self.hint}"


class SpecError(RevzooError, ValueError):
    """A spec or recipe with one or more problems, all of them reported at once."""

    def __init__(self, problems: Sequence[SpecProblem]):
        self.problems = tuple(problems)
        count = len(self.problems)
        header = f"{count} problem{'s' if count != 1 else ''} found:"
        super().__init__("\n  ".join([header, *map(str, self.problems)]))


class PartArgumentError(RevzooError, ValueError):
    """A part's argument that does not fit the place the part is built for; the builder turns it into a `SpecProblem`."""

    def __init__(self, argument: str, found: object, allowed: str):
        self.argument, self.found, self.allowed = argument, found, allowed
        super().__init__(f"{argument}: found {found!r}; allowed: {allowed}.")


class InputError(RevzooError, ValueError):
    """A tensor or an argument given to a model or a chain that it cannot take."""


class ScheduleError(RevzooError, ValueError):
    """A schedule that does not fit the chain or model it was given to."""


class RecoveryError(RevzooError, RuntimeError):
    """A step that cannot be recovered in backward, or not truthfully."""


class BudgetError(RevzooError, ValueError):
    """A memory budget that no schedule fits."""


class PlanError(RevzooError, ValueError):
    """A plan that is damaged, or was made for something else."""


class ConversionError(RevzooError, ValueError):
    """A network that cannot be converted, or weights that are not of the network they are said to be."""


class CheckpointError(RevzooError, ValueError):
    """A weights file that is damaged, foreign, or of another model."""


class DataError(RevzooError, ValueError):
    """Training data that is missing, empty or malformed."""


def nearest(received: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name closest to `received`, or None when nothing is close."""
    return next(iter(difflib.get_close_matches(received, list(allowed), n=1, cutoff=0.5)), None)


def did_you_mean(received: str, allowed: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" with its leading blank, or an empty string."""
    match = nearest(received, allowed)
    return f" Did you mean {match!r}?" if match else ""


def listing(names: Sequence[str], most: int = 12) -> str:
    """Return names joined by commas, shortened past `most`."""
    shown = ", ".join(names[:most])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > most else shown or "none"
