"""Find a learning rate: train a few updates with one that rises, and look where the loss falls.

The learning-rate range test of Smith (Cyclical Learning Rates for Training Neural Networks, WACV 2017, section 3.3), with the
stop and the suggestion of fastai (`valley`): the loss is averaged, the test ends when it is four times its least value, and the
suggestion is the middle of the longest fall, the longest sequence of losses that are each less than the one before, with others
between them left out. Where the loss falls fastest noise decides, often just before it diverges. It says where to begin to
search, for this model, batch and optimizer; schedule, warm-up and regularisation are not looked at.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from revzoo.display.console import show_status
from revzoo.display.figures.learning_rate import plot_learning_rates
from revzoo.errors import InputError, RevzooError
from revzoo.file import write_atomically
from revzoo.training.epochs import train_batch
from revzoo.training.in_backward import update_in_backward
from revzoo.training.options import Recipe
from revzoo.training.setup import Run, build_run, make_accelerator

_LOW, _HIGH, _UPDATES = 1e-7, 10.0, 100  # the range, and updates to cross it
_SMOOTHING = 0.9  # share of the average that stays when a loss is added
_SETTLED = 10  # updates after which it is an average of many: 1 / (1 - _SMOOTHING)
_DIVERGED = 4.0  # times the least loss


@dataclass(frozen=True)
class RangeTest:
    """The losses of rising learning rates.

    Args:
        lrs: learning rate of each update.
        losses: running average of the training loss, before each update.
    """

    lrs: list[float]
    losses: list[float]

    def suggest(self) -> float | None:
        """Return the learning rate in the middle of the longest fall of the loss; None where it does not fall."""
        losses = self.losses[_SETTLED:]
        lengths = list[int]()  # of the longest falling sequence that ends with each loss
        for i, loss in enumerate(losses):
            lengths.append(1 + max((lengths[j] for j in range(i) if losses[j] > loss), default=0))
        longest = max(lengths, default=0)
        return self.lrs[_SETTLED + lengths.index(longest) - longest // 2] if longest > 1 else None


def find_learning_rate(recipe: Recipe, picture: Path) -> float:
    """Run a range test with the recipe's model, data and optimizer, draw it, and return the suggested learning rate.

    Nothing is kept but the picture.

    Args:
        recipe: what is to be trained.
        picture: PNG to write.

    Raises:
        InputError: it is started in several processes.
        RevzooError: the loss does not fall at any learning rate.
    """
    accelerator = make_accelerator(recipe)
    if accelerator.num_processes > 1:
        raise InputError(
            f"A learning rate is looked for in one process. Received: {accelerator.num_processes}. Run revzoo train --find-lr "
            "without a launcher, with data.batch_size of all of them together."
        )
    with TemporaryDirectory() as folder:
        with show_status("loading data and model"):
            run = build_run(recipe, Path(folder), resumed=False, accelerator=accelerator)
        run.print_start()
        result = _run_test(run)
    suggestion = result.suggest()
    write_atomically(picture, lambda path: plot_learning_rates(result.lrs, result.losses, suggestion, path))
    if suggestion is None:
        raise RevzooError(
            f"The loss falls at no learning rate from {_LOW:g} to {_HIGH:g}: {picture} shows it. Look at the data."
        )
    return suggestion


def _run_test(run: Run) -> RangeTest:
    lrs, losses, average = list[float](), list[float](), 0.0
    in_backward = run.recipe.train.optimizer_in_backward
    updates = update_in_backward(run.optimizer.optimizer) if in_backward else nullcontext()
    run.wrapped.train()
    with show_status() as announce, updates:
        for number, (batch, labels) in enumerate(_repeat(run)):
            announce(f"update {len(lrs) + 1} of {_UPDATES}")
            lr = _LOW * (_HIGH / _LOW) ** (len(lrs) / (_UPDATES - 1))
            for group in run.optimizer.param_groups:
                group["lr"] = lr * group.get("lr_scale", 1.0)
            loss = train_batch(run, batch, labels, (run.recipe.train.seed, 0, number)).item()
            average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
            smooth = average / (1 - _SMOOTHING ** (number + 1))  # without the zero that it began with
            if not math.isfinite(loss) or (losses and smooth > _DIVERGED * min(losses)):
                break
            if run.accelerator.sync_gradients:
                lrs.append(lr)
                losses.append(smooth)
            if len(lrs) == _UPDATES:
                break
    return RangeTest(lrs, losses)


def _repeat(run: Run) -> Any:
    """Yield the training batches of one epoch after the other."""
    for epoch in count():
        run.data.start_epoch(epoch)
        yield from run.train_loader
