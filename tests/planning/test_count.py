"""What is counted from six schedules holds for every other one: bytes at the peak and FLOPs, against a measured step."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

import revzoo
from revzoo.analysis.flops import FlopCounter
from revzoo.errors import InputError
from revzoo.planning.profiling import trace
from revzoo.planning.profiling.count import count, count_peak
from revzoo.planning.profiling.derivation import build_problem
from revzoo.planning.profiling.hooks import list_units
from revzoo.planning.profiling.trace import Mark, Trace
from revzoo.planning.solvers.problem import Problem
from revzoo.planning.solvers.schedule_totals import cost, list_phase_peaks, peak
from revzoo.planning.solvers.timeline import solve_timeline
from revzoo.runtime import LiveBytes, ReversibleChain, SpaceToDepth
from revzoo.runtime.layout import LayoutEntry
from revzoo.runtime.mode import Mode

TEXTS = ("reformer", "rev_bert", "rev_roberta")


def measured(model: nn.Module, batch: object, modes: object) -> tuple[int, int]:
    """Return the bytes at the peak and the FLOPs of a step that is run."""
    model.schedule = modes
    with FlopCounter() as flops:
        report = revzoo.measure_memory(model, batch)
    return report.peak_bytes, flops.forward + flops.backward


def agrees(model: nn.Module, batch: object, problem: Problem, drawn: list[list[str]]) -> int:
    """Assert that the problem knows the peak and the FLOPs of these schedules; return the peak of storing everything."""
    stored_peak, stored = measured(model, batch, "store")
    for modes in drawn:
        taken = measured(model, batch, modes)
        assert taken == (peak(problem, modes), stored + cost(problem, modes)), modes
    return stored_peak


def dropping(model: nn.Module, drawn: list[list[str]]) -> list[list[str]]:
    """Return the schedules in which some step is not stored."""
    steps = [k for k, part in enumerate(list_units(model)) if part.can_invert]
    return [modes for modes in drawn if any(modes[k] != "store" for k in steps)]


def test_every_family_has_what_random_schedules_take(family, schedules):
    x = family.example_input(2)
    problem, drawn = count(family, x), dropping(family, schedules(family, 3))
    assert len(drawn) >= 2
    stored_peak = agrees(family, x, problem, drawn)
    # A step that is not stored holds on to the mask (of ids); where all are, it is freed after forward and still counted.
    surplus = peak(problem, ["store"] * len(problem.units)) - stored_peak
    assert surplus in (0, x.numel() if family.spec.family in TEXTS else 0)


def test_runs_of_inverted_steps_of_every_length(tiny):
    x = tiny.example_input(2)
    steps = product(
        ("store", "invert", "recompute", "selective"), ("store", "invert"), ("recompute", "invert"), ("store", "invert")
    )
    drawn = [["store", *modes, "store", "recompute"] for modes in steps]
    assert len(drawn) == 32
    agrees(tiny, x, count(tiny, x), drawn[::3])


def test_evaluation_mode_and_a_frozen_stem(schedules):
    model = revzoo.create("revnet_digits", overrides=["stages.0.depth=1", "stages.1.depth=1", "stages.2.depth=1"]).eval()
    model.stem.requires_grad_(False)
    x = model.example_input(2)
    agrees(model, x, count(model, x), schedules(model, 3))


def test_exact_arithmetic(tiny, schedules):
    tiny.exact = True
    x = tiny.example_input(2)
    agrees(tiny, x, count(tiny, x), schedules(tiny, 2))


def test_dropout_and_drop_path(schedules):
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=2", "block.drop_path.max=0.2"])
    x = model.example_input(2)
    agrees(model, x, count(model, x), schedules(model, 3))


def test_ids_with_a_mask(schedules):
    model = revzoo.create("rev_bert_mini", overrides=["stages.0.depth=1"])
    batch = {"x": model.example_input(2), "attention_mask": torch.ones(2, 64).tril(40).bool()}
    agrees(model, batch, count(model, batch), dropping(model, schedules(model, 4)))


def test_the_optimizers_state_is_there_all_the_time(tiny, schedules):
    x, optimizer = tiny.example_input(2), torch.optim.AdamW(tiny.parameters())
    problem = revzoo.profile(tiny, x, optimizer, run=False, other_bytes=1000).memory
    for modes in schedules(tiny, 3):
        tiny.schedule = modes
        assert peak(problem, modes) == revzoo.measure_memory(tiny, x, optimizer).peak_bytes + 1000


def test_a_loss_of_ones_own(tiny, schedules):
    x, labels = tiny.example_input(2), torch.tensor([3, 7])

    def loss(logits: Tensor) -> Tensor:
        large = logits[:, :, None].expand(-1, -1, 5000).exp()
        return nn.functional.cross_entropy(large.mean(2), labels)

    problem = count(tiny, x, loss)
    for modes in schedules(tiny, 2):
        tiny.schedule = modes
        tiny.zero_grad()
        with LiveBytes() as live:
            live.watch([*tiny.parameters(), *tiny.buffers(), x])
            loss(tiny(x)).backward()
        assert live.peak() == peak(problem, modes)
        assert count_peak(tiny, x, modes, loss) == peak(problem, modes)
    assert peak(problem, ["recompute"] * 7) - 2 * 10 * 5000 * 4 > problem.fixed_bytes  # the loss is felt


def tokens(depth: int) -> list[nn.Module]:
    return [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(depth)]


@pytest.mark.parametrize("coupling", ["additive", "leapfrog"])
def test_chains_of_any_coupling_and_an_odd_number_of_steps(coupling, schedules):
    chain = ReversibleChain(tokens(5), coupling)
    x = tuple(torch.randn(2, 4, 9, 16).unbind())
    problem = count(chain, x)
    for modes in schedules(chain, 5):
        bytes_ = measured(chain, x, modes)[0]
        phases = list_phase_peaks(problem, modes)
        # At the loss, a chain's outputs count as alive, though the measured step has let them go by then.
        assert max(p.bytes for p in phases if p.phase != "loss") <= bytes_ <= peak(problem, modes)
        if modes[0] != "invert":
            assert bytes_ == peak(problem, modes)


def test_a_chain_that_begins_with_an_inverted_step_is_never_above_what_is_predicted(schedules):
    chain = ReversibleChain(tokens(4))
    x = tuple(torch.randn(2, 4, 9, 16).unbind())
    problem, stream = count(chain, x), 4 * 9 * 16 * 4
    for modes in schedules(chain, 5):
        modes = ["invert", *modes[1:]]
        # A run of one step has the batch at hand, which a longer one rebuilds.
        surplus = peak(problem, modes) - measured(chain, x, modes)[0]
        assert surplus in (0, stream) if modes[1] != "invert" else surplus == 0


def test_streams_of_unequal_width(schedules):
    steps = [nn.Sequential(nn.Linear(a, 24), nn.GELU(), nn.Linear(24, b)) for a, b in [(10, 6), (6, 10)] * 2]
    chain = ReversibleChain(steps)
    x = torch.randn(4, 5, 6), torch.randn(4, 5, 10)
    agrees(chain, x, count(chain, x), [["recompute", *modes[1:]] for modes in schedules(chain, 5)])


@pytest.mark.parametrize("tiles", [3, [4, 1, 2, 100]])
def test_steps_cut_into_tiles(tiles, schedules):
    chain = ReversibleChain(tokens(4))
    x = tuple(torch.randn(2, 4, 9, 16).unbind())
    whole = count(chain, x)
    chain.steps[1].acts_on, chain.tiles = "tokens", tiles
    problem = count(chain, x)
    agrees(chain, x, problem, [["recompute", *modes[1:]] for modes in schedules(chain, 5)])
    assert peak(problem, ["invert"] * 4) < peak(whole, ["invert"] * 4)


def test_a_model_cut_into_tiles(tiny, schedules):
    tiny.tiles = 2
    x = tiny.example_input(2)
    agrees(tiny, x, count(tiny, x), schedules(tiny, 4))


def test_bijections_between_steps(schedules):
    def unit(width: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())

    chain = ReversibleChain([unit(2), unit(2), SpaceToDepth(), unit(8), SpaceToDepth(), unit(32), unit(32)])
    x = tuple(torch.randn(2, 2, 2, 8, 8).unbind())
    assert len(list_units(chain)) == 5
    agrees(chain, x, count(chain, x), [["recompute", *modes[1:]] for modes in schedules(chain, 5)])


def test_a_product_whose_input_is_all_that_it_keeps():
    chain = ReversibleChain([nn.Linear(16, 16) for _ in range(4)])
    x = tuple(torch.randn(2, 4, 9, 16).unbind())
    for unit in count(chain, x).units:
        options = {option.mode: option for option in unit.options}
        assert options["store"].kept_bytes == options["selective"].kept_bytes == options["recompute"].kept_bytes == 0
        assert (
            options["store"].kept_states == options["selective"].kept_states == options["recompute"].kept_states == unit.inputs
        )


def test_a_node_that_keeps_nothing_holds_nothing():
    """The mean of the streams saves nothing, so a fuse that recomputes it has no use for them."""
    model = revzoo.create("reformer_mini", overrides=["stages.0.depth=1", "input.length=64"])
    x = model.example_input(2)
    fuse = next(unit for unit in count(model, x).units if unit.name == "fuse")
    assert {option.mode: option.kept_states for option in fuse.options} == {"store": (), "selective": (), "recompute": ()}


def test_the_phases_end_with_the_stem_and_the_highest_is_the_peak(tiny):
    x = tiny.example_input(2)
    problem = count(tiny, x)
    phases = list_phase_peaks(problem, ["store"] * 7)
    assert [phase.name for phase in phases] == [*tiny.units, "loss", *reversed(tiny.units)]
    assert [phase.phase for phase in phases] == ["forward"] * 7 + ["loss"] + ["backward"] * 7
    assert max(phase.bytes for phase in phases) == measured(tiny, x, "store")[0]


def test_the_model_is_left_unchanged(tiny):
    tiny.schedule = schedule = ["recompute", "store", "invert", "invert", "selective", "store", "store"]
    x, before = tiny.example_input(2), {k: v.clone() for k, v in tiny.state_dict().items()}
    drawn = torch.get_rng_state()
    count(tiny, x)
    assert tiny.schedule == schedule
    assert all(torch.equal(v, before[k]) for k, v in tiny.state_dict().items())
    assert all(p.grad is None and not p.is_meta for p in tiny.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_the_schedule_comes_back_when_counting_fails(tiny):
    tiny.schedule = "recompute"
    with pytest.raises(InputError, match=r"takes images"):
        count(tiny, torch.zeros(2, 3, 8, 8))
    assert set(tiny.schedule) == {"recompute", "store"}


def test_compiled_steps_are_refused():
    chain = ReversibleChain(tokens(2))
    chain.steps[1].compile(backend="aot_eager")
    with pytest.raises(InputError, match=r"Received: compiled .*steps\.1.*Plan first, then compile"):
        count(chain, tuple(torch.randn(2, 4, 16).unbind()))


def test_kept_bits_belong_to_the_step_that_keeps_them(schedules):
    """A byte an element for every inverted step but the first of a run; the 4 bytes of the grid's magnitude are not counted."""
    bits = "block.coupling={type: momentum, gain: 1.0, kept_bits: 8}"
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=3", bits])
    x = model.example_input(8)
    problem = count(model, x)
    kept = {unit.name: {o.mode: o.kept_bytes for o in unit.options} for unit in problem.units}
    elements = 8 * 16 * 64
    assert all(kept[name]["invert"] == elements for name in list(kept)[2:-3])
    assert problem.units[1].first.kept_bytes == 0
    for modes in schedules(model, 2):
        assert abs(measured(model, x, modes)[0] - peak(problem, modes)) <= 4, modes


