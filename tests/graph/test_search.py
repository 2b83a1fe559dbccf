"""Plans of captured graphs: bytes and FLOPs as predicted are those of the step that is run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.analysis.dry_run import compute_loss
from revzoo.graph.capture import Capture, capture
from revzoo.graph.counted_step import count_step
from revzoo.graph.front import Front, find_front
from revzoo.graph.remaking import list_remade
from revzoo.graph.span_choices import Choices
from revzoo.graph.spanned_graph import SpannedGraph
from revzoo.graph.step_record import Record, record
from revzoo.runtime.live_bytes import LiveBytesOfReplacedCalls


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
    """Its first convolution is cheap, and norms, activations in place and dropout make the skips."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(4 if i else 1, 4, 3, padding=1) for i in range(3))
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = x[:, :1], []
        for conv, norm in zip(self.down, self.norms, strict=True):
            x = F.dropout(norm(conv(x)).relu_(), 0.1, self.training)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        for conv in self.up:
            x = F.gelu(conv(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1)))
        return x


class _Between(_Residual):
    """What is read again much later is made between two captured graphs."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.compiler.disable(F.relu)(self.convs[0](x))
        return x + F.interpolate(self.convs[1](F.max_pool2d(x, 2)), scale_factor=2.0)


class _Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0, mask: Tensor | None = None) -> None:
        super().__init__()
        self.dropout, self.mask = dropout, mask
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(6))
        self.linears = nn.ModuleList(nn.Linear(8, 24) for _ in range(6))
        self.proj = nn.ModuleList(nn.Linear(24 if i % 2 else 8, 8) for i in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).transpose(1, 2).repeat(1, 1, 2)
        for i in range(0, 6, 2):
            q, k, v = self.linears[i](self.norms[i](x)).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
            out = F.scaled_dot_product_attention(q, k, v, self.mask, dropout_p=self.dropout)
            x = x + self.proj[i](out.transpose(1, 2).flatten(2))
            x = x + self.proj[i + 1](F.dropout(F.gelu(self.linears[i + 1](self.norms[i + 1](x))), 0.1, self.training))
        return x


class _WideStem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [4, 32, 32, 4, 4]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = conv(x if i != 2 else F.max_pool2d(x, 2)).relu_()
        return x


_NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "residual": _Residual,
    "dense": _Dense,
    "between graphs": _Between,
    "unet": _UNet,
    "attention with dropout": partial(_Transformer, 0.1),
    "attention, masked": partial(_Transformer, 0.0, torch.ones(8, 1, 256, 256, dtype=torch.bool).tril()),
    "wide stem": _WideStem,
}


@contextmanager
def _search(name: str) -> Iterator[tuple[Capture, Record, Front]]:
    with capture(_NETWORKS[name]().train(), torch.ones(8, 4, 16, 16)) as captured:
        step = record(captured)
        yield captured, step, find_front(step, count_flops_only=True)


@pytest.mark.parametrize("name", ["residual", "dense", "unet", "attention with dropout", "attention, masked"])
def test_bytes_and_flops_are_counted_as_predicted(name: str) -> None:
    with _search(name) as (captured, step, front):
        points = front.list_points()
        assert front.choose(points[0][0] - 1) is None
        points = points[:: max(1, len(points) // 4)]
        assert len(points) >= 4
        for need, work in points:
            chosen = front.choose(need)
            assert chosen is not None
            counted = count_step(captured, front.make_spans(chosen))
            assert (counted.peak_bytes, counted.flops) == (need, step.total_flops + work)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("between graphs", []),  # it cannot be made again
        ("dense", []),  # nothing makes the result of a product
        ("residual", [({"x"}, {"conv2d_1"})]),  # the first sum is of a norm's result and the batch
        (
            "unet",
            [
                ({"relu_", "x_1"}, {"conv2d"}),
                ({"relu_", "x_1", "relu__1", "x_3"}, {"conv2d", "conv2d_1"}),
                ({"conv2d", "relu_", "x_1"}, set()),  # a slice of the batch makes the first skip
                ({"conv2d", "relu_", "x_1", "relu__1", "x_3"}, {"conv2d_1"}),
            ],
        ),
    ],
)
def test_what_spans_may_make_again_for_themselves(name: str, expected: list[tuple[set[str], set[str]]]) -> None:
    with capture(_NETWORKS[name]().train(), torch.ones(8, 4, 16, 16)) as captured:
        step = record(captured)
        sets = list(list_remade(Choices(step, count_flops_only=True)))
        makers = [str(storage.maker) for storage in step.storages]
        assert [({makers[k] for k in each.recipes}, {makers[k] for k in each.roots}) for each in sets] == expected


def test_the_softmax_alone_spares_the_products_of_attention() -> None:
    with _search("attention with dropout") as (captured, step, front):
        free = next(need for need, work in front.list_points() if not work)
        chosen = front.choose(free)
        assert chosen is not None
        spans = front.make_spans(chosen)
        scores = 8 * 2 * 256 * 256 * 4  # images, heads, tokens squared
        of_scores = [storage.maker.name for storage in step.storages if storage.maker and storage.bytes == scores]
        kept = {node.name for node in spans.kept}.intersection(of_scores)
        free_at_the_peak = {of_scores[-1]}  # backward asks for it first
        assert kept == {"_safe_softmax", "_safe_softmax_1", "_safe_softmax_2"} | free_at_the_peak
        counted = count_step(captured, spans)
        assert (counted.peak_bytes, counted.flops) == (free, step.total_flops)


def test_a_mask_of_booleans_is_no_reason_to_keep_numbers() -> None:
    with _search("attention, masked") as (captured, step, front):
        masks = {node for storage in step.storages for node in storage.nodes if node.name.startswith("convert_mask")}
        assert len(masks) == 3
        free = next(need for need, work in front.list_points() if not work)
        spans = front.make_spans(front.choose(free) or ())
        assert len(masks & spans.kept) <= 1  # that of the last layer, for which backward asks first
        counted = count_step(captured, spans)
        assert (counted.peak_bytes, counted.flops) == (free, step.total_flops)


def test_bytes_without_parameter_gradients_are_counted_as_predicted() -> None:
    with capture(_Residual().train(), torch.ones(8, 4, 16, 16)) as captured:
        step = record(captured, with_parameter_gradients=False)
        front = find_front(step, count_flops_only=True)
        (call,) = captured.calls
        for need, _ in front.list_points()[::4]:
            chosen = front.choose(need)
            assert chosen is not None
            program = SpannedGraph(call.graph, front.make_spans(chosen).take(call.numbers))
            with LiveBytesOfReplacedCalls() as live:
                live.watch(captured.tensors)
                compute_loss(None, captured.run(lambda _, inputs, program=program: program(*inputs))).backward()
                gradients = live.watch([t.grad for t in captured.tensors])
            assert live.peak(without=gradients) == need < live.peak()


def test_the_smallest_plan_of_a_wide_stem_is_what_autograd_has_at_once() -> None:
    with _search("wide stem") as (captured, step, front):
        least, work = front.list_points()[0]
        assert work == step.flops[1] == 4718592  # the first convolution
        chosen = front.choose(least)
        assert chosen is not None
        peak = count_step(captured, front.make_spans(chosen)).peak_bytes
        wide = 8 * 32 * 16 * 16 * 4  # the gradient that reaches an activation, what it saves, and the gradient it makes
        gradients = sum(weight.nbytes for weight in list(_WideStem().parameters())[1:]) + 2 * 4  # and of the loss, and the loss
        assert peak == least == step.fixed_bytes + 3 * wide + gradients < step.peak_bytes
