"""What the commands share: the argument parser, types of arguments, and checks that come before any work."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from revzoo.errors import InputError, UnknownNameError, find_nearest, quote

DTYPES = ("float64", "float32", "bfloat16", "float16")
DTYPE_HELP = "number format of weights and streams (default: float32)"
NAME_HELP = "a model, a spec file, the folder of a run or of a saved model, or hf-hub:OWNER/NAME"
JSON_HELP = "print everything as JSON instead"
DEVICE_HINT = (  # of commands whose device Accelerate chooses
    " A GPU is used where there is one: CUDA_VISIBLE_DEVICES=0 in front of the command chooses it, "
    "ACCELERATE_USE_CPU=true the CPU."
)


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are revzoo's errors, with the nearest option or override.

    A command adds what its users may take for an option: `hints`, a sentence for each name, and `list_settings`, which returns
    the paths of its overrides.
    """

    def __init__(self, **settings: Any):
        self.hints: dict[str, str] = {}
        self.list_settings: Callable[[], list[str]] | None = None
        super().__init__(allow_abbrev=False, **settings)

    @property
    def options(self) -> list[str]:
        """The names of all options, those in groups, too."""
        return list(self._option_string_actions)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the parsed arguments; positional ones may stand anywhere among the options.

        Raises:
            UnknownNameError: there is no such option.
            InputError: a value is missing or wrong, or there is one too many.
        """
        if "" in arguments:
            raise self.error("an empty word was typed, such as that of a shell variable that is not set")
        parsed, rest = self.parse_known_intermixed_args(self._join_negative_values(arguments))
        if rest and rest[0].startswith("-"):
            raise self._unknown_option(rest[0], arguments)
        if rest:
            self.error(f"unexpected argument {rest[0]!r}")
        return parsed

    def _join_negative_values(self, arguments: Sequence[str]) -> list[str]:
        """Write `--budget -8MiB` as `--budget=-8MiB`: the value is what is wrong, and not that there is none."""
        joined: list[str] = []
        for argument in arguments:
            if joined and joined[-1] in self.options and argument[:1] == "-" and argument[1:2].isdecimal():
                joined[-1] += f"={argument}"
            else:
                joined.append(argument)
        return joined

    def _unknown_option(self, received: str, arguments: Sequence[str]) -> UnknownNameError:
        """Return the error of an option, with the override that sets what it was to set."""
        option, _, value = received.partition("=")
        hint = self.hints.get(option, "")
        if not hint and self.list_settings is not None and find_nearest(option, self.options, cutoff=0.75) is None:
            from revzoo.spec.synonym import find_settings, find_similar_settings

            path, known = option.lstrip("-").replace("-", "_"), self.list_settings()
            settings = find_settings(path, known) or find_similar_settings(path, known)
            value = value or next(iter(arguments[arguments.index(received) + 1 :]), "")
            value = value if value and not value.startswith("-") and "=" not in value else "..."
            hint = "".join(
                f" Settings are overrides without dashes: {quote(f'{setting}={value}')}." for setting in settings[:1]
            )
        return UnknownNameError(f"option of {self.prog}", option, self.options, hint)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        raise InputError(f"{message[:1].upper()}{message[1:]}. See {self.prog} --help.")


def declare_import(parser: Parser) -> None:
    """Add --import; `zoo_cli` imports what it names before the command runs."""
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="a package or module with parts or specs of yours, which is not installed as a plugin",
    )


class Command(Protocol):
    """What the file of a command offers."""

    SUMMARY: str

    def declare(self, parser: Parser) -> None:
        """Add the command's arguments to its parser."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command and return the exit status: 0, or 1 for a comparison that failed."""


def positive_count(text: str) -> int:
    """Return a whole number from 1 to 10^9."""
    if not (text.isdecimal() and 1 <= int(text) <= 10**9):
        raise argparse.ArgumentTypeError(f"expected an integer from 1 to 10^9. Received: {text!r}")
    return int(text)


def batch_or_range(text: str) -> int | tuple[int, int]:
    """Return a batch size, or the lowest and highest of a range such as "auto:16-256"."""
    if not text.startswith("auto"):
        return positive_count(text)
    low, _, high = text.removeprefix("auto:").partition("-")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= 10**9):
        raise argparse.ArgumentTypeError(f"a range goes from low to high, such as auto:16-256. Received: {text!r}")
    return int(low), int(high)


def split_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """Split positional arguments into names and PATH=VALUE overrides; the name of an existing file is no override."""
    # Unlike pathlib's, os.path.exists does not raise for an override that is longer than the name of a file may be.
    overrides = [word for word in words if "=" in word and not os.path.exists(word)]
    return [word for word in words if word not in overrides], overrides


def require_png(path: Path) -> None:
    """Raise unless a PNG can be written at this path."""
    if path.suffix.lower() != ".png":
        raise InputError(f"A picture is written as PNG. Received: --plot {path}. Use --plot network.png.")
    require_writable(path)


def require_writable(path: Path) -> None:
    """Raise OSError unless a file can be written at this path; what is there stays."""
    existed = path.exists()
    path.open("ab").close()
    if not existed:
        path.unlink()
