"""Limits on runs of inverted steps, and the table of modes."""

from itertools import groupby

import pytest
import torch

from revzoo.runtime import Coupling
from revzoo.runtime.coupling import momentum
from revzoo.runtime.drift import count_invertible_steps
from revzoo.runtime.schedule import MODES, limit_inverted_runs

I, R, S = "invert", "recompute", "store"  # noqa: E741


def test_the_modes():
    assert MODES == ("store", "selective", "recompute", "invert")


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
def test_the_step_behind_a_run_of_inverted_ones_recomputes(longest, expected):
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
