"""Submodules of a step whose outputs are kept: what a second run has to decide as the first one did.

The router of a mixture of experts sends each token to the experts with the largest scores. Where two scores are nearly equal,
rounding in a second run may turn the decision, and with it the shapes of all that follows. So what such a module returns in
the first run takes the place of what it returns in the second, and so do the integers that autograd saves in it. The module
itself runs again, for what autograd saves besides.

Kept are the submodules that a user names, and those that are seen to return integers: indices of `topk` or `argmax`. A decision
in the code of a step outside of its submodules is not seen.

Cost: the outputs of these modules.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from revzoo.runtime import seams
from revzoo.runtime.conditions import Conditions
from revzoo.runtime.exact import attach_graph
from revzoo.runtime.forward import Forward
from revzoo.runtime.inventory import find_submodules, get_root
from revzoo.runtime.nested import map_tensors, tensors_in


class KeptRegions:
    """What the regions of one call have returned.

    Args:
        named: the submodules to keep.
        seen: others, which are kept if they return integers.
    """

    def __init__(self, named: Sequence[nn.Module], seen: Sequence[nn.Module] = ()):
        self._named = set(named)
        self._modules = list(dict.fromkeys((*named, *seen)))
        self._outputs: list[tuple[nn.Module, Any]] = []  # in the order of the calls
        self._open: list[tuple[nn.Module, int]] = []  # calls that have begun: the module, and the next slot
        self._integers: list[tuple[int, Tensor]] = []  # saved in them, by slot
        self.is_paused = False
        self._next = 0  # the slot of the next tensor that autograd saves
        self.slots: dict[int, Tensor] = {}  # integers that autograd saved in a region

    @property
    def seen_regions(self) -> list[nn.Module]:
        """Those that were kept because they returned integers."""
        return [module for module in self.regions if module not in self._named]

    @property
    def regions(self) -> list[nn.Module]:
        """The modules that were kept."""
        return list(dict.fromkeys(module for module, _ in self._outputs))

    def record(self) -> "_Hooks":
        """Return a context for the first run."""
        return _Hooks(self._modules, self._begin, self._end)

    def note_saved(self, slot: int, tensor: Tensor) -> None:
        """Note a tensor that autograd saves in the first run."""
        self._next = slot + 1
        if self._open and not tensor.is_floating_point() and not tensor.is_complex():
            self._integers.append((slot, tensor))

    def end_first_run(self) -> None:
        """Let go of what is not kept."""
        self._modules, self._open, self._integers = self.regions, [], []

    def hand_out(self) -> "_Hooks":
        """Return a context for a second run."""
        waiting = self._outputs[::-1]

        def replace(module: nn.Module, _: Any, out: Any) -> Any:
            if torch.compiler.is_compiling() or not waiting or waiting[-1][0] is not module:
                return None  # another run than the first, which will be noticed by what it saves
            kept = iter(list(tensors_in(waiting.pop()[1])))
            return map_tensors(lambda x: _put_in_place(next(kept), x), out)

        return _Hooks(self._modules, None, replace)

    def _begin(self, module: nn.Module, _: Any) -> None:
        if not self.is_paused and not torch.compiler.is_compiling():  # as in the branches of torch.cond
            self._open.append((module, self._next))

    def _end(self, module: nn.Module, _: Any, out: Any) -> None:
        if self.is_paused or torch.compiler.is_compiling():
            return
        start = 0
        while self._open:  # a call inside may have raised what f has caught
            opened, start = self._open.pop()
            if opened is module:
                break
        tensors = list(tensors_in(out))
        if module in self._named or any(_is_index(x) for x in tensors):
            self._outputs.append((module, [x.detach() for x in tensors]))
            self.slots.update((slot, x) for slot, x in self._integers if slot >= start)
        if not self._open:
            self._integers.clear()


class _Hooks:
    """Hooks on modules, for the time of a `with` statement."""

    def __init__(self, modules: Sequence[nn.Module], before: Callable[..., Any] | None, after: Callable[..., Any]):
        self._modules, self._before, self._after = modules, before, after
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for module in self._modules:
            if self._before is not None:
                self._handles.append(module.register_forward_pre_hook(self._before))
            self._handles.append(module.register_forward_hook(self._after))

    def __exit__(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()


def _is_index(x: Tensor) -> bool:
    return x.dtype in (torch.int64, torch.int32)


def _put_in_place(kept: Tensor, x: Tensor) -> Tensor:
    """Return the kept tensor, differentiated as the one that it replaces."""
    return attach_graph(kept.detach(), (1.0,), x) if x.requires_grad else kept.detach()


def keep_regions(f: Callable[..., Any], name: str, forward: Forward, conditions: Conditions) -> KeptRegions | None:
    """Return what keeps the outputs of submodules of a call that is about to run first; None where there is nothing to keep."""
    inventory = conditions.inventory
    if not isinstance(f, nn.Module) or inventory.has_layers or inventory.has_compiled(get_root(f)):
        return None  # hooks would change how layers are run, and compiled code has none
    named = find_submodules(f, name, forward.keep) if forward.keep else []
    return KeptRegions((*named, *inventory.regions), inventory.submodules if conditions.is_observed else ())


seams.keep_regions = keep_regions
