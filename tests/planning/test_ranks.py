"""Plans for many ranks: predicted peaks are counted ones, in every schedule, and the model is left as it was."""

import pytest
import torch
from timm.optim import create_optimizer_v2
from torch import distributed

import revzoo
from revzoo.analysis.dry_run import accumulated_gradients
from revzoo.errors import InputError, UnknownNameError
from revzoo.planning.profiling.count import count, count_peak
from revzoo.planning.ranks.division import Division, count_rank_bytes
from revzoo.planning.ranks.rank_copy import Collective, divide_copy
from revzoo.planning.ranks.rank_plan import plan_ranks
from revzoo.planning.solvers.schedule_totals import peak
from revzoo.runtime.live_bytes import LiveBytes

BATCH = 4


def create_vit(device: str = "meta") -> revzoo.Model:
    return revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"], device=device)


def send(model: revzoo.Model, **settings: str) -> dict[str, Collective]:
    """Return the collectives of a stored training step of two ranks."""
    with divide_copy(model, Division(2), **settings) as (divided, mode):
        count_peak(divided, model.example_input(BATCH), ["store"] * len(model.units))
        return mode.steps[-1]


@pytest.mark.parametrize(
    ("name", "division"),
    [
        ("rev_vit_digits", Division(3)),
        pytest.param("rev_vit_digits", Division(4, "hybrid", 2), marks=pytest.mark.slow),
        pytest.param("rev_swin_digits", Division(4), marks=pytest.mark.slow),
    ],
)
def test_any_schedule_takes_what_is_predicted(name, division, schedules):
    model = revzoo.create(name, device="meta", overrides=["stages.0.depth=1"])
    batch = model.example_input(BATCH)
    with divide_copy(model, division) as (divided, _), accumulated_gradients(divided):
        problem = count(divided, batch)
        for modes in schedules(divided, 3):
            assert peak(problem, modes) == count_peak(divided, batch, modes)


def test_shards_are_counted_with_what_fills_them_up():
    """Three ranks: 10 outputs are cut into 4, 4 and 2 rows, and the largest piece decides."""
    model = create_vit()
    shards = {name: 4 * -(-len(p) // 3) * p[0].numel() for name, p in model.named_parameters()}
    assert [shards[name] for name, p in model.named_parameters() if p.shape == (10,)] == [16]
    held = count_rank_bytes(model, Division(3), create_optimizer_v2(model, "adamw"))
    assert held.weights == held.gradients == sum(shards.values())
    steps = sum(4 for p in model.parameters())  # AdamW counts the updates of each parameter
    assert held.optimizer.state == 2 * sum(shards.values()) + steps
    with divide_copy(model, Division(3)) as (divided, _), LiveBytes() as live:
        assert live.size(live.watch(divided.parameters())) == held.weights


def test_frozen_parameters_have_no_gradients_and_are_not_reduced():
    model = create_vit()
    model.stem.requires_grad_(False)
    whole = count_rank_bytes(create_vit(), Division(2))
    held = count_rank_bytes(model, Division(2))
    stem = sum(4 * -(-len(p) // 2) * p[0].numel() for p in model.stem.parameters())
    assert (held.weights, held.gradients) == (whole.weights, whole.gradients - stem)
    calls = {kind: each.calls for kind, each in send(model).items()}
    assert calls == {"all-gather": 2 * len(model.units), "reduce-scatter": len(model.units) - 1}


def test_a_model_is_left_as_it_was_and_no_process_group_behind():
    model = create_vit("cpu")
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    result, _ = plan_ranks(model, model.example_input(BATCH), "1GiB", Division(2))
    assert not distributed.is_initialized()
    assert type(model) is revzoo.Model
    for name, p in model.named_parameters():
        assert id(p) == before[name][0]
        assert torch.equal(p, before[name][1])
    result.plan.apply(model)


def test_autocast_sends_what_float32_sends():
    """Parameters are gathered as they are."""
    model = create_vit()
    full = send(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert send(model, precision="bf16") == full


def test_what_is_no_division_or_no_model_of_the_zoo_is_refused():
    with pytest.raises(UnknownNameError, match="Unknown shard 'none'. Allowed: full, hybrid"):
        Division(2, "none")
    with pytest.raises(InputError, match="8 ranks on 3 nodes. Give a multiple of 3 ranks"):
        Division(8, "full", 3)
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match="Models of the zoo are planned for many ranks. Received: Linear."):
        plan_ranks(layer, torch.randn(2, 2), "1GiB", Division(2))
