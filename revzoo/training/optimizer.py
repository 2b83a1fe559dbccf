"""timm's optimizers: which options each of them accepts, and how it is made."""

from inspect import signature
from typing import Any, cast

from timm.optim import create_optimizer_v2, get_optimizer_info, param_groups_layer_decay, param_groups_weight_decay
from torch import nn
from torch.optim import Optimizer

from revzoo.training.options import DecayedParameters


class OptimizerError(Exception):
    """timm cannot make an optimizer on this machine, or not with these arguments."""


def find_accepted_options(opt: str) -> set[str]:
    """Return those of momentum, betas, eps, foreach and fused that timm's optimizer of this name accepts."""
    info = get_optimizer_info(opt)
    accepts = {"momentum": info.has_momentum, "betas": info.has_betas, "eps": info.has_eps}
    parameters = signature(cast(Any, info.opt_class)).parameters
    return {name for name, accepted in accepts.items() if accepted} | ({"foreach", "fused"} & parameters.keys())


def make_optimizer(
    model: nn.Module,
    opt: str,
    lr: float,
    weight_decay: float = 0.0,
    *,
    weight_decay_of: DecayedParameters = "weights",
    layer_decay: float | None = None,
    **arguments: Any,
) -> Optimizer:
    """Return timm's optimizer of this name for the model.

    Args:
        weight_decay_of: which parameters are decayed; timm leaves out biases, norms and the model's `no_weight_decay()`.
        layer_decay: factor of the learning rate from one layer to the one before it; not with `weight_decay_of="all"`.
        arguments: further arguments of `timm.optim.create_optimizer_v2`.
    Raises:
        OptimizerError: timm cannot make it; the message starts with the type of timm's own error.
    """
    parameters: Any = model
    if weight_decay_of == "all":
        parameters = [p for p in model.parameters() if p.requires_grad]
    elif weight_decay_of == "weights_and_positions":  # timm's groups, but without asking the model what not to decay
        if layer_decay is None:
            parameters = param_groups_weight_decay(model, weight_decay)
        else:
            parameters, layer_decay = param_groups_layer_decay(model, weight_decay, layer_decay=layer_decay), None
    try:
        return create_optimizer_v2(parameters, opt, lr, weight_decay, layer_decay=layer_decay, **arguments)
    except (TypeError, ValueError, LookupError, AssertionError, ImportError, RuntimeError) as error:
        raise OptimizerError(f"{type(error).__name__}: {error}") from error
