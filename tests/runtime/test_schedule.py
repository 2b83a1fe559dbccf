"""Limits on runs of inverted steps, and the table of modes."""

import pickle
from itertools import groupby
from operator import is_
from typing import get_args

import pytest
import torch
from torch import nn

from revzoo.bounds import ModeName
from revzoo.runtime import Coupling, ReversibleChain
from revzoo.runtime.coupling import momentum
from revzoo.runtime.drift import count_invertible_steps
from revzoo.runtime.mode import MODES, Mode
from revzoo.runtime.schedule import limit_inverted_runs

I, R, S = Mode.INVERT, Mode.RECOMPUTE, Mode.STORE  # noqa: E741


def test_the_modes():
    assert MODES == get_args(ModeName) == ("store", "selective", "recompute", "invert")
    assert repr(list(MODES)) == str(["store", "selective", "recompute", "invert"])
    assert all(map(is_, pickle.loads(pickle.dumps(MODES)), MODES))


def test_a_schedule_of_names_becomes_one_of_modes():
    chain = ReversibleChain([nn.Identity(), nn.Identity()])
    chain.schedule = ["store", "invert"]
    assert all(map(is_, chain.schedule, (Mode.STORE, Mode.INVERT)))


@pytest.mark.parametrize(
    ("longest", "expected"),
    [
        (None, [I, I, I, S, I, I, R, I]),
        (3, [I, I, I, S, I, I, R, I]),
        (2, [I, I, R, S, I, I, R, I]),
        (1, [I, R, I, S, I, R, R, I]),
        (0, [R, R, R, S, R, R, R, R]),
    ],
)
def test_the_step_after_a_run_of_inverted_ones_recomputes(longest, expected):
    modes = [I, I, I, S, I, I, R, I]
    limited = limit_inverted_runs(modes, longest)
    assert limited == expected
    assert modes == [I, I, I, S, I, I, R, I]
    runs = [len(list(run)) for mode, run in groupby(limited) if mode == I]
    assert longest is None or max(runs, default=0) <= longest


def test_how_many_steps_the_couplings_allow():
    half = Coupling(0, 0.5, 1)
    assert count_invertible_steps([half] * 100, torch.float32) == 19  # 2^19 of 2^-23 is a sixteenth, 2^20 an eighth
    assert count_invertible_steps([half] * 19, torch.float32) is None
    assert count_invertible_steps([half] * 100, torch.float64) == 48
    assert count_invertible_steps([half] * 100, torch.float32, error=2**-12) == 11
    assert count_invertible_steps([Coupling(0, 1, 1)] * 1000, torch.bfloat16) is None
    assert count_invertible_steps([momentum(kept_bits=2)] * 1000, torch.float32) is None
    assert count_invertible_steps([half, Coupling(1, 0, 1)], torch.float32) == 0
