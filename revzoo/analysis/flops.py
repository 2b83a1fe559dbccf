"""Counting arithmetic: what a forward and backward compute."""

from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from revzoo.analysis.trial import borrowed, call, linear_loss


def count_flops(model: nn.Module, batch: Any) -> int:
    """Return the floating-point operations of one forward and backward of the model as it is now.

    Counted under `FakeTensorMode`, so nothing is computed or allocated, and apart from memory: a FLOP counter keeps
    tensors alive. Matrix products, convolutions and attention count (a multiply-add is 2); norms, activations and sums
    do not, so a ratio of FLOPs is not a ratio of times.

    Args:
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
    Raises:
        InputError: nothing to differentiate.
    """
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()
    with borrowed(model, batch, fake=True) as inputs, counter:
        linear_loss(call(model, inputs)).backward()
    return counter.get_total_flops()


class _NoModules(ModuleTracker):
    """In place of the counter's module tracker, whose hooks fail on modules that are given views of inputs."""

    def __enter__(self) -> "_NoModules":
        return self

    def __exit__(self, *error: Any) -> None: ...
