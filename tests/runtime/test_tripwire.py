"""What a second run does differently, and nothing but its effect shows: the tripwire raises, and names the step."""

import math
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from revzoo import device
from revzoo.errors import RecoveryError
from revzoo.runtime import Bijection, ReversibleChain, call_watch, fingerprint, set_tripwire
from revzoo.runtime.coupling import momentum
from revzoo.runtime.live_bytes import LiveBytes
from revzoo.runtime.tripwire import Watch

own = torch.Generator()
RERUN = ["invert", "recompute", "selective"]


class Changing(nn.Module):
    """A layer whose output depends on something that PyTorch does not know of."""

    def __init__(self, source: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        self.source, self.linear, self.calls, self.mask = source, nn.Linear(6, 6), 0, torch.ones(6)

    def forward(self, w: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(self.source(self, w).tanh()).sin()


def use_a_counter(f: Changing, w: Tensor) -> Tensor:
    return w / f.calls


SOURCES: dict[str, Callable[[Changing, Tensor], Tensor]] = {
    "Python's random": lambda f, w: w * random.uniform(-4, 4),
    "an attribute": lambda f, w: w * f.mask,
    "a generator of its own": lambda f, w: w * torch.rand(w.shape, generator=own),
    "values outside torch": lambda f, w: w * torch.from_numpy(f.mask.numpy() * random.uniform(-4, 4)),
}


@pytest.fixture(autouse=True)
def seed():
    random.seed(1)  # its first two numbers are far apart


COUPLINGS = {"additive": {}, "exact": {"exact": True}, "kept bits": {"coupling": momentum(kept_bits=3, gain=1.0)}}


def run(chain: ReversibleChain, between: Callable[[], None] = lambda: None) -> list[Tensor]:
    x1, x2 = (x.requires_grad_() for x in torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0)).unbind())
    y1, y2 = chain(x1, x2)
    between()
    return list(torch.autograd.grad((y1 * y2).sum(), [x1, x2, *chain.parameters()]))


def change(chain: ReversibleChain) -> None:
    """Change what PyTorch does not know of, as between two training steps."""
    for step in chain.steps:
        if isinstance(step, Changing):
            step.mask = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("mode", RERUN)
@pytest.mark.parametrize("settings", COUPLINGS.values(), ids=COUPLINGS)
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("place", [0, 2])
def test_a_source_of_difference_raises_in_the_backward_of_its_step(source, settings, mode, place):
    steps = [Changing(source) if i == place else nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for i in range(4)]
    chain = ReversibleChain(steps, **settings)
    chain.schedule = mode
    with pytest.raises(
        RecoveryError, match=rf"^steps\.{place} ran differently the second time: .* or set its schedule to 'store'"
    ):
        run(chain, lambda: change(chain))


@pytest.mark.parametrize("mode", ["recompute", "selective"])
def test_an_index_that_is_saved_last_raises(mode):
    class Shuffled(nn.Linear):
        def forward(self, w: Tensor) -> Tensor:
            return super().forward(w)[..., torch.tensor(random.sample(range(6), 6))]

    chain = ReversibleChain([Shuffled(6, 6) for _ in range(2)])
    chain.schedule = mode
    with pytest.raises(RecoveryError, match=r"^steps\.1 ran differently the second time: what autograd saves"):
        run(chain)


@pytest.mark.parametrize("bits", [False, True])
def test_every_element_changes_a_fingerprint(bits):
    x = torch.randn(6, 4, dtype=torch.float64)
    expected = fingerprint.take_fingerprint(x, bits=bits)
    changed = (x + 1e-9 * place.view(6, 4) for place in torch.eye(24))
    assert all(fingerprint.take_fingerprint(each, bits=bits) != expected for each in changed)


