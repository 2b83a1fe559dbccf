"""What the commands share: the argument parser, types of arguments, and checks that come before any work."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from revzoo.errors import InputError, UnknownNameError

DTYPES = ("float64", "float32", "bfloat16", "float16")
DTYPE_HELP = "number format of weights and streams (default: float32)"
NAME_HELP = "a model name, a spec file, a folder with spec.yaml, or hf-hub:OWNER/NAME"
JSON_HELP = "print everything as JSON instead"


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are revzoo's errors, with the nearest option."""

    def __init__(self, **settings: Any):
        self.options: list[str] = []
        super().__init__(allow_abbrev=False, **settings)

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """Add an argument, and remember the names of its option."""
        self.options += [name for name in names if name.startswith("-")]
        return super().add_argument(*names, **settings)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the parsed arguments; positional ones may stand anywhere among the options."""
        parsed, rest = self.parse_known_intermixed_args(arguments)
        if rest and rest[0].startswith("-"):
            raise UnknownNameError(f"option of {self.prog}", rest[0].partition("=")[0], self.options)
        if rest:
            self.error(f"unexpected argument {rest[0]!r}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        raise InputError(f"{message[:1].upper()}{message[1:]}. See {self.prog} --help.")


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
    overrides = [word for word in words if "=" in word and not Path(word).exists()]
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
