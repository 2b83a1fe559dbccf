"""What a module holds that its result depends on: submodules, training flags, parameters and buffers.

It is found once, kept with the module, and found again only if something in it has been exchanged. To see that, all entries of
its modules' dictionaries are compared with what was in them, by identity, in C.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import cache, cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, cast
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from revzoo.errors import InputError
from revzoo.sharded import is_sharded

Tensors = dict[str, Tensor | None]
Pattern = str | type[nn.Module] | Callable[[nn.Module], bool]  # names submodules
_NAME, _LEARNED = "_revzoo_inventory", "_revzoo_learned"  # in the module's __dict__
_is_training: Callable[[nn.Module], bool] = attrgetter("training")
_get_version: Callable[[Tensor], int] = attrgetter("_version")
_get_device: Callable[[Tensor], torch.device] = attrgetter("device")
_get_dtype: Callable[[Tensor], torch.dtype] = attrgetter("dtype")


class Inventory:
    """What one module held when it was called. It does not hold the module itself, which would be a cycle.

    Args:
        root: the module; None for a function that is none.
        silent: its submodules that do not run.

    Attributes:
        fixed: parameters and buffers that must be unchanged until backward.
        strided: those of them that have strides.
        learned: what has been seen of the module's calls.
        statistics: the buffers of norms that move their running statistics in this call.
    """

    def __init__(self, root: nn.Module | None, silent: Sequence[nn.Module] = ()):
        modules = [] if root is None else _walk(root, silent)
        self._root = None if root is None else ref(root)
        self.submodules: Sequence[nn.Module] = modules[1:]
        self.training = list(map(_is_training, modules))
        holders = [cast(dict[str, Any], d) for m in modules for d in (m._modules, m._parameters, m._buffers)]
        self._entries = [d.values() for d in holders]  # views, which show what is in the dictionaries at any time
        self._ids = list(map(id, chain.from_iterable(self._entries)))
        moving = [m for m in modules if isinstance(m, _NormBase) and m.training and m.track_running_stats]
        self.statistics: list[Tensors] = [m._buffers for m in moving]
        self.only_moves = [_only_moves(m) for m in moving]
        skipped = set(map(id, self.statistics))
        self._held = [(d, dict(d)) for d in holders if id(d) not in skipped]
        self.fixed = [t for _, held in self._held for t in held.values() if isinstance(t, Tensor)]
        try:
            list(map(_get_version, self.fixed))
        except RuntimeError:
            self.fixed = [t for t in self.fixed if not t.is_inference()]  # they have no version, nor can they change
        self.strided = [t for t in self.fixed if t.layout is torch.strided and not t.is_nested and not is_lazy(t)]
        self.devices = frozenset(map(_get_device, self.fixed))
        self.learned = Learned() if root is None else _find_learned(root)
        self.named: dict[Any, list[nn.Module]] = {}  # submodules by the patterns that name them

    @property
    def root(self) -> nn.Module | None:
        """The module itself."""
        return None if self._root is None else self._root()

    @property
    def modules(self) -> list[nn.Module]:
        """The module and those inside, as long as it exists."""
        root = self.root
        return [] if root is None else [root, *self.submodules]

    def has_same_entries(self) -> bool:
        """Return whether every dictionary holds the very objects that it held."""
        return list(map(id, chain.from_iterable(self._entries))) == self._ids

    def read_training(self) -> list[bool]:
        """Return the training flags of all modules as they are now."""
        return list(map(_is_training, self.modules))

    @cached_property
    def has_layers(self) -> bool:
        """Whether one of the modules defines an inverse, so that it may be undone by itself."""
        return any(map(defines_inverse, self.submodules))

    def set_training(self, wanted: list[bool]) -> None:
        """Set each flag: not by .train(), since submodules have flags of their own."""
        for module, flag in zip(self.modules, wanted, strict=True):
            module.training = flag

    @cached_property
    def spacing(self) -> float:
        """Relative spacing of the coarsest numbers among the fixed tensors; 0 without any."""
        return max(map(find_spacing, set(map(_get_dtype, self.fixed))), default=0.0)

    @cached_property
    def moving_sizes(self) -> frozenset[int]:
        """The lengths of statistics that move between two runs, although no result depends on them.

        InstanceNorm has this many numbers for each example.
        """
        moving = (buffers for buffers, only_moves in zip(self.statistics, self.only_moves, strict=True) if only_moves)
        return frozenset(len(b) for buffers in moving for b in buffers.values() if b is not None and b.dim() == 1)

    def find_replaced(self) -> str | None:
        """Return the name of what was replaced by another tensor or module. FSDP exchanges shards and whole tensors of one."""
        for holder, held in self._held:
            for key, old in held.items():
                new = holder.get(key)
                if new is not old and new is not None and old is not None and not is_sharded(old, new):
                    return self.name(old) if isinstance(old, Tensor) else key
        return None

    def name(self, tensor: Tensor) -> str:
        """Return the name that a tensor had, relative to the module; "side input" if it is none of the module's."""
        held = {id(holder): held for holder, held in self._held}
        for name, module in () if self.root is None else self.root.named_modules():
            for holder in (module._parameters, module._buffers):
                for key, t in held.get(id(holder), {}).items():
                    if t is tensor:
                        return f"{name}.{key}".removeprefix(".")
        return "side input"

    def __reduce__(self) -> Any:
        return type(None), ()  # in a copy of the module, or what is unpickled, it is found again


