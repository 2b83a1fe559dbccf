"""What modules hold, and setting it back after a run: attributes, tensors, submodules, hooks, and what is in containers.

Entries are compared by identity. They are read and written by the methods of the built-in types: a subclass may forbid writing,
as configurations of diffusers do, or compare and iterate in ways of its own.
"""

import gc
import os
import random
import sys
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, cast

from torch import Generator, Size, Tensor, device, dtype, nn

_MOST = 100_000  # objects that are looked into, those nearest to the module first: a module may hold a data set
_PLAIN = {str, int, float, complex, bool, bytes, type(None), Size, device, dtype, BuiltinFunctionType, ModuleType}
# Packages whose objects are not looked into: locks, queues and caches are their own affair.
_LIBRARIES = {"torch", "numpy", "revzoo"}
_STANDARD = os.path.dirname(os.__file__)
_OPEN = (nn.Module, Tensor, UserDict, UserList, SimpleNamespace)  # but for these
_OTHERS = (nn.Module, Tensor, FunctionType, MethodType, partial, tuple)  # what they hold is not a module's own
_CONTAINERS: dict[type, Callable[[Any, Any], object]] = {list: list.extend, set: set.update, deque: deque.extend}


class _Snapshot:
    def __init__(self) -> None:
        self._held: list[Callable[[], bool]] = []

    def restore(self) -> bool:
        """Set everything as it was, also where an error or Ctrl-C comes between; return whether anything had changed."""
        has_changed, failures = False, list[BaseException]()
        for restore in self._held:
            for _ in range(2):  # what was interrupted begins again
                try:
                    has_changed |= restore()
                    break
                except BaseException as error:
                    failures.append(error)
        if failures:
            raise failures[0]
        return has_changed

    def _look_into(self, each: Any) -> list[Any]:
        """Note what an object holds now, and return it."""
        kind, inside = type(each), list[Any]()
        held: list[_Mapping | _Container | _Variable] = [_Mapping(each)] if issubclass(kind, dict) else []
        held += [_Container(each, base) for base in _CONTAINERS if issubclass(kind, base)]
        if issubclass(kind, tuple):
            inside += tuple.__iter__(each)
        elif kind is MethodType:
            inside += each.__self__, each.__func__
        elif issubclass(kind, partial):
            inside += each.func, each.args, each.keywords
        elif kind is FunctionType and not _is_library(str(each.__module__)):
            inside += each.__defaults__, each.__kwdefaults__
            for cell in each.__closure__ or ():
                with suppress(ValueError):  # no value yet
                    held.append(_Variable(cell))
        if not issubclass(kind, type) and (issubclass(kind, _OPEN) or not _is_library(str(kind.__module__))):
            with suppress(AttributeError):
                held.append(_Mapping(object.__getattribute__(each, "__dict__")))
        self._held += [each.restore for each in held]
        return [*inside, *(value for each in held for value in each.inside)]


class Attributes(_Snapshot):
    """What modules have set on themselves: attributes, tensors, submodules, hooks; and in their containers and plain objects.

    A second run is thrown away, and so is what it sets: an average that f updates is updated once, and what f would put back at
    its end is put back if the run ends before.
    """

    def __init__(self, *modules: nn.Module):
        super().__init__()
        for attributes in (m.__dict__ for m in modules):
            self._held.append(_Mapping(attributes).restore)
            for value in attributes.values():
                if type(value) not in _PLAIN and not isinstance(value, _OTHERS):
                    self._look_into(value)


