"""The entry point: help, version, `python -m revzoo`, and a command stopped by a signal."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import revzoo
import zoo_cli

ROOT = Path(zoo_cli.__file__).parent


def test_without_arguments_the_commands_are_listed(run):
    printed = run()
    assert printed == run("--help") == run("-h") == run("help")
    for name in zoo_cli.COMMANDS:
        assert f"\n  {name:<9} {zoo_cli.load_command(name).SUMMARY}\n" in printed


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


def run_module(folder: Path, code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `python -m revzoo` with these arguments, after some code."""
    code = (
        f"import atexit, runpy, signal, sys; {code}; sys.argv = {['revzoo', *arguments]}; "
        "runpy.run_module('revzoo', run_name='__main__')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=folder)


def test_a_stopped_command_ends_with_its_signal(capsys, monkeypatch):
    def stop(pattern):
        raise KeyboardInterrupt

    monkeypatch.setattr("revzoo.spec.list_models", stop)
    assert zoo_cli.main(["list"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "\nrevzoo: stopped\n"


def test_a_reader_who_has_seen_enough_ends_a_command_silently(capsys, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert zoo_cli.main(["list"]) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


def test_sigterm_ends_a_command_by_an_exception(tmp_path):
    """So temporary files are removed."""
    code = "import revzoo.spec; revzoo.spec.list_models = lambda pattern: signal.raise_signal(signal.SIGTERM)"
    done = run_module(tmp_path, code, "list")
    assert (done.stdout, done.stderr, done.returncode) == ("", "\nrevzoo: stopped\n", 128 + signal.SIGTERM)
