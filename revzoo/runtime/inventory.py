"""What a module holds that its result depends on: submodules, training flags, parameters and buffers.

It is found once, and found again only if something in it has been exchanged. To see that, all entries of its modules'
dictionaries are compared with what was in them, by identity, in C.

An inventory owns nothing: it refers to modules and tensors weakly, and no module holds it. So what a user exchanges is freed
at once, and modules are copied and pickled without it.
"""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from functools import cache, cached_property, partial
from itertools import chain
from operator import attrgetter, call, is_, is_not
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from revzoo.device import is_sharded
from revzoo.errors import InputError

Tensors = dict[str, Tensor | None]
Pattern = str | type[nn.Module] | Callable[[nn.Module], bool]  # names submodules
_is_training: Callable[[nn.Module], bool] = attrgetter("training")
_get_version: Callable[[Tensor], int] = attrgetter("_version")
_get_device: Callable[[Tensor], torch.device] = attrgetter("device")
_get_dtype: Callable[[Tensor], torch.dtype] = attrgetter("dtype")
_exists: Any = partial(is_not, None)  # as those above, in C
_HOLDERS = [attrgetter(name) for name in ("_modules", "_parameters", "_buffers")]
_get_holders = attrgetter("_modules", "_parameters", "_buffers")


class Inventory:
    """What one module held when it was called.

    Args:
        root: the module; None for a function that is none.
        silent: its submodules that do not run.

    Attributes:
        training: the flag of each module.
        learned: what has been seen of the module's calls.
    """

    def __init__(self, root: nn.Module | None, silent: Sequence[nn.Module] = ()):
        modules = [] if root is None else _walk(root, silent)
        self._modules = list(map(ref, modules))
        self.training = read_training(modules)
        self._entries = list(map(_refer, _list_entries(modules)))  # of tensors and modules
        moving = [m for m in modules if isinstance(m, _NormBase) and m.training and m.track_running_stats]
        self._moving = list(map(ref, moving))
        self.only_moves = [_only_moves(m) for m in moving]
        places = [_Place(ref(m), h, key) for m in modules for h in _HOLDERS for key in h(m).keys()]  # noqa: SIM118 - TorchScript's have no others
        is_moving = {(m, key) for m in moving for key in m._buffers}
        self._places = [None if (place.module(), place.key) in is_moving else place for place in places]
        fixed = [e() for place, e in zip(self._places, self._entries, strict=True) if place and isinstance(e(), Tensor)]
        try:
            list(map(_get_version, fixed))
        except RuntimeError:
            fixed = [t for t in fixed if not t.is_inference()]  # they have no version, nor can they change
        self._fixed = list(map(ref, fixed))
        self.has_strides = [t.layout is torch.strided and not t.is_nested and not is_lazy(t) for t in fixed]
        self.devices = frozenset(map(_get_device, fixed))
        # Relative spacing of the coarsest numbers among the fixed tensors; 0 without any.
        self.spacing = max(map(find_spacing, set(map(_get_dtype, fixed))), default=0.0)
        self.learned = Learned() if root is None else _learned.setdefault(root, Learned())
        self.named: dict[Any, list[ref[nn.Module]]] = {}  # submodules by the patterns that name them
        # How long inputs were that were tried in pieces (`independence.py`), or into how many groups heads can be put, and what
        # stood against that.
        self.tested: dict[Any, tuple[int, str | None]] = {}

    @property
    def root(self) -> nn.Module | None:
        """The module itself."""
        return self._modules[0]() if self._modules else None

    @property
    def modules(self) -> list[nn.Module]:
        """The module and those inside, those that still exist."""
        return list(filter(_exists, map(call, self._modules)))

    @property
    def submodules(self) -> list[nn.Module]:
        """Those inside."""
        return self.modules[1:]

    @property
    def fixed(self) -> list[Tensor]:
        """Parameters and buffers that must be unchanged until backward, those that still exist."""
        return list(filter(_exists, map(call, self._fixed)))

    @property
    def statistics(self) -> list[Tensors]:
        """The buffers of norms that move their running statistics in this call."""
        return [m._buffers for m in map(call, self._moving) if m is not None]

    def has_same_entries(self) -> bool:
        """Return whether every dictionary holds the very objects that it held."""
        modules = list(map(call, self._modules))
        if None in modules:
            return False
        now = _list_entries(cast(list[nn.Module], modules))
        return len(now) == len(self._entries) and all(map(is_, now, map(call, self._entries)))

    @cached_property
    def has_layers(self) -> bool:
        """Whether one of the modules defines an inverse, so that it may be undone by itself."""
        return any(map(defines_inverse, self.submodules))

    @cached_property
    def moving_sizes(self) -> frozenset[int]:
        """The lengths of statistics that move between two runs, although no result depends on them.

        InstanceNorm has this many numbers for each example.
        """
        moving = (buffers for buffers, only_moves in zip(self.statistics, self.only_moves, strict=True) if only_moves)
        return frozenset(len(b) for buffers in moving for b in buffers.values() if b is not None and b.dim() == 1)

    def find_replaced(self) -> str | None:
        """Return the name of what was replaced by another tensor or module. FSDP exchanges shards and whole tensors of one."""
        for place, reference in zip(self._places, self._entries, strict=True):
            if place is None or reference is _refer_to_nothing or (module := place.module()) is None:
                continue
            old, new = reference(), dict(place.holder(module).items()).get(place.key)
            if new is not None and new is not old and not is_sharded(*(t for t in (old, new) if isinstance(t, Tensor))):
                return self._name(place)
        return None

    def name(self, tensor: Tensor) -> str:
        """Return the name that a tensor had, relative to the module; "side input" if it is none of the module's."""
        places = zip(self._places, self._entries, strict=True)
        return next((self._name(place) for place, reference in places if place and reference() is tensor), "side input")

    def _name(self, place: "_Place") -> str:
        named = () if self.root is None else self.root.named_modules()
        path = next((path for path, module in named if module is place.module()), "")
        return f"{path}.{place.key}".removeprefix(".")