class Switched(nn.Module):
    """Gives zeros until it is switched on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.is_on = False

    def forward(self, w: Tensor) -> Tensor:
        return torch.tanh(self.linear(w) if self.is_on else 0 * self.linear(w))


def test_states_that_were_zero_everywhere_are_compared():
    chain = ReversibleChain([Switched() for _ in range(4)])
    zeros = torch.zeros(5, 6, requires_grad=True)
    y1, y2 = chain(zeros, zeros)
    for step in chain.steps:
        step.is_on = True
    with pytest.raises(RecoveryError, match=r"^steps\.3 ran differently the second time: .* by inf of its size"):
        (y1 + y2).sum().backward()


@pytest.mark.parametrize("mode", RERUN)
@pytest.mark.filterwarnings("ignore:The streams are torch.float16")
def test_large_numbers_in_half_precision_are_compared(mode):
    class Growing(nn.Module):
        calls = 0

        def forward(self, w: Tensor) -> Tensor:
            self.calls += 1
            return (w * self.calls).abs()

    chain = ReversibleChain([nn.Tanh(), nn.Tanh(), Growing(), nn.Tanh()]).half()
    chain.schedule = mode
    x1, x2 = (x.half().requires_grad_() for x in torch.linspace(1e4, 3e4, 60).view(2, 5, 6).unbind())
    y1, y2 = chain(x1, x2)
    with pytest.raises(RecoveryError, match=r"^steps\.2 ran differently"):
        (y1.float() * y2.float()).sum().backward()


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_forward_that_overflows_has_gradients_that_say_so(place, value):
    """A loss scaler skips such a step, and a training loop names the loss."""
    chain = ReversibleChain([nn.Linear(6, 6) for _ in range(4)])
    with torch.no_grad():
        chain.steps[place].bias[0] = value
    assert not all(gradient.isfinite().all() for gradient in run(chain))


def test_a_step_that_gives_nan_the_second_time_is_named():
    class Failing(nn.Module):
        calls = 0

        def forward(self, w: Tensor) -> Tensor:
            self.calls += 1
            return w.sin() * (1.0 if self.calls == 1 else math.nan)

    with pytest.raises(RecoveryError, match=r"^steps\.2 ran differently the second time: .* is not finite any more"):
        run(ReversibleChain([nn.Tanh(), nn.Tanh(), Failing(), nn.Linear(6, 6)]))


def test_the_default_device_may_be_another_one():
    fingerprint._make_weights.cache_clear()
    chain = ReversibleChain([nn.Linear(6, 6) for _ in range(4)])
    with torch.device("meta"):
        x1, x2 = torch.randn(2, 5, 6, device="cpu", requires_grad=True).unbind()
        y1, y2 = chain(x1, x2)
        (y1 * y2).sum().backward()
    assert all(p.grad.device.type == "cpu" for p in chain.parameters())


class Halves(Bijection):
    """Exchange the halves of the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(3, -1)

    def inverse(self, y: Tensor) -> Tensor:
        return y.roll(-3, -1)


@pytest.mark.parametrize("settings", COUPLINGS.values(), ids=COUPLINGS)
def test_steps_around_a_bijection_are_watched(settings):
    steps = [nn.Tanh(), Changing(use_a_counter), Halves(), nn.Tanh(), nn.Tanh()]
    with pytest.raises(RecoveryError, match=r"^steps\.1 ran differently"):
        run(ReversibleChain(steps, **settings))
    steps = [nn.Tanh(), nn.Tanh(), Halves(), Changing(use_a_counter), nn.Tanh()]
    with pytest.raises(RecoveryError, match=r"^steps\.3 ran differently"):
        run(ReversibleChain(steps, **settings))
    steps[3] = nn.Tanh()
    run(ReversibleChain(steps, **settings))


def test_it_can_be_switched_off():
    chain = ReversibleChain([nn.Tanh(), nn.Tanh(), Changing(use_a_counter)])
    with set_tripwire(False):
        run(chain)
        with set_tripwire(True), pytest.raises(RecoveryError, match=r"^steps\.2 ran differently"):
            run(chain)
        run(chain)
    with pytest.raises(RecoveryError, match=r"^steps\.2 ran differently"):
        run(chain)
    set_tripwire(False)
    run(chain)
    set_tripwire(True)


