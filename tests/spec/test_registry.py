"""A registry knows the entries of its home module from the first lookup on, of whatever kind."""

import sys
from functools import partial
from itertools import count

import pytest

from revzoo import registry
from revzoo.bounds import PositiveInt
from revzoo.errors import UnknownNameError
from revzoo.registry import Registry

HOME = """
from revzoo import registry

@registry.toys.register("car")
def car(context, *, wheels: "int" = 4): ...
"""
NUMBER = count()


@pytest.fixture
def toys(tmp_path, monkeypatch):
    """Return a registry whose home module has not been imported."""
    name = f"home_of_toys_{next(NUMBER)}"
    (tmp_path / f"{name}.py").write_text(HOME)
    monkeypatch.syspath_prepend(tmp_path)
    toys = Registry("toy", name)
    monkeypatch.setattr(registry, "toys", toys, raising=False)
    assert name not in sys.modules
    yield toys
    sys.modules.pop(name, None)


@pytest.mark.parametrize("look_up", [list, lambda toys: "car" in toys, lambda toys: toys["car"]])
def test_the_first_lookup_imports_the_home_module(toys, look_up):
    assert look_up(toys)
    assert [p.annotation for p in toys.arguments("car").values()] == [int]


def test_an_unknown_name_is_answered_with_the_known_ones(toys):
    with pytest.raises(UnknownNameError, match=r"^Unknown toy 'cart'\. Did you mean 'car'\? Allowed: car\.$"):
        toys["cart"]


TEXTUAL = """
from __future__ import annotations
from revzoo.bounds import PositiveInt

class Base:
    def __init__(self, context: object, *, wheels: PositiveInt): ...

def make(context: object, size: PositiveInt, *, wheels: PositiveInt): ...
"""


def test_annotations_that_are_text_are_evaluated_where_they_were_written(toys):
    namespace = {}
    exec(TEXTUAL, namespace)
    toys.register("bus")(type("Bus", (namespace["Base"],), {}))  # which is of another module
    toys.register("tram")(partial(namespace["make"], size=None))
    for name in ("bus", "tram"):
        assert toys.arguments(name)["wheels"].annotation == PositiveInt


def test_a_name_is_needed(toys):
    with pytest.raises(TypeError, match=r'A toy is registered with its name: .register\("NAME"\). Received: <class'):

        @toys.register
        class Boat: ...


def test_registering_needs_no_home_module_and_a_name_is_registered_once(toys):
    toys.register("boat")(object)
    assert toys._home not in sys.modules
    with pytest.raises(ValueError, match="toy 'boat' is registered twice"):
        toys.register("boat")(object)
    assert list(toys) == ["boat", "car"]
