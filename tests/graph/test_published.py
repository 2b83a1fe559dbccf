"""The published plan of real graphs: as the paper would draw them, and run by the same spans as any other plan."""

import copy
from contextlib import contextmanager

import pytest
import torch
from timm.models.resnet import Bottleneck, ResNet
from torch import nn

import revzoo
from revzoo.errors import BudgetError, InputError
from revzoo.graph.capture import capture
from revzoo.graph.published import choose_as_published, make_graph, make_spans
from revzoo.graph.step_record import count_step, record
from revzoo.planning.solvers.closed_set import divide
from revzoo.planning.solvers.reforwarding import split
from revzoo.runtime import ReversibleChain


def make_vgg() -> nn.Module:
    layers: list[nn.Module] = []
    for i, (width, out) in enumerate([(3, 8), (8, 8), (8, 16), (16, 16)]):
        layers += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU(inplace=True), *([nn.MaxPool2d(2)] if i % 2 else [])]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.5), nn.Linear(16 * 16, 10))


def make_resnet() -> nn.Module:
    return ResNet(Bottleneck, (1, 1, 1, 1), channels=(8, 8, 16, 16), stem_width=8, num_classes=10, drop_path_rate=0.5)


MODULES = {"vgg": make_vgg, "resnet": make_resnet}
BATCHES = {"vgg": (2, 3, 16, 16), "resnet": (2, 3, 64, 64)}


@contextmanager
def recorded(name: str):
    with capture(MODULES[name]().train(), torch.empty(*BATCHES[name])) as captured:
        yield captured, record(captured)


def test_a_vgg_is_a_chain_of_its_tensors():
    with recorded("vgg") as (_, step):
        graph, makers = make_graph(step)
    chain = divide(graph)
    assert (chain.kind, len(chain.vertices)) == ("splittable", len(makers))
    convolved, pooled = [8 * 256, 8 * 256, 16 * 64, 16 * 64], [8 * 64, 16 * 16]
    indices = [8 * n for n in pooled]
    dropped = 2 * 4 * 16 * 16  # with the mask
    expected = [0, *(4 * n for n in convolved[:2]), 4 * pooled[0] + indices[0]]
    expected += [*(4 * n for n in convolved[2:]), 4 * pooled[1] + indices[1], dropped, 4 * 10, 0]
    assert list(graph.costs) == [2 * cost for cost in expected]


@pytest.mark.parametrize("name", MODULES)
def test_the_published_plan_has_the_gradients_of_the_stored_run(name):
    torch.manual_seed(0)
    module, batch = MODULES[name]().train(), torch.randn(*BATCHES[name])
    planned = copy.deepcopy(module)
    plan = revzoo.plan(planned, batch.clone().requires_grad_(), "1GiB", solver="reforwarding")
    plan.apply(planned)
    results = []
    for each in (module, planned):
        torch.manual_seed(1)
        given = batch.clone().requires_grad_()
        out = each(given)
        out.square().sum().backward()
        results.append([out, given.grad, *(p.grad for p in each.parameters()), *each.buffers()])
    assert [len(graph.ends) for graph in plan.graphs] == [3]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("name", "stored", "extra_flops", "peaks"),
    [
        ("vgg", (0, 2, 4, 9), 221_184 + 589_824, (123_384, 109_336)),  # the first and the last convolution again
        ("resnet", (0, 2, 11, 44), 43_407_872 - 2_560, (2_410_208, 1_886_432)),  # one forward but for the classifier
    ],
)
def test_the_published_plan_is_counted(name, stored, extra_flops, peaks):
    with recorded(name) as (captured, step):
        spans, chosen = choose_as_published(step)
        peak, flops = count_step(captured, spans)
    assert chosen.stored == stored
    assert flops - step.total_flops == extra_flops
    assert (step.peak_bytes, peak) == peaks


class Residual(nn.Module):
    """Two branches between a stem and their sum, which is added in place or not."""

    def __init__(self, in_place: bool):
        super().__init__()
        self.stem, self.first, self.second, self.down = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(4))
        self.norm, self.down_norm = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.in_place = in_place

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.second(self.first(x)))
        d = self.down_norm(self.down(x))
        return (y.add_(d) if self.in_place else y + d).relu()


@pytest.mark.parametrize(("in_place", "num_spans"), [(False, 2), (True, 1)])
def test_no_part_is_recovered_twice(in_place, num_spans):
    """In place, the sum is one atom with the norm before it, whose gradient needs one branch while the other is missing."""
    with capture(Residual(in_place).train(), torch.empty(2, 4, 8, 8)) as captured:
        step = record(captured)
        graph, makers = make_graph(step)
        names = [step.atoms[i].name for i in makers]
        sums = ("y", "add", "iadd", "relu")
        stored = [0, 1, *(v for v, name in enumerate(names, 1) if name.startswith(sums)), len(names) + 1]
        chosen = split(graph, stored)
        assert len(chosen.parts) == 2
        spans = make_spans(step, makers, chosen).take(captured.calls[0].numbers)
        _, flops = count_step(captured, make_spans(step, makers, chosen))
    assert len(spans.ends) == num_spans
    assert flops - step.total_flops == 3 * 2 * (2 * 8 * 8 * 4) * 4 * 9


def test_the_front_door():
    module, batch = make_vgg(), torch.empty(*BATCHES["vgg"])
    plan = revzoo.plan(module, batch, "1MiB", solver="reforwarding")
    assert (plan.peak_bytes, plan.extra_flops) == (109_336, 811_008)
    assert plan.notes == ("Re-forwarding as published, which counts 42.1 KiB of activations (equation 1).",)
    with pytest.raises(
        BudgetError, match="knows no budget, and its plan takes 106.8 KiB, more than 97.7 KiB. Try solver='timeline'"
    ):
        revzoo.plan(module, batch, 100_000, solver="reforwarding")
    with pytest.raises(InputError, match="solver='timeline' or 'reforwarding', and lookahead=0. Received: solver='knapsack'"):
        revzoo.plan(module, batch, "1MiB", solver="knapsack")


def test_models_of_the_zoo_are_refused():
    chain = ReversibleChain([nn.Linear(4, 4)])
    with pytest.raises(
        InputError, match="plans modules without reversible steps. Received: ReversibleChain. Try solver='timeline'"
    ):
        revzoo.plan(chain, torch.empty(2, 8), "1MiB", solver="reforwarding")
