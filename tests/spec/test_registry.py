"""A registry knows the entries of its home module from the first lookup on, of whatever kind."""

import sys
from functools import partial
from itertools import count

import pytest

from revzoo import registry
from revzoo.bounds import PositiveInt
from revzoo.errors import InputError, UnknownNameError
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


@pytest.mark.parametrize(
    ("look_up", "expected"),
    [
        (list, ["car"]),
        (lambda toys: ("car" in toys, "cat" in toys), (True, False)),
        (lambda toys: toys["car"].__name__, "car"),
        (lambda toys: [p.annotation for p in toys.arguments("car").values()], [int]),
    ],
    ids=["iterate", "contains", "get", "arguments"],
)
def test_the_first_lookup_imports_the_home_module(toys, look_up, expected):
    assert look_up(toys) == expected


def test_an_unknown_name_is_answered_with_the_known_ones(toys):
    with pytest.raises(UnknownNameError, match=r"^Unknown toy 'cart'\. Did you mean 'car'\? Allowed: car\.$"):
        toys["cart"]


HALF_IMPORTED = """
from __future__ import annotations
from typing import TYPE_CHECKING
from revzoo.bounds import PositiveInt
if TYPE_CHECKING:
    from revzoo.parts import BuildContext
    from revzoo.parts import Activation

class Base:
    def __init__(self, context: BuildContext, size: Activation, *, wheels: PositiveInt, doors: "int | None" = None): ...

def make(context: BuildContext, size: PositiveInt, *, wheels: PositiveInt, **others: Activation): ...

class Maker:
    def __call__(self, context: BuildContext, *, wheels: PositiveInt): ...
"""


def test_only_what_a_spec_sets_has_to_be_known_where_the_program_runs(toys):
    namespace = {}
    exec(HALF_IMPORTED, namespace)
    toys.register("bus")(type("Bus", (namespace["Base"],), {}))  # which is of another module
    annotations = {key: parameter.annotation for key, parameter in toys.arguments("bus").items()}
    assert annotations == {"wheels": PositiveInt, "doors": int | None}
    assert toys.list_positional("bus") == ["context", "size"]
    toys.register("tram")(partial(partial(namespace["make"], size=None), size=None))
    toys.register("boat")(namespace["Maker"]())
    assert {key: parameter.annotation for key, parameter in toys.arguments("tram").items()}["wheels"] == PositiveInt
    assert [parameter.annotation for parameter in toys.arguments("boat").values()] == [PositiveInt]
    exec(HALF_IMPORTED.replace("wheels: PositiveInt", "wheels: Activation"), namespace)
    toys.register("van")(namespace["Base"])
    message = (
        r"of wheels in the toy 'van' cannot be read \(name 'Activation' is not defined\)\. Received: Activation\. Import the"
    )
    with pytest.raises(InputError, match=message):
        toys.arguments("van")


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
