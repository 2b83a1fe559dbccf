"""What `revzoo train` costs beside a plain training loop: the time of the same epochs.

    python benchmarks/training_loop.py --out training_loop.json     about a minute
    python benchmarks/training_loop.py --epochs 1                   the same figures in seconds, too few to mean anything

Both train rev_vit_digits, all steps stored, as the recipe `digits` says: shifted images, AdamW, a learning rate for every
update, clipped gradients and averaged weights. The plain loop is PyTorch's `DataLoader`, loss and clipping, and timm's schedule
and `ModelEmaV3`. The other one also seeds every batch, may be stopped after any update, checks the loss and shows progress.
Epochs take turns on the CPU clock of one thread. The figure is the median of their ratios.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from runtime import Figure, report
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import nn
from torch.utils.data import DataLoader

import revzoo
from revzoo.data.digits import Digits
from revzoo.training.epochs import train_epoch
from revzoo.training.interrupt import StopSignal
from revzoo.training.options import Recipe
from revzoo.training.recipe import load_recipe
from revzoo.training.run import Run
from revzoo.training.setup import build_run

_MOST = 1 / 0.95  # at least 95 % of the images per second of the plain loop


def make_plain_epoch(digits: Digits, recipe: Recipe) -> Callable[[int], None]:
    """Return a function that trains an epoch of a new network, as anybody would write it."""
    model = revzoo.create(recipe.model.name)
    model.schedule = "store"
    schedule = recipe.schedule
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.optimizer.lr, weight_decay=recipe.optimizer.weight_decay)
    loader = DataLoader(digits, recipe.data.batch_size, shuffle=True, drop_last=True, collate_fn=lambda batch: batch)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        schedule.sched,
        num_epochs=recipe.train.epochs,
        warmup_epochs=schedule.warmup_epochs,
        warmup_lr=schedule.warmup_lr,
        min_lr=schedule.min_lr,
        step_on_epochs=False,
        updates_per_epoch=len(loader),
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=recipe.train.label_smoothing)
    ema = ModelEmaV3(model, decay=recipe.ema.decay)
    updates = itertools.count(1)

    def train(epoch: int) -> None:
        digits.start_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.train.clip_grad)
            optimizer.step()
            scheduler.step_update(next(updates))
            ema.update(model)

    return train


def make_epoch(run: Run, stop: StopSignal) -> Callable[[int], None]:
    """Return a function that trains an epoch as `revzoo train` does."""

    def train(epoch: int) -> None:
        run.data.start_epoch(epoch)
        run.display.start_epoch(epoch, 0, len(run.data.train))
        train_epoch(run, epoch, stop)
        run.progress.batch, run.progress.examples, run.progress.loss_sum = 0, 0, 0.0

    return train


def measure(epochs: int) -> Iterator[Figure]:
    recipe = load_recipe("digits", ["model.schedule=store"])
    with ExitStack() as stack:
        run = build_run(recipe, Path(stack.enter_context(tempfile.TemporaryDirectory())), resumed=False)
        stack.enter_context(run.display)
        stop = stack.enter_context(StopSignal(run.accelerator))
        loops = {"revzoo train": make_epoch(run, stop), "plain": make_plain_epoch(run.data.train.dataset, recipe)}
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for epoch, (name, train) in itertools.product(range(epochs + 1), loops.items()):
            start = time.process_time()
            train(epoch)
            seconds[name].append(time.process_time() - start)
    pairs = list(zip(seconds["plain"], seconds["revzoo train"], strict=True))[1:]  # the first epoch warms up
    ratio = statistics.median(own / plain for plain, own in pairs)
    yield Figure("time over that of a plain loop", recipe.model.name, "revzoo train", epochs, ratio, _MOST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15, help="epochs of each loop that are timed (default: 15)")
    parser.add_argument(
        "--out", type=Path, default=Path("training_loop.json"), help="JSON file with the figure (default: training_loop.json)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report(measure(arguments.epochs), arguments.out)


if __name__ == "__main__":
    main()
