"""Submodules of a step whose outputs are kept: what a second run has to decide as the first one did.

The router of a mixture of experts sends each token to the experts with the largest scores. Where two scores are nearly equal,
rounding in a second run may turn the decision, and with it the shapes of all that follows. So what such a module returns in
the first run takes the place of what it returns in the second, and so do the integers that autograd saves in it. The module
itself runs again, for what autograd saves besides.

Kept are the submodules that a user names, and those that are seen to return integers: indices of `topk` or `argmax`. A decision
in the code of a step outside of its submodules is not seen.

Cost: the outputs of these modules.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map_only

from revzoo.errors import InputError
from revzoo.runtime import seams
from revzoo.runtime.compiling import are_compiled
from revzoo.runtime.conditions import Conditions
from revzoo.runtime.exact import attach_graph
from revzoo.runtime.forward import Forward
from revzoo.runtime.inventory import defines_inverse, find_submodules


class KeptRegions:
    """What the regions of one call have returned.

    Args:
        named: the submodules to keep.
        seen: others, which are kept if they return integers.
    """

    def __init__(self, named: Sequence[nn.Module], seen: Sequence[nn.Module] = ()):
        self._named = set(named)
        self._modules = list(dict.fromkeys((*named, *seen)))
        self._outputs: dict[tuple[nn.Module, int], list[Tensor]] = {}  # by module, and number of its call
        self._calls: Counter[nn.Module] = Counter()
        self._open: list[tuple[nn.Module, int]] = []  # calls that have begun: the module, and the next slot
        self._integers: list[tuple[int, Tensor]] = []  # saved in them, by slot
        self.is_paused = False
        self._thread = 0
        self._next = 0  # the slot of the next tensor that autograd saves
        self.slots: dict[int, tuple[Tensor, int]] = {}  # integers that autograd saved in a region, with their versions

    @property
    def seen_regions(self) -> list[nn.Module]:
        """Those that were kept because they returned integers."""
        return [module for module in self.regions if module not in self._named]

    @property
    def regions(self) -> list[nn.Module]:
        """The modules that were kept."""
        return list(dict.fromkeys(module for module, _ in self._outputs))

    def record(self) -> AbstractContextManager[None]:
        """Return a context for the first run."""
        self._thread = get_ident()
        return _hook(self._modules, self._begin, self._end)

    def note_saved(self, slot: int, tensor: Tensor) -> None:
        """Note a tensor that autograd saves in the first run."""
        self._next = slot + 1
        if self._open and not tensor.is_floating_point() and not tensor.is_complex():
            self._integers.append((slot, tensor))

    def end_first_run(self) -> None:
        """Let go of what is not kept."""
        self._modules, self._open, self._integers = self.regions, [], []

    def hand_out(self) -> AbstractContextManager[None]:
        """Return a context for a second run."""
        calls, thread = Counter[nn.Module](), get_ident()

        def replace(module: nn.Module, _: Any, out: Any) -> Any:
            if torch.compiler.is_compiling() or get_ident() != thread:
                return None
            calls[module] += 1
            outputs = self._outputs.get((module, calls[module]))
            if outputs is None or len(outputs) != len(_list_tensors(out)):
                return None  # another run than the first, which will be noticed by what it saves
            kept = iter(outputs)
            return tree_map_only(Tensor, lambda x: _put_in_place(next(kept), x), out)

        return _hook(self._modules, None, replace)

    def _begin(self, module: nn.Module, _: Any) -> None:
        if self._is_looking():
            self._open.append((module, self._next))

    def _end(self, module: nn.Module, _: Any, out: Any) -> None:
        if not self._is_looking():
            return
        self._calls[module] += 1
        start = 0
        while self._open:  # a call inside may have raised what f has caught
            opened, start = self._open.pop()
            if opened is module:
                break
        tensors = _list_tensors(out)
        if tensors and not any(map(_is_wrapped, tensors)) and (module in self._named or any(map(_is_index, tensors))):
            # Copies: f may change what it is given in place.
            self._outputs[module, self._calls[module]] = [x.detach().clone() for x in tensors]
            self.slots.update((slot, (x, x._version)) for slot, x in self._integers if slot >= start)
        if not self._open:
            self._integers.clear()

    def _is_looking(self) -> bool:
        """Return whether a call belongs to this run: not to another thread, nor to what is compiled, as in torch.cond."""
        return not (torch.compiler.is_compiling() or self.is_paused or get_ident() != self._thread)


@contextmanager
def _hook(modules: Sequence[nn.Module], before: Callable[..., Any] | None, after: Callable[..., Any]) -> Iterator[None]:
    """Have hooks on modules for the time of a `with` statement."""
    with ExitStack() as stack:
        for module in modules:
            if before is not None:
                stack.enter_context(module.register_forward_pre_hook(before))
            stack.enter_context(module.register_forward_hook(after))
        yield


_is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def _list_tensors(out: Any) -> list[Tensor]:
    """Return the tensors that a module returns, in the collections that PyTorch knows: an iterator must not be used up."""
    return [x for x in tree_leaves(out) if isinstance(x, Tensor)]


def _is_index(x: Tensor) -> bool:
    return x.dtype in (torch.int64, torch.int32)


def _put_in_place(kept: Tensor, x: Tensor) -> Tensor:
    """Return a copy of the kept tensor, differentiated as the one that it replaces."""
    return attach_graph(kept.clone(), (1.0,), x) if x.requires_grad else kept.clone()


def keep_regions(f: Callable[..., Any], name: str, forward: Forward, conditions: Conditions) -> KeptRegions | None:
    """Return what keeps the outputs of submodules of a call that is about to run first; None where there is nothing to keep.

    Raises:
        InputError: a module that is named cannot be kept.
    """
    if not isinstance(f, nn.Module):
        return None
    inventory, named = conditions.inventory, list[nn.Module]()
    if forward.keep:
        named = [module for each in inventory.named.get((name, forward.keep), ()) if (module := each())]
        named = named or find_submodules(f, name, forward.keep)
        inventory.named[name, forward.keep] = list(map(ref, named))
    is_compiled = are_compiled(inventory.modules)
    if refused := [module for module in named if is_compiled or not _may_have_hooks(module)]:
        raise InputError(
            f"keep names a {type(refused[0]).__name__} of {name} that is compiled, scripted or made of layers with an inverse, "
            "so its output cannot be kept. Name other modules, or compile the whole model instead of the step."
        )
    seen = list[nn.Module]()
    if conditions.is_observed and not is_compiled:  # norms return no integers
        seen = [module for module in inventory.submodules if not isinstance(module, _NormBase) and _may_have_hooks(module)]
    known = [module for module in inventory.submodules if module in inventory.learned.regions] if not is_compiled else []
    return KeptRegions((*named, *known), seen) if named or known or seen else None


def _may_have_hooks(module: nn.Module) -> bool:
    """Return whether hooks change nothing about how a module is run: layers with hooks are not inverted one by one."""
    return not isinstance(module, torch.jit.ScriptModule) and not any(map(defines_inverse, module.modules()))


seams.keep_regions = keep_regions