@pytest.mark.parametrize("mode", ["invert", "recompute"])
def test_another_thread_may_move_the_random_stream_of_an_f_that_draws_nothing(mode):
    """As one that loads data does. Here it draws during both runs of each step."""

    class Interrupted(nn.Module):
        def forward(self, w):
            torch.rand(random.randint(1, 9))
            return w.tanh()

    chain = ReversibleChain([Interrupted() for _ in range(3)])
    chain.schedule = mode
    run(chain)
    with set_tripwire(False), pytest.raises(RecoveryError, match="it drew another amount of random numbers"):
        run(chain)


def test_a_watched_chain_takes_the_bytes_of_an_unwatched_one():
    def peak(enabled):
        chain = ReversibleChain([nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(6)])
        x1, x2 = torch.randn(2, 80, 32).unbind()
        with set_tripwire(enabled), LiveBytes() as live:
            known = live.watch([x1, x2, *chain.parameters()])
            y1, y2 = chain(x1, x2)
            after_forward = live.alive(without=known)
            (y1 * y2).sum().backward()
            return after_forward, live.peak(without=known)

    assert peak(True) == peak(False)
    assert peak(True)[0] == 2 * 80 * 32 * 4


@pytest.fixture
def queued(monkeypatch):
    """Play a device by the CPU: nothing is judged before it has been copied to the host. Return the copies' events."""
    events: list[Mock] = []
    for module in (fingerprint, device, call_watch):
        monkeypatch.setattr(module, "can_read_now", lambda x: False)
    monkeypatch.setattr(device, "_record_event", lambda _: events.append(Mock(**{"query.return_value": False})) or events[-1])
    judge = Watch.judge

    def judge_when_arrived(*arguments: Any) -> None:
        assert events[-1].synchronize.called
        judge(*arguments)

    monkeypatch.setattr(Watch, "judge", judge_when_arrived)
    return events


@pytest.mark.parametrize("settings", COUPLINGS.values(), ids=COUPLINGS)
@pytest.mark.parametrize("schedule", [*RERUN, ["recompute", "store", "invert", "recompute"]], ids=str)
def test_a_device_sends_its_comparisons_at_the_end_of_backward(settings, schedule, queued):
    chain = ReversibleChain([nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh()) for _ in range(4)], **settings)
    chain.schedule = schedule
    for _ in range(3):
        run(chain)
    assert len(queued) == 2  # the third is not compared
    chain.steps[2] = Changing(use_a_counter)
    with pytest.raises(RecoveryError, match=r"^steps\.2 ran differently"):
        run(chain)
    assert len(queued) == 3


def test_what_a_device_rebuilds_outside_of_a_backward_is_judged_in_the_next_forward(queued):
    x = torch.randn(5, 6)
    assert Watch().compare("steps.0", fingerprint.take_fingerprint(x), 2 * x, 1e-3)
    assert not queued
    with pytest.raises(RecoveryError, match=r"^steps\.0 ran differently"):
        run(ReversibleChain([nn.Tanh()]))


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.BatchNorm1d(16)], ids=["layer", "batch"])
@pytest.mark.parametrize("filler", [0.0, 3.0])
@pytest.mark.parametrize("seed", range(2))
def test_a_constant_stream_in_front_of_a_norm_is_no_difference(norm, filler, seed):
    """Its rebuilt state is constant up to rounding, of which the norm makes something that was zero."""
    torch.manual_seed(seed)
    steps = [nn.Sequential(deepcopy(norm), nn.Linear(16, 16), nn.GELU()) for _ in range(6)]
    x1, x2 = torch.randn(64, 16), torch.full((64, 16), filler, requires_grad=True)
    y1, y2 = ReversibleChain(steps)(x1, x2)
    (y1 * y2).sum().backward()


def test_what_is_finite_beside_infinities_is_compared():
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = (x + random.random()).masked_fill(x > 1, -math.inf)
            return h.atan()

    chain = ReversibleChain([Noisy()])
    chain.schedule = "recompute"
    with pytest.raises(RecoveryError, match=r"^steps\.0 ran differently"):
        run(chain)
