"""Kill or stop processes of trainings that torchrun starts anew: how many end as those left alone?

    python benchmarks/restarts.py             4 processes; 20 killed, five of each training, and 2 that hang
    python benchmarks/restarts.py --quick     2 processes; one killed

Run by hand when what resumes or restarts has changed: it takes minutes. The slow tests run it quickly.

Every second training divides the network, and goes on while its states are written.

A training by `torchrun --max-restarts` saves a state every few updates. A random time after a new one a process gets SIGKILL,
or SIGSTOP, after which the others wait for it as long as `train.timeout_seconds` says. torchrun then ends all and starts them
again; the command is the same, and goes on in its own folder. In the end weights and the metrics of every epoch are compared
with those of a training left alone: to the bit for two processes, else metrics to 1e-5 and weights to 1e-3, since after a start
PyTorch adds the gradients of more than two processes in another order, once.

Status 1 if a training ended otherwise, did not end, or ended before every signal was sent.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import torch
from faults import are_equal, read_metrics
from safetensors.torch import load_file

from revzoo.training.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
RECIPE = ["digits", "data.batch_size=40", "model.overrides=[stages.0.depth=2]", "train.save_every=3"]
SETTINGS = (["train.shard=full", "train.save_async=true"], [])  # in turn
WAIT_SECONDS = 120  # for a process that hangs; starting takes less, also on a busy machine
LIMIT_SECONDS = 7200  # in which a training has to end


@contextmanager
def start(place: Path, name: str, processes: int, restarts: int, settings: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a training under torchrun; inside the block it runs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [f"--max-restarts={restarts}", "-m", "zoo_cli", "train", *RECIPE, *settings, "--out", name]
    command += [f"train.timeout_seconds={WAIT_SECONDS}", f"train.epochs={6 if processes > 2 else 3}"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (place / f"{name}.log").open("w") as log:
        job = subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log)
        try:
            yield job
        finally:
            for process in (*psutil.Process(job.pid).children(recursive=True), job) if job.poll() is None else ():
                process.kill()


def list_workers(job: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the processes that train, but for those that load data."""
    return psutil.Process(job.pid).children()


def wait_for_state(folder: RunFolder, job: subprocess.Popen[bytes], seen: str) -> str:
    """Return the name of the first state that is newer than `seen`, or "" where the training has ended."""
    while job.poll() is None:
        names = [path.name for path in folder.list_states()]
        if names and names[-1] > seen:
            return names[-1]
        time.sleep(0.02)
    return ""


def disturb(place: Path, number: int, processes: int, signals: list[signal.Signals], rng: random.Random) -> tuple[int, str]:
    """Send signals to processes of one training; return how many were sent, and how it ended."""
    name = f"job-{number}"
    folder, seen, sent = RunFolder(place / name), "", 0
    began = time.monotonic()
    with start(place, name, processes, len(signals), SETTINGS[number % 2]) as job:
        for signum in signals:
            seen = wait_for_state(folder, job, seen)
            time.sleep(rng.uniform(0, 0.3))
            if job.poll() is not None or len(workers := list_workers(job)) != processes:
                continue
            rng.choice(workers).send_signal(signum)
            sent += 1
            while job.poll() is None and set(workers) & set(list_workers(job)):
                time.sleep(0.02)
            seen = max((path.name for path in folder.list_states()), default="")
        try:
            status = job.wait(LIMIT_SECONDS - (time.monotonic() - began))
        except subprocess.TimeoutExpired:
            return sent, "hung"
    if sent < len(signals):
        return sent, "ended before every signal was sent"
    same = status == 0 and (are_equal if processes == 2 else are_close)(place / f"whole-{number % 2}", place / name)
    return sent, "as if left alone" if same else "lost"


def are_close(one: Path, other: Path) -> bool:
    """Return whether two runs have the same metrics after every epoch, and the same weights, but for rounding."""
    rows = [[list(map(float, row.values())) for row in read_metrics(run)] for run in (one, other)]
    left, right = (load_file(run / "last.safetensors") for run in (one, other))
    return (
        np.shape(rows[0]) == np.shape(rows[1])
        and np.allclose(*rows, rtol=0, atol=1e-5)
        and left.keys() == right.keys()
        and all(torch.allclose(left[key], right[key], rtol=0, atol=1e-3) for key in left)
    )


def main() -> int:
    """Disturb all trainings and print how they ended."""
    parser = argparse.ArgumentParser(description="Kill processes under torchrun, and count the trainings that are lost.")
    parser.add_argument("--quick", action="store_true", help="two processes, one of which is killed once")
    parser.add_argument("--seed", type=int, default=0, help="of times and processes (default: 0)")
    arguments = parser.parse_args()
    processes = 2 if arguments.quick else 4
    jobs = [[signal.SIGKILL]] if arguments.quick else [[signal.SIGKILL] * 5] * 4 + [[signal.SIGSTOP] * 2]
    outcomes = []
    with TemporaryDirectory() as folder:
        place = Path(folder)
        for number, settings in enumerate(SETTINGS[: len(jobs)]):
            with start(place, f"whole-{number}", processes, 0, settings) as job:
                if job.wait(LIMIT_SECONDS) != 0:
                    raise SystemExit(f"It cannot be trained:\n{(place / f'whole-{number}.log').read_text()}")
        for number, signals in enumerate(jobs):
            began = time.monotonic()
            rng = random.Random(f"{arguments.seed} {number}")
            sent, outcome = disturb(place, number, processes, signals, rng)
            outcomes.append(outcome)
            kind = "killed" if signals[0] == signal.SIGKILL else "stopped"
            seconds = time.monotonic() - began
            print(f"{sent} of {len(signals)} times one of {processes} processes {kind}: {outcome}, {seconds:.0f} s", flush=True)
            if outcome != "as if left alone" or arguments.quick:
                print((place / f"job-{number}.log").read_text()[-6000:], flush=True)
    return 0 if set(outcomes) == {"as if left alone"} else 1


if __name__ == "__main__":
    sys.exit(main())
