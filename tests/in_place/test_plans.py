"""Plans of networks whose blocks were made reversible where they stand: predicted bytes, budgets, and what is refused."""

from functools import partial
from itertools import product

import pytest
import torch
import transformers

import revzoo
from revzoo.analysis.chains import find_block_chains
from revzoo.errors import BudgetError, InputError, PlanError
from revzoo.in_place.peaks import Peaks
from revzoo.planning import planner
from revzoo.planning.profiling.count import count
from revzoo.planning.profiling.hooks import assign_schedule, list_units
from revzoo.planning.solvers.schedule_totals import peak
from revzoo.planning.solvers.timeline import minimize_peak
from tests.in_place.networks import IDS, SPLIT, TEXT, Tanh, Toy, assert_equal, llama, train_step

X = torch.linspace(-1, 1, 384).view(64, 6).sin()
WEIGHTS_OF_A_BLOCK = 124  # gradients of two blocks may be there at once: what a schedule takes besides its prediction


@pytest.fixture
def toy():
    model = Toy()
    revzoo.reversible_(model)
    return model


def measure(model, batch, modes):
    assign_schedule(model, modes)
    return revzoo.measure_memory(model, batch).peak_bytes


def test_units_are_blocks_and_what_lies_around_them(toy):
    names = [entry.name for entry in list_units(toy)]
    assert names == ["before blocks", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "after blocks"]
    assert revzoo.plan(toy, X, "1GiB").units == tuple(names)


def test_every_schedule_has_the_predicted_peak():
    model = Toy(Tanh(), Tanh(), Tanh())
    revzoo.reversible_(model)
    problem = count(model, X)
    peaks = []
    for steps in product(("store", "recompute", "invert"), repeat=3):
        modes = ["store", *steps, "store"]
        peaks.append(measure(model, X, modes))
        assert 0 <= peaks[-1] - peak(problem, modes) <= WEIGHTS_OF_A_BLOCK
    assert len(peaks) == 27
    assert minimize_peak(problem)[0] == min(peaks)


def test_a_plan_is_applied_and_released(toy):
    (chain,) = find_block_chains(toy).values()
    least, _ = minimize_peak(count(toy, X))
    plan = revzoo.plan(toy, X, least)
    assert plan.peak_bytes <= least
    plan.apply(toy, X)
    assert ["store", *chain.schedule, "store"] == list(plan.schedule)
    assert "store" not in chain.schedule[:2]
    assert revzoo.measure_memory(toy, X).peak_bytes == plan.peak_bytes
    assert revzoo.verify(toy, X).identical
    revzoo.release(toy)
    assert chain.schedule == ["invert"] * 4
    revzoo.release(toy)
    assert chain.schedule == ["invert"] * 4


def test_a_plan_of_a_language_model_with_its_loss():
    model = llama()
    revzoo.reversible_(model)
    stored, _ = train_step(model, TEXT, "store")
    problem = count(model, TEXT)
    for steps in (["invert"] * 3, ["selective"] * 3, ["invert", "recompute", "store"]):
        modes = ["store", *steps, "store"]
        assert 0 <= peak(problem, modes) - measure(model, TEXT, modes) <= 288  # a mask that nobody keeps where all is stored
    budget = peak(problem, modes)
    plan = revzoo.plan(model, TEXT, budget, loss=lambda outputs: outputs.loss)
    assert plan.peak_bytes <= budget < plan.no_recompute_peak_bytes
    plan.apply(model, TEXT)
    assert_equal(train_step(model, TEXT)[0], stored)


