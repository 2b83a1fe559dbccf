"""Toy parts, so that these tests depend on no real one."""

from pathlib import Path
from textwrap import dedent
from typing import Literal

import pytest

import revzoo.parts
import revzoo.runtime.coupling  # noqa: F401  likewise
from revzoo import registry


def patches(site, *, width: int, patch: int | tuple[int, int]): ...
def plain(site): ...
def momentum(*, m: float): ...
def attention(site, *, heads: int, bias: bool = True, norm: Literal["layer_norm", "none"] = "layer_norm"): ...
def mlp(site, *, ratio: float = 4.0, act: str = "gelu", hidden: int | None = None, gain: int | float = 1): ...
def conv(site, *, kernel: tuple[int, ...] = (3, 3)): ...
def linear(site, *, outputs: int): ...
def normal(*, std: float): ...


TOYS = {
    "couplings": {"additive": plain, "momentum": momentum},
    "stems": {"patches": patches},
    "splits": {"duplicate": plain, "halves": plain},
    "branches": {"attention": attention, "mlp": mlp, "conv": conv},
    "transitions": {"merging": plain},
    "fuses": {"concat": plain},
    "heads": {"linear": linear},
    "inits": {"normal": normal},
}


@pytest.fixture
def toys(monkeypatch):
    """Put the toy parts in place of whatever is registered."""
    for name, entries in TOYS.items():
        monkeypatch.setattr(getattr(registry, name), "_entries", entries)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a YAML file into the current directory and returns its relative path."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "toy.yaml") -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
        return path

    return write
