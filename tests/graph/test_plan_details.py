"""What is said about a planned step is what it does: its peak, its FLOPs, what it keeps, and its times."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import revzoo
from revzoo.errors import InputError
from revzoo.graph import ModulePlan, PlanDetails, call_times, plan_module
from revzoo.planning.profiling.clock import Clock, Median

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


class Tapped(Net):
    """One that `torch.compile` captures as two graphs."""

    def forward(self, x):
        x = F.dropout(F.gelu(self.layers[0](x)), 0.1, self.training)
        torch._dynamo.graph_break()
        return self.head(self.norm(F.gelu(self.layers[1](x.exp().log()))))


def plan_ends(net) -> tuple[tuple[ModulePlan, PlanDetails], tuple[ModulePlan, PlanDetails]]:
    """Return the plans that store everything and that have the smallest peak."""
    torch._dynamo.reset()
    stored = plan_module(net.train(), BATCH, "1TB")
    least = plan_module(net, BATCH, stored[0].no_recompute_peak_bytes - 1)[0].min_peak_bytes
    return stored, plan_module(net, BATCH, least)


@pytest.mark.parametrize(("make", "graphs"), [(Net, 1), (Tapped, 2)])
def test_phases_and_calls_add_up(make, graphs):
    net = make()
    _, (plan, details) = plan_ends(net)
    assert max(phase.bytes for phase in details.phases) == plan.peak_bytes == plan.budget_bytes
    assert plan.extra_flops == sum(call.flops * call.num_reruns for call in details.calls)
    assert [len(plan.graphs), [call.name for call in details.calls].count("what runs between captured graphs")] == [
        graphs,
        graphs + 1,
    ]
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


def test_what_is_kept_and_what_is_not():
    """A layer's gelu needs the linear's result, its dropout a mask, the next layer the dropout's result."""
    (_, stored), (_, least) = plan_ends(Net())
    middle = {call.name: call.kept_bytes for call in stored.calls if call.path == "layers.1"}
    assert middle == {"layers.1 (linear)": ROW}
    assert sum(call.dropped_bytes + call.num_reruns for call in stored.calls) == 0
    assert {call.path for call in stored.calls} >= {"", "layers.2", "norm", "head"}
    assert [call.kept_bytes + call.dropped_bytes for call in least.calls] == [call.kept_bytes for call in stored.calls]
    assert sum(call.kept_bytes for call in least.calls) < sum(call.kept_bytes for call in stored.calls) / 2


def test_plans_by_time(monkeypatch, tmp_path):
    """Where every call takes a second, forward and backward, a plan's time is the number of calls that run again."""
    ticks = iter(range(10**9))
    clock = Clock(ticks.__next__, lambda start, end: float(end - start))
    monkeypatch.setattr(call_times, "make_clock", lambda device: clock)
    torch._dynamo.reset()
    net = Tapped().train()
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    plan, details = plan_module(net, BATCH, None, profile=True)
    works = [phase.work for phase in details.phases if phase.kind == "forward"]
    assert set(works) == {0, 10**9}
    assert plan.stored_seconds == 2 * works.count(10**9) == 2 * (len(details.calls) - works.count(0))
    assert plan.seconds == plan.stored_seconds + sum(call.num_reruns for call in details.calls) > plan.stored_seconds
    assert f"more time ({plan.seconds:.3g} s +- 0 %)" in str(plan)
    assert details.front[-1].extra_seconds == 0 < details.front[0].extra_seconds
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    plan.save(tmp_path / "plan.json")
    assert revzoo.ModulePlan.load(tmp_path / "plan.json") == plan


def test_times_decide_what_runs_again(same_step, monkeypatch):
    """By FLOPs a layer is dear and a gelu free. Where only gelus take time, a layer runs again in place of its gelu."""

    def assign(measured, calls):
        names = ["", *(atom.name for atom in calls[0].atoms), ""]
        times = [Median(float("gelu" in name), 0.0) for name in names]
        return call_times.CallTimes(times, times)

    monkeypatch.setattr("revzoo.graph.module_planner.assign_times", assign)
    torch._dynamo.reset()
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.GELU())))
    budget = revzoo.plan(net, BATCH, "1TB").no_recompute_peak_bytes - ROW
    by_flops, by_time = (revzoo.plan(net, BATCH, budget, profile=profile) for profile in (False, True))
    assert by_flops.extra_flops == 0 < by_time.extra_flops
    assert by_time.seconds == by_time.stored_seconds
    plain = copy.deepcopy(net)
    by_time.apply(net, BATCH)
    same_step(net, plain, BATCH)


def test_nothing_is_timed_on_the_meta_device():
    with torch.device("meta"):
        net = Net()
    with pytest.raises(InputError, match="the meta device. Leave it out"):
        revzoo.plan(net, torch.empty(4, 8, device="meta"), "1TB", profile=True)
