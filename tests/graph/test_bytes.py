"""What spans keep and compute, to the byte, and when it is freed."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from revzoo.graph.recovery import Observer, Slot
from revzoo.graph.spanned_graph import SpannedGraph
from revzoo.graph.spans import Spans
from revzoo.runtime.live_bytes import LiveBytes

UNIT = 4 * 100  # bytes of the only shape
DEPTH = 8


class Listener(Observer):
    """Notes how many units are alive as backward asks for each slot."""

    def __init__(self, live: LiveBytes):
        self.live, self.without = live, frozenset[int]()
        self.alive: list[tuple[int, float]] = []

    def unpack(self, atom: int, slot: Slot) -> None:
        if all(atom != known for known, _ in self.alive):  # not again after a recovery
            self.alive.append((atom, self.live.alive(self.without) / UNIT))


def run_chain(
    capture: Callable[..., Any], ends: Sequence[int], kept: Sequence[int]
) -> tuple[float, list[tuple[int, float]], float]:
    """Return units alive after the forward of a chain of sines, at each slot in backward, and at the end."""
    torch._dynamo.reset()

    def chain(x: Tensor) -> Tensor:
        for _ in range(DEPTH):
            x = x.sin()  # autograd saves its input
        return x

    captured = capture(chain)
    captured(torch.randn(100))
    (program,) = captured.programs
    atoms = program.spans.atoms
    assert len(atoms) == DEPTH
    live = LiveBytes()
    listener = Listener(live)
    spans = Spans(atoms, ends, frozenset(node for i in kept for node in atoms[i].makes), frozenset())
    with FakeTensorMode(), live:
        x = torch.empty(100, requires_grad=True)
        listener.without = live.watch(x)
        (out,) = SpannedGraph(program.graph, spans, listener)(x)
        after_forward = live.alive(listener.without) / UNIT
        gradient = torch.empty(100)
        listener.without |= live.watch(gradient)
        out.backward(gradient)
        del out
        listener.without |= live.watch(x.grad)
        return after_forward, listener.alive, live.alive(listener.without) / UNIT


def test_kept_results_die_as_backward_passes(capture: Callable[..., Any]):
    after_forward, alive, at_end = run_chain(capture, [4, 8], [3])
    assert after_forward == 1 + 1  # the border between the spans, and the result
    # The result, the gradient from atom 6 on, and: the border; what the second span refills, the border among it; the same for
    # the first span, whose last result the border was.
    assert alive == [(7, 1 + 1), (6, 2 + 3), (5, 2 + 2), (4, 2 + 1), (3, 2), (2, 2 + 2), (1, 2 + 1), (0, 2)]
    assert at_end == 0


@pytest.mark.parametrize(("kept", "statistics"), [([0, 1], 1), ([0], 0)])
def test_statistics_of_a_norm_that_runs_again_are_made_with_it(kept: list[int], statistics: int, capture: Callable[..., Any]):
    """They are small: kept, unless the norm runs again because what it makes is dropped."""
    torch._dynamo.reset()

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x.sin(), (100,)).sin()

    captured = capture(norm)
    captured(torch.randn(8, 100))
    (program,) = captured.programs
    atoms = program.spans.atoms
    assert [node.name for atom in atoms for node in atom.nodes] == ["sin", "layer_norm", "sin_1"]
    spans = Spans(atoms, [len(atoms)], frozenset(node for i in kept for node in atoms[i].makes), frozenset())
    run, live = SpannedGraph(program.graph, spans), LiveBytes()
    with FakeTensorMode(), live:
        for _ in range(2):
            x = torch.empty(8, 100, requires_grad=True)
            without = live.watch(x)
            (out,) = run(x)
            without |= live.watch(out)
            assert live.alive(without) == 8 * UNIT * len(kept) + 2 * 8 * 4 * statistics  # mean and deviation of eight rows
            out.sum().backward()
            del out
            without |= live.watch(x.grad)
            assert live.alive(without) == 0
