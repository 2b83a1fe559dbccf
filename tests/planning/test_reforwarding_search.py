"""Plans of captured graphs: bytes and FLOPs as predicted are those of the step that is run."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from revzoo.analysis.dry_run import linear_loss
from revzoo.analysis.flops import FlopCounter
from revzoo.planning.reforwarding.nesting import add_nests
from revzoo.planning.reforwarding.record import Record, record
from revzoo.planning.reforwarding.search import Choices, Front
from revzoo.runtime.graph.spanned_graph import SpannedGraph
from revzoo.runtime.graph.spans import Spans
from revzoo.runtime.live_bytes import LiveBytes


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(8))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(0, 8, 2):
            y = self.norms[i](self.convs[i](x)).relu_()
            y = self.norms[i + 1](self.convs[i + 1](y))
            y += x
            x = y.relu_()
        return x


class _Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(4 * (i + 1)) for i in range(6))
        self.narrow = nn.ModuleList(nn.Conv2d(4 * (i + 1), 8, 1, bias=False) for i in range(6))
        self.convs = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        features = [x * 2]
        for norm, narrow, conv in zip(self.norms, self.narrow, self.convs, strict=True):
            features.append(conv(narrow(norm(torch.cat(features, 1)).relu_()).sigmoid()))
        return torch.cat(features, 1).mean((2, 3))


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for conv in self.down:
            x = F.gelu(conv(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        for conv in self.up:
            x = torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1)
            x = F.gelu(conv(x))
        return x


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(6))
        self.linears = nn.ModuleList(nn.Linear(8, 24) for _ in range(6))
        self.proj = nn.ModuleList(nn.Linear(24 if i % 2 else 8, 8) for i in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).transpose(1, 2).repeat(1, 1, 2)
        for i in range(0, 6, 2):
            q, k, v = self.linears[i](self.norms[i](x)).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
            x = x + self.proj[i](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + self.proj[i + 1](F.dropout(F.gelu(self.linears[i + 1](self.norms[i + 1](x))), 0.1, self.training))
        return x


_NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "residual": _Residual,
    "dense": _Dense,
    "unet": _UNet,
    "transformer": _Transformer,
}


@cache
def _search(name: str) -> tuple[Record, list[Any], Front]:
    graphs: list[tuple[GraphModule, list[Tensor]]] = []

    def backend(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append((graph, inputs))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(_NETWORKS[name](), backend=backend)(torch.ones(8, 4, 16, 16))
    ((graph, inputs),) = graphs
    given = [each.detach().requires_grad_(each.requires_grad) for each in inputs]
    step = record(graph, given)
    choices = Choices(step, count_flops_only=True)
    add_nests(choices)
    return step, given, Front(choices)


def _count(step: Record, inputs: list[Tensor], spans: Spans) -> tuple[int, int]:
    """Return the peak of bytes and the FLOPs of a step in FakeTensors."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
        given = [mode.from_tensor(each).requires_grad_(each.requires_grad) for each in inputs]
        live, flops = LiveBytes(), FlopCounter()
        with flops, live:
            live.watch(given)
            loss = linear_loss(SpannedGraph(step.graph, spans)(*given))
            loss.backward()
        return live.peak(), flops.forward + flops.backward


@pytest.mark.parametrize(("name", "number"), [("residual", 11), ("dense", 6), ("unet", 5), ("transformer", 10)])
def test_bytes_and_flops_are_counted_as_predicted(name: str, number: int) -> None:
    step, inputs, front = _search(name)
    points = front.list_points()
    points = points[:: max(1, len(points) // 8)]
    assert len(points) == number
    for need, work in points:
        chosen = front.choose(need)
        assert chosen is not None
        assert _count(step, inputs, front.make_spans(chosen)) == (need, step.total_flops + work)


def test_a_budget_below_the_least_has_no_plan() -> None:
    _, _, front = _search("residual")
    least, _ = front.list_points()[0]
    assert front.choose(least) is not None
    assert front.choose(least - 1) is None
