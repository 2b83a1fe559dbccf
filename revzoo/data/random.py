"""Random numbers that are a function of a key (seed, epoch, example, ...) and of nothing else."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def number(*key: int) -> int:
    """Return a 64-bit seed that is a function of the key, unrelated for neighbouring keys."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


def generator(*key: int) -> torch.Generator:
    """Return a CPU generator seeded with the key."""
    return torch.Generator().manual_seed(number(*key))


def reseed(*key: int) -> None:
    """Seed the process's random streams (Python, NumPy, torch on all devices) with the key."""
    seed = number(*key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Seed the process's CPU streams with the key inside, and have them untouched outside."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed = number(*key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which would seed the accelerators as well
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
