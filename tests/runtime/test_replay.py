"""A second run sees what the first saw: random stream, autocast, buffers; and leaves no trace."""

import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from timm.layers import DropPath
from torch import Tensor, nn

from revzoo.errors import RecoveryError
from revzoo.runtime import LiveBytes, ReversibleChain, set_tripwire
from revzoo.runtime.random_state import RandomState, find_generators

MODES = ("invert", "recompute", "selective")
DROPPING = (*MODES, ["invert", "selective", "store", "invert"])


def stochastic() -> ReversibleChain:
    def step():
        return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh(), DropPath(0.4))

    return ReversibleChain([step() for _ in range(4)]).double()


def batch_norm(norm: type[nn.Module] = nn.BatchNorm1d) -> ReversibleChain:
    return ReversibleChain([nn.Sequential(norm(6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4)]).double()


class Renorm(nn.BatchNorm1d):
    """Batch renormalisation: in training the output depends on the running statistics, which then move."""

    def forward(self, input: Tensor) -> Tensor:
        mean, deviation = input.mean(0), input.std(0, unbiased=False) + self.eps
        running = (self.running_var + self.eps).sqrt()
        r, d = (deviation / running).detach().clamp(1 / 3, 3), ((mean - self.running_mean) / running).detach().clamp(-5, 5)
        out = ((input - mean) / deviation * r + d) * self.weight + self.bias
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(deviation.square(), 0.1)
            self.num_batches_tracked += 1
        return out


def renorm() -> ReversibleChain:
    return batch_norm(Renorm)


@pytest.mark.parametrize("schedule", DROPPING)
def test_masks_are_those_of_the_stored_run_and_the_users_stream_is_untouched(schedule, streams, gradients, error):
    chain = stochastic()
    torch.manual_seed(7)
    expected = gradients(chain, streams, "store")
    next_draw = torch.rand(1)
    torch.manual_seed(7)
    assert error(gradients(chain, streams, schedule), expected) < 1e-12
    assert torch.equal(torch.rand(1), next_draw)


@pytest.mark.parametrize("schedule", DROPPING)
@pytest.mark.parametrize("make", [stochastic, batch_norm, renorm])
def test_two_forwards_before_one_backward(make, schedule, streams, error):
    original = make()

    def run(schedule):
        chain = deepcopy(original)  # with statistics that have not moved
        chain.schedule = schedule
        torch.manual_seed(3)
        a1, a2 = chain(*streams)
        b1, b2 = chain(streams[1] * 2, streams[0])
        return list(torch.autograd.grad((a1 * b2 + a2 * b1).sum(), [*streams, *chain.parameters()]))

    assert error(run(schedule), run("store")) < 1e-12


@pytest.mark.parametrize("schedule", DROPPING)
@pytest.mark.parametrize("make", [batch_norm, renorm])
def test_a_norm_counts_once(make, schedule, streams, gradients, error):
    chain, other = make(), make()
    other.load_state_dict(chain.state_dict())
    for _ in range(2):
        expected = gradients(other, streams, "store")
        assert error(gradients(chain, streams, schedule), expected) < 1e-12
    for (name, a), b in zip(chain.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b), name
        assert not name.endswith("tracked") or a == 2


def test_batch_norm_in_eval_moves_nothing(streams, gradients, error):
    chain = batch_norm().eval()
    before = [b.clone() for b in chain.buffers()]
    assert error(gradients(chain, streams, "invert"), gradients(chain, streams, "store")) < 1e-12
    assert all(torch.equal(a, b) for a, b in zip(chain.buffers(), before, strict=True))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(6), Renorm(6)], ids=["plain", "reading"])
def test_only_a_norm_of_ones_own_keeps_its_statistics(norm):
    chain = ReversibleChain([nn.Sequential(norm, nn.Tanh())])
    x1, x2 = torch.randn(2, 12, 6).unbind()
    with LiveBytes() as live:
        known = live.watch([x1, x2, *chain.parameters(), *chain.buffers()])
        y = chain(x1, x2)
        kept = live.alive(without=known)
    del y
    statistics = 0 if type(norm) is nn.BatchNorm1d else 2 * 6 * 4 + 8
    assert kept == 12 * 6 * 4 + statistics  # the chain's first output is its second input


