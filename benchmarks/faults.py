"""Leave trainings alone and break them: stop, damage, tear, start twice, delete, fill the disk.

    python benchmarks/faults.py             50 stopped, 20 damaged, 10 torn, 10 started twice, 5 full disks, 3 deleted; mutants
    python benchmarks/faults.py --quick     one or three of each, of two recipes, and mutants

The slow tests run it quickly; whole, which takes half an hour, it is run by hand when what saves or resumes has changed.

Every fault befalls a training by the command, in a process of its own, of one of several recipes made small: of images and
texts, with a budget, with random signs and tiles, with states written in a thread, and in two processes. Afterwards it is
resumed to its end and compared with the same training left alone: weights after the last epoch, best weights, and metrics. What
counts memory before the first step is left out in one process, so that most of the time is training.

    stopped         SIGKILL, SIGTERM or SIGINT at a random time, and in half of the cases once more after resuming
    damaged         one file of the newest state has a bit flipped, is cut, emptied or removed; in every fourth case every state
    torn            the folder is copied while it is written, states first, and the copy is resumed
    started twice   two processes resume the same folder at the same time; only where they overlap it counts
    full disk       no file can grow beyond a random size (RLIMIT_FSIZE), until the training is resumed
    deleted         the folder is deleted while it is written: the command says so, and makes no other

A fault is *survived* where the end is bit-identical, *refused* where the command ends with status 2 and says why and what to do
(the run is then as it was), and *lost* otherwise: other weights, other metrics, or an error that only a programmer can read. A
training with a fault that could be survived must be. A mutant is revzoo with one thing broken, of which a fault has to tell.
Status 1 if anything is lost, or a mutant is not noticed.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import psutil
import torch
from safetensors.torch import load_file
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import zoo_cli
from revzoo.training.checksums import seal
from revzoo.training.run_folder import RunFolder, _state_name

_MEASURED = {"seconds", "images_per_second", "texts_per_second", "bytes_per_second", "memory_bytes"}  # different in every run
_SMALL = ["train.epochs=3", "train.save_every=1"]
_DIGITS = ["digits", "data.batch_size=360", "model.overrides=[stages.0.depth=2]", "schedule.warmup_epochs=0"]
_SIGNS = "coupling={type: momentum, kept_bits: 1, gain: 1.0, sign: random}"
RECIPES = {
    "digits": [*_DIGITS, "mixup={mixup_alpha: 0.8}", "model.overrides=[stages.0.depth=2,head.dropout=0.1]"],
    "random signs in tiles": ["lm", _SIGNS, "model.tiles=4", "model.overrides=[input.length=64]", "data.limit=32"],
    "states in a thread": [*_DIGITS, "train.save_async=true", "train.keep_states=3"],
    "budget": [*_DIGITS, "memory.budget=30MiB"],
    "revnet": ["digits_revnet", "data.batch_size=360"],
    "swin": ["digits_rev_swin", "data.batch_size=360"],
    "irevnet": ["digits_irevnet", "data.batch_size=360"],
    "bert": ["text_bert", "data.batch_size=290", "model.overrides=[input.length=16]"],
    "two processes": _DIGITS,
    "two processes that divide": [*_DIGITS, "train.shard=full"],
}
COUNTS = {"stopped": 50, "damaged": 20, "torn": 10, "started twice": 10, "full disk": 5, "deleted": 3}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
IN_SEVERAL = ("stopped", "damaged", "torn")  # faults that befall trainings in two processes, too
OUTCOMES = ("survived bit-identical", "refused by name", "lost")


@dataclass(frozen=True)
class Subject:
    """A recipe, and its training left alone.

    Args:
        recipe: its key in `RECIPES`.
        whole: folder of the training.
        seconds: how long it took.
    """

    recipe: str
    whole: Path
    seconds: float

    def start(self, folder: Path, limit: int | None = None) -> "Command":
        """Start the same training in another folder."""
        return self._call(folder, *RECIPES[self.recipe], *_SMALL, "--out", str(folder), limit=limit)

    def resume(self, folder: Path) -> "Command":
        """Start to resume a training."""
        return self._call(folder, "--resume", str(folder))

    def _call(self, folder: Path, *words: str, limit: int | None = None) -> "Command":
        return Command(["train", *words], folder, limit, processes=self.processes)

    @property
    def processes(self) -> int:
        """How many processes train."""
        return 2 if self.recipe.startswith("two processes") else 1


class Command:
    """A command in a forked process, which has everything imported already.

    Args:
        arguments: of `revzoo`.
        folder: what it says is appended to a file next to this folder.
        limit: largest size of a file that it writes [bytes]; None: no limit.
        processes: if there are several, torchrun starts them.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, limit: int | None = None, processes: int = 1):
        self.log = folder.with_name(f"{folder.name}-{time.monotonic_ns()}.log")
        self.pid = os.fork()
        if self.pid == 0:
            self._run(arguments, limit, processes)

    def _run(self, arguments: Sequence[str], limit: int | None, processes: int) -> None:
        status = 70  # an error that revzoo does not name
        try:
            torch.set_num_threads(1)  # makes PyTorch's pool again, before two threads do so at once, which aborts the process
            stream = os.open(self.log, os.O_CREAT | os.O_WRONLY)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            patch("revzoo.training.loop._print_memory", lambda run, **options: None).start()
            patch("revzoo.training.run_folder.LOCK_SECONDS", 0.1).start()  # or the second waits for the end of the first
            if processes > 1:
                root = str(Path(zoo_cli.__file__).parent)
                os.environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
                # A library that crashes at the end is restarted.
                options = ["--standalone", "--max-restarts=2", f"--nproc-per-node={processes}"]
                torchrun.main([*options, "-m", "zoo_cli", *arguments])
                status = 0
            else:
                status = zoo_cli.main(arguments)
        except ChildFailedError as error:
            status = error.get_first_failure()[1].exitcode
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(status)  # the parent's clean-up is not this process's

    def wait(self) -> int:
        """Return the exit status."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def stop(self, seconds: float, signum: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process and its workers after some seconds, and wait for their end."""
        time.sleep(seconds)
        process = psutil.Process(self.pid)
        processes = [process, *process.children(recursive=True)]
        for each in processes if signum == signal.SIGKILL else processes[:1]:
            each.send_signal(signum)
        self.wait()
        psutil.wait_procs(processes[1:])

    @property
    def is_named(self) -> bool:
        """Whether it ended with an error that says why and what to do."""
        text = self.log.read_text(errors="replace")
        return "revzoo: " in text and "Traceback" not in text


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


