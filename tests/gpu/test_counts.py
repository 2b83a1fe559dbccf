"""What a training step has the device do and the host wait for, counted on the CUDA stub; and the allocator's own peak."""

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import revzoo
from revzoo.analysis.dry_run import linear_loss
from revzoo.planning.planner import enforce_budget
from revzoo.runtime import ReversibleChain, set_tripwire
from revzoo.runtime.coupling import momentum
from tests.cuda_stub import stub
from tests.gpu.models import CASES, WIDTH, make_steps, make_transformer

SHAPE = (8, 197, WIDTH)


class Loop(nn.Module):
    """The same recurrence by autograd alone, or with PyTorch's checkpoint around every step."""

    def __init__(self, steps: list[nn.Module], checkpoints: bool):
        super().__init__()
        self.steps, self.checkpoints = nn.ModuleList(steps), checkpoints

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        for f in self.steps:
            x1, x2 = x2, x1 + (checkpoint(f, x2, use_reentrant=False) if self.checkpoints else f(x2))
        return x1, x2


def make(kind: str, blocks: int) -> nn.Module:
    """Return a chain such as "invert ahead", or a loop: "plain" or "checkpoint"."""
    mode, *options = kind.split()
    if mode in ("plain", "checkpoint"):
        return Loop(make_steps(blocks), mode == "checkpoint").cuda()
    coupling: Any = momentum(kept_bits=8, gain=1.0) if "kept" in options else "additive"
    if "signs" in options:
        coupling = momentum(kept_bits=1, gain=1.0, sign="random")
    chain = make_transformer(blocks, coupling, exact="exact" in options, lookahead=int("ahead" in options))
    chain.schedule, chain.tiles = mode, 2 if "tiles" in options else 1
    return chain


def run(net: nn.Module, streams: tuple[Tensor, ...], autocast: bool) -> None:
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        y1, y2 = net(*streams)
    loss = y1.float().sum() + y2.float().sum()
    del y1, y2
    loss.backward()


def count(kind: str, blocks: int, autocast: bool = False, warm_ups: int = 2) -> stub.Counts:
    net, streams = make(kind, blocks), torch.randn(2, *SHAPE, device="cuda").requires_grad_().unbind()
    for _ in range(warm_ups):
        run(net, streams, autocast)
        net.zero_grad()
    counts = stub.Counts()
    run(net, streams, autocast)
    return counts.stop()


def count_beyond_plain(kind: str, autocast: bool) -> float:
    """Return the kernels of a step beyond those of the plain loop."""
    per_step = {each: (count(each, 4, autocast).kernels - count(each, 2, autocast).kernels) / 4 for each in (kind, "plain")}
    return per_step[kind] - per_step["plain"]


KERNELS = {  # of PyTorch 2.14, in float32, and under autocast, which casts the weights again in each second run
    "checkpoint": (4, 8),
    "selective": (1.5, 6.5),
    "recompute": (4, 8),
    "recompute ahead": (4, 8),
    "invert": (6, 10),
    "invert ahead": (6, 10),
    "invert exact": (12, 18),
    "invert kept": (26, 32),
    "invert kept signs": (50, 56),
    "invert tiles": (40, 49),  # two tiles
}


@pytest.mark.counts
@pytest.mark.skipif(not torch.__version__.startswith("2.14."), reason="PyTorch's own kernels differ from version to version")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KERNELS)
def test_kernels_of_a_step_beyond_plain(kind, autocast):
    with set_tripwire(False):
        assert count_beyond_plain(kind, autocast) == KERNELS[kind][autocast]


@pytest.mark.counts
def test_the_fingerprint_of_a_state_takes_one_kernel():
    """In the rounds that are compared; none in others."""
    counts = dict[object, float]()
    for setting in (False, True, "always"):
        with set_tripwire(setting):
            counts[setting] = count_beyond_plain("invert", False)
    assert counts["always"] - counts[False] == 2  # in forward and in backward
    assert counts[True] == counts[False]  # after the first two rounds


MODES = [
    "store",
    "selective",
    "recompute",
    "invert",
    "invert ahead",
    "recompute ahead",
    "invert exact",
    "invert kept",
    "invert kept signs",
    "invert tiles",
]


@pytest.mark.counts
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", MODES)
def test_a_training_step_copies_once_to_the_host_and_waits_for_nothing(kind, autocast):
    with set_tripwire("always"):
        counts = count(kind, 3, autocast)
    # The fingerprints of all steps travel together, on a grid in two dtypes, and so do the ranges of all states.
    assert counts["copy_to_host"] == {"store": 0, "invert exact": 3, "invert kept": 3, "invert kept signs": 3}.get(kind, 1)
    assert counts["copy_to_device"] == counts.waits == 0


