"""timm's optimizers: which options each of them accepts, and how it is made."""

from typing import Any

from timm.optim import create_optimizer_v2, get_optimizer_info
from torch import nn
from torch.optim import Optimizer


class OptimizerError(Exception):
    """timm cannot make an optimizer on this machine, or not with these arguments."""


def find_accepted_options(opt: str) -> set[str]:
    """Return those of momentum, betas and eps that timm's optimizer of this name accepts."""
    info = get_optimizer_info(opt)
    accepts = {"momentum": info.has_momentum, "betas": info.has_betas, "eps": info.has_eps}
    return {name for name, accepted in accepts.items() if accepted}


def make_optimizer(model: nn.Module, opt: str, lr: float, weight_decay: float = 0.0, **arguments: Any) -> Optimizer:
    """Return timm's optimizer of this name for the model.

    Args:
        arguments: further arguments of `timm.optim.create_optimizer_v2`.
    Raises:
        OptimizerError: timm cannot make it; the message starts with the type of timm's own error.
    """
    try:
        return create_optimizer_v2(model, opt, lr, weight_decay, **arguments)
    except (TypeError, ValueError, LookupError, AssertionError, ImportError) as error:
        raise OptimizerError(f"{type(error).__name__}: {error}") from error
