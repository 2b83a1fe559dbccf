"""The command line: parses arguments and calls the command, which is the file of its name in `revzoo/commands/`."""

import atexit
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import UnsupportedOperation
from types import FrameType
from typing import Any, NoReturn, TextIO, cast

from revzoo.commands.parser import Command, Parser
from revzoo.errors import RevzooError, UnknownNameError, explain_os_error

# What other tools call a command.
OTHER_NAMES = {
    **{"check": "verify", "test": "verify", "evaluate": "eval", "validate": "eval", "fit": "train", "finetune": "train"},
    **{"ls": "list", "models": "list", "info": "show", "summary": "show", "inspect": "show"},
    **{"infer": "predict", "classify": "predict"},
}
COMMANDS = (
    "list", "show", "profile", "plan", "convert", "export", "train", "eval", "predict", "verify", "numerics", "tokenizer",
)  # fmt: skip


def run() -> int:
    """Run one command and end the process, or return the exit status.

    At its end Python would free every object one by one, which takes a second of CPU after `import timm`. The operating system
    frees them at once. Where other threads still run, Python ends the process and waits for them. `python -m zoo_cli` ends as
    Python does, for launchers of many processes and for profilers, which write when it ends.
    """
    status = main()
    if threading.active_count() == 1:
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:  # nobody reads the output: Python says so when it ends the process
            return status
        os._exit(status)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 for a comparison that failed, the status of an error, or 128 + signal when stopped.

    The status of an error is 2 for a mistake and 3 for training that diverged.
    """
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    # Threads that spin while they wait make small models ten times slower where something else uses the cores as well.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "_ARGCOMPLETE" in os.environ:
        from revzoo.commands.completion import complete

        complete({name: load_command(name) for name in COMMANDS})
    try:
        try:
            return _run(name, rest)
        finally:
            sys.stdout.flush()  # while a pipe that was closed can still be noticed
    except RevzooError as error:
        print(f"revzoo: {error}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _is_closed(sys.stdout):  # whoever reads it, such as head, has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes when it exits
            return 128 + signal.SIGPIPE
        print(f"revzoo: {explain_os_error(error)}", file=sys.stderr)
        return 2
    except Exception as error:
        from revzoo.plugin import explain_part

        if (reason := explain_part(error)) is None:
            raise
        print(f"revzoo: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print(f"\nrevzoo: {stopped if stopped.args else 'stopped'}", file=sys.stderr)
        return 128 + getattr(stopped, "signum", 2)


def _run(name: str, rest: list[str]) -> int:
    if name == "help" and rest:
        name, rest = rest[0], ["--help"]
    if name in ("-h", "--help", "help"):
        return _print_help()
    if name == "--version":
        return _print_version()
    if name not in COMMANDS:
        raise UnknownNameError("command", name, COMMANDS, _hint_at_command(name))
    command = load_command(name)
    parser = Parser(prog=f"revzoo {name}", description=command.SUMMARY)
    command.declare(parser)
    with _end_by_exception():
        arguments = parser.parse(rest)
        _import_packages(getattr(arguments, "imports", ()))
        return command.run(arguments)


def _is_closed(stream: TextIO) -> bool:
    """Return whether a stream is a pipe that nobody reads any more."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)
    except UnsupportedOperation:  # it is no file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _import_packages(names: Sequence[str]) -> None:
    if names:
        from revzoo.plugin import import_package

        for name in names:
            import_package(name)


class _Stopped(KeyboardInterrupt):
    """A signal asked the command to end."""

    def __init__(self, signum: int):
        super().__init__()
        self.signum = signum


@contextmanager
def _end_by_exception() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, by an exception: temporary files are then removed.

    A library that meets the exception where it expects none may raise another one in its place, or go on. The command has been
    stopped all the same.

    Raises:
        _Stopped: a signal has come.
    """
    received: list[int] = []

    def end(signum: int, frame: FrameType | None) -> NoReturn:
        received.append(signum)
        raise _Stopped(signum)

    defaults: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    is_main = threading.current_thread() is threading.main_thread()  # signals can only be caught there
    ours = [signum for signum, default in defaults.items() if is_main and signal.getsignal(signum) is default]
    for signum in ours:
        signal.signal(signum, end)
    try:
        yield
    except Exception as error:
        if received:
            raise _Stopped(received[0]) from error
        raise
    finally:
        for signum in ours:
            signal.signal(signum, defaults[signum])
    if received:
        raise _Stopped(received[0])


def load_command(name: str) -> Command:
    """Import the file of a command."""
    return cast(Command, import_module(f"revzoo.commands.{name}"))


def _hint_at_command(name: str) -> str:
    """Return what to type instead of a command that other tools have, or of a model's name."""
    if name in OTHER_NAMES:
        return f" Did you mean {OTHER_NAMES[name]!r}?"
    if name in ("bench", "benchmark"):
        return " Other packages are compared in a checkout: python benchmarks/peers.py."
    from revzoo.spec.names import model_files

    return f" {name} is a model: revzoo show {name}." if name in model_files() else ""


def _print_help() -> int:
    print("usage: revzoo COMMAND [...]\n\nA zoo of reversible networks for PyTorch.\n")
    print("\n".join(f"  {name:<9} {load_command(name).SUMMARY}" for name in COMMANDS))
    print("\nrevzoo COMMAND --help or revzoo help COMMAND says more; revzoo --version prints the version.")
    return 0


def _print_version() -> int:
    import revzoo

    print(f"revzoo {revzoo.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
