"""Gradient checkpointing of a network that has reversible blocks: it passes them by, since they keep no inputs.

    flag of a block, in Transformers                     switched off before the network's own loop runs
    flag of what has the list, older Transformers        its checkpoints become non-reentrant, and so can be left
    a non-reentrant checkpoint around a block, timm      its hooks see nothing of the block, so it never runs that again

A reentrant checkpoint in somebody's own loop cannot be left: it runs blocks without gradients, and once more in backward.
"""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from traceback import walk_stack
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from revzoo.errors import InputError
from revzoo.runtime.ownership import ModuleReference

_FLAGS = ("gradient_checkpointing", "grad_checkpointing")  # of Transformers and of timm
_SECOND_RUNS = ("recompute_fn", "forward", "backward")  # functions of torch.utils.checkpoint; the latter two are reentrant


class _Step(Protocol):
    _block: ModuleReference


class Checkpoints:
    """Those around the blocks of one chain.

    Args:
        owner: the module that has the list.
        steps: that stand for the blocks.
    """

    def __init__(self, owner: ModuleReference, steps: Sequence[_Step]):
        self._owner = owner
        self._steps = steps
        self._has_told = False

    def watch(self) -> None:
        """Let them be passed by in every forward of the owner."""
        self.end_watch()  # an interrupted `ordinary_` installs again
        if (owner := self._owner()) is not None:
            owner.register_forward_pre_hook(self.pass_by)

    def end_watch(self) -> None:
        """End `watch`."""
        if (owner := self._owner()) is not None:  # a handle could not be copied with blocks whose owner is gone
            hooks = owner._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                del hooks[key]

    def pass_by(self, module: nn.Module, _: Any = None) -> None:
        """Switch them off if this module, the owner or a block, is checkpointed or has such blocks; warn of it once."""
        function = getattr(module, "_gradient_checkpointing_func", None)
        if isinstance(function, partial) and function.keywords.get("use_reentrant"):
            module.__dict__["_gradient_checkpointing_func"] = partial(function, use_reentrant=False)
        blocks = [block for block in [step._block() for step in self._steps] if block is not None and is_checkpointed(block)]
        if not blocks and not is_checkpointed(module):
            return
        for block in blocks:
            for flag in _FLAGS:
                if hasattr(block, flag):
                    setattr(block, flag, False)
        if not self._has_told:
            self._has_told = True
            warnings.warn(
                "Gradient checkpointing passes reversible blocks by: they keep no inputs. Other blocks are checkpointed. "
                "gradient_checkpointing=False in the arguments of a trainer ends this warning.",
                stacklevel=2,
            )


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether a module of Transformers or timm is set to recompute its blocks in backward."""
    return any(getattr(module, flag, False) is True for flag in _FLAGS)


@contextmanager
def without_checkpoints(model: nn.Module) -> Iterator[None]:
    """Let the networks of Transformers and timm store everything inside the block."""
    flags = [(module, flag) for module in model.modules() for flag in _FLAGS if vars(module).get(flag) is True]
    try:
        for module, flag in flags:
            setattr(module, flag, False)
        yield
    finally:
        for module, flag in flags:
            setattr(module, flag, True)


def leave_checkpoint() -> AbstractContextManager[object]:
    """Return a context in which autograd saves tensors as usual, also inside of a non-reentrant checkpoint."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or getattr(hooks[0], "__module__", None) != checkpoint.__name__:
        return nullcontext()
    return saved_tensors_hooks(_return, _return)


def refuse_second_run(name: str) -> None:
    """Raise InputError if a checkpoint runs a step a second time, or is reentrant: it loses the state before."""
    codes = (frame.f_code for frame, _ in walk_stack(sys._getframe()))
    if any(code.co_filename == checkpoint.__file__ and code.co_name in _SECOND_RUNS for code in codes):
        raise InputError(
            f"{name} is a step of a reversible chain, and a checkpoint around it loses the state before. Received: "
            "torch.utils.checkpoint, reentrant or around a block with hooks of its own. Give a trainer "
            'gradient_checkpointing_kwargs={"use_reentrant": False} or gradient_checkpointing=False; in your own loop '
            "leave the checkpoint out."
        )


def _return(x: Tensor) -> Tensor:
    return x
