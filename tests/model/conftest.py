"""Training steps of whole networks, and how their gradients are compared."""

import random
from types import SimpleNamespace

import pytest
import torch


def compute_gradients(model, schedule, *batch):
    """Return the gradient of every parameter for a fixed loss; dropout and drop path draw the same numbers in every call."""
    model.schedule = schedule
    model.zero_grad()
    torch.manual_seed(1)
    outputs = model(*batch)
    outputs.backward(torch.randn(outputs.shape, generator=torch.Generator().manual_seed(2), dtype=outputs.dtype))
    return {name: p.grad for name, p in model.named_parameters()}


def largest_error(gradients, expected):
    """Return the largest relative error of a gradient; a gradient that is nearly 0 is compared with the typical one."""
    typical = torch.stack([g.norm() for g in expected.values()]).square().mean().sqrt()
    return max(float((gradients[name] - g).norm() / max(g.norm(), 1e-6 * typical)) for name, g in expected.items())


def differing(gradients, expected):
    """Return the names of the gradients that are not bit-identical."""
    return [name for name, g in expected.items() if not torch.equal(g, gradients[name])]


def make_streams_unequal(model):
    """Let the two streams differ from the first step on: after most splits they are equal, which would hide a mistake."""
    model.split.register_forward_hook(lambda split, inputs, pair: (pair[0], 0.7 * pair[1].flip(-1)))


def draw_modes(model, seed):
    """Return a mode for each unit, drawn from those it may have."""
    rng, units = random.Random(seed), [entry for entry in model.layout() if entry.is_unit]
    return [rng.choice(["store", "selective", "recompute", *["invert"] * 3 * entry.can_invert]) for entry in units]


@pytest.fixture(scope="session")
def gradients():
    """Return the functions of this file (test files cannot import it)."""
    return SimpleNamespace(
        compute=compute_gradients,
        largest_error=largest_error,
        differing=differing,
        draw_modes=draw_modes,
        make_streams_unequal=make_streams_unequal,
    )
