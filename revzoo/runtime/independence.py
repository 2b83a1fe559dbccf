"""Whether a function treats the places along a dimension of its input by themselves, so that it may run on pieces of it.

Whatever is cut asks here: steps in tiles, norms in pieces, heads of language models in chunks. Groups of heads, which are no
pieces of an input but terms of a sum, are tried in `block_steps/branch.py`. Two tests, on the full length:

    values    f of the first and of the last piece returns what f of everything returns there, with the parameters that f has
              and with random ones: those that are zero hide what they multiply
    marks     NaN in one of these pieces leaves all others finite: 0 x NaN is NaN, so that nothing hides

What has been seen holds for pieces of that size, until the modules of f, their classes, hooks or flags are others, or the input
is longer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _disable_current_modes

from revzoo.device import has_value, is_capturing
from revzoo.runtime.attributes import Attributes
from revzoo.runtime.inventory import Inventory, set_training
from revzoo.runtime.nested import tensors_in
from revzoo.runtime.random_state import RandomState, find_generators
from revzoo.runtime.settings import Settings
from revzoo.runtime.tiles import Tile

Piece = Callable[[Tensor, Tile], Any]  # f, given a piece of its input and which piece that is
OF_MODULES = {*vars(nn.Module()), "_call_impl"}  # attributes that every module has or may be given by this package
_HOLDING = Tensor, float, int, list, tuple, dict  # kinds of other attributes that f may leave results in
_Check = Callable[[Any, Any], bool]  # whether a result for everything, and one of a trial, show that places are mixed


def find_known_mixing(inventory: Inventory, dim: int) -> str | None:
    """Return why a function that holds these modules may not be cut, where that need not be tried; else None."""
    for module in inventory.modules:
        is_of_examples = isinstance(module, _InstanceNorm) and not module.track_running_stats
        if isinstance(module, _NormBase) and (module.training or not module.track_running_stats) and not is_of_examples:
            return f"{_name(inventory, module)} mixes them in its statistics"
        if dim and module.training and drops_examples(module):
            return f"{_name(inventory, module)} drops whole examples"
    return None


def drops_examples(module: nn.Module) -> bool:
    """Return whether a module is a drop path, which draws for each example, of timm's, torchvision's or one like these."""
    is_one = type(module).__name__.endswith(("DropPath", "StochasticDepth"))
    return is_one and bool(getattr(module, "drop_prob", getattr(module, "p", None)))


def can_tell(x: Tensor) -> bool:
    """Return whether an input has finite numbers, so that runs on it can be compared."""
    return has_value(x) and x.numel() > 0 and bool(x.isfinite().all())


def describe_code(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """Return what the code of modules is besides their tensors and submodules: classes, hooks, functions, flags and words."""
    others = [(*m._forward_pre_hooks.values(), *m._forward_hooks.values()) for m in modules]
    held = [
        (k, x) for m in modules for k, x in vars(m).items() if k not in OF_MODULES and (callable(x) or type(x) in (bool, str))
    ]
    flags = (x if isinstance(x, bool | str) else getattr(x, "__code__", type(x)) for _, x in held)
    codes = (getattr(each, "__code__", type(each)) for each in chain.from_iterable(others))
    return (*map(type, modules), *codes, *(key for key, _ in held), *flags)


def find_mixing(
    f: Piece, inventory: Inventory, x: Tensor, dim: int, size: int, kind: Any = None, may_draw: bool = True
) -> str | None:
    """Return why f may not be run on pieces one by one, as the end of a sentence; None if it may, or if nobody can tell.

    Values are compared in its present mode, or in evaluation if it draws random numbers there. What f raises for everything is
    raised here, too.

    Args:
        f: the function.
        inventory: of its modules.
        x: its whole input; one without values, or that is not finite, tells nothing.
        dim: the dimension that is cut, from 0.
        size: places in a piece.
        kind: what else tells functions of these modules apart.
        may_draw: whether f may draw random numbers, which each piece then does for itself.
    """
    if (reason := find_known_mixing(inventory, dim)) is not None:
        return reason
    key, length = (dim, size, kind, describe_code(inventory.modules)), x.shape[dim]
    tried, reason = inventory.tested.get(key, (-1, None))
    if reason is not None or length <= tried or is_capturing() or torch.compiler.is_dynamo_compiling():
        return reason
    if can_tell(x):
        with on_trial(inventory, x.device):
            reason = _Trial(f, inventory, x, dim, size, may_draw).find_reason()
        inventory.tested[key] = length, reason
    return reason


class _Trial:
    def __init__(self, f: Piece, inventory: Inventory, x: Tensor, dim: int, size: int, may_draw: bool):
        length = x.shape[dim]
        self._f, self._inventory, self._x, self._may_draw = f, inventory, x, may_draw
        self._whole = Tile(dim, 0, length)
        last = (length - 1) // size * size
        self._pieces = [Tile(dim, 0, min(size, length)), Tile(dim, last, length - last)]
        self._limit = min(0.05, 256 * max(inventory.spacing, Settings(x.device).spacing, torch.finfo(x.dtype).eps))
        self._random = find_generators((x.device,))

    def find_reason(self) -> str | None:
        whole = self._run(self._whole)
        try:
            if (reason := self._find_marks(whole) or self._compare()) is not None:
                return reason
            with suppress(Exception):  # not every function takes random parameters
                randomize(self._inventory.modules)
                return self._compare()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"for a piece it raises {type(error).__name__}: {error}"
        return None

    def _compare(self) -> str | None:
        """Compare values, in training and, if random numbers are drawn there, in evaluation."""
        inventory = self._inventory
        for flags in (inventory.training, [False] * len(inventory.training)):
            set_training(inventory.modules, flags)
            try:
                random, fixed = RandomState(self._random), [*_list_tensors(inventory)]
                versions = [t._version for _, t in fixed]
                whole, held = self._run(self._whole), _list_attributes(inventory)
                random.end_first_run()
                if changed := [key for (key, t), version in zip(fixed, versions, strict=True) if t._version != version]:
                    return f"f changes its {changed[0]!r} in every run"
                if random.has_drawn and not self._may_draw:
                    return "f draws random numbers"
                for piece in () if random.has_drawn else self._pieces:
                    check = lambda a, b, piece=piece: self._differs(a, b, piece)  # noqa: E731
                    if check(whole, self._run(piece)):
                        return self._name_first(check, piece)
                    if left := next((at for at, t in _list_attributes(inventory).items() if _is_of_all(t, held.get(at))), None):
                        return f"f leaves {left[1]!r} on {_name(inventory, inventory.modules[left[0]])} which is of all of them"
                if not random.has_drawn:
                    return None
            finally:
                set_training(inventory.modules, inventory.training)
        return None

    def _find_marks(self, whole: Any) -> str | None:
        """Look for NaN where it was not put."""
        for piece in self._pieces if self._pieces[0] != self._whole else ():
            check = lambda a, b, piece=piece: self._spreads(a, b, piece)  # noqa: E731
            with suppress(Exception):  # f may take no NaN
                if check(whole, self._run(self._whole, piece)):
                    return self._name_first(check, self._whole, piece)
        return None

    def _run(self, tile: Tile, marked: Tile | None = None) -> Any:
        x = tile.of(self._x).clone()  # f may change it in place
        if marked is not None:
            marked.of(x).fill_(torch.nan)
        with torch.no_grad():
            return self._f(x, tile)

    def _name_first(self, check: _Check, tile: Tile, marked: Tile | None = None) -> str:
        """Return a reason that names the first module without submodules whose results differ."""
        calls: list[list[tuple[nn.Module, Any]]] = []
        for each in ((self._whole, None), (tile, marked)):
            calls.append([])
            with _note_calls(calls[-1]):
                self._run(*each)
        at = next((module for (module, a), (_, b) in zip(*calls, strict=False) if check(a, b)), None)
        where = "its own code" if at is None else _name(self._inventory, at)
        return f"what it returns for one place depends on others, as {where} is the first to show"

    def _differs(self, whole: Any, part: Any, piece: Tile) -> bool:
        """Return whether a result for everything has other values at a piece than that for the piece alone, if one can tell."""
        if not _are_comparable(whole, part):
            return False
        for dim in range(whole.dim()):
            if part.shape[dim] * self._whole.length == whole.shape[dim] * piece.length:
                share = whole.shape[dim] // self._whole.length or 1
                expected = whole.narrow(dim, piece.start * share, part.shape[dim])
                if expected.shape != part.shape:
                    return True
                known = expected.isfinite()
                error, size = (t.where(known, 0.0).movedim(dim, 0).flatten(1).norm(dim=1) for t in (expected - part, expected))
                return not bool((error <= self._limit * (size + size.square().mean().sqrt())).all())
        return False

    def _spreads(self, whole: Any, marked: Any, piece: Tile) -> bool:
        """Return whether NaN in a piece of the input has made something else NaN, too, if one can tell."""
        dim, _, length = self._whole
        if not _are_comparable(whole, marked) or whole.shape != marked.shape or whole.dim() <= dim:
            return False
        share = whole.shape[dim] // length
        is_spoilt = (whole.isfinite() & ~marked.isfinite()).movedim(dim, 0).flatten(1).any(1)
        is_spoilt[piece.start * share : (piece.start + piece.length) * share] = False
        return share * length == len(is_spoilt) and bool(is_spoilt.any())


def _are_comparable(a: Any, b: Any) -> bool:
    return all(isinstance(t, Tensor) and t.is_floating_point() and t.numel() for t in (a, b)) and a.dim() == b.dim() > 0


@contextmanager
def on_trial(inventory: Inventory, device: torch.device) -> Iterator[None]:
    """Run modules inside the block without a trace: tensors, flags, attributes and random streams are as before it.

    Hooks in them run, too; what these keep elsewhere stays.

    No dispatch mode sees it: those that count bytes and FLOPs count a step that is not tried.
    """
    random, attributes = RandomState(find_generators((device,))), Attributes(*inventory.modules)
    cache = dict(parametrize._cache)
    try:
        for module in inventory.modules:
            if isinstance(module._buffers, dict):
                module._buffers.update({key: None if b is None else b.clone() for key, b in module._buffers.items()})
        with _disable_current_modes():
            yield
    finally:
        attributes.restore()
        random.end_first_run()
        random.rewind()
        torch.clear_autocast_cache()  # of casts without a graph, as those of parametrize.cached()
        parametrize._cache.clear()
        parametrize._cache.update(cache)


def randomize(modules: Sequence[nn.Module]) -> None:
    """Give modules other parameters and buffers, with noise of a size that is usual for each: inside `on_trial`."""
    known: dict[Tensor, Tensor] = {}  # one may have several names
    tables: list[Any] = [table for module in modules for table in (module._parameters, module._buffers)]
    for table in (table for table in tables if isinstance(table, dict)):  # TorchScript's cannot be put back
        for key, p in table.items():
            if p is not None and p.dtype is torch.bool:
                table[key] = ~p
            elif p is not None and p.is_floating_point() and p.dtype.itemsize >= 2:
                size = 0.5 if p.dim() < 2 else p[0].numel() ** -0.5
                if p not in known:
                    noisy = torch.randn_like(p.detach()).mul_(size).add_(p.detach())
                    known[p] = nn.Parameter(noisy, p.requires_grad) if isinstance(p, nn.Parameter) else noisy
                table[key] = known[p]


def _list_tensors(inventory: Inventory) -> Iterator[tuple[str, Tensor]]:
    root = inventory.root
    for named in () if root is None else (root.named_parameters(), root.named_buffers()):
        yield from ((name, t) for name, t in named if not t.is_inference())


def _list_attributes(inventory: Inventory) -> dict[Any, Any]:
    """Return the tensors and numbers that modules hold besides parameters and buffers, by module, name and place."""
    own = ((i, key, x) for i, m in enumerate(inventory.modules) for key, x in vars(m).items() if key not in OF_MODULES)
    held = ((i, key, [x] if isinstance(x, float | int) else [*tensors_in(x)]) for i, key, x in own if isinstance(x, _HOLDING))
    return {(i, key, place): each for i, key, found in held for place, each in enumerate(found)}


def _is_of_all(of_piece: Any, of_all: Any) -> bool:
    """Return whether what f has left, such as a loss, is another one for a piece."""
    if of_all is None or of_piece is of_all:
        return False
    return not (torch.equal(of_piece, of_all) if isinstance(of_piece, Tensor) else of_piece == of_all)


@contextmanager
def _note_calls(calls: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Note the modules without submodules that are called, and what they return."""

    def note(module: nn.Module, _: Any, out: Any) -> None:
        if not module._modules:
            calls.append((module, out))

    handle = register_module_forward_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _name(inventory: Inventory, module: nn.Module) -> str:
    root = inventory.root
    named = root.named_modules() if root is not None else ()
    return f"{next((name for name, each in named if each is module and name), 'f')}, a {type(module).__name__},"
