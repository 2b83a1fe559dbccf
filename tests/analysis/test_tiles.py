"""Tiles are chosen by counted peaks: as few as bring the peak down, for each kind of step."""

import pytest
import torch
from torch import nn

import revzoo
from revzoo.errors import InputError
from revzoo.runtime import ReversibleChain
from tests.in_place.networks import Toy


def mlp(ratio: int) -> nn.Module:
    f = nn.Sequential(nn.Linear(8, 8 * ratio), nn.GELU(), nn.Linear(8 * ratio, 8))
    f.acts_on = "tokens"
    return f


def peak(chain: ReversibleChain, batch: object, tiles: list[int]) -> int:
    chain.tiles = tiles
    return revzoo.measure_memory(chain, batch).activation_bytes


def test_each_kind_of_step_gets_as_few_as_bring_the_peak_down():
    chain, batch = ReversibleChain([mlp(8), mlp(1), mlp(8), mlp(1)]), tuple(torch.randn(2, 2, 128, 8))
    least = peak(chain, batch, [1] * 4) / 20
    revzoo.choose_tiles(chain, batch)
    assert chain.tiles == [16, 2, 16, 2]
    lowest = peak(chain, batch, [16] * 4)
    assert lowest - peak(chain, batch, [32] * 4) <= least < peak(chain, batch, [8] * 4) - lowest
    assert peak(chain, batch, [16, 2, 16, 2]) <= lowest + least
    assert min(peak(chain, batch, [8, 2, 8, 2]), peak(chain, batch, [16, 1, 16, 1])) > lowest + least


def test_where_the_peak_is_elsewhere_nothing_is_cut():
    chain, batch = ReversibleChain([nn.Linear(8, 8) for _ in range(3)]), tuple(torch.randn(2, 16, 8))
    chain.tiles = 4
    revzoo.choose_tiles(chain, batch)
    assert chain.tiles == [1, 1, 1]


def test_what_mixes_examples_stays_whole():
    steps = [nn.Sequential(nn.Linear(8, 64), norm, nn.GELU(), nn.Linear(64, 8)) for norm in (nn.BatchNorm1d(64), nn.Identity())]
    chain, batch = ReversibleChain(steps), tuple(torch.randn(2, 64, 8))
    revzoo.choose_tiles(chain, batch)
    assert chain.tiles[0] == 1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 96), nn.GELU(), nn.Linear(96, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def test_a_network_that_became_reversible_in_place():
    batch, bytes_ = torch.randn(64, 6), []
    for tiles in (1, "auto"):
        report = revzoo.reversible_(Toy(Block(), Block(), Block()), batch=batch, tiles=tiles)
        bytes_.append(report.peaks.reversible.activation_bytes)
    [chain] = report.chains
    assert chain.tiles == [8] * 3
    assert "cut into 8 tiles" in str(report)
    assert bytes_[1] < bytes_[0] / 2


def test_what_cannot_be_chosen_is_refused():
    with pytest.raises(InputError, match="this Linear has none"):
        revzoo.choose_tiles(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(InputError, match="batch=batch, tiles='auto'"):
        revzoo.reversible_(Toy(nn.Linear(6, 6), nn.Linear(6, 6)), tiles="auto")