def test_tiles_are_planned_with_modes_applied_and_released(monkeypatch):
    monkeypatch.setattr(planner, "profile", partial(planner.profile, run=False))
    monkeypatch.setattr(planner, "_time_step", lambda model, batch, plan, loss: plan)
    model, ids, settings = llama(2), IDS.repeat(2, 8), {"loss": lambda outputs: outputs.loss}
    batch = {"input_ids": ids, "labels": ids}
    [chain] = revzoo.reversible_(model, batch=batch, split=SPLIT).chains
    monkeypatch.setattr(planner, "choose_tiles", lambda model, batch, loss: setattr(chain, "tiles", 2))
    least = revzoo.plan(model, batch, "1TiB", **settings).min_peak_bytes
    plan = revzoo.plan(model, batch, least - 1, tiles="auto", **settings)
    assert chain.tiles == [1] * 4
    plan.apply(model, batch)
    assert chain.tiles == [*plan.setting.tiles] != [1] * 4
    assert revzoo.measure_memory(model, batch, **settings).peak_bytes == plan.peak_bytes < least
    revzoo.release(model)
    assert (chain.tiles, chain.schedule) == ([1] * 4, ["invert"] * 4)


def test_a_budget_below_the_least_names_the_step(toy):
    with pytest.raises(BudgetError, match=r"at least .* \(\d+ bytes\) are needed, in the backward of blocks.3"):
        revzoo.plan(toy, X, 1000)


def test_a_plan_is_for_these_chains(toy):
    plan = revzoo.plan(toy, X, "1GiB")
    revzoo.ordinary_(toy)
    with pytest.raises(PlanError, match="hash of the model's parts"):
        plan.apply(toy)
    revzoo.reversible_(toy, kept_bits=4)
    with pytest.raises(PlanError, match="hash of the model's parts"):
        plan.apply(toy)


def test_two_lists_are_planned_together(toy):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Toy(), Toy()
            self.first.head = torch.nn.Linear(6, 6)

        def forward(self, x):
            return self.second(self.first(x).tanh())

    two = Two()
    revzoo.reversible_(two, "first.blocks", "second.blocks")
    problem = count(two, X)
    for steps in (("invert",) * 8, ("recompute", "invert") * 4, ("invert", "invert", "store", "recompute") * 2):
        modes = ["store", *steps[:4], "store", *steps[4:], "store"]
        assert 0 <= measure(two, X, modes) - peak(problem, modes) <= WEIGHTS_OF_A_BLOCK


def test_loops_that_a_plan_cannot_follow_are_refused(toy):
    class Loop(Toy):
        def __init__(self, order, factor=1.0):
            super().__init__()
            self.order, self.factor = order, factor

        def forward(self, x):
            for i in self.order:
                x = self.blocks[i](x * self.factor if self.factor != 1 else x)
            return self.head(x)

    refused = {
        "blocks.2 is called before blocks.1": Loop((0, 2, 1, 3)),
        "blocks.3 is not called with this batch": Loop((0, 1, 2)),
        "blocks.1 is called a second time": Loop((0, 1, 1, 2, 3)),
        "changes the state between blocks.0 and blocks.1": Loop((0, 1, 2, 3), 1.5),
    }
    for message, model in refused.items():
        revzoo.reversible_(model)
        with pytest.raises(InputError, match=message):
            revzoo.plan(model, X, "1MiB")


def test_what_a_plan_does_not_take_is_named(toy):
    with pytest.raises(InputError, match="recovered one by one. Received: lookahead=1"):
        revzoo.plan(toy, X, "1MiB", lookahead=1)
    with pytest.raises(InputError, match="what is planned are their modes, with revzoo.plan"):
        revzoo.reforward(toy, X)
    both = torch.nn.Sequential(toy, revzoo.runtime.ReversibleChain([Tanh(), Tanh()]))
    with pytest.raises(InputError, match="1 is a reversible chain, and 0.blocks a list of reversible blocks"):
        revzoo.plan(both, X, "1MiB")


def test_a_mixture_whose_kernel_has_other_rules_without_values_is_counted_by_running():
    """Without values, PyTorch's grouped product refuses float32."""
    sizes = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_hidden_layers=3, num_local_experts=4))
    assert isinstance(revzoo.reversible_(model, batch=TEXT).peaks, Peaks)
    plan = revzoo.plan(model, TEXT, "1TiB", loss=lambda outputs: outputs.loss)
    assert 0 < plan.peak_bytes <= plan.no_recompute_peak_bytes
