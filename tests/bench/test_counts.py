"""Memory and FLOPs of methods: exact numbers."""

import pytest
import torch
from revzoo.bench.measure import SMALL_STEPS, count, count_peak, time_machinery
from revzoo.bench.method import METHODS
from revzoo.bench.net import NETS, SMALL_NETS

from revzoo.errors import InputError

BY_NAME = {method.name: method for method in METHODS}
TRANSFORMER, CONV = SMALL_NETS
# Streams at the peak of 2 blocks, streams more for each block, FLOPs over those of plain autograd: of convolutions, where a
# forward is 4 convolutions a block and a backward is 8.
OWN = {
    "plain autograd": (19, 8, 1),
    "checkpoint per block": (13, 2, (12 + 3) / 12),  # the last convolution of a block is not run again
    "revzoo store": (19, 8, 1),
    "revzoo recompute": (10, 2, (12 + 2) / 12),
    "revzoo invert": (9, 0, (12 + 4 - 1 / 2) / 12),  # the last convolution of the first step is not run again
    "revzoo exact": (9, 0, (12 + 4 - 1 / 2) / 12),
}
OTHERS = {
    "memcnn": (18, 0, (12 + 8) / 12),
    "RevTorch": (14, 0, (12 + 4) / 12),
    "revlib": (14, 0, (12 + 4) / 12),
    "reformer_pytorch": (16, 0, (12 + 4) / 12),
    "xformers": (16, 0, (12 + 4) / 12),
    "FrEIA": (20, 9, 1),
}


def measure(name, depths=(2, 3)):
    figures = [f for each in ("plain autograd", name) for f in count(CONV, BY_NAME[each], depths)]
    values = {(f.what, f.method, f.blocks): f.value for f in figures}
    ratio = values["flops", name, depths[0]] / values["flops", "plain autograd", depths[0]]
    return values["peak", name, depths[0]], values["slope", name, depths[-1]], ratio


def check(name, peak, slope, flops):
    counted, more, ratio = measure(name)
    statistics = 2 * 2 * CONV.shape[1] * 4 + 8  # of two norms, for every F or G whose tensors are alive; and the loss
    assert 0 <= counted - peak * CONV.stream_bytes <= 4 * statistics
    assert 0 <= more - slope * CONV.stream_bytes <= 2 * statistics
    assert slope > 0 or more == 0
    assert ratio == pytest.approx(flops, abs=1e-12)


@pytest.mark.parametrize("name", OWN)
def test_own_methods(name):
    check(name, *OWN[name])


@pytest.mark.parametrize("name", OTHERS)
def test_other_packages(name):
    try:
        BY_NAME[name].require()
    except InputError as error:
        pytest.skip(str(error))
    check(name, *OTHERS[name])


def test_a_plan_has_the_memory_of_checkpointing_and_fewer_flops():
    peak, _, flops = measure("revzoo planned", (3, 4))
    most, _, others = measure("checkpoint per block", (3, 4))
    assert peak <= most
    assert 1 < flops < others


@pytest.mark.slow
def test_the_graph_of_a_compiled_loop_is_counted():
    _, full, flops = measure("torch.compile, budget 0.5", (1, 2))
    assert flops == 1
    assert 0 < full < 8 * CONV.stream_bytes


def test_the_nets_are_the_published_ones():
    transformer, conv = NETS
    assert (transformer.shape, transformer.stream_bytes) == ((8, 197, 192), 1_210_368)
    assert (conv.shape, conv.stream_bytes) == ((32, 32, 32, 32), 4_194_304)
    weights = [sum(p.nbytes for step in net.make_steps(1) for p in step.parameters()) for net in NETS]
    assert weights == [1_779_456, 148_480]


def test_the_same_weights_and_inputs_for_everybody():
    first, second = CONV.make_steps(2), CONV.make_steps(2, dropout=0.1)
    for one, other in zip(first, second, strict=True):
        assert all(map(torch.equal, one.parameters(), other.parameters()))
    method = BY_NAME["reformer_pytorch"]
    pair = TRANSFORMER.make_pair()
    (joined,) = method.join(TRANSFORMER, pair)
    assert joined.shape == (4, 17, 96)
    assert all(map(torch.equal, method.split(TRANSFORMER, joined), pair))


def test_freed_inputs_are_credited():
    class Frees(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            if self.frees:
                x.untyped_storage().resize_(0)
            return self.weight * torch.ones(1000)

    module = Frees()
    peaks = {}
    for module.frees in (False, True):
        peaks[module.frees] = count_peak(module, (torch.ones(1000),))
    assert peaks[False] - peaks[True] == 4000


def test_machinery_is_beyond_as_many_calls():
    """A loop has hardly any; checkpointing has more. The calls are counted, so that a second run is no machinery."""
    figures = list(time_machinery([BY_NAME["plain autograd"], BY_NAME["checkpoint per block"]], blocks=2, rounds=5))
    plain, checkpoint = (f.value for f in figures)
    assert {f.net for f in figures} == {SMALL_STEPS.name}
    assert plain < checkpoint
