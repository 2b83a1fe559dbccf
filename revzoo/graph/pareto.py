"""Fronts: points that no other point beats. Rows are bytes, work and more; every point is a column."""

import numpy as np
from numpy.typing import NDArray

_BINS = 12  # bits: by bytes, in which the least work of the few is looked up


def list_best(columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the columns that no other beats in bytes and work, by rising bytes."""
    return columns[:, find_best(columns[0], columns[1])]


def find_best(size: NDArray[np.int64], work: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places of the points that no other beats in bytes and work, by rising bytes."""
    order = size.argsort(kind="stable")
    least = np.minimum.accumulate(work[order])
    differs = np.ones(size.size, np.bool_)
    np.less(least[1:], least[:-1], out=differs[1:])
    order = order[differs]
    sizes = size[order]
    differs = differs[: order.size]
    np.not_equal(sizes[1:], sizes[:-1], out=differs[:-1])  # of as many bytes, the last takes the least work
    differs[-1:] = True
    return order[differs]


def find_unbeaten(
    size: NDArray[np.int64], work: NDArray[np.int64], front_size: NDArray[np.int64], front_work: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the places of the points that a front does not beat, and of few others."""
    first = front_size[0]
    shift = max(0, int(front_size[-1] - first).bit_length() - _BINS)
    begins = first + (np.arange((int(front_size[-1] - first) >> shift) + 1) << shift)
    least = front_work[front_size.searchsorted(begins, "right") - 1]  # with no more bytes than any point in the bin
    bins = np.minimum((size - first) >> shift, least.size - 1)
    return np.flatnonzero((bins < 0) | (work <= least[bins]))


def thin(columns: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], int]:
    """Return at most `most` columns of a front, and by how much the work of a dropped column may be below that of those left.

    They are evenly spaced in bytes and work together: where many columns are nearly alike, few of them are left.
    """
    if columns.shape[1] <= most:
        return columns, 0
    size, work = columns[0] - columns[0, 0], columns[1, 0] - columns[1]  # both rise
    way = size / size[-1] + work / work[-1]
    interval = (way * (most - 2) / 2).astype(np.int64)  # of each the first is left, and the last column of all
    places = np.union1d(np.flatnonzero(np.diff(interval, prepend=-1)), [columns.shape[1] - 1])
    nearest = places[places.searchsorted(np.arange(columns.shape[1]), "right") - 1]  # with as many bytes or fewer
    return columns[:, places], int((columns[1, nearest] - columns[1]).max())
