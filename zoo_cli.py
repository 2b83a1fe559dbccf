"""The command line: parses arguments and calls the command, which is the file of its name in `revzoo/commands/`."""

import os
import signal
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from revzoo.commands.parser import Parser
from revzoo.errors import RevzooError, UnknownNameError, explain_os_error

COMMANDS = (
    "list", "show", "fits", "profile", "plan", "convert", "export", "check", "train", "eval", "predict", "generate",
    "verify", "numerics", "tokenizer",
)  # fmt: skip


def run() -> int:
    """Run one command as a process of its own, and return the exit status."""
    signal.signal(signal.SIGTERM, _terminate)
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # programs that libraries start do not look into the present folder
    return main()


class _Terminated(KeyboardInterrupt):
    """SIGTERM asked the command to end."""

    signum = signal.SIGTERM


def _terminate(signum: int, frame: object) -> NoReturn:
    """End a command by an exception, as Ctrl-C does: temporary files are removed."""
    raise _Terminated


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 for a comparison that failed, the status of an error, or 128 + signal when stopped.

    The status of an error is 2 for a mistake and 3 for training that diverged.
    """
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    # Threads that spin while they wait make small models ten times slower where something else uses the cores as well.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        status = _run(name, rest)
        sys.stdout.flush()  # while a pipe that was closed can still be noticed
        return status
    except RevzooError as error:
        print(f"revzoo: {error}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:  # whoever reads the output, such as head, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes when it exits
        return 128 + signal.SIGPIPE
    except OSError as error:
        print(f"revzoo: {explain_os_error(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print(f"\nrevzoo: {stopped if stopped.args else 'stopped'}", file=sys.stderr)
        return 128 + getattr(stopped, "signum", signal.SIGINT)


def _run(name: str, rest: list[str]) -> int:
    if name == "help" and rest:
        name, rest = rest[0], ["--help"]
    if name in ("-h", "--help", "help"):
        return _print_help()
    if name == "--version":
        import revzoo

        print(f"revzoo {revzoo.__version__}")
        return 0
    if name not in COMMANDS:
        raise UnknownNameError("command", name, COMMANDS)
    command = load_command(name)
    parser = Parser(prog=f"revzoo {name}", description=command.SUMMARY)
    command.declare(parser)
    arguments = parser.parse(rest)
    for package in getattr(arguments, "imports", ()):
        from revzoo.plugin import import_package

        import_package(package)
    if hasattr(arguments, "imports"):
        from revzoo.plugin import import_packages_of_runs

        for line in import_packages_of_runs(_list_words(vars(arguments).values())):
            print(line, file=sys.stderr)
    status: int = command.run(arguments)
    return status


def _list_words(values: Iterable[object]) -> list[str]:
    """Return what was typed, for arguments with one value or with several."""
    return [str(word) for value in values for word in (value if isinstance(value, list) else [value])]


def load_command(name: str) -> ModuleType:
    """Import the file of a command: a SUMMARY, `declare`, which adds its arguments, and `run`, which returns the status."""
    return import_module(f"revzoo.commands.{name}")


def _print_help() -> int:
    print("usage: revzoo COMMAND [...]\n\nA zoo of reversible networks for PyTorch.\n")
    print("\n".join(f"  {name:<9} {load_command(name).SUMMARY}" for name in COMMANDS))
    print("\nrevzoo COMMAND --help or revzoo help COMMAND says more; revzoo --version prints the version.")
    return 0


if __name__ == "__main__":
    sys.exit(run())
