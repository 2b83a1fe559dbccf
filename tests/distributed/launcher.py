"""A program that runs commands of launchers, one after another. Their processes are forked and share what it has imported."""

import os
import runpy
import shlex
import sys
from typing import Any
from unittest.mock import patch

import torch
from accelerate.commands import launch as accelerate
from conftest import fork
from torch.distributed import run as torchrun
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run_python(*words: str) -> None:
    """Do what `python -u` with these words does: run a module, or a file."""
    torch.set_num_threads(1)  # as in `fork`
    python, *rest = words
    assert python == "-u"
    sys.argv = rest[1:] if rest[0] == "-m" else rest
    run: Any = runpy.run_module if rest[0] == "-m" else runpy.run_path
    run(sys.argv[0], run_name="__main__")


def launch_forked(config: LaunchConfig, entrypoint: str) -> elastic_launch:
    assert entrypoint == sys.executable
    config.start_method = "fork"
    return elastic_launch(config, run_python)


def launch(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "torchrun":
        torchrun.main(["--standalone", *(word for word in words[1:] if word != "--standalone")])
    else:
        assert words[:2] == ["accelerate", "launch"]
        accelerate.launch_command(accelerate.launch_command_parser().parse_args(["--main_process_port=0", *words[2:]]))


if __name__ == "__main__":
    for number, line in enumerate(sys.argv[2:]):

        def print_to_file(rank: int, line: str = line, number: int = number) -> None:
            os.dup2(os.open(f"output-{number}.txt", os.O_WRONLY | os.O_CREAT), 1)
            with patch.object(torchrun, "elastic_launch", launch_forked):
                launch(line)
            sys.stdout.flush()

        if fork(1, print_to_file):
            sys.exit(line)
