"""What modules hold, and setting it back after a run: attributes, tensors, submodules, hooks, and what is in containers.

Entries are compared by identity, and only those that are others are set. They are read and written by the methods of the
built-in types: a subclass may forbid writing, as configurations of diffusers do, or compare and iterate in ways of its own.
Nothing is emptied to be filled again, so an error on the way never leaves less than there was.
"""

import random
import sys
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from operator import is_
from types import BuiltinFunctionType, CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Generator, Size, Tensor, device, dtype, nn

_MISSING = object()
_MOST = 100_000  # objects that are looked into, those nearest to the module first
_PLAIN = {str, int, float, complex, bool, bytes, type(None), Size, device, dtype, BuiltinFunctionType, ModuleType}
# Packages whose objects are not looked into: locks, queues and caches are their own affair.
_CLOSED = sys.stdlib_module_names | {"torch", "numpy", "revzoo"}
_OPEN = (nn.Module, Tensor, UserDict, UserList, SimpleNamespace)  # but for these
_OTHERS = (nn.Module, Tensor, FunctionType, MethodType, partial, tuple)  # what they hold is not a module's own
_OWN = "_revzoo_"  # what this package remembers of modules


class Attributes:
    """What modules have set on themselves: attributes, tensors, submodules, hooks; and in their containers and plain objects.

    A second run is thrown away, and so is what it sets: an average that f updates is updated once, and what f would put back at
    its end is put back if the run ends before.
    """

    def __init__(self, *modules: nn.Module):
        own = [m.__dict__ for m in modules]
        inside = [value for attributes in own for value in attributes.values() if type(value) not in _PLAIN]
        self._held: list[_Held] = [_Mapping(each, keeps_own=True) for each in own]
        self._held += [held for each in inside if not isinstance(each, _OTHERS) for held in _look_into(each)]

    def restore(self) -> bool:
        """Set everything as it was; return whether anything had changed."""
        return _restore_all(self._held)


class Contents:
    """What can be reached from an object: the entries of dicts, lists, sets and deques, and the attributes of objects.

    Objects are followed through attributes, slots, tuples, bound methods and `functools.partial`. Attributes of objects of
    torch, NumPy and the standard library, of classes and of Python modules are not looked at, nor are values in tensors. But
    generators of random numbers are set back to where they were.

    Args:
        root: the object.
        follows_functions: whether the variables count, too, that functions share with those around them, such as the dict that
            a hook writes to.
    """

    def __init__(self, root: object, *, follows_functions: bool = False):
        self._held: list[_Held] = []
        known, waiting = {id(root)}, deque([root])
        skipped = _PLAIN if follows_functions else {*_PLAIN, FunctionType}
        while waiting and len(known) < _MOST:
            each = waiting.popleft()
            for held in _look_into(each) if (stream := _find_stream(each)) is None else [stream]:
                self._held.append(held)
                for inside in held.list_inside():
                    if type(inside) not in skipped and id(inside) not in known:
                        known.add(id(inside))
                        waiting.append(inside)

    def restore(self) -> bool:
        """Set everything as it was; return whether anything had changed."""
        return _restore_all(self._held)


class _Held:
    """What one object holds. This one cannot change, as a tuple.

    Args:
        now: the object.
        then: what is in it.
    """

    def __init__(self, now: Any, then: Iterable[Any]):
        self._now = now
        self._then = list(then)

    def list_inside(self) -> Iterable[Any]:
        """Return what is in it."""
        return self._then

    def restore(self) -> bool:
        """Set what has changed as it was; return whether anything had."""
        return False


class _Mapping(_Held):
    """Args: keeps_own: whether what this package remembers is left."""

    def __init__(self, now: dict[Any, Any], *, keeps_own: bool = False):
        self._base: Any = OrderedDict if isinstance(now, OrderedDict) else dict  # which keeps an order of its own
        self._now, self._entries, self._keeps_own = now, dict(self._base.items(now)), keeps_own

    def list_inside(self) -> Iterable[Any]:
        return self._entries.values()

    def restore(self) -> bool:
        now, then, base = self._now, self._entries, self._base
        if (
            dict.__len__(now) == len(then)
            and all(map(is_, base.values(now), then.values()))
            and all(map(is_, base.keys(now), then))
        ):
            return False
        has_changed = False
        for key in [key for key in base.keys(now) if key not in then and not self._leaves(key)]:
            base.__delitem__(now, key)
            has_changed = True
        for key, value in then.items():
            if dict.get(now, key, _MISSING) is not value and not self._leaves(key):
                base.__setitem__(now, key, value)
                has_changed = True
        if all(map(is_, base.keys(now), then)):
            return has_changed
        for key in [key for key in then if key in dict.keys(now)]:
            value = dict.__getitem__(now, key)
            try:
                base.__delitem__(now, key)
            finally:
                base.__setitem__(now, key, value)  # now the last
        return has_changed

    def _leaves(self, key: Any) -> bool:
        return self._keeps_own and isinstance(key, str) and key.startswith(_OWN)


