"""timm's optimizers and learning-rate schedules: which options they accept, and how they are made."""

from inspect import signature
from typing import Any, cast

from timm.optim import create_optimizer_v2, get_optimizer_info, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from torch import nn
from torch.optim import Optimizer

from revzoo.training.options import DecayedParameters, Recipe


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


def make_recipe_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """Return the recipe's optimizer for a model. Raises SpecError if timm cannot make it on this machine."""
    options = recipe.optimizer
    values = {name: getattr(options, name) for name in find_accepted_options(options.opt)}
    arguments = {name: value for name, value in values.items() if value is not None}
    try:
        return make_optimizer(
            model,
            options.opt,
            options.lr,
            options.weight_decay,
            weight_decay_of=options.weight_decay_of,
            layer_decay=options.layer_decay,
            **arguments,
        )
    except OptimizerError as error:
        allowed = f"what timm's {options.opt} accepts on this machine"
        raise recipe.error("optimizer.opt", str(error), allowed) from error


def make_scheduler(recipe: Recipe, optimizer: Optimizer, updates_per_epoch: int) -> Any:
    """Return timm's schedule of the learning rate, to be stepped once per update.

    Every number of epochs is given as one of updates, because `train.max_updates` may end training within an epoch.
    """
    options, decay_epochs = recipe.schedule, recipe.schedule.decay_epochs
    decay = {"decay_epochs": decay_epochs and decay_epochs * updates_per_epoch, "decay_rate": options.decay_rate}
    name = options.sched
    if name == "constant":  # which timm has since 1.0.30, and makes of the same steps
        name, decay = "step", {"decay_epochs": 1, "decay_rate": 1.0}
    starts_after_warm_up = options.warmup_prefix or name == "linear"
    if name == "linear":
        name, decay = "poly", {"decay_rate": 1.0}
    warm_up = options.warmup_epochs * updates_per_epoch
    updates = recipe.train.count_updates(updates_per_epoch) - (warm_up if starts_after_warm_up else 0)
    arguments: dict[str, Any] = {key: value for key, value in decay.items() if value is not None}
    scheduler, _ = create_scheduler_v2(
        optimizer,
        name,
        num_epochs=max(1, updates),  # which may all be of the warm-up
        warmup_epochs=warm_up,
        warmup_prefix=starts_after_warm_up,
        warmup_lr=options.warmup_lr,
        min_lr=options.min_lr,
        decay_milestones=[milestone * updates_per_epoch for milestone in options.decay_milestones],
        step_on_epochs=False,
        updates_per_epoch=1,
        **arguments,
    )
    return scheduler
