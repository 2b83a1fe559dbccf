"""Plans made inside autocast: casts of weights count for as long as they live, and statistics in their real dtypes."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import revzoo
from revzoo.analysis.autocast import leave_autocast
from revzoo.analysis.dry_run import isolated, linear_loss
from revzoo.planning.profiling.count import count, count_peak
from revzoo.planning.solvers.schedule_totals import peak
from revzoo.runtime.live_bytes import LiveBytesOfReplacedCalls

WEIGHT = 64 * 64


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def count_real_step(model: nn.Module, batch: Tensor) -> int:
    """Return the peak of a step as users write it: forward and loss inside autocast, backward behind it."""
    with isolated(model, batch) as x, LiveBytesOfReplacedCalls() as live:
        live.watch([model.parameters(), model.buffers(), x])
        with autocast():
            loss = linear_loss(model(x))
        loss.backward()
    return live.peak()


def test_a_counted_step_of_every_family_is_the_real_one(family, schedules):
    x = family.example_input(2)
    mask = x.numel() if family.spec.family in ("reformer", "rev_bert", "rev_roberta") else 0  # one that no unit keeps counts
    compare_with_real_steps(family, x, schedules(family, 1), autocast(), mask)


def test_a_counted_step_is_the_real_one_where_autocast_is_around_forward_alone(tiny, schedules):
    """As Accelerate has it."""
    tiny.forward = autocast()(tiny.forward)
    compare_with_real_steps(tiny, tiny.example_input(2), schedules(tiny, 2), nullcontext())


def compare_with_real_steps(model, x, drawn, around, mask=0):
    with around:
        problem = count(model, x)
        promised = [count_peak(model, x, modes) for modes in drawn]
    for modes, promise in zip(drawn, promised, strict=True):
        model.schedule = modes
        assert promise == count_real_step(model, x)
        assert peak(problem, modes) - promise in (0, mask)


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        units = [(nn.Conv2d(c, 16, 3), nn.BatchNorm2d(16), nn.GroupNorm(4, 16), nn.ReLU()) for c in (3, 16)]
        super().__init__(*(layer for unit in units for layer in unit), nn.Flatten(), nn.Linear(16 * 12 * 12, 10))


class Perceptron(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))))


@pytest.mark.parametrize(("module", "shape"), [(Convolutions, (4, 3, 16, 16)), (Perceptron, (64, 64))])
def test_a_planned_module_takes_what_its_plan_says(module, shape):
    network, x = module(), torch.randn(shape)
    with autocast():
        stored = revzoo.plan(network, x, "1TiB").peak_bytes
        least = revzoo.plan(network, x, stored - 1).min_peak_bytes
    assert stored == count_real_step(network, x)
    budget = least + (stored - least) // 3
    with autocast():
        plan = revzoo.plan(network, x, budget)
        plan.apply(network, x)
        measured = revzoo.measure_memory(network, x).peak_bytes
    assert count_real_step(network, x) == plan.peak_bytes == measured <= budget


def test_casts_are_freed_where_backward_begins():
    weight = nn.Parameter(torch.randn(64, 64))
    with LiveBytesOfReplacedCalls() as live, autocast(), autocast():
        live.watch(weight)
        torch.mm(torch.ones(1, 64), weight.detach().requires_grad_())  # of a weight that nobody else has: not cached for long
        before = live.alive()
        torch.mm(torch.ones(1, 64), weight)
        assert live.alive() - before == 2 * WEIGHT
        with leave_autocast():
            assert live.alive() == 4 * WEIGHT
            assert not torch.is_autocast_enabled("cpu")
            with autocast():
                torch.mm(torch.ones(1, 64), weight)
                assert live.alive() == 6 * WEIGHT
            assert live.alive() == 4 * WEIGHT  # as behind an outermost block
        assert torch.is_autocast_enabled("cpu")
        torch.mm(torch.ones(1, 64), weight)
        assert live.alive() == 6 * WEIGHT
    assert live.alive() == 4 * WEIGHT
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(5), nn.BatchNorm2d(4).bfloat16()])
def test_norms_have_the_dtypes_of_their_kernels_without_values(norm):
    x = torch.randn(3, 4, 5, 5, dtype=torch.bfloat16, requires_grad=True)

    def log(fake: bool) -> list[tuple[int, int]]:
        with isolated(norm, x, fake=fake) as inputs, LiveBytesOfReplacedCalls() as live:
            live.watch([norm.parameters(), norm.buffers(), inputs])
            norm(inputs).backward(torch.ones_like(inputs))
            return list(live.log)

    assert log(fake=True) == log(fake=False)