def test_a_unit_may_have_many_inputs():
    """24 of them have 16 million subsets; only those that are asked for are computed."""
    count = 24  # of 10, 11, ... bytes; the output has 100, its backward takes 500
    log = [(j, 10 + j) for j in range(count)] + [(count, 100), (count + 1, 500), (count + 1, -500), (count, -100)]
    log += [(j, -10 - j) for j in range(count)]
    marks = [Mark("forward", 0, 24, 0), Mark("loss", 1, 25, 0), Mark("backward", 0, 25, 0), Mark("end", 1, len(log), 0)]
    inputs, out = frozenset(range(count)), frozenset({count})
    traced = Trace([Mode.STORE], log, marks, [inputs], [inputs, out], [inputs], backward_start=25)
    problem = build_problem([LayoutEntry("node", nn.Identity(), "node")], [traced] * 6)
    (table,) = (option.backward_bytes for option in problem.units[0].options)
    all_inputs = sum(range(10, 10 + count))
    assert len(table) == 2**count
    assert (table[0], table[5], table[-1]) == (all_inputs + 600, all_inputs + 600 - 10 - 12, 600)
    assert peak(problem, ["store"]) == all_inputs + 600
    assert solve_timeline(problem, all_inputs + 600) == ["store"]
    with pytest.raises(IndexError):
        table[2**count]


def test_what_is_alive_follows_from_the_log(monkeypatch):
    monkeypatch.setattr(trace, "_SNAPSHOT_EVERY", 3)
    log = [(0, 8), (1, 4), (1, 2), (2, 1), (1, -6), (0, -8), (1, 3), (2, -1)]
    alive = [{}, {0: 8}, {0: 8, 1: 4}, {0: 8, 1: 6}, {0: 8, 1: 6, 2: 1}, {0: 8, 2: 1}, {2: 1}, {2: 1, 1: 3}, {1: 3}]
    traced = Trace([Mode.STORE], log)
    order = [5, 0, 8, 3, 4, 7, 1, 2, 6]
    assert [traced.alive(position) for position in order] == [alive[position] for position in order]
    assert traced.peak((2, 8), {0}) == 7
