"""Whether a function treats the places along a dimension of its input by themselves: seen by running it on tiles."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import _disable_current_modes

from revzoo.runtime.inventory import Inventory, take_inventory
from revzoo.runtime.random_state import RandomState, find_generators
from revzoo.runtime.settings import Settings
from revzoo.runtime.tiles import Tile, cut_side
from revzoo.sharded import is_sharded

_Calls = list[list[tuple[nn.Module, Any]]]  # of each run: the modules called, with what they have returned


def explain_mixing(f: Callable[..., Tensor], x: Tensor, side: Any, tiles: Sequence[Tile]) -> str | None:
    """Return why f may not be run on two tiles one by one, as the end of a sentence; None if it may.

    It may if it returns for both together what it returns for each: in evaluation, and in its present mode unless it draws
    random numbers there.

    Args:
        f: the function.
        x: its input.
        side: its second argument, if it has one.
        tiles: the first two.
    """
    inventory, settings = take_inventory(f), Settings(x.device)
    if is_sharded(*inventory.fixed):
        return "its parameters are sharded, and would be gathered for each tile"
    for module in inventory.modules:
        if isinstance(module, _NormBase) and (module.training or not module.track_running_stats):
            return f"{_name(inventory, module)} mixes them in its statistics"
    first, second = tiles
    both = Tile(first.dim, first.start, first.length + second.length)
    limit = min(0.05, 256 * max(inventory.spacing, settings.spacing, torch.finfo(x.dtype).eps))
    random = RandomState(find_generators((x.device,)))
    for training in ([False] * len(inventory.training), inventory.training):
        results, calls = list[Any](), _Calls()
        inventory.set_training(training)
        try:
            with torch.no_grad(), _disable_current_modes(), _note_calls(calls):
                for tile in (both, first, second):
                    calls.append([])
                    results.append(f(tile.of(x)) if side is None else f(tile.of(x), cut_side(side, tile, x)))
        except Exception as error:
            return f"for a tile it raises {type(error).__name__}: {error}"
        finally:
            inventory.set_training(inventory.training)
            random.end_first_run()
            random.rewind()
        if random.has_drawn:
            break
        if _differ(results, limit):
            at = next((a for (a, x), (_, y), (_, z) in zip(*calls, strict=False) if _differ([x, y, z], limit)), None)
            where = "its own code" if at is None else _name(inventory, at)
            return f"what it returns for one place depends on others, as {where} is the first to show"
    return None


@contextmanager
def _note_calls(calls: _Calls) -> Iterator[None]:
    """Note in the last list the modules without submodules that are called, and what they return."""

    def note(module: nn.Module, _: Any, out: Any) -> None:
        if not module._modules:
            calls[-1].append((module, out))

    handle = register_module_forward_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _differ(results: Sequence[Any], limit: float) -> bool:
    """Return whether what is returned for two tiles differs from that for each of them, where one can tell."""
    whole, first, second = results
    if not all(isinstance(x, Tensor) and x.is_floating_point() and x.dim() == whole.dim() for x in results):
        return False
    for dim in range(whole.dim()):
        if first.shape[dim] + second.shape[dim] == whole.shape[dim]:
            parts = torch.cat((first, second), dim)
            return parts.shape != whole.shape or not (whole - parts).norm() <= limit * whole.norm()
    return False


def _name(inventory: Inventory, module: nn.Module) -> str:
    root = inventory.root
    named = root.named_modules() if root is not None else ()
    return f"{next((name for name, each in named if each is module and name), 'it')}, a {type(module).__name__},"
