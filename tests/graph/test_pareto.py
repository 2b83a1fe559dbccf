"""Fronts of very many points: what is left out is nearly what is left."""

import numpy as np
import pytest

from revzoo.graph.pareto import list_best, thin


@pytest.fixture
def front():
    """A thousand points that are nearly alike, and ten far from these and from one another, the last of them without work."""
    alike = np.stack([np.arange(1000) + 5000, 100_000 - np.arange(1000)])
    far = np.stack([np.arange(1, 11) * 10_000, np.arange(9, -1, -1) * 10_000])
    return list_best(np.concatenate([alike, far], axis=1))


def test_points_far_apart_stay(front):
    assert front.shape[1] == 1010
    thinned, lost = thin(front, 100)
    assert set(zip(*thinned.tolist(), strict=True)) >= set(zip(*front[:, -10:].tolist(), strict=True))
    assert 10 < thinned.shape[1] <= 100
    assert 0 < lost <= 100_000 / 49  # two ranges, of bytes and of work, share the points


def test_what_is_lost_is_the_most_that_a_dropped_point_spares(front):
    thinned, lost = thin(front, 40)
    spared = [thinned[1, thinned[0] <= size].min() - work for size, work in front.T]
    assert lost == max(spared)
