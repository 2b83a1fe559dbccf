"""Profiles: what is counted, what is measured, and which notes explain what could not be."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import revzoo
from revzoo.errors import InputError
from revzoo.planning.profiling import profile as module
from revzoo.planning.profiling import timing
from revzoo.planning.profiling.count import count
from revzoo.planning.solvers.schedule_totals import cost, peak
from revzoo.planning.solvers.timeline import minimize_peak
from revzoo.runtime import ReversibleChain


@pytest.fixture
def quick(monkeypatch):
    """Let nothing be run for its time."""

    def refuse(*args, **kwargs):
        raise AssertionError("steps are being timed")

    monkeypatch.setattr(module, "measure_timing", refuse)


def test_counting_alone(tiny, quick):
    x = tiny.example_input(2)
    profile = revzoo.profile(tiny, x, run=False)
    assert profile.timing is None
    assert profile.memory == count(tiny, x)
    stored, inverted = ["store"] * 7, ["store", *["invert"] * 4, "store", "store"]
    # The bytes made again count too, for FLOPs call norms and activations free.
    assert cost(profile.problem, stored) == 0 < cost(profile.memory, inverted) < cost(profile.problem, inverted)
    assert peak(profile.problem, inverted) == peak(profile.memory, inverted)
    assert profile.model_bytes == sum(p.nbytes for p in tiny.parameters())
    assert (profile.other_bytes, profile.notes) == (0, ())


def test_times_make_the_costs(tiny):
    x = tiny.example_input(2)
    profile = revzoo.profile(tiny, x)
    assert profile.timing is not None
    assert profile.notes == ()
    recomputed = ["store", *["recompute"] * 4, "store", "store"]
    assert cost(profile.problem, recomputed) == sum(extra["recompute"] for extra in profile.timing.extra[1:5])
    assert cost(profile.memory, recomputed) == cost(count(tiny, x), recomputed)
    assert peak(profile.problem, recomputed) == peak(profile.memory, recomputed)


def failing(error: Exception):
    def fail(*args, **kwargs):
        raise error

    return fail


def test_running_out_of_memory_falls_back_to_what_is_counted(tiny):
    x, calls = tiny.example_input(2), []

    def loss(logits: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > counting:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return logits.sum()

    counting = 10**9
    revzoo.profile(tiny, x, loss=loss, run=False)
    counting, calls = len(calls), []
    profile = revzoo.profile(tiny, x, loss=loss)
    assert profile.timing is None
    assert [note.partition(":")[0] for note in profile.notes] == ["No step with stored units fits the memory"]
    assert revzoo.solve(profile, "8GiB").seconds is None
    assert tiny.schedule == ["store", *["invert"] * 4, "store", "store"]


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_no_step_that_is_timed_takes_more_than_the_budget(share, tiny, monkeypatch):
    x = tiny.example_input(64)
    memory, run, peaks = count(tiny, x), timing._time_step, []
    smallest, stored = minimize_peak(memory)[0], peak(memory, ["store"] * 7)
    budget = int(smallest + share * (stored - smallest))

    def note(model, batch, modes, *others, **settings):
        peaks.append(peak(memory, modes))
        return run(model, batch, modes, *others, **settings)

    monkeypatch.setattr(timing, "_time_step", note)
    plan = revzoo.plan(tiny, x, budget)
    assert plan.spread is not None
    assert smallest <= min(peaks) <= max(peaks) <= budget
    peaks.clear()
    assert revzoo.profile(tiny, x, budget=smallest - 1).timing is None
    assert not peaks


def test_the_spread_is_printed_with_the_plan(tiny):
    x = tiny.example_input(2)
    profile = revzoo.profile(tiny, x, run=False)
    units = len(profile.memory.units)
    extra = dict.fromkeys(("store", "selective", "recompute", "invert", "first"), 0)
    profile = replace(profile, timing=timing.Timing(0.5, (0.1,) * units, (extra,) * units, 0.025, 16))
    plan = revzoo.solve(profile, "8GiB")
    assert plan.spread == 0.025
    assert "7 store; 500 ms +- 2.5 % a training step" in str(plan)


def test_another_error_is_no_lack_of_memory(tiny, monkeypatch):
    monkeypatch.setattr(module, "measure_timing", failing(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        revzoo.profile(tiny, tiny.example_input(2))


def test_what_is_on_meta_is_counted_as_what_has_values(tiny, quick):
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=2"], device="meta")
    profile = revzoo.profile(model, model.example_input(8))
    assert profile.timing is None
    assert profile.setting.device == "meta"
    assert len(profile.notes) == 1
    assert profile.notes[0].startswith("On the meta device nothing is run: ")
    assert profile.memory.max_invert_run is None
    with_values = count(tiny, tiny.example_input(8))
    for modes in (["store"] * 7, ["store", *["invert"] * 4, "recompute", "store"]):
        assert peak(profile.memory, modes) == peak(with_values, modes)


def test_the_optimizer_and_what_else_is_alive(tiny, quick):
    x, optimizer = tiny.example_input(2), torch.optim.AdamW(tiny.parameters())
    profile = revzoo.profile(tiny, x, optimizer, run=False, other_bytes=500)
    expected = revzoo.measure_memory(tiny, x, optimizer).optimizer_bytes + 500
    assert profile.other_bytes == expected
    assert profile.memory.fixed_bytes == revzoo.profile(tiny, x, run=False).memory.fixed_bytes + expected


@pytest.mark.filterwarnings("ignore:The streams are torch.bfloat16:UserWarning")
@pytest.mark.parametrize(("half", "limited"), [(False, False), (True, True)])
def test_runs_are_limited_where_rounding_asks_for_it(half, limited, mlp):
    chain, x = ReversibleChain([mlp() for _ in range(8)], "leapfrog"), torch.randn(2, 4, 5, 8).unbind()
    if half:  # in float32, 8 steps of leapfrog keep their precision
        chain, x = chain.bfloat16(), [w.bfloat16() for w in x]
    profile = revzoo.profile(chain, x, run=False)
    assert (profile.memory.max_invert_run is not None) == limited
    assert [note.startswith("At most ") and note.endswith("would lose too much precision.") for note in profile.notes] == [
        True
    ] * limited


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (
            nn.Linear(4, 4),
            torch.zeros(2, 4),
            r"changed can be profiled\. Received: Linear\. For any other module there is revzoo\.plan\(",
        ),
        (ReversibleChain([nn.Linear(4, 4)]), (torch.zeros(0, 4), torch.zeros(0, 4)), "at least one example"),
        (ReversibleChain([nn.GELU()]), (torch.zeros(2, 4), torch.zeros(2, 4)), "No parameter of the model requires a gradient"),
    ],
)
def test_what_cannot_be_profiled(model, batch, message):
    with pytest.raises(InputError, match=message):
        revzoo.profile(model, batch)


def test_another_optimizer_is_refused(tiny):
    with pytest.raises(InputError, match="parameters that are not the model's"):
        revzoo.profile(tiny, tiny.example_input(2), torch.optim.SGD(nn.Linear(2, 2).parameters()))
