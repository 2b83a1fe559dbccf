"""Toy parts and a complete toy spec, so that these tests depend on no real part."""

from pathlib import Path
from textwrap import dedent
from typing import Literal

import pytest

from revzoo import registry

SPEC = """
name: toy
family: toys
sources: [{of: all, cite: nowhere}]
input: {kind: image, channels: 3, size: [32, 32]}
stem: {type: patches, width: 8, patch: 4}
split: {type: duplicate}
block:
  coupling: additive
  f: {type: attention, heads: 2}
  g: {type: mlp, ratio: 4}
  drop_path: {max: 0.1}
stages:
  - {depth: 2, width: 8}
  - {depth: 3, width: 16, f: {heads: 4}, transition: {type: merging}}
fuse: {type: concat}
head: {type: linear, outputs: 10}
"""


def patches(site, *, width: int, patch: int | tuple[int, int]): ...
def plain(site): ...
def momentum(*, m: float): ...
def attention(site, *, heads: int, bias: bool = True, norm: Literal["layer_norm", "none"] = "layer_norm"): ...
def mlp(site, *, ratio: float = 4.0, act: str = "gelu", hidden: int | None = None): ...
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
def no_parts(monkeypatch):
    """Empty every registry, as before the parts are imported."""
    for name in TOYS:
        monkeypatch.setattr(getattr(registry, name), "_entries", {})


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
