"""The entry point: help, version, `python -m revzoo`, and a command stopped by a signal."""

import errno
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import revzoo
import zoo_cli
from revzoo.commands.show import pause_collection

ROOT = Path(zoo_cli.__file__).parent


def test_without_arguments_the_commands_are_listed(run):
    printed = run()
    assert printed == run("--help") == run("-h") == run("help")
    for name in zoo_cli.COMMANDS:
        assert f"\n  {name:<9} {zoo_cli.load_command(name).SUMMARY}\n" in printed


def test_every_file_is_a_command_or_shared():
    files = {path.stem for path in (ROOT / "revzoo" / "commands").glob("*.py")}
    shared = {"__init__", "any_module", "completion", "parser", "model_name", "model_options"}
    assert files - set(zoo_cli.COMMANDS) == shared
    assert set(zoo_cli.COMMANDS) <= files


def test_help_of_a_command_is_printed_either_way(capsys):
    printed = set()
    for arguments in (["help", "list"], ["list", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            zoo_cli.main(arguments)
        printed.add(capsys.readouterr().out)
    assert len(printed) == 1
    assert printed.pop().startswith("usage: revzoo list ")


def test_other_names_of_commands_are_none_of_ours():
    assert set(zoo_cli.OTHER_NAMES.values()) <= set(zoo_cli.COMMANDS)
    assert not set(zoo_cli.OTHER_NAMES) & set(zoo_cli.COMMANDS)


def test_version(run):
    assert run("--version") == f"revzoo {revzoo.__version__}\n"


def test_every_command_explains_its_arguments(capsys):
    for name in zoo_cli.COMMANDS:
        with pytest.raises(SystemExit, match="0"):  # argparse leaves by itself
            zoo_cli.main([name, "--help"])
        printed = capsys.readouterr().out
        assert printed.startswith(f"usage: revzoo {name} ")
        assert zoo_cli.load_command(name).SUMMARY.split()[0] in printed


def test_python_dash_m_lists_models_without_torch(tmp_path):
    code = "atexit.register(lambda: print(sorted({'torch', 'timm', 'numpy'} & set(sys.modules))))"
    done = run_module(tmp_path, code, "list", "revnet_1*_cifar100")
    assert (done.stdout, done.stderr, done.returncode) == ("revnet_110_cifar100\nrevnet_164_cifar100\n[]\n", "", 0)


def test_a_process_ends_without_freeing_its_objects(tmp_path):
    code = "kept = type('Kept', (), {'__del__': lambda self: print('freed')})()"
    done = run_module(tmp_path, code, "list", "no_such_model")
    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr.startswith("revzoo: ")


def test_a_process_waits_for_its_threads(tmp_path):
    code = "threading.Thread(target=lambda: (threading.main_thread().join(), print('done'))).start()"
    done = run_module(tmp_path, code, "--version")
    assert (done.stdout, done.returncode) == (f"revzoo {revzoo.__version__}\ndone\n", 0)


def run_module(folder: Path, code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `python -m revzoo` with these arguments, behind some code."""
    code = (
        f"import atexit, runpy, sys, threading; {code}; sys.argv = {['revzoo', *arguments]}; "
        "runpy.run_module('revzoo', run_name='__main__')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=folder)


def test_imports_are_not_searched_for_garbage():
    for was_enabled in (True, False):
        (gc.enable if was_enabled else gc.disable)()
        try:
            with pause_collection():
                assert not gc.isenabled()
            assert gc.isenabled() == was_enabled
        finally:
            gc.enable()


def test_a_stopped_command_ends_with_its_signal(capsys, monkeypatch):
    def stop(pattern):
        raise KeyboardInterrupt

    monkeypatch.setattr("revzoo.spec.list_models", stop)
    assert zoo_cli.main(["list"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "\nrevzoo: stopped\n"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("library", ["lets it pass", "raises another error", "goes on"])
def test_a_signal_ends_a_command_whatever_a_library_makes_of_it(signum, library, capsys, monkeypatch):
    def meet(pattern):
        try:
            signal.raise_signal(signum)
        except BaseException:
            if library == "raises another error":
                raise ImportError("cannot load module more than once per process") from None
            if library == "lets it pass":
                raise
        return []

    monkeypatch.setattr("revzoo.spec.list_models", meet)
    default = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(signum, default)  # a process in the background may ignore signals
    try:
        assert zoo_cli.main(["list"]) == 128 + signum
        assert signal.getsignal(signum) is default
    finally:
        signal.signal(signum, before)
    assert capsys.readouterr().err.endswith("\nrevzoo: stopped\n")


def test_a_reader_who_has_seen_enough_ends_a_command_silently(capsys, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert zoo_cli.main(["list"]) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


def test_a_closed_pipe_of_another_kind_is_an_error(capsys, monkeypatch):
    """Such as that of a process that loads data: standard output is read."""

    def fail(pattern):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("revzoo.spec.list_models", fail)
    assert zoo_cli.main(["list"]) == 2
    assert "Broken pipe" in capsys.readouterr().err