class _Place(NamedTuple):
    """Where an entry of an inventory stood.

    Args:
        module: the module that has it.
        holder: returns the dictionary of a module that has it.
        key: in the dictionary.
    """

    module: ref[nn.Module]
    holder: Callable[[nn.Module], dict[str, Any]]
    key: str


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


_learned: WeakKeyDictionary[nn.Module, Learned] = WeakKeyDictionary()
# By silent submodules, and by those and training flags.
_inventories: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Inventory]] = WeakKeyDictionary()


def find_plain_tensors(modules: Sequence[nn.Module]) -> dict[tuple[int, str], int]:
    """Return the versions of tensors that modules hold as attributes but not as parameters or buffers, by their place."""
    attributes = (((i, key), value) for i, m in enumerate(modules) for key, value in m.__dict__.items())
    return {at: t._version for at, t in attributes if isinstance(t, Tensor) and not (t.requires_grad or t.is_inference())}


def take_inventory(f: Any) -> Inventory:
    """Return what a function holds now."""
    if not isinstance(f, nn.Module):
        return Inventory(None)
    root = get_root(f)
    silent: Sequence[nn.Module] = cast(Any, f).silent_modules if hasattr(type(f), "silent_modules") else ()
    inventories = _inventories.get(root)
    if inventories is None:
        inventories = _inventories[root] = {}
    key = tuple(map(id, silent))
    known = inventories.get(key)
    if known is not None and known.has_same_entries():
        flags = list(map(_is_training, cast(Any, map(call, known._modules))))
        if known.training == flags:
            return known
        known = inventories.get((*key, *flags))
    if known is None or not known.has_same_entries():
        for other in [other for other, each in inventories.items() if not each.has_same_entries()]:
            del inventories[other]
        known = Inventory(root, silent)
    inventories[key] = inventories[*key, *known.training] = known
    return known


def read_training(modules: Sequence[nn.Module]) -> list[bool]:
    """Return the training flags of modules."""
    return list(map(_is_training, modules))


def set_training(modules: Sequence[nn.Module], wanted: Sequence[bool]) -> None:
    """Set the training flag of each module: not by .train(), since submodules have flags of their own."""
    for module, flag in zip(modules, wanted, strict=True):
        module.training = flag


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


def _list_entries(modules: Iterable[nn.Module]) -> list[Any]:
    holders = list(chain.from_iterable(map(_get_holders, modules)))
    try:
        return list(chain.from_iterable(map(dict.values, holders)))
    except TypeError:  # TorchScript's are no dictionaries
        return [each for holder in holders for each in holder.values()]


def _refer(entry: Any) -> Callable[[], Any]:
    return _refer_to_nothing if entry is None else ref(entry)


def _refer_to_nothing() -> None:
    return None
