"""Training that diverges: what is not finite is noticed before it is saved, so the newest state is always a good one."""

import math

import torch

from revzoo.checkpoint.files import find_not_finite
from revzoo.errors import RevzooError, join_names
from revzoo.sharding.shard import take_local
from revzoo.training.setup import Run


class DivergedError(RevzooError, ArithmeticError):
    """The loss or the weights are infinite or not a number."""


def check_training_loss(run: Run) -> None:
    """Raise DivergedError, in every process, unless the sum of this epoch's losses is finite in every process."""
    own = torch.tensor([run.progress.loss_sums[run.accelerator.process_index]], device=run.accelerator.device)
    for loss_sum in run.accelerator.gather(own).tolist():
        if not math.isfinite(loss_sum):
            raise _explain(run, f"The training loss is {loss_sum}")


def check_test_loss(run: Run, loss: float) -> None:
    """Raise DivergedError unless the test loss is finite."""
    if not math.isfinite(loss):
        raise _explain(run, f"The test loss is {loss}")


def check_weights(run: Run) -> None:
    """Raise DivergedError, in every process, unless all weights, and their running average, are finite in every process."""
    names = find_not_finite(take_local(run.model.state_dict()))
    if run.ema is not None:
        names += [f"the running average of {name}" for name in find_not_finite(take_local(run.ema.module.state_dict()))]
    counts = run.accelerator.gather(torch.tensor([len(names)], device=run.accelerator.device))
    if counts.sum() > 0:
        raise _explain(
            run, f"There are infinities or NaN in the weights ({join_names(names or ['in another process'], most=4)})"
        )


def _explain(run: Run, what: str) -> DivergedError:
    recipe, progress = run.recipe, run.progress
    states = run.folder.list_states()
    kept = f"nothing was saved since {states[-1]}" if states else "nothing was saved"
    return DivergedError(
        f"{what} in epoch {progress.epoch + 1}, by update {progress.updates}; {kept}. Try a smaller optimizer.lr (it is "
        f"{recipe.optimizer.lr:g}), a longer schedule.warmup_epochs ({recipe.schedule.warmup_epochs}), train.clip_grad=1 "
        f"({recipe.train.clip_grad}) or train.mixed_precision=no ({recipe.train.mixed_precision}); revzoo verify "
        f"{recipe.model.name} checks the gradients."
    )
