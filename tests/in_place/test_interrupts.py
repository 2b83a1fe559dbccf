"""After an error or Ctrl-C anywhere in a call, the module and the process are as before; containers of any type are kept."""

from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass, field

import pytest
import timm
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import revzoo
from revzoo.analysis.dry_run import isolated
from revzoo.runtime import ReversibleChain
from tests.in_place.interrupts import State, interrupt_everywhere
from tests.in_place.networks import SPLIT, Toy, X


def refuse(*_, **__):
    raise TypeError("this is frozen")


WRITING = ("__setitem__", "__delitem__", "update", "clear", "pop", "add", "remove", "append", "extend", "insert", "copy")
READING = ("__eq__", "__iter__", "__len__", "__getitem__", "__contains__", "__bool__", "keys", "values", "items")


def harden(base):
    """Return a subclass that neither lets itself be written nor read or compared."""
    return type(f"Hostile{base.__name__}", (base,), dict.fromkeys((*WRITING, *READING), refuse) | {"__hash__": object.__hash__})


def make(base, *items):
    """Return a hostile container that has these items."""
    built = harden(base)()
    if issubclass(base, dict):
        for key, value in items:
            (OrderedDict if issubclass(base, OrderedDict) else dict).__setitem__(built, key, value)
        return built
    for each in items:
        {list: list.append, set: set.add, deque: deque.append}[base](built, each)
    return built


@dataclass
class Cache:
    last: torch.Tensor | None = None
    seen: list = field(default_factory=list)


class Keeper(nn.Module):
    """A network that writes to everything that it holds, and takes away what there was."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.1)
        self.mappings = [make(base, ("a", 1), ("b", [2])) for base in (dict, OrderedDict, defaultdict)]
        self.listed, self.queued, self.grouped = make(list, 1, 2), deque([1, 2], maxlen=2), make(set, "a", "b")
        self.user, self.cache = UserDict(a={"b": [0]}), Cache()
        self.nested = ({"deep": [{"deeper": Cache()}]},)
        self.count = 0
        self.table = torch.ones(6)

    def forward(self, x):
        y = self.drop(self.norm(self.layer(x)).tanh()) * self.table
        for mapping in self.mappings:
            base = OrderedDict if isinstance(mapping, OrderedDict) else dict
            base.__delitem__(mapping, "a")
            base.__setitem__(mapping, "c", y)
        list.clear(self.listed)
        set.clear(self.grouped)
        set.add(self.grouped, y)
        self.queued.append(y)
        self.user["a"]["b"][0] = self.cache.last = self.nested[0]["deep"][0]["deeper"].last = y
        self.cache.seen.append(y)
        self.nested[0]["deep"].append(y)
        self.count += 1
        self.added = y
        del self.table
        return x + y


@pytest.mark.parametrize("fake", [True, False])
def test_a_run_gives_every_container_back(fake):
    model, noted = Keeper(), {}
    model.layer.register_forward_hook(lambda module, inputs, out: noted.update(out=out))
    before = State(model)
    with isolated(model, X, fake=fake) as x:
        assert isinstance(model(x), FakeTensor) == fake
        assert model.count == 1
        torch.set_default_dtype(torch.float64)
        torch.autocast_increment_nesting()
        torch.set_grad_enabled(False)
        model.layer.weight.requires_grad_(False)
    assert before.find_changes(model) == []
    assert list(noted) == ([] if fake else ["out"])


def test_keys_come_back_in_their_order():
    model = Keeper()
    model.log = OrderedDict(a=1, b=2, c=3)
    with isolated(model, X):
        model.log.move_to_end("a")
        model.log["b"] = model.log.pop("b")
    assert list(model.log) == ["a", "b", "c"]


def test_restoring_goes_on_after_an_error():
    class Key(tuple):
        def __hash__(self):
            return hashes.pop()

    hashes, model = [1], Keeper()
    model.broken = {}
    before = State(model)
    with pytest.raises(IndexError), isolated(model, X) as x:
        model.broken[Key(model(x))] = 1
    del model.broken, before.parts[".broken"]
    assert before.find_changes(model) == []


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp, self.drop, self.log = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.1), {}

    def forward(self, x):
        x = x + self.drop(self.attn(x))
        self.last = x + self.mlp(x).tanh()
        self.log["last"] = self.last
        return self.last


class Frozen(OrderedDict):
    """A configuration of diffusers: entries are attributes, too, and may not be written to."""

    def __init__(self, **entries):
        super().__init__(entries)
        vars(self).update(entries)

    update = clear = pop = __delitem__ = __setattr__ = refuse


class Noting(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.cache, self.history, self.count = Frozen(width=6, names=["a"]), Cache(), [{}], 0
        self.layer, self.drop = nn.Linear(6, 6), nn.Dropout(0.1)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.drop(self.layer(x)).tanh()
        self.cache.last = self.history[0]["y"] = y
        self.count += 1
        return y.float() * self.config.width


def reversible():
    model = Toy(Residual(), Residual())
    revzoo.reversible_(model)
    return model


def chain():
    return ReversibleChain([nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1)) for _ in range(2)], exact=True)


CALLS = {  # what makes a module, what is called, whether that changes the module, and how often a call is interrupted
    "plan": (Noting, lambda m: revzoo.plan(m, X, "1 GB"), False, 2),
    "plan, timed": (Noting, lambda m: revzoo.plan(m, X, "1 GB", profile=True), False, 1),
    "plan of a chain": (chain, lambda m: revzoo.plan(m, (X, X), "1 GB"), False, 2),
    "plan with tiles": (chain, lambda m: revzoo.plan(m, (X, X), 1200, tiles="auto"), False, 1),
    "plan of blocks": (reversible, lambda m: revzoo.plan(m, X, "1 GB"), False, 2),
    "reversible_": (lambda: Toy(Residual(), Residual()), lambda m: revzoo.reversible_(m, batch=X), True, 12),
    "reversible_, no batch": (lambda: Toy(Residual(), Residual()), revzoo.reversible_, True, 12),
    "split": (lambda: Toy(Residual(), Residual()), lambda m: revzoo.reversible_(m, batch=X, split=SPLIT), True, 12),
    "ordinary_": (reversible, revzoo.ordinary_, True, 4),
    "choose_tiles": (chain, lambda m: revzoo.choose_tiles(m, (X, X)), True, 2),
    "verify": (chain, lambda m: revzoo.verify(m, (X, X)), False, 12),
    "measure_numerics": (chain, lambda m: revzoo.measure_numerics(m, (X, X)), False, 12),
    "convert": (lambda: timm.create_model("test_vit", num_classes=5), revzoo.convert, False, 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_leaves_all_as_it_was(name):
    make, run, changes, times = CALLS[name]
    assert list(interrupt_everywhere(make, run, times, changes=changes)) == []