class Learned:
    """What has been seen of the calls of a module, in the first of them and in rounds that are compared.

    Attributes:
        trials: how many more second runs are watched to see what the module does.
        sets_attributes: whether a second run has set attributes of the modules.
        differentiates: whether it differentiates inside its own forward.
        may_keep_products: whether no product was read or changed where no dispatch mode sees it (`selective.py`).
        regions: submodules that have returned integers, whose outputs are kept (`kept_regions.py`).
    """

    def __init__(self) -> None:
        self.trials = 2
        self.sets_attributes = self.differentiates = False
        self.may_keep_products = True
        self.regions: WeakSet[nn.Module] = WeakSet()

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy learns for itself


def find_plain_tensors(modules: Sequence[nn.Module]) -> dict[tuple[int, str], int]:
    """Return the versions of tensors that modules hold as attributes but not as parameters or buffers, by their place."""
    attributes = (((i, key), value) for i, m in enumerate(modules) for key, value in m.__dict__.items())
    return {at: t._version for at, t in attributes if isinstance(t, Tensor) and not (t.requires_grad or t.is_inference())}


def take_inventory(f: Any) -> Inventory:
    """Return what a function holds now."""
    if not isinstance(f, nn.Module):
        return Inventory(None)
    root, name = get_root(f), _NAME
    silent: Sequence[nn.Module] = ()
    if hasattr(type(f), "silent_modules"):
        silent = cast(Any, f).silent_modules
        name = "_".join([_NAME, *(str(id(m)) for m in silent)])
    known: Inventory | None = root.__dict__.get(name)
    # A shallow copy of a module has the inventory of the other one.
    is_known = known is not None and known.root is root and known.has_same_entries()
    if known is not None and is_known and known.training == known.read_training():
        return known
    # On the root, not on what stands for it: a network that is deleted is freed with its blocks.
    inventory = root.__dict__[name] = Inventory(root, silent)
    return inventory


def forget_inventory(f: Any) -> None:
    """Let go of what a module held in its latest recorded call: since then its tensors may have been exchanged."""
    if isinstance(f, nn.Module) and not torch.compiler.is_compiling():
        attributes = get_root(f).__dict__
        for name in [name for name in attributes if name.startswith(_NAME)]:  # of the branches of a block, too
            del attributes[name]


def get_root(f: nn.Module) -> nn.Module:
    """Return the module that has f's tensors: f itself, or the module that f stands for."""
    return getattr(f, "stands_for") if hasattr(type(f), "stands_for") else f  # noqa: B009


def check_patterns(keep: Any) -> tuple[Pattern, ...]:
    """Return what names regions to keep.

    Raises:
        InputError: something is no name, class of modules or function.
    """
    patterns = (keep,) if isinstance(keep, str) or callable(keep) else tuple(keep)
    for each in patterns:
        if not isinstance(each, str) and not callable(each):
            raise InputError(f'keep is a list of names ("*.router"), classes of modules or functions. Received: {each!r}.')
    return patterns


def find_submodules(f: nn.Module, name: str, patterns: Sequence[Pattern]) -> list[nn.Module]:
    """Return the submodules of a step that are named by patterns.

    Args:
        f: the step.
        name: its name; a pattern is a name within the step, or begins with this.
        patterns: names with wildcards, classes, functions that return whether to keep a module.
    """

    def fits(path: str, module: nn.Module, pattern: Pattern) -> bool:
        if isinstance(pattern, str):
            return fnmatch(path, pattern) or fnmatch(f"{name}.{path}", pattern)
        return isinstance(module, pattern) if isinstance(pattern, type) else bool(pattern(module))

    named = ((path, module) for path, module in get_root(f).named_modules() if path)
    return [module for path, module in named if any(fits(path, module, pattern) for pattern in patterns)]


def defines_inverse(module: nn.Module | None) -> bool:
    """Return whether a module, or its class, has a method `inverse`."""
    # Not hasattr: for what is missing, a module looks through its parameters, buffers and children.
    return callable(getattr(type(module), "inverse", None)) or "inverse" in vars(module)


def _find_learned(root: nn.Module) -> Learned:
    learned = root.__dict__.get(_LEARNED)
    if learned is None:
        learned = root.__dict__[_LEARNED] = Learned()
    return cast(Learned, learned)


@cache
def find_spacing(dtype: torch.dtype) -> float:
    """Return the relative spacing of the numbers of a dtype; 0 for integers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _walk(module: nn.Module, silent: Sequence[nn.Module]) -> list[nn.Module]:
    """Return a module and all modules in it but the silent ones."""
    modules = {id(m): m for m in (*silent, module)}
    waiting = [module]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in modules:
                modules[id(child)] = child
                waiting.append(child)
    return list(modules.values())[len(silent) :]


def _only_moves(norm: _NormBase) -> bool:
    """Return whether a norm in training moves its running statistics but normalizes without them, as PyTorch's do.

    A subclass with a forward of its own may use them, unless that calls `batch_norm` in the end, as timm's and revzoo's do.
    """
    home = str(getattr(norm.forward, "__module__", ""))
    return home.startswith(("torch.nn.modules.", "timm.layers.norm_act", "revzoo."))