class _List(_Held):
    def restore(self) -> bool:
        if list.__len__(self._now) == len(self._then) and all(map(is_, list.__iter__(self._now), self._then)):
            return False
        list.__setitem__(self._now, slice(None), self._then)
        return True


class _Set(_Held):
    def restore(self) -> bool:
        present, then = ({id(each): each for each in items} for items in (set.__iter__(self._now), self._then))
        for key in present.keys() - then.keys():
            set.discard(self._now, present[key])
        for key in then.keys() - present.keys():
            set.add(self._now, then[key])
        return present.keys() != then.keys()


class _Deque(_Held):
    def restore(self) -> bool:
        now, then = self._now, self._then
        if deque.__len__(now) == len(then) and all(map(is_, deque.__iter__(now), then)):
            return False
        while deque.__len__(now) > len(then):
            deque.pop(now)
        while deque.__len__(now) < len(then):
            deque.append(now, None)
        for i, each in enumerate(then):
            deque.__setitem__(now, i, each)
        return True


class _Slots(_Held):
    """Attributes without a dict: slots of an object, or the variable in a cell.

    Args:
        places: what reads, what sets and what deletes each.
    """

    def __init__(self, places: Iterable[tuple[Callable[[], Any], Callable[[Any], Any], Callable[[], Any]]]):
        self._places = [(*place, _read(place[0])) for place in places]

    def list_inside(self) -> Iterable[Any]:
        return [then for *_, then in self._places]

    def restore(self) -> bool:
        has_changed = False
        for read, write, delete, then in self._places:
            if _read(read) is not then:
                delete() if then is _MISSING else write(then)
                has_changed = True
        return has_changed


class _Stream(_Held):
    """The state of a generator of random numbers.

    Args:
        read: returns it.
        write: sets it.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any]):
        self._write, self._state = write, read()

    def list_inside(self) -> Iterable[Any]:
        return ()

    def restore(self) -> bool:
        self._write(self._state)
        return False  # it is not compared


def _find_stream(each: Any) -> _Stream | None:
    """Return the random stream that an object is, of torch, Python or NumPy."""
    if isinstance(each, Generator):
        return _Stream(each.get_state, each.set_state)
    if isinstance(each, random.Random) and not isinstance(each, random.SystemRandom):  # which has no state
        return _Stream(each.getstate, each.setstate)
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    if isinstance(each, numpy.random.RandomState):
        return _Stream(each.get_state, each.set_state)
    if isinstance(each, numpy.random.Generator):
        bits = each.bit_generator
        return _Stream(partial(getattr, bits, "state"), partial(setattr, bits, "state"))
    return None


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (AttributeError, ValueError):  # a slot or a cell without a value
        return _MISSING


def _look_into(each: Any) -> Iterator[_Held]:
    """Yield what an object holds."""
    kind = type(each)
    if issubclass(kind, dict):
        yield _Mapping(each)
    elif issubclass(kind, list):
        yield _List(each, list.__iter__(each))
    elif issubclass(kind, set):
        yield _Set(each, set.__iter__(each))
    elif issubclass(kind, deque):
        yield _Deque(each, deque.__iter__(each))
    elif issubclass(kind, tuple):
        yield _Held(each, tuple.__iter__(each))
    elif kind is MethodType:
        yield _Held(each, (each.__self__, each.__func__))
    elif issubclass(kind, partial):
        yield _Held(each, (each.func, each.args, each.keywords))
    elif kind is FunctionType and not _is_closed(each):
        yield _Held(each, (each.__defaults__, each.__kwdefaults__))
        yield _Slots(map(_list_cell_access, each.__closure__ or ()))
    if issubclass(kind, type) or (_is_closed(kind) and not issubclass(kind, _OPEN)):
        return
    with suppress(AttributeError):
        if type(attributes := object.__getattribute__(each, "__dict__")) is dict:
            yield _Mapping(attributes)
    if not issubclass(kind, nn.Module | Tensor):  # which have none
        slots = (slot for base in kind.__mro__ for slot in vars(base).values() if type(slot) is MemberDescriptorType)
        yield _Slots((partial(s.__get__, each), partial(s.__set__, each), partial(s.__delete__, each)) for s in slots)


def _is_closed(kind: Any) -> bool:
    return str(kind.__module__).partition(".")[0] in _CLOSED


def _list_cell_access(cell: CellType) -> tuple[Callable[[], Any], Callable[[Any], Any], Callable[[], Any]]:
    name = "cell_contents"
    return partial(getattr, cell, name), partial(setattr, cell, name), partial(delattr, cell, name)


def _restore_all(held: Iterable[_Held]) -> bool:
    """Restore each, also where one raises an error or Ctrl-C comes; these are raised at the end."""
    has_changed, failures = False, list[BaseException]()
    for each in held:
        for _ in range(2):  # what was interrupted begins again
            try:
                has_changed |= each.restore()
                break
            except BaseException as error:
                failures.append(error)
    if failures:
        raise failures[0]
    return has_changed
