"""A process that has imported what the programs of the tests share, and forks one for each line of JSON that it reads."""

import json
import os
import runpy
import signal
import sys

import torch

import revzoo.data.digits
import revzoo.training.loop  # noqa: F401  what the programs share


def run(program: str, folder: str, words: list[str], environment: dict[str, str], seconds: int) -> None:
    """Be the program; what it prints goes to two files in the folder, where it runs."""
    signal.alarm(seconds)
    os.chdir(folder)
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ |= environment
    sys.argv = [program, folder, *words]
    runpy.run_path(program, run_name="__main__")


torch.set_num_threads(1)
for line in sys.stdin:
    if not (child := os.fork()):
        run(*json.loads(line))
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
