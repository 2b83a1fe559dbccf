"""Leave trainings alone and break them: kill them, damage their states, start them twice, fill their disk.

    python benchmarks/faults.py             50 kills, 20 damaged states, 10 double starts, 5 full disks
    python benchmarks/faults.py --quick     one or two of each

Run by hand when what saves or resumes has changed: it takes minutes, and CI leaves it out.

Every fault befalls a training by the command, in a process of its own, of one of five recipes made small. Afterwards it is
resumed to its end and compared with the same training left alone: weights after the last epoch, best weights, and metrics. The
table of memory is left out, so that most of the time is training.

    killed          SIGKILL at a random time, and in half of the cases once more after resuming
    damaged         one file of the newest state has a bit flipped, is cut, emptied or removed; in every fourth case every state
    started twice   two processes resume the same folder at the same time
    full disk       no file can grow beyond a random size (RLIMIT_FSIZE), until the training is resumed

A fault is *survived* where the end is bit-identical, *refused* where the command ends with status 2 and says why and what to do
(the run is then as it was), and *lost* otherwise: other weights, other metrics, or an error that only a programmer can read. A
training with a fault that could be survived must be. Status 1 if anything is lost.
"""

import argparse
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file

import revzoo.data.digits
import revzoo.data.text_examples  # noqa: F401  imported once, before forking
import zoo_cli
from revzoo.training.planned_step import WholeStep
from revzoo.training.run_folder import RunFolder

_MEASURED = {"seconds", "images_per_second", "texts_per_second", "bytes_per_second", "memory_bytes"}  # different in every run
_SMALL = ["train.epochs=3", "train.save_every=1"]
RECIPES = {
    "digits": ["data.batch_size=360", "model.overrides=[stages.0.depth=2]"],
    "digits_revnet": ["data.batch_size=360"],
    "digits_rev_swin": ["data.batch_size=360"],
    "digits_irevnet": ["data.batch_size=360"],
    "text_bert": ["data.batch_size=290", "model.overrides=[input.length=16]"],
}
COUNTS = {"killed": 50, "damaged": 20, "started twice": 10, "full disk": 5}
OUTCOMES = ("survived bit-identical", "refused by name", "lost")


@dataclass(frozen=True)
class Subject:
    """A recipe, and its training left alone.

    Args:
        recipe: name of the recipe.
        whole: folder of the training.
        seconds: how long it took.
    """

    recipe: str
    whole: Path
    seconds: float

    def start(self, folder: Path, limit: int | None = None) -> "Command":
        """Start the same training in another folder."""
        return Command(["train", self.recipe, *_SMALL, *RECIPES[self.recipe], "--out", str(folder)], folder, limit)


