"""Training that diverges: infinities and NaN are looked for before every save, so the newest state is always a good one."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.utils import gather_object
from torch import Tensor, nn

from revzoo.checkpoint.files import find_not_finite
from revzoo.checkpoint.slices import get_own_part
from revzoo.errors import RecoveryError, RevzooError, join_names, quote
from revzoo.hub import is_foreign
from revzoo.training.run import Run

_FAR = 10  # times the loss of a network that knows nothing


class DivergedError(RevzooError, ArithmeticError):
    """The loss or the weights are infinite, not a number, or so large that states are lost to rounding."""

    exit_status = 3  # a sweep goes on with other settings, and ends for a mistake


def add_losses(run: Run, losses: Tensor) -> None:
    """Add the training losses of every process to the sum of this epoch, and set them to 0; all processes call this together.

    Sums in double precision of losses in single precision are exact in all but strange cases, so that it does not matter when
    they are added, and by how many processes.

    Shapes: losses: (), float64: the sum of what this process has not added yet.
    Raises:
        DivergedError: one of them is not finite; raised in every process.
    """
    total = math.fsum(gather_object([losses.item()]))
    losses.zero_()
    if not math.isfinite(total):
        raise _explain(run, f"The training loss is {total}")
    run.progress.loss_sum += total


def check_test_loss(run: Run, loss: float) -> None:
    """Raise DivergedError unless the test loss is finite."""
    if not math.isfinite(loss):
        raise _explain(run, f"The test loss is {loss}")


def check_weights(run: Run) -> None:
    """Raise DivergedError, in every process, unless all weights, and their running average, are finite in every process."""
    names = _find_own_not_finite(run.model)
    if run.ema is not None:
        names += [f"the running average of {name}" for name in _find_own_not_finite(run.ema.module)]
    if everywhere := list(dict.fromkeys(gather_object(names))):
        raise _explain(run, f"There are infinities or NaN in the weights ({join_names(everywhere, most=4)})")


@contextmanager
def explain_lost_states(run: Run) -> Iterator[None]:
    """Raise DivergedError for states that cannot be recovered while the loss is far above that of equal probabilities."""
    try:
        yield
    except RecoveryError as error:
        loss = 0.0 if run.last_loss is None else float(run.last_loss.detach())
        if loss < _FAR * math.log(max(2, run.model.num_outputs)):
            raise
        raise _explain(run, f"The training loss is {loss:.4g}, and states are lost to rounding,") from error


def _find_own_not_finite(model: nn.Module) -> list[str]:
    """Return the names of the tensors with infinities or NaN in what this process holds (its part of sharded ones)."""
    return find_not_finite({name: get_own_part(tensor) for name, tensor in model.state_dict().items()})


def _explain(run: Run, what: str) -> DivergedError:
    recipe, progress = run.recipe, run.progress
    run.upload.settle()
    states = run.folder.list_states()
    name = str(run.folder.path / "spec.yaml") if is_foreign(recipe.model.name) else recipe.model.name
    kept = f"nothing was saved since {states[-1]}" if states else "nothing was saved"
    return DivergedError(
        f"{what} in epoch {progress.epoch + 1}, by update {progress.updates}; {kept}. Try a smaller optimizer.lr (it is "
        f"{recipe.optimizer.lr:g}), a longer schedule.warmup_epochs ({recipe.schedule.warmup_epochs}), train.clip_grad=1 "
        f"({recipe.train.clip_grad}) or train.mixed_precision=no ({recipe.train.mixed_precision}); revzoo verify "
        f"{quote(name)} checks the gradients."
    )
