"""`verify` passes what is right and finds, by name, what is not."""

import pytest
import torch
from torch import nn

import revzoo
from revzoo.errors import InputError
from revzoo.runtime import InvertibleLeakyReLU, LayerChain, ReversibleChain


def mlp(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def streams(dtype: torch.dtype = torch.float32, width: int = 8):
    return [torch.randn(5, width, dtype=dtype) for _ in range(2)]


class Counting(nn.Module):
    """Depends on how often it and its copies have been called."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        Counting.calls += 1
        return self.inner(x) * (1 + 0.05 * Counting.calls)


class SecondRun(nn.Module):
    """Behaves in forward, and has a fault in every further call before the next forward."""

    def __init__(self, fault):
        super().__init__()
        self.inner, self.fault, self.again = mlp(), fault, False

    def forward(self, x):
        y = self.inner(x)
        return self.fault(y) if self.again else y


class Faulty(nn.Module):
    """A chain with one `SecondRun` step, whose `again` is set after each forward of the chain."""

    def __init__(self, fault):
        super().__init__()
        self.chain = ReversibleChain([mlp(), mlp(), SecondRun(fault), mlp()])

    def forward(self, x1, x2):
        self.chain.steps[2].again = False
        y = self.chain(x1, x2)
        self.chain.steps[2].again = self.chain.schedule[2] != "store"
        return y


class Stems(nn.Module):
    """A network with two chains, ordinary modules around them, and an output that needs no gradient."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.first = ReversibleChain([mlp() for _ in range(3)])
        self.second = ReversibleChain([mlp(), nn.Dropout(0.5), mlp()], exact=True)
        self.second.schedule = "recompute"

    def forward(self, *, x):
        y1, y2 = self.first(self.stem(x), self.stem(x))
        return {"y": self.second(y1, y2), "label": y1.argmax()}


@pytest.mark.parametrize(("dtype", "most", "coupling"), [(torch.float64, 1e-14, "additive"), (torch.float32, 1e-5, "momentum")])
def test_a_good_chain_passes(dtype, most, coupling):
    chain = ReversibleChain([mlp() for _ in range(6)], coupling=coupling).to(dtype)
    report = revzoo.verify(chain, streams(dtype))
    assert report.ok
    assert report.dtype is dtype
    assert len(report.gradient_errors) == 6 * 6
    assert 0 < report.gradient_error < most
    assert max(report.gradient_errors.values()) < 10 * most
    assert list(report.modes.values()) == ["invert"] * 6
    assert report.reconstruction_errors["steps.5"] == 0  # the chain's own output
    assert 0 < report.reconstruction_errors["steps.0"] < most
    assert f"Safe to train in {str(dtype)[6:]}: gradients agree, up to rounding" in str(report)


def test_gradients_are_those_of_the_loss():
    report = revzoo.verify(ReversibleChain([mlp(), mlp()]), streams(), loss=lambda y: y[0].sum())
    assert report.ok
    assert {name.split(".")[1] for name in report.gradient_errors} == {"0"}  # the other step is not in the first stream


def test_exact_arithmetic_is_called_bit_identical():
    report = revzoo.verify(ReversibleChain([mlp() for _ in range(6)], exact=True), streams())
    assert report.identical
    assert report.gradient_error == 0
    assert set(report.reconstruction_errors.values()) == {0.0}
    assert "Safe to train in float32: gradients are bit-identical" in str(report)


def test_only_steps_that_run_again_have_an_error():
    chain = ReversibleChain([mlp(), mlp(), mlp()])
    chain.schedule = ["store", "recompute", "invert"]
    report = revzoo.verify(chain, streams())
    assert report.modes == {"steps.0": "store", "steps.1": "recompute", "steps.2": "invert"}
    assert report.reconstruction_errors == {"steps.1": 0.0, "steps.2": 0.0}
    assert "steps.0  store      not run again" in str(report)
    assert chain.schedule == ["store", "recompute", "invert"]


def test_a_shipped_model_passes_and_is_left_as_found():
    model = revzoo.create("revnet_digits")
    before = {key: t.clone() for key, t in model.state_dict().items()}
    random = torch.get_rng_state()
    x = model.example_input(4)
    moved = torch.get_rng_state()
    report = revzoo.verify(model, x)
    assert report.ok
    assert list(report.reconstruction_errors) == [step.name for step in reversed(model.steps)]
    assert torch.equal(torch.get_rng_state(), moved)
    assert not torch.equal(random, moved)
    assert all(torch.equal(before[key], t) for key, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(step._forward_pre_hooks for step in model.steps)


def test_chains_inside_any_module_are_found():
    report = revzoo.verify(Stems(), {"x": torch.randn(3, 4)})
    assert report.ok
    assert list(report.modes) == [f"first.steps.{i}" for i in range(3)] + [f"second.steps.{i}" for i in range(3)]
    assert list(report.modes.values()) == ["invert"] * 3 + ["recompute"] * 3


def test_layers_of_two_chains_are_told_apart():
    """With names that are those of other layers in the other chain, every layer is inverted, and its own error is stated."""
    chains = [LayerChain(nn.Linear(4, 4), *[InvertibleLeakyReLU(0.5) for _ in range(count)]) for count in (2, 3)]
    report = revzoo.verify(nn.Sequential(*chains), torch.randn(3, 4))
    assert report.ok
    assert list(report.modes) == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2", "1.3"]
    assert report.reconstruction_errors.keys() == {"0.1", "0.2", "1.1", "1.2", "1.3"}


def test_a_chain_called_twice_compares_each_call_with_its_own():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.chain = ReversibleChain([mlp(), mlp(), mlp()])

        def forward(self, x1, x2):
            return self.chain(*self.chain(x1, x2))

    report = revzoo.verify(Twice(), streams())
    assert report.ok
    assert max(report.reconstruction_errors.values()) < 1e-5


def test_frozen_and_unused_parameters_are_left_out():
    chain = ReversibleChain([mlp() for _ in range(4)])
    chain.steps[1].requires_grad_(False)
    chain.spare = nn.Parameter(torch.zeros(3))  # which nothing uses
    report = revzoo.verify(chain, streams())
    assert report.ok
    assert not [name for name in report.gradient_errors if name.startswith("steps.1.")]
    assert len(report.gradient_errors) == 3 * 6


def test_a_function_that_counts_its_calls_is_found(monkeypatch):
    monkeypatch.setattr(Counting, "calls", 0)
    report = revzoo.verify(ReversibleChain([mlp(), Counting(), mlp(), mlp()]), streams())
    assert not report.ok
    assert "does not repeat itself" in str(report)
    assert "states are reconstructed with an error above 1e-04, the worst at steps.0" in str(report)
    assert "Single gradients differ by more than 1e-01: steps.1" in str(report)
    assert report.reconstruction_errors["steps.0"] > 1e-2
    assert report.reconstruction_errors["steps.1"] < 1e-6  # its own input is right, its output is not


def test_a_fault_in_the_second_run_alone_is_found():
    report = revzoo.verify(Faulty(lambda y: 1.5 * y), streams())
    assert not report.ok
    assert "does not repeat itself" not in str(report)
    assert report.reconstruction_errors["chain.steps.1"] > 1e-2
    assert any(problem.startswith("1 of 4 states") or problem.startswith("2 of 4 states") for problem in report.problems)


def test_a_run_that_draws_more_random_numbers_is_found():
    class Drawing(nn.Module):
        def __init__(self):
            super().__init__()
            self.chain = ReversibleChain([mlp(), mlp()])

        def forward(self, x1, x2):
            if self.chain.schedule[0] != "store":
                torch.rand(1)
            return self.chain(x1, x2)

    report = revzoo.verify(Drawing(), streams())
    assert report.problems == ("The run uses another amount of torch's random numbers than when everything is stored.",)


def test_a_second_run_that_moves_a_buffer_is_found():
    def count(y):
        model.seen += 1
        return y

    model = Faulty(count)
    model.register_buffer("seen", torch.zeros(()))
    report = revzoo.verify(model, streams())
    assert report.problems == ("Buffers end with other values than when everything is stored, as if updated twice: seen.",)
    assert model.seen == 0


def test_a_gradient_in_one_run_only_is_found():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.chain, self.shift = ReversibleChain([mlp(), mlp()]), nn.Parameter(torch.zeros(8))

        def forward(self, x1, x2):
            y1, y2 = self.chain(x1, x2)
            return y1, y2 + self.shift if self.chain.schedule[0] == "store" else y2

    report = revzoo.verify(Fickle(), streams())
    assert report.problems == ("Parameters with a gradient in one run and none in the other: shift.",)


def test_nan_in_the_stored_run_is_not_blamed_on_the_schedule():
    chain = ReversibleChain([mlp() for _ in range(2)])
    with torch.no_grad():
        chain.steps[0][1].weight[0, 0] = torch.nan
    report = revzoo.verify(chain, streams())
    assert len(report.problems) == 1
    assert "With all activations stored the gradients are not finite" in report.problems[0]


def test_a_step_that_the_runtime_refuses_is_reported():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.inner(x) * self.calls

    report = revzoo.verify(ReversibleChain([mlp(), Stateful()]), streams())
    assert not report.ok
    assert "steps.1 changes its 'calls' in forward" in str(report)


def test_a_coupling_that_cannot_be_inverted_in_this_precision_is_found():
    chain = ReversibleChain([mlp() for _ in range(8)], coupling=revzoo.runtime.Coupling(1.0, 0.01, 1.0))
    report = revzoo.verify(chain, streams())
    assert not report.ok
    assert "the steps before it multiplies rounding errors by" in str(report)


def test_autocast_is_the_coarsest_precision_at_work():
    chain = ReversibleChain([mlp() for _ in range(2)])
    with torch.autocast("cpu", torch.bfloat16):
        report = revzoo.verify(chain, streams())
    assert report.dtype is torch.bfloat16
    assert report.ok


def test_a_gradient_that_is_zero_but_for_rounding_is_no_fault():
    class Shifted(nn.Module):
        """A bias before a softmax, whose true gradient is 0."""

        def __init__(self):
            super().__init__()
            self.inner, self.shift = mlp(), nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return (self.inner(x) + self.shift).softmax(-1)

    report = revzoo.verify(ReversibleChain([Shifted() for _ in range(4)]), streams())
    assert report.ok
    assert max(error for name, error in report.gradient_errors.items() if name.endswith("shift")) < 1e-3


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (abs, "must be a torch.nn.Module. Received: builtin_function_or_method"),
        (nn.Linear(8, 8), "no revzoo.Model, ReversibleChain or LayerChain in this Linear"),
        (ReversibleChain([nn.Linear(8, 8, device="meta")]), "Received: meta or fake parameters"),
    ],
)
def test_what_cannot_be_verified_is_refused(model, message):
    with pytest.raises(InputError, match=message):
        revzoo.verify(model, streams())
