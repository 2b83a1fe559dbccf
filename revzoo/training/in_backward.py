"""An optimizer inside backward: it updates each parameter, and frees its gradient, as soon as that is complete.

So gradients are never all there at once. The optimizer itself makes the updates, with one parameter in place of its groups. Its
state, its groups and their learning rates are those of an ordinary optimizer. What is left after backward is for the ordinary
`step`: settings of groups that every step changes, and parameters that backward needed to its end.

Source: the hooks are those of PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward pass".
"""

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from revzoo.analysis.optimizer_step import copy_optimizer
from revzoo.runtime.complete_gradients import take_gradients

_SHAPES = ((3,), (4, 3), (2, 3, 2, 2))
_STEPS = 8


def update_in_backward(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Let every backward inside the block update the optimizer's parameters; call its `step` afterwards all the same."""
    places = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}

    def update(p: nn.Parameter) -> None:
        groups = optimizer.param_groups  # others after loading a state
        optimizer.param_groups = [{**groups[places[p]], "params": [p]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        p.grad = None

    return take_gradients(places, update)


def updates_each_alone(optimizer: Optimizer) -> bool:
    """Return whether parameters that are updated one after the other get the same weights as together, bit for bit.

    That is tried out, with a few small parameters. LAMB, for example, divides by the norm of all gradients.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            return all(map(torch.equal, *_update_together_and_apart(optimizer)))
        except Exception:  # whatever an optimizer raises that does not expect a single parameter, or none with a gradient
            return False


def _update_together_and_apart(optimizer: Optimizer) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    first = [nn.Parameter(torch.randn(shape)) for shape in _SHAPES]
    second = copy.deepcopy(first)
    together, apart = (_copy_for(optimizer, parameters) for parameters in (first, second))
    for _ in range(_STEPS):
        gradients = [torch.randn(shape) for shape in _SHAPES]
        for p, gradient in zip(first, gradients, strict=True):
            p.grad = gradient.clone()
        together.step()
        with update_in_backward(apart):
            torch.autograd.backward(second, gradients)
        apart.step()
        apart.zero_grad()
    return first, second


def _copy_for(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Optimizer:
    group: dict[str, Any] = {**optimizer.param_groups[0], "params": parameters}
    return copy_optimizer(optimizer, [group])
