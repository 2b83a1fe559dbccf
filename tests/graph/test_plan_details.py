"""What is said about a planned step is what it does: its peak, its FLOPs, and what it keeps."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from revzoo.graph import ModulePlan, PlanDetails, plan_module

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
    return stored, plan_module(net, BATCH, stored[0].min_peak_bytes)


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


def test_what_is_kept_and_what_is_not():
    """A layer's gelu needs the linear's result, its dropout a mask, the next layer the dropout's result."""
    (_, stored), (_, least) = plan_ends(Net())
    middle = {call.name: call.kept_bytes for call in stored.calls if call.path == "layers.1"}
    assert middle == {"layers.1 (linear)": ROW}
    assert sum(call.dropped_bytes + call.num_reruns for call in stored.calls) == 0
    assert {call.path for call in stored.calls} >= {"", "layers.2", "norm", "head"}
    assert [call.kept_bytes + call.dropped_bytes for call in least.calls] == [call.kept_bytes for call in stored.calls]
    assert sum(call.kept_bytes for call in least.calls) < sum(call.kept_bytes for call in stored.calls) / 2
