"""Plans own nothing: modules, their tensors and what the compiler made of them are freed with the last reference."""

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx.graph_module import _loader

import revzoo
from revzoo.errors import BudgetError
from revzoo.graph import plan_module
from revzoo.graph.planned_call import PlannedCall

BATCH = torch.linspace(-1, 1, 512).view(64, 8)


class Net(nn.Sequential):
    """One whose forward is one graph."""

    def __init__(self):
        super().__init__(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.GELU())))


class Tapped(Net):
    """One whose forward is several graphs, so that the compiler compiles functions of its class, too."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


class Annealed(Net):
    """One whose graphs differ from step to step."""

    rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.rate += 0.01
        return super().forward(nn.functional.dropout(x, self.rate))


def plan(module: nn.Module) -> revzoo.ModulePlan:
    return plan_module(module, BATCH, None)[0]


def train(module: nn.Module) -> None:
    plan(module).apply(module)
    for _ in range(2):
        module(BATCH).square().sum().backward()


def train_and_release(module: nn.Module) -> None:
    train(module)
    revzoo.release(module)


def plan_with_times(module: nn.Module) -> None:
    plan_module(module, BATCH, None, profile=True)


def refuse(module: nn.Module) -> None:
    with pytest.raises(BudgetError):
        revzoo.plan(module, BATCH, "1KiB")


USES = [(plan, Net), (train, Tapped), (train_and_release, Net), (plan_with_times, Tapped), (refuse, Tapped)]


@pytest.fixture(autouse=True)
def _capture_anew() -> None:
    torch._dynamo.reset()


def count(use: Callable[[nn.Module], object], make: type[nn.Module], times: int) -> Counter[type]:
    """Return what there is of every type after so many modules were made, used and deleted."""
    with patch.object(logging.getLogger("torch.__trace"), "handlers", []):  # those of pytest keep all that is said
        for _ in range(times):
            use(make())
    for _ in range(3):  # what is freed may free more
        gc.collect()
    return Counter(map(type, gc.get_objects()))


@pytest.mark.parametrize(("use", "make"), USES, ids=lambda each: each.__name__)
def test_a_module_goes_with_its_last_reference(use: Callable[[nn.Module], object], make: type[nn.Module]):
    module = make()
    use(module)
    left = weakref.ref(module), *map(weakref.ref, module.parameters())
    del module
    gc.collect()
    assert not any(each() is not None for each in left)


def test_no_text_of_graphs_stays():
    before = set(_loader.eval_cache)
    count(train_and_release, Tapped, 2)
    assert _loader.eval_cache.keys() <= before  # texts of what was compiled earlier may go


@pytest.mark.filterwarnings("ignore:Annealed is compiled anew again and again")
def test_variants_that_are_dropped_leave_no_environment():
    module = Annealed()
    plan(module).apply(module)
    for _ in range(20):  # with variants that are dropped
        module(BATCH).square().sum().backward()
    assert len(vars(module)["_compiled_call_impl"]._call._captured.backend.environments) < 12


@pytest.mark.parametrize("make", [Tapped, Annealed])
def test_four_plans_leave_no_more_than_two(make: type[nn.Module]):
    """No tensor, graph or object of this package. PyTorch notes some dozens of things at every compilation."""
    before, after = (count(train_and_release, make, 2) for _ in range(2))
    more = {kind: number - before[kind] for kind, number in after.items() if number > before[kind]}
    assert not [k for k in more if issubclass(k, Tensor | nn.Module | torch.fx.Node) or k.__module__.startswith("revzoo")]
    assert sum(more.values()) < 2 * 300


@pytest.mark.filterwarnings("ignore:A call of Written differs")
def test_inputs_that_share_memory_now_and_then_are_planned_once():
    class Written(nn.Sequential):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x + 0) + y.mul_(2).sum()

    module = Written(*Net())
    plan_module(module, (BATCH, BATCH + 1), None)[0].apply(module)
    given = [(BATCH.clone(), BATCH.clone()), (shared := BATCH.clone(), shared)]
    with patch("revzoo.graph.planned_call.PlannedCall._choose", autospec=True, side_effect=PlannedCall._choose) as choose:
        for _ in range(3):
            for each in given:
                module(*each).sum().backward()
    assert choose.call_count == 2


def test_what_is_compiled_without_a_plan_stays():
    """The class has functions that are compiled for both modules."""
    module, x = Tapped(), BATCH.clone()
    module.compile(backend="eager")
    module(x)
    train_and_release(Tapped())
    compiled = counters["stats"]["unique_graphs"]
    module(x)
    assert counters["stats"]["unique_graphs"] == compiled
