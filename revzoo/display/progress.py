"""Progress of a training run on the console: one line per epoch, and a progress bar on a terminal."""

import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from revzoo.data.base import Data
from revzoo.format import format_bits, format_bytes
from revzoo.metric import CHOSEN


class TrainingDisplay:
    """Shows training on the console of the main process; in the other processes it prints nothing.

    Args:
        shown: whether this process prints anything.
        epochs: epochs of the whole training.
        data: what is trained on.
        batch_size: examples of one batch over all processes.
    """

    def __init__(self, shown: bool, epochs: int, data: Data, batch_size: int):
        self.console = Console(quiet=not shown, markup=False, highlight=False, soft_wrap=not sys.stdout.isatty())
        self.epochs, self.batches, self.batch_size = epochs, len(data.train), batch_size
        self.example_noun, self.label_noun = data.example_noun, data.label_noun
        self.memory_noun = "CUDA peak" if torch.cuda.is_available() else "process"  # neither is what the tables count
        self.score = "-"
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=8),  # leaves room for the numbers on 80 columns
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (shown and self.console.is_terminal),
            transient=True,
        )

    def __enter__(self) -> "TrainingDisplay":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def start_epoch(self, epoch: int, done: int) -> None:
        """Start the bar of an epoch.

        Args:
            epoch: number of the epoch, from 0.
            done: batches of it that are done already.
        """
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._first, self._began = done, time.perf_counter()
        title = f"epoch {epoch + 1}/{self.epochs}"
        self._task = self._bar.add_task(title, total=self.batches, completed=done, numbers="")

    def step(self, done: int, loss: float, memory_bytes: int) -> None:
        """Move the bar.

        Args:
            done: batches of the epoch that are done.
            loss: mean training loss of the epoch so far.
            memory_bytes: memory in use.
        """
        rate = (done - self._first) * self.batch_size / (time.perf_counter() - self._began)
        numbers = f"loss {loss:.4f} {CHOSEN.label} {self.score} {rate:.0f} {self.example_noun}/s {self._describe(memory_bytes)}"
        self._bar.update(self._task, completed=done, numbers=numbers)

    def end_epoch(self, record: dict[str, Any], best: float) -> None:
        """Print the line of an epoch.

        Args:
            record: its metrics, as in metrics.jsonl.
            best: best CHOSEN metric of all epochs.
        """
        self.score = CHOSEN.format(record[CHOSEN.key])
        loss = f"{record['loss']:.4f}{format_bits(record['loss'], self.label_noun, prefix=', ')}"
        rate = f"{record[f'{self.example_noun}_per_second']:.0f} {self.example_noun}/s"
        self.console.print(
            f"epoch {record['epoch']:>{len(str(self.epochs))}}/{self.epochs}  train loss {record['train_loss']:.4f}  "
            f"test loss {loss}  {CHOSEN.label} {self.score} (best {best:.2f})  "
            f"{rate}  {self._describe(record['memory_bytes'])}  {record['seconds']:.1f} s"
        )

    def _describe(self, memory_bytes: int) -> str:
        return f"{self.memory_noun} {format_bytes(memory_bytes)}"