def stop(subject: Subject, folder: Path, rng: random.Random) -> str:
    """Stop a training once or twice."""
    subject.start(folder).stop(rng.uniform(0, subject.seconds), rng.choice(SIGNALS))
    if (folder / "config.yaml").is_file() and rng.random() < 0.5:
        subject.resume(folder).stop(rng.uniform(0, subject.seconds), rng.choice(SIGNALS))
    return expect("survived bit-identical", judge(subject, folder, go_on(subject, folder)))


def go_on(subject: Subject, folder: Path) -> Command:
    """Start to resume a training, or to train anew where nothing was trained yet."""
    return subject.resume(folder) if (folder / "config.yaml").is_file() else subject.start(folder)


def damage(subject: Subject, folder: Path, rng: random.Random) -> str:
    """Damage the newest state, or every state, of a training that was killed; one that can be survived must be."""
    shutil.copytree(subject.whole, folder)
    states = RunFolder(folder).list_states()
    all_states = rng.random() < 0.25
    for state in states if all_states else states[-1:]:
        file = rng.choice(sorted(path for path in state.iterdir() if path.stat().st_size))
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
    return expect("refused by name" if all_states else "survived bit-identical", judge(subject, folder, subject.resume(folder)))


def tear(subject: Subject, folder: Path, rng: random.Random) -> str:
    """Copy the folder of a training, file by file in random order, while it is written; what a state needs comes after it."""
    original = folder.with_name(f"{folder.name}-original")
    command = subject.start(original)
    time.sleep(rng.uniform(0.3, 1) * subject.seconds)
    for part in ("state", "."):
        files = [path for path in (original / part).rglob("*") if path.is_file()]
        for file in rng.sample(files, len(files)):
            copy = folder / file.relative_to(original)
            if not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # renamed meanwhile
                    shutil.copyfile(file, copy)
    command.stop(0)
    if not (folder / "config.yaml").is_file():
        shutil.rmtree(folder, ignore_errors=True)
    return expect("survived bit-identical", judge(subject, folder, go_on(subject, folder)))


def start_twice(subject: Subject, folder: Path, rng: random.Random) -> str:
    """Resume a training in two processes at the same time: one is refused, the other ends as if alone.

    Where one came only after the other had ended it found a finished run, and both are started again.
    """
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        subject.start(folder).stop(rng.uniform(0.3, 0.6) * subject.seconds)
        commands = [go_on(subject, folder)]
        time.sleep(rng.uniform(0, 0.3))
        commands.append(go_on(subject, folder))
        outcomes = sorted(judge(subject, folder, command) for command in commands)
        if not any("Resuming after 3 epochs" in command.log.read_text() for command in commands):
            return "survived bit-identical" if outcomes == ["refused by name", "survived bit-identical"] else "lost"


def fill_disk(subject: Subject, folder: Path, rng: random.Random) -> str:
    """Let a training meet a full disk, which must be named, and resume it where there is room."""
    largest = max(path.stat().st_size for path in subject.whole.rglob("*") if path.is_file())
    command = subject.start(folder, limit=rng.randrange(100, largest))
    if command.wait() == 0 or not command.is_named:
        return "lost"
    return expect("survived bit-identical", judge(subject, folder, go_on(subject, folder)))


