"""CUDA graphs of whole training steps: every mode is captured after eager steps, and a replay computes what they do."""

from collections.abc import Sequence
from itertools import groupby

import pytest
import torch
from torch import Tensor, nn

import revzoo
from revzoo.errors import RecoveryError
from tests.cuda_stub import stub
from tests.gpu.models import CASES, DEVICE, make_chain


class Step:
    """One training step on static tensors."""

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor]):
        self.model, self.inputs = model, inputs
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.loss = torch.zeros((), device=DEVICE)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        out = self.model(*self.inputs)
        loss = torch.stack([y.float().square().mean() for y in (out if isinstance(out, tuple) else (out,))]).sum()
        loss.backward()
        self.loss.copy_(loss.detach())
        self.optimizer.step()


def warm_up(step: Step, times: int = 3) -> torch.cuda.Stream:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            step()
    torch.cuda.current_stream().wait_stream(side)
    return side


def capture(step: Step, side: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    return graph


@pytest.mark.parametrize("case", CASES)
def test_a_training_step_is_captured(case):
    model, inputs = CASES[case]()
    step = Step(model, inputs)
    side = warm_up(step)
    counts = stub.Counts() if stub.is_in_use() else None
    graph = capture(step, side)
    if counts is not None:
        assert counts.stop()["copy_to_host"] == counts["copy_to_device"] == 0
        assert counts["stray_launch"] <= 2  # PyTorch's own: outside of the graph it fills what graphs know of random streams
    graph.replay()
    step()  # an eager step may follow, such as the last batch of an epoch


@pytest.mark.values
@pytest.mark.parametrize("case", CASES)
def test_replays_compute_what_eager_steps_do(case):
    losses = []
    for captured in (False, True):
        torch.manual_seed(0)
        model, inputs = CASES[case]()
        for m in model.modules():
            if isinstance(m, nn.Dropout):
                m.p = 0.0
        step = Step(model, inputs)
        side = warm_up(step)
        run = capture(step, side).replay if captured else step
        losses.append([])
        for _ in range(4):
            run()
            losses[-1].append(float(step.loss))
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 4


@pytest.mark.values
def test_states_that_leave_the_grid_make_the_gradients_of_a_replay_nan():
    model, inputs = make_chain(exact=True)
    step = Step(model, inputs)
    graph = capture(step, warm_up(step))
    graph.replay()
    assert all(p.isfinite().all() for p in model.parameters())
    inputs[0].fill_(1e4)
    graph.replay()
    assert any(p.isnan().any() for p in model.parameters())


@pytest.mark.skipif(not hasattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph"), reason="PyTorch 2.14 tells the graph")
@pytest.mark.parametrize("mode", ["invert", "recompute", "selective"])
def test_random_numbers_in_two_graphs_are_refused(mode):
    chain, inputs = make_chain(mode)
    with pytest.raises(RecoveryError, match=r"steps\.3 draws random numbers.*make_graphed_callables"):
        torch.cuda.make_graphed_callables(chain, tuple(x.requires_grad_() for x in inputs))


def test_a_forward_that_goes_on_after_a_backward_is_checked():
    """The blocks of one list have one grid, also where a loss in the middle is differentiated first."""
    blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(4)).to(DEVICE)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: Tensor) -> Tensor:
            for i, block in enumerate(self.blocks):
                x = block(x) if i else block(x.clone())
                if i == 1:
                    x.square().mean().backward(retain_graph=True)
            return x

    net = Net()
    revzoo.reversible_(net, "blocks")
    net(torch.randn(4, 16, device=DEVICE)).sum().backward()


@pytest.mark.counts
@pytest.mark.parametrize("mode", ["invert", "recompute"])
def test_look_ahead_forks_and_joins_within_a_capture(mode):
    model, inputs = make_chain(mode, lookahead=1)
    step = Step(model, inputs)
    side = warm_up(step)
    with stub.log() as queued:
        capture(step, side)
    works = [
        (what, stream) for what, stream, _ in queued if what in ("launch", "blas", "copy_on_device", "stream_wait") and stream
    ]
    main = works[0][1]
    names = {("stream_wait", False): "fork ", ("stream_wait", True): "join "}
    order = "".join(
        key
        for key, _ in groupby(
            names.get((what, stream == main), "main " if stream == main else "side ") for what, stream in works
        )
    )
    # The last step is recovered on the main stream; then each recovery is beside the gradient of the step after it.
    assert order == "main " + 3 * "fork side main join " + "main "
