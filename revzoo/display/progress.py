"""Progress of a training run on the console: a bar on a terminal, a line every few seconds elsewhere, a line per epoch."""

import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from revzoo.data.base import Data
from revzoo.format import format_bytes, format_loss
from revzoo.metric import CHOSEN

T = TypeVar("T")


class TrainingDisplay:
    """Shows training on the console of the main process; in the other processes it prints nothing.

    Args:
        shown: whether this process prints anything.
        epochs: epochs of the whole training.
        batches: batches of the whole training.
        data: what is trained on.
        log_every: seconds between two lines where there is no terminal.
    """

    def __init__(self, shown: bool, epochs: int, batches: int, data: Data, log_every: float):
        self.console = Console(quiet=not shown, markup=False, highlight=False, soft_wrap=not sys.stdout.isatty())
        self.epochs, self.all_batches, self.batches, self.log_every = epochs, batches, len(data.train), log_every
        self.label_noun = data.label_noun
        self.memory_noun = "CUDA peak" if torch.cuda.is_available() else "process"  # neither is what the tables count
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=8),  # leaves room for the numbers on 80 columns
            TextColumn("{task.completed}/{task.total}  {task.fields[words]}"),
            console=self.console,
            disable=not (shown and sys.stdout.isatty()),  # Jupyter sets FORCE_COLOR, which rich takes for a terminal
            transient=True,
        )

    def __enter__(self) -> "TrainingDisplay":
        self._bar.start()
        self._began = self._said = time.monotonic()
        self._first: int | None = None  # batch that the run began with, in all of training
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def start_epoch(self, epoch: int, done: int, batches: int) -> None:
        """Start the bar of an epoch.

        Args:
            epoch: number of the epoch, from 0.
            done: batches of it that are done already.
            batches: of it that are trained on.
        """
        self._epoch = epoch
        if self._first is None:
            self._first = self._epoch * self.batches + done
        self._start(f"epoch {epoch + 1}/{self.epochs}", batches, done)

    def step(self, done: int, loss: float, lr: float) -> bool:
        """Move the bar, or print a line if the last one is long ago; return whether it is.

        Args:
            done: batches of the epoch that are done.
            loss: mean training loss of the epoch, up to when it was last read.
            lr: learning rate.
        """
        assert self._first is not None
        elapsed, before = time.monotonic() - self._began, self._epoch * self.batches + done
        rest = elapsed * (self.all_batches - before) / max(1, before - self._first)
        left, total = (timedelta(seconds=round(seconds)) for seconds in (rest, elapsed + rest))
        return self._move(done, f"loss {loss:.4f}  lr {lr:.2e}  {left} left of {total}")

    def watch_evaluation(self, batches: Iterable[T], total: int) -> Iterator[T]:
        """Yield the batches of an evaluation, and show how many of `total` are done."""
        self._start("testing", total, 0)
        for done, batch in enumerate(batches):
            self._move(done, "")
            yield batch

    def _start(self, title: str, total: int, done: int) -> None:
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._title, self._total = title, total
        self._task = self._bar.add_task(title, total=total, completed=done, words="")

    def _move(self, done: int, words: str) -> bool:
        self._bar.update(self._task, completed=done, words=words)
        if (now := time.monotonic()) - self._said < self.log_every:
            return False
        self._said = now
        if self._bar.disable:
            self.console.print(f"{self._title}  {done}/{self._total}  {words}".rstrip())
        return True

    def end_epoch(self, record: dict[str, Any], best: float) -> None:
        """Print the line of an epoch.

        Args:
            record: its metrics, as in metrics.jsonl.
            best: best CHOSEN metric of all epochs.
        """
        loss = format_loss(record["loss"], self.label_noun)
        rate = next(f"{value:.0f} {key[:-11]}/s" for key, value in record.items() if key.endswith("_per_second"))
        memory = f"{self.memory_noun} {format_bytes(record['memory_bytes'])}"
        self.console.print(
            f"epoch {record['epoch']:>{len(str(self.epochs))}}/{self.epochs}  train loss {record['train_loss']:.4f}  "
            f"test loss {loss}  {CHOSEN.label} {CHOSEN.format(record[CHOSEN.key])} (best {best:.2f})  "
            f"{rate}  {memory}  {record['seconds']:.1f} s"
        )