class Command:
    """A command in a forked process, which has everything imported already.

    Args:
        arguments: of `revzoo`.
        folder: what it says is appended to a file next to this folder.
        limit: largest size of a file that it writes [bytes]; None: no limit.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, limit: int | None = None):
        self.log = folder.with_name(f"{folder.name}-{time.monotonic_ns()}.log")
        self.pid = os.fork()
        if self.pid == 0:
            self._run(arguments, limit)

    def _run(self, arguments: Sequence[str], limit: int | None) -> None:
        status = 70  # an error that revzoo does not name
        try:
            torch.set_num_threads(1)  # makes PyTorch's pool again, before two threads do so at once, which aborts the process
            stream = os.open(self.log, os.O_CREAT | os.O_WRONLY)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            WholeStep.measure_modes = lambda step: ({}, None)
            status = zoo_cli.main(arguments)
        finally:
            os._exit(status)  # the parent's clean-up is not this process's

    def wait(self, seconds: float | None = None) -> int:
        """Return the exit status, or that of a process killed after some seconds."""
        if seconds is not None:
            time.sleep(seconds)
            os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def is_named(self) -> bool:
        """Whether it ended with an error that says why and what to do."""
        text = self.log.read_text(errors="replace")
        return "revzoo: " in text and "Traceback" not in text


def resume(folder: Path) -> Command:
    """Start to resume a training."""
    return Command(["train", "--resume", str(folder)], folder)


def judge(subject: Subject, folder: Path, command: Command) -> str:
    """Return the outcome of a fault, from the command that resumed the training."""
    status = command.wait()
    if status == 2 and command.is_named:
        return "refused by name"
    return "survived bit-identical" if status == 0 and are_equal(subject.whole, folder) else "lost"


def are_equal(one: Path, other: Path) -> bool:
    """Return whether two runs have the same metrics and weights, bit for bit."""
    return read_metrics(one) == read_metrics(other) and all(
        have_equal_tensors(one / name, other / name) for name in ("last.safetensors", "best.safetensors")
    )


def read_metrics(folder: Path) -> list[dict[str, object]]:
    """Return the metrics of a run without times and memory."""
    return [{key: value for key, value in line.items() if key not in _MEASURED} for line in RunFolder(folder).read_records()]


def have_equal_tensors(one: Path, other: Path) -> bool:
    """Return whether two files hold the same tensors, bit for bit."""
    left, right = load_file(one), load_file(other)
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def kill(subject: Subject, folder: Path, rng: random.Random) -> str:
    """Kill a training once or twice."""
    subject.start(folder).wait(rng.uniform(0, subject.seconds))
    if not (folder / "config.yaml").is_file():  # nothing was trained yet
        command = subject.start(folder)
    else:
        if rng.random() < 0.5:
            resume(folder).wait(rng.uniform(0, subject.seconds))
        command = resume(folder)
    return expect("survived bit-identical", judge(subject, folder, command))


def damage(subject: Subject, folder: Path, rng: random.Random) -> str:
    """Damage the newest state, or every state, of a training that was killed; one that can be survived must be."""
    shutil.copytree(subject.whole, folder)
    states = RunFolder(folder).list_states()
    all_states = rng.random() < 0.25
    for state in states if all_states else states[-1:]:
        file = rng.choice(sorted(state.iterdir()))
        content = bytearray(file.read_bytes())
        position = rng.randrange(len(content))
        match rng.choice(("flip", "cut", "empty", "remove")):
            case "flip":
                content[position] ^= 1 << rng.randrange(8)
                file.write_bytes(content)
            case "cut":
                file.write_bytes(content[:position])
            case "empty":
                file.write_bytes(b"")
            case "remove":
                file.unlink()
    return expect("refused by name" if all_states else "survived bit-identical", judge(subject, folder, resume(folder)))


def start_twice(subject: Subject, folder: Path, rng: random.Random) -> str:
    """Resume a training in two processes at the same time: one is refused, the other ends as if alone.

    The one that comes too late, after the other has ended, finds a finished run. Both refused would be a training lost.
    """
    subject.start(folder).wait(rng.uniform(0.5, 1.0) * subject.seconds)
    if not (folder / "config.yaml").is_file():
        subject.start(folder).wait()
    commands = [resume(folder)]
    time.sleep(rng.uniform(0, 0.3))
    commands.append(resume(folder))
    outcomes = sorted(judge(subject, folder, command) for command in commands)
    if outcomes == ["refused by name", "survived bit-identical"]:
        return "survived bit-identical"
    return expect("survived bit-identical", *outcomes)


def fill_disk(subject: Subject, folder: Path, rng: random.Random) -> str:
    """Let a training meet a full disk, which must be named, and resume it where there is room."""
    largest = max(path.stat().st_size for path in subject.whole.rglob("*") if path.is_file())
    command = subject.start(folder, limit=rng.randrange(100, largest))
    if command.wait() != 2 or not command.is_named:
        return "lost"
    again = resume(folder) if (folder / "config.yaml").is_file() else subject.start(folder)
    return expect("survived bit-identical", judge(subject, folder, again))


def expect(wanted: str, *outcomes: str) -> str:
    """Return the outcome, or "lost" if one was not the wanted one."""
    return wanted if set(outcomes) == {wanted} else "lost"


FAULTS: dict[str, Callable[[Subject, Path, random.Random], str]] = {
    "killed": kill,
    "damaged": damage,
    "started twice": start_twice,
    "full disk": fill_disk,
}


def main() -> int:
    """Run all faults and print the table."""
    parser = argparse.ArgumentParser(description="Break trainings in every way that is known, and count what is lost.")
    parser.add_argument("--quick", action="store_true", help="two recipes, one or two faults of a kind")
    parser.add_argument("--seed", type=int, default=0, help="of times, files and bits (default: 0)")
    arguments = parser.parse_args()
    recipes = list(RECIPES)[:2] if arguments.quick else list(RECIPES)
    counts = {kind: (2 if kind == "damaged" else 1) if arguments.quick else count for kind, count in COUNTS.items()}
    torch.set_num_threads(1)
    table: Counter[tuple[str, str]] = Counter()
    with TemporaryDirectory() as place:
        subjects = [leave_alone(recipe, Path(place)) for recipe in recipes]
        for kind, count in counts.items():
            for n in range(count):
                subject = subjects[n % len(subjects)]
                folder = Path(place) / f"{kind.replace(' ', '-')}-{n}"
                outcome = FAULTS[kind](subject, folder, random.Random(f"{arguments.seed} {kind} {n}"))
                table[kind, outcome] += 1
                print(f"{kind} {n + 1} of {count}, {subject.recipe}: {outcome}", flush=True)
                if outcome == "lost":
                    report_loss(subject, folder)
                else:
                    shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{'':<14}" + "".join(f"{outcome:>24}" for outcome in OUTCOMES))
    for kind in counts:
        print(f"{kind:<14}" + "".join(f"{table[kind, outcome]:>24}" for outcome in OUTCOMES))
    return 1 if any(outcome == "lost" for _, outcome in table) else 0


def leave_alone(recipe: str, place: Path) -> Subject:
    """Train without a fault."""
    whole = place / f"{recipe}-whole"
    began = time.perf_counter()
    command = Subject(recipe, whole, 0.0).start(whole)
    if command.wait() != 0:
        raise SystemExit(f"{recipe} cannot be trained:\n{command.log.read_text()}")
    subject = Subject(recipe, whole, time.perf_counter() - began)
    print(f"{recipe}: {subject.seconds:.1f} s, {len(read_metrics(whole))} epochs", flush=True)
    return subject


def report_loss(subject: Subject, folder: Path) -> None:
    """Print what every process said."""
    print(f"LOST: {folder.name} of {subject.recipe}")
    for log in sorted(folder.parent.glob(f"{folder.name}-*.log")):
        print(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
