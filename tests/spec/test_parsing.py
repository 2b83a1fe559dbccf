"""Annotations decide what YAML may say, for any dataclass: specs and recipes alike."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import pytest

from revzoo.bounds import Bound, PositiveInt
from revzoo.errors import InputError
from revzoo.spec import YamlNode, apply_overrides, parse, to_plain
from revzoo.spec.parsing import NOT_WRITTEN


class Note(TypedDict, total=False):
    text: str


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1
    betas: tuple[float, float] | None = None


@dataclass(frozen=True)
class Outer:
    steps: PositiveInt
    inner: Inner = Inner()
    maybe: Inner | None = None
    many: tuple[Inner, ...] = ()
    notes: tuple[Note, ...] = ()
    folder: str = field(default="", metadata=NOT_WRITTEN)


def read(annotation, value):
    """Return what the value is read as, or what is allowed instead."""

    @dataclass
    class One:
        value: annotation

    one, problems = parse(One, YamlNode.from_plain({"value": value}, "one.yaml"))
    if one is not None:
        assert not problems
        return one.value
    return {f"{problem.path}: {problem.allowed}" for problem in problems}


EVEN = Annotated[tuple[int, ...], Bound("an even number of integers", lambda items: len(items) % 2 == 0)]


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (int, 3, 3),
        (bool, False, False),
        (Literal["a", 2], 2, 2),
        (Literal["no", "bf16"], False, "no"),
        (int | None, None, None),
        (int | str, "x", "x"),
        (tuple[float, ...], [1, 2.5], (1.0, 2.5)),
        (tuple[tuple[int, int], ...], [[1, 2], [3, 4]], ((1, 2), (3, 4))),
        (PositiveInt, 1, 1),
        (EVEN, [1, 2], (1, 2)),
        (Any, {"a": [1, None]}, {"a": [1, None]}),
    ],
)
def test_value_fits(annotation, value, expected):
    assert read(annotation, value) == expected


def test_integer_becomes_a_number_where_one_is_declared():
    assert isinstance(read(float, 1), float)
    assert isinstance(read(float | None, 1), float)
    assert isinstance(read(int | float, 1), int)


@pytest.mark.parametrize(
    ("annotation", "value", "allowed"),
    [
        (int, True, "value: an integer"),
        (int, "3", "value: an integer"),
        (float, True, "value: a number"),
        (str, False, "value: text"),
        (Literal["a", 1], True, "value: 'a' or 1"),
        (int | None, "x", "value: null or an integer"),
        (int | str, 2.5, "value: an integer or text"),
        (tuple[int, ...], 3, "value: a list (each item an integer)"),
        (tuple[int, ...], [1, "x"], "value.1: an integer"),
        (tuple[int, int], [1], "value: a list of 2 (an integer, an integer)"),
        (tuple[int, int] | None, [1], "value: null or a list of 2 (an integer, an integer)"),
        (PositiveInt, 0, "value: an integer >= 1"),
        (EVEN, [1], "value: an even number of integers"),
        (Inner | None, [], "value: null or a mapping with the keys rate, betas"),
        (Note, {"text": 3}, "value.text: text"),
    ],
)
def test_value_does_not_fit(annotation, value, allowed):
    assert read(annotation, value) == {allowed}


@dataclass(frozen=True)
class Tree:
    leaf: int = 0
    left: "Tree | None" = None


@dataclass(frozen=True)
class Point:
    x: int


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (Tree, {"left": {"leaf": 3}}, Tree(left=Tree(3))),
        (Inner | Point, {"x": 3}, Point(3)),
        (None, None, None),
        (list[int] | None, None, None),  # what is not set may be annotated with anything
    ],
)
def test_other_annotations_that_are_known(annotation, value, expected):
    assert read(annotation, value) == expected


class Hidden(TypedDict):
    inner: list[int]


@pytest.mark.parametrize("annotation", [list[int], tuple, Path, Hidden])
def test_annotations_that_are_not_known_are_named(annotation):
    with pytest.raises(
        InputError, match=r"^value(\.inner)? is annotated with .*, which no spec can set. Allowed: int, float, "
    ):
        read(annotation, {"inner": [1]} if annotation is Hidden else [1])


def test_nested_dataclasses():
    tree = {"steps": 3, "many": [{"rate": 1}, {}], "maybe": {"betas": [0, 1]}, "notes": [{"text": "x"}]}
    outer, problems = parse(Outer, YamlNode.from_plain(tree, "outer.yaml"))

    assert problems == []
    assert outer == Outer(3, Inner(), Inner(betas=(0.0, 1.0)), (Inner(1.0), Inner()), ({"text": "x"},))
    assert parse(Outer, YamlNode.from_plain(to_plain(outer), "again.yaml")) == (outer, [])
    assert "folder" not in to_plain(outer)


def test_every_problem_has_its_path():
    tree = {"inner": {"rat": 1}, "maybe": {"betas": ["x", 0]}, "many": [{}, {"rate": "x"}], "notes": [3], "folder": "x"}
    outer, problems = parse(Outer, YamlNode.from_plain(tree, "outer.yaml"))

    assert outer is None
    assert [str(problem).removeprefix("outer.yaml: ") for problem in problems] == [
        "folder: found the unknown key 'folder'; allowed: steps, inner, maybe, many, notes.",
        "steps: found nothing; allowed: an integer >= 1.",
        "inner.rat: found the unknown key 'rat'; allowed: rate, betas. Did you mean 'rate'?",
        "maybe.betas.0: found 'x'; allowed: a number.",
        "many.1.rate: found 'x'; allowed: a number.",
        "notes.0: found 3; allowed: a mapping with the keys text.",
    ]


def test_long_values_are_shortened():
    _, problems = parse(Outer, YamlNode.from_plain({"steps": list(range(100))}, "outer.yaml"))
    assert problems[0].received == "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16..."


def test_overrides_leave_the_tree_as_it_was_and_open_what_is_absent():
    tree = YamlNode.from_plain({"steps": 3, "maybe": None, "many": [{"rate": 1}]}, "outer.yaml")
    new, problems = apply_overrides(tree, ["maybe.rate=0.5", "inner.betas=[1, 2]", "many[0].rate=2", "steps=4"])

    assert problems == []
    assert tree.to_plain() == {"steps": 3, "maybe": None, "many": [{"rate": 1}]}
    assert new.to_plain() == {"steps": 4, "maybe": {"rate": 0.5}, "many": [{"rate": 2}], "inner": {"betas": [1, 2]}}
    assert apply_overrides(tree, "steps=4")[0].to_plain()["steps"] == 4


def test_text_with_equals_signs_and_blanks_is_one_value():
    new, problems = apply_overrides(YamlNode.from_plain({}, "outer.yaml"), ["a='x=y z'", "b=", "c=x=y", 'd="no"'])
    assert (new.to_plain(), problems) == ({"a": "x=y z", "b": None, "c": "x=y", "d": "no"}, [])