class Recorded(nn.Module):
    """Notes what a linear layer gave under the autocast state of each run."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.note = list[torch.dtype]().append  # a list of its own would be as it was after a second run

    def forward(self, w):
        out = self.linear(w)
        self.note(out.dtype)
        return out.tanh()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dtype", "exact"), [(torch.bfloat16, True), (torch.float16, False)])
def test_autocast_around_forward_only_is_in_force_in_both_runs(mode, dtype, exact):
    chain = ReversibleChain([Recorded() for _ in range(3)], exact=exact)
    streams = [x.requires_grad_() for x in torch.randn(2, 3, 6).unbind()]

    def run(schedule):
        chain.schedule = schedule
        with torch.autocast("cpu", dtype):
            y1, y2 = chain(*streams)
        assert y1.dtype == y2.dtype == torch.float32
        return torch.autograd.grad((y1 * y2).sum(), [*streams, *chain.parameters()])

    expected = run("store")
    grads = run(mode)
    assert all(step.note.__self__ == [dtype] * 3 for step in chain.steps)  # stored run, first run, second run
    if exact or mode != "invert":
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    else:  # the recovered state differs by float32 rounding, which may flip a half-precision rounding
        torch.testing.assert_close(grads, expected, rtol=0.02, atol=0.02)


def test_a_backward_inside_another_autocast_still_sees_the_first(streams):
    chain = ReversibleChain([Recorded()])
    chain.schedule = "recompute"
    x = torch.randn(3, 6)
    y1, y2 = chain(x, x)
    with torch.autocast("cpu", torch.bfloat16):
        (y1 * y2).sum().backward()
    assert chain.steps[0].note.__self__ == [torch.float32] * 2


@pytest.mark.parametrize("grad", [True, False])
def test_streams_are_float32_under_autocast_whatever_comes_in(grad):
    chain = ReversibleChain([Recorded(), Recorded()])
    x = torch.randn(3, 6).bfloat16()
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
        y1, y2 = chain(x, x)
    assert y1.dtype == y2.dtype == torch.float32
    assert [step.note.__self__ for step in chain.steps] == [[torch.bfloat16]] * 2


def test_half_precision_streams_stay_half_when_a_step_answers_in_more():
    class Widening(nn.Module):
        def forward(self, w):
            return w.float().tanh()

    chain = ReversibleChain([Widening(), Widening()])
    chain.schedule = "recompute"
    x = torch.randn(3, 6).bfloat16().requires_grad_()
    y1, y2 = chain(x, x)
    assert y1.dtype == y2.dtype == torch.bfloat16
    (y1 * y2).sum().backward()
    assert x.grad.dtype == torch.bfloat16


class Counter(nn.Module):
    """A step whose own buffer moves: a second run would see another value."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, w):
        self.calls += 1
        return w * self.calls


def test_a_moving_buffer_is_refused_unless_stored(streams):
    chain = ReversibleChain([Counter()])
    with pytest.raises(RecoveryError, match=r"steps\.0 changes its 'calls' in forward.* schedule of steps\.0 to 'store'"):
        chain(*streams)
    chain.schedule = "store"
    chain(*streams)


@pytest.mark.parametrize("compares", [False, True])
def test_another_order_of_memory_in_backward_is_refused(compares):
    """Dropout, for example, draws in the order of memory."""
    chain = ReversibleChain([nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.5))] * 2)
    with set_tripwire(compares):
        y1, y2 = chain(*torch.randn(2, 2, 4, 5, 5, requires_grad=True))
        (y1 * y2).sum().backward(retain_graph=True)
        chain.to(memory_format=torch.channels_last)
        with pytest.raises(
            RecoveryError, match=r"'0\.weight' of steps\.1 has another order of memory .* Change it before forward"
        ):
            (y1 * y2).sum().backward()


def test_a_parameter_changed_between_forward_and_backward_is_refused(streams):
    chain = ReversibleChain([nn.Linear(6, 6)]).double()
    y1, y2 = chain(*streams)
    with torch.no_grad():
        chain.steps[0].weight.mul_(2)
    with pytest.raises(RecoveryError, match=r"'weight' of steps\.0 was changed in place between forward and backward"):
        (y1 * y2).sum().backward()


def test_an_error_inside_a_recovery_leaves_stream_and_statistics_as_they_were(streams):
    class Fragile(nn.Module):
        broken = False

        def forward(self, w):
            w = torch.dropout(w.tanh(), 0.5, True)
            if self.broken:
                raise ValueError("broken")
            return w

    step = Fragile()
    chain = ReversibleChain([nn.Tanh(), nn.Sequential(nn.BatchNorm1d(6).double(), step)])
    y1, y2 = chain(*streams)
    buffers = [b.clone() for b in chain.buffers()]
    state = torch.get_rng_state()
    step.broken = True
    with pytest.raises(ValueError, match="broken"):
        (y1 * y2).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(chain.buffers(), buffers, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compares", [True, False])
def test_what_f_draws_from_a_fork_of_the_random_stream_is_drawn_again(mode, compares, streams, error):
    class Forking(nn.Module):
        def forward(self, w):
            with torch.random.fork_rng():
                mask = torch.rand_like(w)
            return w.tanh() * mask

    chain = ReversibleChain([Forking() for _ in range(4)])

    def run(schedule):
        torch.manual_seed(5)
        chain.schedule = schedule
        y1, y2 = chain(*streams)
        torch.rand(7)
        return torch.autograd.grad((y1 * y2).sum(), streams)

    with set_tripwire(compares):
        assert error(run(mode), run("store")) < 1e-12


def test_a_second_run_that_draws_nothing_more_still_stops_early(streams):
    ended = []
    step = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)).double()
    step[2].register_forward_hook(lambda *_: ended.append(1))
    chain = ReversibleChain([step])
    chain.schedule = "recompute"
    y1, y2 = chain(*streams)
    assert len(ended) == 1
    (y1 * y2).sum().backward()
    assert len(ended) == 1


