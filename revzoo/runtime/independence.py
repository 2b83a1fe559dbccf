"""Whether a function treats the places along a dimension of its input by themselves: seen by running it on tiles."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import _disable_current_modes

from revzoo.runtime.attributes import Attributes
from revzoo.runtime.inventory import Inventory, set_training, take_inventory
from revzoo.runtime.random_state import RandomState, find_generators
from revzoo.runtime.settings import Settings
from revzoo.runtime.tiles import Tile, cut_side
from revzoo.sharded import is_sharded

_Calls = list[list[tuple[nn.Module, Any]]]  # of each run: the modules called, with what they have returned
_FEWEST = 64  # places that are looked at: a dilated convolution mixes those that are far from one another


def find_known_mixing(inventory: Inventory, dim: int) -> str | None:
    """Return why a function that holds these modules may not be cut, where that need not be tried; else None."""
    if is_sharded(*inventory.fixed):
        return "its parameters are sharded, and would be gathered for each tile"
    for module in inventory.modules:
        is_of_examples = isinstance(module, _InstanceNorm) and not module.track_running_stats
        if isinstance(module, _NormBase) and (module.training or not module.track_running_stats) and not is_of_examples:
            return f"{_name(inventory, module)} mixes them in its statistics"
        if dim and module.training and drops_examples(module):
            return f"{_name(inventory, module)} drops whole examples"
    return None


def drops_examples(module: nn.Module) -> bool:
    """Return whether a module is a drop path, which draws for each example, of timm's or a library like it."""
    return type(module).__name__.endswith("DropPath") and bool(getattr(module, "drop_prob", None))


def explain_mixing(f: Callable[..., Tensor], x: Tensor, side: Any, tiles: Sequence[Tile]) -> str | None:
    """Return why f may not be run on tiles one by one, as the end of a sentence; None if it may.

    It may if it returns for the first tile and for those after it what it returns for all of them: in evaluation, and in its
    present mode unless it draws random numbers there. A few tiles are enough, and one example where examples are not cut.

    Args:
        f: the function.
        x: its input.
        side: its second argument, if it has one.
        tiles: into which x is cut.
    """
    inventory = take_inventory(f)
    dim, first = tiles[0].dim, tiles[0].length
    if dim and x.shape[0] > 1:
        example = Tile(0, 0, 1)
        x, side = example.of(x), cut_side(side, example, x)
    length = min(max(2 * first, _FEWEST if dim else 0), x.shape[dim])
    parts = [Tile(dim, *piece) for piece in ((0, length), (0, first), (first, length - first))]
    limit = min(0.05, 256 * max(inventory.spacing, Settings(x.device).spacing, torch.finfo(x.dtype).eps))

    def run(note: _Calls | None = None) -> tuple[list[Any], list[dict[Any, Tensor]]]:
        results, held = [], []
        for part in parts:
            if note is not None:
                note.append([])
            of_part = part.of(x).clone()  # f may change it in place
            results.append(f(of_part) if side is None else f(of_part, cut_side(side, part, x)))
            held.append(_list_attributes(inventory))
        return results, held

    fixed = inventory.fixed
    versions = [t._version for t in fixed]
    random, attributes = RandomState(find_generators((x.device,))), Attributes(*inventory.modules)
    for training in ([False] * len(inventory.training), inventory.training):
        set_training(inventory.modules, training)
        try:
            with torch.no_grad(), _disable_current_modes():
                results, held = run()
            random.end_first_run()
            if random.has_drawn:
                return None
            if changed := [t for t, v in zip(fixed, versions, strict=True) if t._version != v]:
                return f"f changes its {inventory.name(changed[0])!r} in every run"
            if left := next((key for key, t in held[0].items() if _is_of_all(t, held[1].get(key))), None):
                return f"f leaves {left[1]!r} on {_name(inventory, inventory.modules[left[0]])} which is of all of them"
            if _differ(results, limit):
                calls = _Calls()
                with torch.no_grad(), _disable_current_modes(), _note_calls(calls):
                    run(calls)
                at = next((a for (a, x), (_, y), (_, z) in zip(*calls, strict=False) if _differ([x, y, z], limit)), None)
                where = "its own code" if at is None else _name(inventory, at)
                return f"what it returns for one place depends on others, as {where} is the first to show"
        except Exception as error:
            return f"for a tile it raises {type(error).__name__}: {error}"
        finally:
            set_training(inventory.modules, inventory.training)
            attributes.restore()
            random.end_first_run()
            random.rewind()
    return None


def _list_attributes(inventory: Inventory) -> dict[Any, Tensor]:
    """Return the floating tensors that modules hold besides parameters and buffers, by module and name."""
    attributes = (((i, key), x) for i, m in enumerate(inventory.modules) for key, x in m.__dict__.items())
    return {at: x for at, x in attributes if isinstance(x, Tensor) and x.is_floating_point()}


def _is_of_all(of_all: Tensor, of_first: Tensor | None) -> bool:
    """Return whether a tensor that f has left, such as a loss, is another one for the first tile."""
    return of_first is not None and of_first.shape == of_all.shape and not torch.equal(of_first, of_all)


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
    """Return whether what is returned for all places differs at one of them from that for its part, where one can tell."""
    whole, first, second = results
    if not all(isinstance(x, Tensor) and x.is_floating_point() and x.dim() == whole.dim() and x.numel() for x in results):
        return False
    for dim in range(whole.dim()):
        lengths = first.shape[dim], second.shape[dim]
        if sum(lengths) == whole.shape[dim]:
            if any(part.shape != x.shape for part, x in zip(whole.split(lengths, dim), (first, second), strict=True)):
                return True
            is_finite = whole.isfinite()
            error, size = (
                x.where(is_finite, 0.0).movedim(dim, 0).flatten().view(sum(lengths), -1).norm(dim=1)
                for x in (whole - torch.cat((first, second), dim), whole)
            )
            return not bool((error <= limit * (size + size.square().mean().sqrt())).all())
    return False


def _name(inventory: Inventory, module: nn.Module) -> str:
    root = inventory.root
    named = root.named_modules() if root is not None else ()
    return f"{next((name for name, each in named if each is module and name), 'f')}, a {type(module).__name__},"