@pytest.mark.counts
@pytest.mark.usefixtures("lagging")
@pytest.mark.parametrize(
    "kind", ["store", "selective", "recompute", "invert", "invert exact", "invert kept", "invert kept signs"]
)
def test_a_compiled_step_waits_for_nothing_and_copies_nothing_to_the_host(kind):
    streams = torch.randn(2, *SHAPE, device="cuda").requires_grad_().unbind()
    compiled = torch.compile(make(kind, 2), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        counts = stub.Counts()
        run(compiled, streams, False)
        counts.stop()
    assert counts["copy_to_host"] == counts["copy_to_device"] == counts.waits == 0


@pytest.mark.counts
def test_a_loss_in_chunks_waits_once():
    """For the number of labels that count."""
    head, hidden = nn.Linear(WIDTH, 99, device="cuda"), torch.randn(4, 50, WIDTH, device="cuda", requires_grad=True)
    labels = torch.zeros(4, 50, dtype=torch.int64, device="cuda")
    for _ in range(2):
        counts = stub.Counts()
        revzoo.chunked_loss(head, hidden, labels, chunk=40).backward()
    assert (counts.waits, counts["copy_to_host"], counts["copy_to_device"]) == (1, 1, 0)


@pytest.fixture
def lagging() -> Iterator[None]:
    stub.let_events_lag()
    yield
    stub.let_events_lag(False)


@pytest.mark.counts
@pytest.mark.usefixtures("lagging")
@pytest.mark.parametrize("kind", MODES)
def test_nothing_waits_for_a_device_that_is_far_behind(kind):
    """But for exact arithmetic, which at the end of backward waits for its beginning: an error must come before the update."""
    assert count(kind, 3).waits == ("exact" in kind or "kept" in kind)


@pytest.mark.counts
@pytest.mark.parametrize("kind", MODES)
def test_a_new_shape_copies_nothing_to_the_device(kind):
    net = make(kind, 2)
    run(net, torch.randn(2, *SHAPE, device="cuda").requires_grad_().unbind(), False)
    counts = stub.Counts()
    for shape in ((7, 197, WIDTH), (8, 100, WIDTH), (3, 31, WIDTH)):
        run(net, torch.randn(2, *shape, device="cuda").requires_grad_().unbind(), False)
    assert counts["copy_to_device"] == counts.waits == 0


@pytest.mark.counts
@pytest.mark.usefixtures("lagging")
def test_an_in_place_abn_waits_in_its_first_step_only():
    (model, (images,)), waits = CASES["in-place ABN"](), []
    for _ in range(3):
        counts = stub.Counts()
        model(images).sum().backward()
        waits.append(counts.waits)
    assert waits[0] > 0
    assert waits[1:] == [0, 0]


def measure_buffer(rows: int, columns: int) -> int:
    """Return what the kernel of a sum over rows takes beside its result."""
    x = torch.empty(rows, columns, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    total = x.sum(0)
    return torch.cuda.max_memory_allocated() - before - total.nbytes


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("kind", MODES)
def test_the_allocators_peak_is_the_counted_one(kind, lag, request):
    """Also where no event is ever ready, so that the allocator cannot reuse what another stream may still read."""
    set_tripwire("always")  # as where bytes are counted
    request.addfinalizer(partial(set_tripwire, True))
    net, streams = make(kind, 3), torch.randn(2, 64, 197, WIDTH, device="cuda").unbind()
    report = revzoo.measure_memory(net, streams)  # which also gives cuBLAS its workspace
    linear_loss(net(*streams)).backward()  # on two streams with look-ahead; what counts bytes runs on one
    net.zero_grad()
    if stub.is_in_use() and lag:
        request.getfixturevalue("lagging")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_loss(net(*streams)).backward()
    seen = torch.cuda.max_memory_allocated() - before
    counted = report.peak_bytes - report.weight_bytes - report.buffer_bytes - report.batch_bytes
    # The allocator leaves up to 1 MiB of a block unsplit and counts it, and the sum that is a bias's gradient has a buffer.
    assert -(2**10) <= seen - counted <= 2**20 + measure_buffer(64 * 197, 4 * WIDTH), (seen - counted) / 2**20


@pytest.mark.parametrize("name", ["rev_vit_digits", "rev_swin_digits"])
def test_the_allocators_peak_stays_within_a_plans_budget(name):
    model = revzoo.create(name).cuda().train()
    images = model.example_input(64)
    present = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), images))
    profile = revzoo.profile(model, images)
    widest = revzoo.solve(profile, "60GiB")
    for share in (0.0, 0.5):
        budget = int(widest.min_peak_bytes + share * (widest.no_recompute_peak_bytes - widest.min_peak_bytes))
        enforce_budget(model, images, profile, revzoo.solve(profile, budget)).apply(model)
        torch._C._cuda_clearCublasWorkspaces()  # a process has them once; here they are part of every step
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(images).sum().backward()
        assert torch.cuda.max_memory_allocated() - before + present <= budget + 2**20
        model.zero_grad()


@pytest.mark.parametrize("kind", ["invert", "layers", "reversible Llama", "in-place ABN", "rev_swin_digits"])
def test_a_deleted_model_is_freed_without_the_garbage_collector(kind):
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        model, inputs = CASES[kind]()
        out = model(*inputs)
        torch.stack([y.float().sum() for y in (out if isinstance(out, tuple) else (out,))]).sum().backward()
        weights = sum(p.nbytes for p in model.parameters())
        del model, inputs, out
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        assert kept < weights / 10, f"{kept} bytes are kept, the weights had {weights}"
    finally:
        gc.enable()


class Force(nn.Module):
    """The gradient of an energy; backward unpacks what a step saves in a thread of the device, while the step is running."""

    def __init__(self, energy: nn.Module):
        super().__init__()
        self.energy = energy

    def forward(self, w: Tensor) -> Tensor:
        x = w if w.requires_grad else w.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return force


@pytest.mark.parametrize("mode", ["invert", "recompute", "selective"])
def test_a_step_that_differentiates_inside_waits_for_no_turn(mode, monkeypatch):
    monkeypatch.setattr("revzoo.runtime.forward._LONGEST_WAIT_SECONDS", 5)
    with set_tripwire(not stub.is_in_use()):  # the stub computes nothing that could be compared
        chain = ReversibleChain([Force(nn.Sequential(nn.Linear(8, 8), nn.Tanh())) for _ in range(2)]).cuda()
        chain.schedule = mode
        for _ in range(3):
            streams = [x.requires_grad_() for x in torch.randn(2, 4, 8, device="cuda").unbind()]
            y1, y2 = chain(*streams)
            (y1 * y2).sum().backward()
            assert all(x.grad is not None for x in streams)
