"""An optimizer inside backward: it updates each parameter, and frees its gradient, as soon as that is complete.

So gradients are never all there at once. The optimizer itself makes the updates, with one parameter in place of its groups. Its
state, its groups and their learning rates are those of an ordinary optimizer. What is left after backward is for the ordinary
`step`: settings of groups that every step changes, and parameters that backward needed to its end.

Source: the hooks are those of PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward pass".
"""

from contextlib import AbstractContextManager

from torch import nn
from torch.optim import Optimizer

from revzoo.runtime.complete_gradients import take_gradients


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
