"""What is said about a planned step is what it does: its peak, its FLOPs, what it keeps, and its times."""

import copy
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import revzoo
from revzoo.errors import InputError
from revzoo.graph import call_times, plan_module
from revzoo.planning.profiling.clock import Clock

BATCH = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
ROW = 16 * 8 * 4  # bytes of a result


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), 0.1, self.training)
        return self.head(self.norm(x))


@pytest.fixture
def net() -> Net:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Net().train()


@cache
def find_range() -> tuple[int, int]:
    stored = revzoo.plan(Net().train(), BATCH, "1TB")
    return stored.min_peak_bytes, stored.no_recompute_peak_bytes


def plan_at(net, share, **options):
    least, most = find_range()
    return plan_module(net, BATCH, least + int(share * (most - least)), **options)


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_phases_and_calls_add_up(net, share):
    plan, details = plan_at(net, share)
    assert max(phase.bytes for phase in details.phases) == plan.peak_bytes
    assert plan.extra_flops == sum(call.flops * call.num_reruns for call in details.calls)
    assert len(plan.graphs[0].atoms) == len(details.calls) - 2  # what runs before the graph and behind it
    reruns = [phase.call for phase in details.phases if phase.kind == "recovery"]
    assert [reruns.count(i) for i in range(len(details.calls))] == [call.num_reruns for call in details.calls]
    assert sum(reruns) > 0
    kinds = [phase.kind for phase in details.phases]
    loss = kinds.index("loss")
    assert [phase.call for phase in details.phases[:loss]] == list(range(len(details.calls)))
    assert set(kinds[loss + 1 :]) == {"backward", "recovery"}
    assert details.fixed_bytes == sum(t.nbytes for t in (*net.parameters(), *net.buffers(), BATCH))
    peaks, flops = zip(*((point.peak_bytes, point.extra_flops) for point in details.front), strict=True)
    assert list(peaks) == sorted(peaks)
    assert peaks[0] >= plan.min_peak_bytes
    assert flops[-1] == 0 < flops[0]
    assert all(point.extra_seconds is None for point in details.front)


def test_what_is_kept_and_what_is_not(net):
    """A layer's gelu needs the linear's result, its dropout a mask, the next layer the dropout's result."""
    _, stored = plan_module(net, BATCH, "1TB")
    middle = {call.name: call.kept_bytes for call in stored.calls if call.path == "layers.1"}
    assert middle == {"layers.1 (linear)": ROW}
    assert sum(call.dropped_bytes + call.num_reruns for call in stored.calls) == 0
    assert {call.path for call in stored.calls} >= {"", "layers.2", "norm", "head"}
    _, least = plan_at(net, 0.0)
    assert [call.kept_bytes + call.dropped_bytes for call in least.calls] == [call.kept_bytes for call in stored.calls]
    assert sum(call.kept_bytes for call in least.calls) < sum(call.kept_bytes for call in stored.calls) / 2


@pytest.fixture
def steady_clock(monkeypatch):
    """Every call takes a second, forward and backward."""
    seconds = iter(range(10**9))
    clock = Clock(seconds.__next__, lambda start, end: float(end - start))
    monkeypatch.setattr(call_times, "make_clock", lambda device: clock)


def test_plans_by_time(net, steady_clock, tmp_path):
    """Where every call takes a second, no call is cheap, and a plan's time is the number of calls that run again."""
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    plan, details = plan_at(net, 0.0, profile=True)
    assert plan.stored_seconds == 2 * (len(details.calls) - 2)
    assert plan.seconds == plan.stored_seconds + sum(call.num_reruns for call in details.calls)
    assert f"more time ({plan.seconds:.3g} s +- 0 %)" in str(plan)
    assert {phase.work for phase in details.phases if phase.kind == "recovery"} == {10**9}
    assert [phase.work for phase in details.phases if phase.kind == "forward"] == [0, *[10**9] * (len(details.calls) - 2), 0]
    assert details.front[-1].extra_seconds == 0 < details.front[0].extra_seconds
    assert plan.peak_bytes <= plan.budget_bytes == find_range()[0]
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    plan.save(tmp_path / "plan.json")
    assert revzoo.ModulePlan.load(tmp_path / "plan.json") == plan


class Gelus(nn.Module):
    """Backward needs what each layer makes and what each gelu makes: either can be made again from the other."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


def test_the_price_decides_what_runs_again(same_step, monkeypatch):
    """By FLOPs a layer is dear and a gelu free; where only gelus take time, layers run again in their place."""

    def measure(measured, calls):
        names = ["", *(atom.name for atom in calls[0].atoms), ""]
        return call_times.CallTimes(tuple(10**9 if "gelu" in name else 1 for name in names), (0,) * len(names))

    torch._dynamo.reset()
    monkeypatch.setattr("revzoo.graph.module_planner.assign_times", measure)
    net = Gelus()
    budget = revzoo.plan(net, BATCH, "1TB").no_recompute_peak_bytes - ROW
    by_flops, by_time = (revzoo.plan(net, BATCH, budget, profile=profile) for profile in (False, True))
    assert by_flops.extra_flops == 0 < by_time.extra_flops
    assert by_time.seconds - by_time.stored_seconds < 1e-6
    plain = copy.deepcopy(net)
    by_time.apply(net, BATCH)
    same_step(net, plain, BATCH)


class Tapped(Net):
    """One that `torch.compile` captures as several graphs."""

    def forward(self, x):
        x = F.dropout(F.gelu(self.layers[0](x)), 0.1, self.training)
        torch._dynamo.graph_break()
        return self.head(self.norm(F.gelu(self.layers[1](x.exp().log()))))


def test_several_graphs_add_up_too(steady_clock):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Tapped().train()
    least = revzoo.plan(net, BATCH, "1TB").min_peak_bytes
    plan, details = plan_module(net, BATCH, least, profile=True)
    assert len(plan.graphs) == 2
    assert max(phase.bytes for phase in details.phases) == plan.peak_bytes == least
    assert plan.extra_flops == sum(call.flops * call.num_reruns for call in details.calls)
    reruns = sum(call.num_reruns for call in details.calls)
    assert plan.seconds - plan.stored_seconds == reruns > 0
    assert [call.name for call in details.calls].count("what runs between captured graphs") == 3


def test_real_clocks_measure_something(net):
    plan = revzoo.plan(net, BATCH, "1TB", profile=True)
    assert 0 < plan.stored_seconds == plan.seconds < 60


def test_nothing_is_timed_on_the_meta_device():
    torch._dynamo.reset()
    with torch.device("meta"):
        net = Net()
    with pytest.raises(InputError, match="profile=True runs the module, which has no values here. Received: the meta device"):
        revzoo.plan(net, torch.empty(4, 8, device="meta"), "1TB", profile=True)
