"""Profiles: what is counted, what is measured, and what is said where nothing can be."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import revzoo
from revzoo.errors import InputError
from revzoo.planning.profiling import profile as home
from revzoo.planning.profiling.count import count
from revzoo.planning.solvers.problem import cost, peak
from revzoo.runtime import ReversibleChain


@pytest.fixture
def quick(monkeypatch):
    """Let nothing be run for its time."""

    def refuse(*args, **kwargs):
        raise AssertionError("steps are being timed")

    monkeypatch.setattr(home, "measure_timing", refuse)
    monkeypatch.setattr(home, "estimate_timing", refuse)


def test_counting_alone(tiny, quick):
    x = tiny.example_input(2)
    found = revzoo.profile(tiny, x, run=False)
    assert found.timing is None
    assert found.memory == count(tiny, x)
    stored, inverted = ["store"] * 7, ["store", *["invert"] * 4, "store", "store"]
    # The bytes made again count too, for FLOPs call norms and activations free.
    assert cost(found.problem, stored) == 0 < cost(found.memory, inverted) < cost(found.problem, inverted)
    assert peak(found.problem, inverted) == peak(found.memory, inverted)
    assert found.model_bytes == sum(p.nbytes for p in tiny.parameters())
    assert (found.other_bytes, found.notes) == (0, ())


def test_times_make_the_costs(tiny):
    x = tiny.example_input(2)
    found = revzoo.profile(tiny, x)
    assert found.timing is not None
    assert found.notes == ()
    recomputed = ["store", *["recompute"] * 4, "store", "store"]
    assert cost(found.problem, recomputed) == sum(extra["recompute"] for extra in found.timing.extra[1:5])
    assert cost(found.memory, recomputed) == cost(count(tiny, x), recomputed)
    assert peak(found.problem, recomputed) == peak(found.memory, recomputed)


def failing(error: Exception):
    def fail(*args, **kwargs):
        raise error

    return fail


def test_without_the_memory_there_is_an_estimate_and_then_what_is_counted(tiny, monkeypatch):
    error = MemoryError("no step fits")
    monkeypatch.setattr(home, "measure_timing", failing(error))
    x = tiny.example_input(2)
    found = revzoo.profile(tiny, x)
    assert found.timing.step_seconds > 0
    assert found.notes == (
        "Profiling with stored units ran out of memory, so every other mode is assumed to cost one extra forward.",
    )
    monkeypatch.setattr(home, "estimate_timing", failing(error))
    found = revzoo.profile(tiny, x)
    assert found.timing is None
    assert found.notes == ("Profiling ran out of memory, so costs are counted FLOPs and bytes instead of seconds.",)
    assert revzoo.solve(found, "8GiB").seconds is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_running_out_of_memory_falls_back_to_what_is_counted(error, tiny):
    x, calls = tiny.example_input(2), []

    def loss(logits: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > counting:
            raise error
        return logits.sum()

    counting = 10**9
    revzoo.profile(tiny, x, loss=loss, run=False)
    counting, calls = len(calls), []
    found = revzoo.profile(tiny, x, loss=loss)
    assert found.timing is None
    assert found.notes == ("Profiling ran out of memory, so costs are counted FLOPs and bytes instead of seconds.",)
    assert tiny.schedule == ["store", *["invert"] * 4, "store", "store"]


def test_the_estimate_is_a_forward(tiny):
    found = revzoo.profile(tiny, tiny.example_input(2), estimate=True)
    for extra, seconds in zip(found.timing.extra, found.timing.forward_seconds, strict=True):
        assert extra == {"store": 0, **dict.fromkeys(("selective", "recompute", "invert", "first"), round(seconds * 1e9))}
    assert found.notes == ("Every mode but storing is assumed to cost one extra forward of the unit.",)


def test_another_error_is_no_lack_of_memory(tiny, monkeypatch):
    monkeypatch.setattr(home, "measure_timing", failing(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        revzoo.profile(tiny, tiny.example_input(2))


def test_what_is_on_meta_is_counted_as_what_has_values(tiny, quick):
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=2"], device="meta")
    found = revzoo.profile(model, model.example_input(64))
    assert found.timing is None
    assert found.setting.device == "meta"
    assert len(found.notes) == 1
    assert found.notes[0].startswith("On the meta device nothing is run: ")
    assert found.memory.max_invert_run is None
    for modes in (["store"] * 7, ["store", *["invert"] * 4, "recompute", "store"]):
        assert peak(found.memory, modes) == peak(revzoo.profile(tiny, tiny.example_input(64), run=False).memory, modes)


@pytest.mark.parametrize("state", [torch.optim.SGD, torch.optim.AdamW])
def test_the_optimizer_and_what_else_is_alive(state, tiny, quick):
    x, optimizer = tiny.example_input(2), state(tiny.parameters())
    found = revzoo.profile(tiny, x, optimizer, run=False, other_bytes=500)
    expected = revzoo.measure_memory(tiny, x, optimizer).optimizer_bytes + 500
    assert found.other_bytes == expected
    assert found.memory.fixed_bytes == revzoo.profile(tiny, x, run=False).memory.fixed_bytes + expected


@pytest.mark.filterwarnings("ignore:The streams are torch.bfloat16:UserWarning")
@pytest.mark.parametrize(("half", "limited"), [(False, False), (True, True)])
def test_runs_are_limited_where_rounding_asks_for_it(half, limited, mlp):
    chain, x = ReversibleChain([mlp() for _ in range(24)], "leapfrog"), torch.randn(2, 4, 5, 8).unbind()
    if half:  # in float32, 24 steps of leapfrog keep their precision
        chain, x = chain.bfloat16(), [w.bfloat16() for w in x]
    found = revzoo.profile(chain, x, run=False)
    assert (found.memory.max_invert_run is not None) == limited
    assert [note.startswith("At most ") and note.endswith("would lose too much precision.") for note in found.notes] == [
        True
    ] * limited


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (nn.Linear(4, 4), torch.zeros(2, 4), r"A revzoo\.Model or a ReversibleChain can be planned\. Received: Linear"),
        (ReversibleChain([nn.Linear(4, 4)]), None, "at least one tensor. Received: NoneType"),
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


@pytest.mark.parametrize("autocast", [False, True])
def test_the_surrounding_autocast_is_noted(autocast, tiny, quick):
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        found = revzoo.profile(tiny, tiny.example_input(2), run=False)
    assert found.setting.dtype == ("float32, autocast bfloat16" if autocast else "float32")