SETTINGS = {
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "determinism": lambda: switched(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True),
    "threads": lambda: switched(torch.set_num_threads, torch.get_num_threads, torch.get_num_threads() + 1),
    "default device": lambda: torch.device("meta"),
    "default dtype": lambda: switched(torch.set_default_dtype, torch.get_default_dtype, torch.float64),
}


@contextmanager
def switched(set_: Callable[[Any], None], get: Callable[[], Any], value: Any) -> Iterator[None]:
    before = get()
    set_(value)
    try:
        yield
    finally:
        set_(before)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("mode", MODES)
def test_settings_around_forward_only_are_in_force_in_both_runs(setting, mode):
    class Reading(nn.Module):
        def forward(self, w):
            seen.append(
                (
                    torch.backends.cuda.flash_sdp_enabled(),
                    torch.are_deterministic_algorithms_enabled(),
                    torch.get_num_threads(),
                    torch.get_default_dtype(),
                    torch.get_default_device(),
                )
            )
            return w.tanh()

    seen: list[tuple[Any, ...]] = []
    chain = ReversibleChain([Reading(), Reading()])
    chain.schedule = mode
    streams = torch.randn(2, 3, 6, requires_grad=True).unbind()
    chain(*streams)
    outside = seen.pop()
    seen.clear()
    with SETTINGS[setting]():
        y1, y2 = chain(*streams)
    (y1 * y2).sum().backward()
    assert len(seen) == 4
    assert set(seen) == {seen[0]} != {outside}
    seen.clear()
    chain(*streams)
    assert seen[0] == outside


class Notes:
    """As if it stood in a file of the user's that has the name of a standard module."""

    __module__ = "profile"

    def __init__(self):
        self.calls = 0


class Bookkeeping(nn.Module):
    """Notes something of each call in lists, objects and plain tensors, of which nothing is read."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.sizes, self.recent, self.seen = list[float](), deque[float](maxlen=2), set[int]()
        self.state, self.notes = SimpleNamespace(calls=0), Notes()
        self.average, self.calls = torch.zeros(()), 0

    def forward(self, w):
        size = float(w.detach().norm())
        self.sizes.append(size)
        self.recent.append(size)
        self.seen.add(len(self.seen))
        self.state.calls += 1
        self.notes.calls += 1
        self.calls += 1
        self.average.mul_(0.9).add_(w.detach().mean(), alpha=0.1)
        return self.linear(w).tanh()

    def read(self):
        calls = self.state.calls, self.notes.calls, self.calls
        return [len(self.sizes), len(self.recent), len(self.seen), *calls, self.average.item()]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("mode", ["invert", "recompute", "selective"])
def test_what_f_notes_of_its_calls_is_noted_once(mode, lookahead, streams, monkeypatch):
    monkeypatch.setitem(sys.modules, "profile", SimpleNamespace(__file__=__file__))

    def run(mode):
        chain = ReversibleChain([Bookkeeping() for _ in range(3)], exact=True, lookahead=lookahead).double()
        for step in chain.steps:
            nn.init.eye_(step.linear.weight)
            nn.init.zeros_(step.linear.bias)
        chain.schedule = mode
        for _ in range(4):  # the last two are not compared
            y1, y2 = chain(*streams)
            (y1 * y2).sum().backward()
        return [step.read() for step in chain.steps]

    assert run(mode) == run("store")


def test_streams_of_other_devices_are_recorded_too(monkeypatch):
    """A device that shows its generators (CUDA) and one that does not (MPS), both played by the CPU."""
    first, second = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    cuda, mps = ModuleType("cuda"), ModuleType("mps")
    cuda.is_available, cuda.default_generators = (lambda: True), (None, first)
    mps.is_available, mps.get_rng_state, mps.set_rng_state = (lambda: True), second.get_state, second.set_state
    modules = {"cuda": cuda, "mps": mps}
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules[device.type])
    state = RandomState(find_generators([torch.device("cpu"), torch.device("cuda:1"), torch.device("mps:0")]))

    def draw() -> list[float]:
        return [torch.rand(1).item(), *(torch.rand(1, generator=generator).item() for generator in (first, second))]

    drawn = draw()
    state.end_first_run()
    following = draw()
    present = state.rewind()
    assert not state.has_drawn_all
    assert draw() == drawn
    assert state.has_drawn_all
    state.restore(present)
    assert draw() != following != drawn


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_stores_a_tensor_with_its_graph_is_freed(mode):
    class Storing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, w):
            self.latest = self.linear(w).tanh()  # of the second run, after backward
            return self.latest * 2

    gc.disable()
    try:
        weights = []
        for _ in range(10):
            chain = ReversibleChain([Storing(), Storing()])
            chain.schedule = mode
            weights.append(weakref.ref(chain.steps[0].linear.weight))
            y1, y2 = chain(*torch.randn(2, 3, 6).unbind())
            (y1 * y2).sum().backward()
            del chain, y1, y2
        assert [weight() for weight in weights] == [None] * 10
    finally:
        gc.enable()
