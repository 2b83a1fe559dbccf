"""What the commands share: the argument parser, types of arguments, and checks that come before any work."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from revzoo.data.options import read_batch_range
from revzoo.errors import InputError, UnknownNameError, did_you_mean

DTYPES = ("float64", "float32", "bfloat16", "float16")
DTYPE_HELP = "number format of weights and streams (default: float32)"
NAME_HELP = "a model, a spec file, the folder of a run or of a saved model, or hf-hub:OWNER/NAME"
JSON_HELP = "print everything as JSON instead"
FEW = 40  # classes up to which each has its row without being asked for: a screen


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are revzoo's errors."""

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, **settings)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the parsed arguments; positional ones may stand anywhere among the options.

        Raises:
            UnknownNameError: there is no such option.
            InputError: a value is missing or wrong, or there is one too many.
        """
        if "" in arguments:
            self.error("an empty word was typed, such as that of a shell variable that is not set")
        parsed, rest = self.parse_known_intermixed_args(arguments)
        if rest and rest[0].startswith("-"):
            option, options = rest[0].partition("=")[0], list(self._option_string_actions)
            hint = did_you_mean(option, options, 0.75) or " Settings are overrides without dashes: NAME=VALUE."
            raise UnknownNameError(f"option of {self.prog}", option, options, hint)
        if rest:
            self.error(f"unexpected argument {rest[0]!r}")
        return parsed

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
        help="a package or module with parts or specs of yours",
    )


def positive_count(text: str) -> int:
    """Return a whole number from 1 to 10^9."""
    if not (text.isdecimal() and 1 <= int(text) <= 10**9):
        raise argparse.ArgumentTypeError(f"expected an integer from 1 to 10^9. Received: {text!r}")
    return int(text)


def batch_or_range(text: str) -> int | tuple[int, int]:
    """Return a batch size, or the lowest and highest of a range such as "auto:16-256"."""
    if not text.startswith("auto"):
        return positive_count(text)
    low, high = read_batch_range(text) or (1, None)
    if high is None:
        raise argparse.ArgumentTypeError(f"a range goes from low to high, such as auto:16-256. Received: {text!r}")
    return low, high


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
