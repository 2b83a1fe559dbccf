"""What the processes of a training say in their one terminal when they end."""

import os
import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
from revzoo.training import terminal

def stop():
    os.kill(os.getpid(), signal.SIGTERM)

def end(signum, frame):
    raise KeyboardInterrupt

signal.signal(signal.SIGTERM, end)
if sys.argv[1] == "while speaking":
    terminal._is_first = lambda: stop() or True
with terminal.share_terminal():
    try:
        raise RuntimeError("gloo: Connection closed by peer")
    finally:
        if sys.argv[1] == "while cleaning up":
            stop()
"""


def end(script: str, when: str) -> tuple[int, list[str]]:
    """Run a script as one of two processes; return its exit status and what it said, without warnings of libraries."""
    environment = os.environ | {"WORLD_SIZE": "2", "RANK": "0"}
    environment.pop("MASTER_ADDR", None)
    ended = subprocess.run([sys.executable, "-c", script, when], env=environment, capture_output=True, text=True)
    return ended.returncode, [line for line in ended.stderr.splitlines() if line.startswith("revzoo: ")]


@pytest.mark.parametrize("when", ["while speaking", "while cleaning up"])
def test_the_cause_is_said_although_torchrun_stops_the_process(when):
    line = "process 0 waited in vain for another one, which has ended or hangs (gloo: Connection closed by peer)"
    assert end(SCRIPT, when) == (1, [f"revzoo: {line}"])


def test_a_process_that_is_stopped_says_so():
    script = SCRIPT.replace('raise RuntimeError("gloo: Connection closed by peer")', "pass")
    assert end(script, "while cleaning up") == (128 + signal.SIGINT, ["revzoo: stopped"])


def test_a_pipe_gets_lines_although_colors_are_forced():
    script = """
from types import SimpleNamespace
from revzoo.display.progress import TrainingDisplay
with TrainingDisplay(True, 1, 2, SimpleNamespace(train=[0, 0], example_noun="images", label_noun="label"), 0.0) as display:
    display.start_epoch(0, 0, 2)
    display.step(1, 0.5, 0.1)
"""
    environment = os.environ | {"FORCE_COLOR": "1"}  # as Jupyter sets it
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("epoch 1/1  1/2  loss 0.5000")