class Contents(_Snapshot):
    """What can be reached from an object: the entries of dicts, lists, sets and deques, and the attributes of objects.

    Objects are followed through attributes, tuples, bound methods and `functools.partial`. Attributes of objects of torch,
    NumPy and the standard library, of classes and of Python modules are not looked at, nor are values in tensors. But
    generators of random numbers are set back to where they were, and so are the gradients of tensors that are no parameters.

    Args:
        root: the object.
        follows_functions: whether the variables count, too, that functions share with those around them, such as the dict that
            a hook writes to.
    """

    def __init__(self, root: object, *, follows_functions: bool = False):
        super().__init__()
        self.tensors = list[Tensor]()  # that are reached
        known, waiting = {id(root)}, deque([root])
        skipped = _PLAIN if follows_functions else {*_PLAIN, FunctionType}
        while waiting and len(known) < _MOST:
            each = waiting.popleft()
            if (rewind := _mark_state(each)) is not None:
                self._held.append(rewind)
            self.tensors += [each] if isinstance(each, Tensor) else []
            for inside in self._look_into(each):
                if type(inside) not in skipped and id(inside) not in known:
                    known.add(id(inside))
                    waiting.append(inside)


class _Mapping:
    def __init__(self, now: dict[Any, Any]):
        self._base: Any = OrderedDict if isinstance(now, OrderedDict) else dict  # which keeps an order of its own
        self._now = now
        self._then = dict(self._base.items(now))
        self.inside = list(self._then.values())

    def restore(self) -> bool:
        now, then, base = self._now, self._then, self._base
        entries = list(base.items(now))
        if len(entries) == len(then) and all(map(is_, chain.from_iterable(entries), chain.from_iterable(then.items()))):
            return False
        for key in [key for key, _ in entries if key not in then]:
            base.__delitem__(now, key)
        in_order = all(map(is_, [key for key, _ in entries if key in then], then))
        for key, value in then.items():
            if not in_order and key in dict.keys(now):
                base.__delitem__(now, key)  # to be the last
            base.__setitem__(now, key, value)
        return True


class _Container:
    """Args: base: the built-in type, by whose methods it is read and written."""

    def __init__(self, now: Any, base: Any):
        self._now, self._base, self.inside = now, base, list(base.__iter__(now))

    def restore(self) -> bool:
        now, then, base = self._now, self.inside, self._base
        if base.__len__(now) == len(then) and all(map(is_, base.__iter__(now), then)):
            return False
        base.clear(now)
        _CONTAINERS[base](now, then)
        return True


class _Variable:
    """A variable that a function shares with those around it."""

    def __init__(self, cell: CellType):
        self._cell, self.inside = cell, [cell.cell_contents]

    def restore(self) -> bool:
        now, self._cell.cell_contents = self._cell.cell_contents, self.inside[0]
        return now is not self.inside[0]


def _mark_state(each: Any) -> Callable[[], bool] | None:
    """Return what sets back a random generator of torch, Python or NumPy, or the gradient of a tensor that is no parameter.

    None for any other object.
    """
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    numpy = sys.modules.get("numpy")
    if isinstance(each, Generator) or (numpy is not None and isinstance(each, numpy.random.RandomState)):
        read, write = each.get_state, each.set_state
    elif isinstance(each, random.Random) and not isinstance(each, random.SystemRandom):  # which has no state
        read, write = each.getstate, each.setstate
    elif numpy is not None and isinstance(each, numpy.random.Generator):
        read, write = partial(getattr, each.bit_generator, "state"), partial(setattr, each.bit_generator, "state")
    elif isinstance(each, Tensor) and each.requires_grad and each.is_leaf and not isinstance(each, nn.Parameter):
        read, write = partial(getattr, each, "grad"), partial(setattr, each, "grad")
    else:
        return None
    state: Any = read()

    def rewind() -> bool:
        write(state)
        return False  # it is not compared

    return rewind


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Set the random generators of Python and NumPy, wherever they are held, back at the end to where they are now."""
    numpy = sys.modules.get("numpy")
    kinds = {random.Random, *(() if numpy is None else (numpy.random.RandomState, numpy.random.Generator))}
    marks = [_mark_state(each) for each in gc.get_objects() if type(each) in kinds]
    try:
        yield
    finally:
        for rewind in marks:
            cast(Callable[[], bool], rewind)()


@cache
def _is_library(module: str) -> bool:
    name, _, _ = module.partition(".")
    file = getattr(sys.modules.get(name), "__file__", None) or _STANDARD  # a file of the user's may have a standard name
    return name in _LIBRARIES or (name in sys.stdlib_module_names and file.startswith(_STANDARD))
