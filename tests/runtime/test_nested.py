"""Tensors in nested collections: those that PyTorch's pytrees know, and batches of other kinds."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from revzoo.runtime.nested import map_tensors, tensors_in

Point = namedtuple("Point", "x, y")


@dataclass(frozen=True)
class Outputs:
    scores: Any
    name: str = ""


class Encoding(UserDict):
    """A mapping that is not registered, as the BatchEncoding of Hugging Face's tokenizers."""


class Pixels(list):
    """A list that is not registered."""


def test_tensors_in_any_nesting_come_in_order():
    a, b, c = torch.zeros(3).unbind()
    assert [id(t) for t in tensors_in({"b": a, "a": [b, {"c": (c, None, 3)}], "d": "text"})] == [id(a), id(b), id(c)]
    assert [id(t) for t in tensors_in(Point(Encoding(x=a, y=[b]), Pixels([c])))] == [id(a), id(b), id(c)]
    assert [id(t) for t in tensors_in([Outputs([a, {"b": b}]), Outputs])] == [id(a), id(b)]
    assert list(tensors_in(None)) == []
    ring = Outputs([a])
    ring.scores.append(ring)
    assert [id(t) for t in tensors_in(ring)] == [id(a)]
    assert map_tensors(torch.neg, ring).scores[1] is ring  # what is inside itself stays
    assert [id(t) for t in tensors_in([np.array(2.0), np.zeros(3), a])] == [id(a)]


class Unready:
    """An iterable that cannot say yet what is in it, as a cache of Transformers without keys."""

    def __iter__(self):
        yield self.keys


def test_tensors_in_iterables():
    tensors = torch.zeros(3).unbind()
    assert [id(t) for t in tensors_in(t for t in tensors)] == [id(t) for t in tensors]
    assert [id(t) for t in tensors_in({"a": (t for t in tensors), "b": {1: tensors[0]}.values()})] == [
        id(t) for t in (*tensors, tensors[0])
    ]
    assert [id(t) for t in tensors_in([Unready(), tensors[0]])] == [id(tensors[0])]


def test_mapped_collections_keep_their_types():
    x = torch.ones(2)
    batch = {"a": [x, (x, "text")], "b": OrderedDict(c=Point(x, None)), "d": Encoding(e=Pixels([x, 1])), "f": torch.Size([2])}
    mapped = map_tensors(lambda t: t * 3, batch)
    assert [float(t.sum()) for t in tensors_in(mapped)] == [6] * 4
    assert float(x.sum()) == 2
    assert (mapped["a"][1][1], mapped["b"]["c"].y, mapped["d"]["e"][1]) == ("text", None, 1)
    types = [type(part) for part in (mapped["a"], mapped["a"][1], mapped["b"], mapped["b"]["c"], mapped["d"]["e"])]
    assert types == [list, tuple, OrderedDict, Point, Pixels]
    assert type(mapped["d"]) is dict  # how an arbitrary mapping is made is not known
    assert mapped["f"] == (2,)
    outputs = Outputs([x], "x")
    assert [float(t.sum()) for t in tensors_in([map_tensors(lambda t: t * 3, outputs), outputs])] == [6, 2]


def test_a_generator_is_not_mapped():
    generator = (t for t in torch.zeros(3).unbind())
    assert map_tensors(lambda t: t + 1, generator) is generator


def test_an_iterable_that_fails_gives_what_came_before():
    """A cache of Transformers yields the keys of its layers, some of which have none; a generator's error is the user's."""

    class Cache:
        def __iter__(self):
            yield torch.ones(1)
            raise AttributeError("no keys")

    assert len(list(tensors_in({"logits": torch.ones(2), "cache": Cache()}))) == 2
    with pytest.raises(AttributeError, match="no keys"):
        list(tensors_in(iter(Cache())))
