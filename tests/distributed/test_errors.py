"""Errors of one process, which the others must not wait for: two processes on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Each process says what it caught; one that waits for the other is killed by the test's limit.
SCRIPT = """
import sys
from types import SimpleNamespace
from accelerate import Accelerator
from revzoo.errors import RevzooError
from revzoo.training.divergence import DivergedError, check_training_loss
from revzoo.training.main_process import call_on_all, call_on_main

accelerator = Accelerator()
rank = accelerator.process_index

def fail_in(process):
    if rank == process:
        raise RevzooError(f"from {process}")
    return rank

def check():
    options = SimpleNamespace(lr=1.0, warmup_epochs=0, clip_grad=None, mixed_precision="no", name="x")
    recipe = SimpleNamespace(optimizer=options, schedule=options, train=options, model=options)
    progress = SimpleNamespace(loss_sums=[1.0, float("nan")], epoch=0, updates=1)
    folder = SimpleNamespace(list_states=lambda: [])
    check_training_loss(SimpleNamespace(accelerator=accelerator, recipe=recipe, progress=progress, folder=folder))

caught = []
on_all, on_main = lambda: call_on_all(accelerator, lambda: fail_in(1)), lambda: call_on_main(accelerator, lambda: fail_in(0))
for work in (on_all, on_main, check):
    try:
        work()
    except RevzooError as error:
        caught.append(str(error)[:24])
assert caught == ["from 1", "from 0", "The training loss is nan"], caught
assert call_on_all(accelerator, lambda: fail_in(2)) == rank
assert call_on_main(accelerator, lambda: fail_in(2)) == 0
"""


@pytest.mark.slow
def test_an_error_of_one_process_is_raised_in_both(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    command += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0", str(tmp_path / "script.py")]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