def delete(subject: Subject, folder: Path, rng: random.Random) -> str:
    """Delete the folder of a training while it is written: it ends with an error, and no more than it was writing is there."""
    command = subject.start(folder)
    while not (folder / "metrics.jsonl").is_file() and psutil.Process(command.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)  # a state may be written into it meanwhile
    is_named = command.wait() == 2 and command.is_named
    return "refused by name" if is_named and not (folder / "metrics.jsonl").exists() else "lost"


def expect(wanted: str, *outcomes: str) -> str:
    """Return the outcome, or "lost" if one was not the wanted one."""
    return wanted if set(outcomes) == {wanted} else "lost"


FAULTS: dict[str, Callable[[Subject, Path, random.Random], str]] = {
    "stopped": stop,
    "damaged": damage,
    "torn": tear,
    "started twice": start_twice,
    "full disk": fill_disk,
    "deleted": delete,
}


def write_in_place(folder: RunFolder, written: Path, progress: Any, keep: int) -> None:
    """Publish a state without a second place: what was there goes first, and files appear one by one."""
    (written / "progress.json").write_text(json.dumps(asdict(progress)))
    seal(written)
    for state in folder.list_states():
        shutil.rmtree(state)
    state = folder.states / _state_name(progress)
    state.mkdir()
    for file in sorted(written.iterdir()):
        time.sleep(0.1)
        shutil.move(file, state)


# What is broken, and the fault that has to tell.
MUTANTS: dict[str, tuple[str, Any, str]] = {
    "a state written in place": ("revzoo.training.run_folder.RunFolder.publish_state", write_in_place, "stopped"),
    "a lock ignored": ("revzoo.training.run_folder.RunFolder.hold_lock", lambda folder: nullcontext(), "started twice"),
    "a random stream not restored": ("revzoo.training.epochs.reseed", lambda *key: None, "stopped"),
}


def main() -> int:
    """Run all faults and print the table."""
    parser = argparse.ArgumentParser(description="Break trainings in every way that is known, and count what is lost.")
    parser.add_argument("--quick", action="store_true", help="two recipes, one fault of a kind")
    parser.add_argument("--seed", type=int, default=0, help="of times, files and bits (default: 0)")
    arguments = parser.parse_args()
    recipes = list(RECIPES)[:2] if arguments.quick else list(RECIPES)
    counts = dict.fromkeys(COUNTS, 1) | {"stopped": 3} if arguments.quick else COUNTS
    torch.set_num_threads(1)
    table: Counter[tuple[str, str]] = Counter()
    unnoticed = []
    with TemporaryDirectory() as name:
        place = Path(name)
        subjects = [leave_alone(recipe, place) for recipe in recipes]
        for kind, count in counts.items():
            for n in range(count):
                able = [each for each in subjects if kind in IN_SEVERAL or each.processes == 1]
                subject = able[n % len(able)]
                outcome = try_fault(kind, subject, place / f"{kind.replace(' ', '-')}-{n}", f"{arguments.seed} {kind} {n}")
                table[kind, outcome] += 1
                print(f"{kind} {n + 1} of {count}, {subject.recipe}: {outcome}", flush=True)
        for mutant, (target, broken, kind) in MUTANTS.items():
            with patch(target, broken):
                subject = leave_alone("digits", place / mutant)
                tries = (try_fault(kind, subject, place / mutant / str(n), f"{mutant} {n}", is_told=False) for n in range(12))
                lost = next((n for n, outcome in enumerate(tries, 1) if outcome == "lost"), 0)
            print(f"mutant, {mutant}: {f'noticed by try {lost}' if lost else 'NOT NOTICED'}", flush=True)
            unnoticed += [] if lost else [mutant]
    print(f"\n{'':<14}" + "".join(f"{outcome:>24}" for outcome in OUTCOMES))
    for kind in counts:
        print(f"{kind:<14}" + "".join(f"{table[kind, outcome]:>24}" for outcome in OUTCOMES))
    return 1 if unnoticed or any(outcome == "lost" for _, outcome in table) else 0


def try_fault(kind: str, subject: Subject, folder: Path, seed: str, *, is_told: bool = True) -> str:
    """Return the outcome of a fault; of a training that is lost, print what every process said."""
    outcome = FAULTS[kind](subject, folder, random.Random(seed))
    if outcome == "lost" and is_told:
        report_loss(subject, folder)
    shutil.rmtree(folder, ignore_errors=True)
    return outcome


def leave_alone(recipe: str, place: Path) -> Subject:
    """Train without a fault."""
    place.mkdir(exist_ok=True)
    whole = place / f"{recipe.replace(' ', '-')}-whole"
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
