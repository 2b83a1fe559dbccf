"""Random numbers that depend only on a key, such as (seed, epoch, index of the example)."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*key: int) -> int:
    """Return a 64-bit seed computed from the key; neighbouring keys give unrelated seeds."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


def make_generator(*key: int) -> torch.Generator:
    """Return a CPU generator seeded with the key."""
    return torch.Generator().manual_seed(derive_seed(*key))


def reseed(*key: int) -> None:
    """Seed the global generators of Python, NumPy and torch (on all devices) with the key."""
    seed = derive_seed(*key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # for every kind of device that is not there, torch.manual_seed formats a stack trace: as long as a small layer takes
        torch.default_generator.manual_seed(seed)


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Seed the global CPU generators with the key inside the block, and restore their states afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed = derive_seed(*key)
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which would seed the accelerators as well
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
