"""`verify` runs fresh copies, draws random numbers in between, and compares every rebuilt tensor."""

import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import revzoo
from revzoo.runtime import ReversibleChain, set_tripwire, tripwire

own = torch.Generator()
RERUN = ["invert", "recompute", "selective"]


def streams(*shape):
    return [torch.randn(*(shape or (5, 6))) for _ in range(2)]


class Step(nn.Module):
    """A step whose output depends on something that PyTorch does not know of."""

    def __init__(self, factor=lambda f: 1.0):
        super().__init__()
        self.factor, self.linear = factor, nn.Linear(6, 6)
        self.calls, self.scale, self.own, self.cache = 0, 1.0, torch.Generator(), {}

    def forward(self, w):
        self.calls += 1
        return self.linear((w * self.factor(self)).tanh()).sin()


class Scaled(nn.Module):
    """A chain whose steps read an attribute that is set around the chain."""

    def __init__(self, factor):
        super().__init__()
        self.chain = ReversibleChain([Step() if i != 2 else Step(factor) for i in range(4)])

    def forward(self, x1, x2):
        self.chain.steps[2].scale = 3.0
        y = self.chain(x1, x2)
        self.chain.steps[2].scale = 1.0
        return y


def use_the_first_call(f):
    return f.cache.setdefault("factor", 3.0) if f.calls == 1 else 1.0


def build_a_cache(f):
    return 1.0 if "built" in f.cache else f.cache.setdefault("built", 3.0)


def peek_at_python(f):
    state, number = random.getstate(), random.uniform(-4, 4)
    random.setstate(state)
    return number


def peek_at_numpy(f):
    state, number = np.random.get_state(), float(np.random.uniform(-4, 4))
    np.random.set_state(state)
    return number


def peek_at_torch(f):
    with torch.random.fork_rng(devices=[]):
        return torch.rand(6) * 8 - 4


SOURCES = {
    "python": lambda f: random.uniform(-4, 4),
    "python, put back": peek_at_python,
    "numpy, put back": peek_at_numpy,
    "numpy": lambda f: float(np.random.uniform(-4, 4)),
    "generator": lambda f: torch.rand(6, generator=f.own) * 8 - 4,
    "counter": lambda f: 1 / f.calls,
    "attribute": lambda f: f.scale,
    "cache": build_a_cache,
    "first call": use_the_first_call,
}


@pytest.fixture(autouse=True)
def seed():
    random.seed(1)
    np.random.seed(1)


@pytest.mark.parametrize(("source", "mode"), list(zip(SOURCES, RERUN * 3, strict=True)))
def test_what_changes_between_two_runs_is_found(source, mode):
    model = Scaled(SOURCES[source])
    model.chain.schedule = mode
    report = revzoo.verify(model, streams())
    assert not report.ok
    assert "does not repeat itself" not in str(report)  # each run starts with the same state
    assert str(report).count("steps.2 ran differently the second time") == 1
    assert report.gradient_error > 1e-2  # figures come from a run without the tripwire
    assert len(report.reconstruction_errors) == 4


def test_a_generator_that_all_runs_share_keeps_the_model_from_repeating_itself():
    report = revzoo.verify(Scaled(lambda f: torch.rand(6, generator=own) * 8 - 4), streams())
    assert report.problems[0].startswith("The model does not repeat itself")
    assert str(report).count("its input, parameters and torch's random stream alone") == 1


@pytest.mark.parametrize("mode", RERUN)
def test_torch_random_numbers_are_repeated_whatever_is_drawn_in_between(mode):
    model = Scaled(peek_at_torch)
    model.chain.schedule = mode
    assert revzoo.verify(model, streams()).ok


def test_the_tripwire_is_on_whatever_its_setting_is():
    with set_tripwire(False):
        report = revzoo.verify(Scaled(SOURCES["python"]), streams())
        assert not tripwire.get_setting()
    assert "steps.2 ran differently the second time" in str(report)
    assert tripwire.get_setting()


def test_all_random_streams_are_left_as_found():
    chain, batch = ReversibleChain([Step(), nn.Sequential(nn.Linear(6, 6), nn.Dropout()), Step()]), streams()
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    assert revzoo.verify(chain, batch).ok
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == random.getstate()
    assert np.array_equal(state[2][1], np.random.get_state()[1])


def test_an_optimizer_inside_backward_moves_no_weight():
    chain = ReversibleChain([Step() for _ in range(3)])
    before = [p.clone() for p in chain.parameters()]
    for p in chain.parameters():
        optimizer = torch.optim.SGD([p], lr=1.0)
        p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    assert revzoo.verify(chain, streams()).ok
    assert all(map(torch.equal, before, chain.parameters()))


class Stem(nn.Module):
    """Notes what it is given; all copies share the notes."""

    def __init__(self, notes):
        super().__init__()
        self.note = notes.append if isinstance(notes, list) else notes

    def forward(self, *x):
        self.note((weakref.ref(self), x))
        return x


class Network(nn.Module):
    def __init__(self, note, *steps):
        super().__init__()
        self.stem, self.chain = Stem(note), ReversibleChain(list(steps))

    def forward(self, x1, x2):
        return self.chain(*self.stem(x1, x2))


def test_each_run_has_a_copy_of_its_own_and_one_at_a_time():
    copies = []

    def note(call):
        copies.append(call[0])
        alive.append(len({id(copy()) for copy in copies} - {id(None)}))

    alive = []
    model = Network(note, Step(), Step())
    model.stem.network = [model]  # a reference cycle
    assert revzoo.verify(model, streams()).ok
    assert alive == [1] * 3  # stored twice, scheduled
    assert all(copy() is not model.stem for copy in copies)
    assert [step.calls for step in model.chain.steps] == [0, 0]


class Graph(Step):
    """Has an attribute with a graph, which cannot be copied."""

    def __init__(self):
        super().__init__()
        self.doubled = self.linear.weight * 2


class Closed(nn.Module):
    """Computes in a closure, which a copy shares."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), 0

        def compute(w):
            self.calls += 1
            return self.linear(w).sin()

        self.compute = compute

    def forward(self, w):
        return self.compute(w)


@pytest.mark.parametrize("make", [Graph, Closed])
def test_what_cannot_be_copied_is_run_itself(make):
    chain = ReversibleChain([Step(), make(), Step()])
    ran, own = set(), chain.steps[1]
    own.linear.register_forward_hook(lambda module, *_: ran.add(module is own.linear))
    report = revzoo.verify(chain, streams())
    assert report.ok
    assert True in ran
    assert own.calls == 0
    assert {f"steps.{i}.linear.weight" for i in range(3)} <= set(report.gradient_errors)
    assert report.gradient_error > 0
    assert all(p.grad is None for p in chain.parameters())
    assert chain.schedule == ["invert"] * 3
