"""Writes that autograd hardly sees: in forward a plan knows them, after forward they are an error."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import revzoo
from revzoo.errors import RecoveryError
from revzoo.graph import plan_module

BATCH = torch.linspace(-1, 1, 384).view(24, 16)
OTHER = BATCH.flip(0)
library = torch.library.Library("revzoo_writes", "DEF")
library.define("scale(Tensor(a!)[] xs, float by) -> ()")
library.impl("scale", lambda xs, by: [x.mul_(by) for x in xs] and None, "CompositeExplicitAutograd")
library.define("hide(Tensor x) -> Tensor")  # it does not say that it writes
library.impl("hide", lambda x: x.add_(1).clone(), "CPU")
library.impl("hide", torch.clone, "Meta")


class Net(nn.Module):
    """One whose first layer reads what `write` changes after it."""

    def __init__(self, write: Callable[..., Any] = lambda *_: None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.write = write
        for name in ("mean", "other"):
            self.register_buffer(name, torch.ones(24, 16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x * y.cos() * self.mean.cos()))
        with torch.no_grad():
            self.write(self, x, y)
        for layer in self.layers[1:]:
            x = F.gelu(layer(x)) + x * 0.5
        return x


def apply_plan(module: nn.Module, batch: Any) -> None:
    torch._dynamo.reset()
    plan = plan_module(module, batch, None)[0]
    assert plan.drops_something
    plan.apply(module)


@pytest.mark.parametrize(
    "write",
    [
        lambda net, x, y: torch._foreach_mul_([net.mean, net.other], 0.9),
        lambda net, x, y: torch._foreach_add_([y], 1.0),
        lambda net, x, y: torch._foreach_mul_([net.mean[3:5], net.other[:, 2]], 0.5),
        lambda net, x, y: torch._foreach_mul_([net.layers[0].weight], 0.9),
        lambda net, x, y: torch.ops.revzoo_writes.scale([net.mean, net.other], 0.5),
        lambda net, x, y: torch.add(x, y, out=net.mean),
        lambda net, x, y: net.mean.data.mul_(0.5),
    ],
    ids=["lists", "input", "views", "weights", "operator", "out", "data"],
)
def test_writes_in_forward_are_known(write: Callable[..., Any], same_step: Callable[..., None]):
    module = Net(write)
    plain = copy.deepcopy(module)
    apply_plan(module, (BATCH, OTHER))
    for _ in range(3):
        same_step(module, plain, (BATCH, OTHER))


class Twice(Net):
    """One that reads one of two results to which a call writes."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.gelu(self.layers[1](F.gelu(self.layers[0](x * y))))
        with torch.no_grad():
            both = [x * 2, x.sin()]
            self.write(both)
        return torch.tanh(x * both[1] + F.gelu(self.layers[2](x)))


@pytest.mark.parametrize("write", [lambda xs: torch._foreach_add_(xs, 1.0), lambda xs: torch.ops.revzoo_writes.scale(xs, 0.5)])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.8])
def test_calls_that_write_to_several_results(write: Callable[..., Any], share: float, same_step: Callable[..., None]):
    torch._dynamo.reset()
    module = Twice(write)
    plain, least = copy.deepcopy(module), plan_module(module, (BATCH, OTHER), None)[0]
    stored = least.no_recompute_peak_bytes
    budget = int(least.peak_bytes + share * (stored - least.peak_bytes))
    plan_module(module, (BATCH, OTHER), budget)[0].apply(module)
    for _ in range(3):
        same_step(module, plain, (BATCH, OTHER))


def test_planning_leaves_plain_tensors_as_they_are():
    class Decaying(Net):
        def __init__(self):
            super().__init__()
            self.rate, self.rates = torch.ones(16), {"all": [torch.ones(16)]}

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            for each in (self.rate, *self.rates["all"]):
                each.mul_(0.9)
            return super().forward(x, y) * self.rate * self.rates["all"][0]

    module = Decaying()
    revzoo.plan(module, (BATCH, OTHER), "1GB")
    revzoo.measure_memory(module, (BATCH, OTHER))
    assert all(bool((each == 1).all()) for each in (module.rate, *module.rates["all"]))


def test_what_an_earlier_graph_has_read_may_be_written_by_a_later_one(same_step: Callable[..., None]):
    class Parted(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = F.gelu(self.layers[0](x * y)) * self.mean.sigmoid()
            x = F.gelu(self.layers[1](x))
            torch._dynamo.graph_break()
            with torch.no_grad():
                self.mean.lerp_(x.detach(), 0.1)
            return F.gelu(self.layers[3](F.gelu(self.layers[2](x))))

    module = Parted()
    plain = copy.deepcopy(module)
    apply_plan(module, (BATCH, OTHER))
    for _ in range(3):
        same_step(module, plain, (BATCH, OTHER))


def test_a_write_that_no_operator_tells_of_is_refused():
    module = Net(lambda net, x, y: torch.ops.revzoo_writes.hide(net.mean))
    apply_plan(module, (BATCH, OTHER))
    with pytest.raises(
        RecoveryError, match=r"was modified in place after forward, or in forward where the plan does not know it"
    ):
        module(BATCH, OTHER).sum().backward()


def test_a_saved_tensor_that_changes_in_forward_is_refused_as_without_a_plan():
    module = Net(lambda net, x, y: torch._foreach_mul_([x], 2.0))
    plain = copy.deepcopy(module)
    apply_plan(module, (BATCH, OTHER))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain(BATCH, OTHER).sum().backward()
    with pytest.raises(RecoveryError, match="was modified in place"):
        module(BATCH, OTHER).sum().backward()


class Halving(nn.Module):
    """One that writes to its second input after it has read its first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.gelu(self.layers[0](x.sin()))
        y.mul_(0.5)
        for layer in self.layers[1:]:
            x = F.gelu(layer(x)) + x * 0.5
        return x


@pytest.mark.parametrize(
    "share", [lambda t: (t[:16], t[1:17]), lambda t: (t, torch.from_numpy(t.numpy()))], ids=["views", "numpy"]
)
@pytest.mark.parametrize("planned_with", ["shared", "separate"])
@pytest.mark.filterwarnings("ignore:A call of Halving differs")
def test_inputs_that_share_memory(share: Callable[[Tensor], Any], planned_with: str):
    """Also if those that it was planned with did not, or those of the step before."""
    module = Halving()
    plain = copy.deepcopy(module)
    shared = share(BATCH.clone())
    apply_plan(module, shared if planned_with == "shared" else tuple(t.clone() for t in shared))
    for step in range(4):
        for each in (module, plain):
            each.zero_grad()
            batch = share(BATCH.clone())
            each(*(tuple(t.clone() for t in batch) if step == 2 else batch)).square().sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


def scale_biases(by: float) -> Callable[..., None]:
    def write(net: Net, _: Any) -> None:
        for layer in net.layers:
            layer.bias.data.mul_(by)

    return write


@pytest.mark.parametrize(
    "write",
    [scale_biases(2), scale_biases(1.01), lambda _, batch: batch.numpy().fill(0), lambda _, batch: batch.data.mul_(1.01)],
    ids=["double", "percent", "numpy", "batch"],
)
def test_writes_between_forward_and_backward_are_refused(write: Callable[..., Any]):
    """In every step, not only in those in which all bits are compared."""
    module = Net()
    state = copy.deepcopy(module.state_dict())
    apply_plan(module, (BATCH, OTHER))
    for step in range(6):
        module.load_state_dict(state)
        batch = BATCH.clone()
        loss = module(batch, OTHER).square().sum()
        if step % 3:
            loss.backward()
            continue
        write(module, batch)
        with pytest.raises(RecoveryError, match=re.escape("was changed after forward where autograd does not see it")):
            loss.backward()


def test_a_write_within_a_tensor_is_found_where_all_bits_are_compared():
    module = Net()
    apply_plan(module, (BATCH, OTHER))
    batch = BATCH.clone()
    loss = module(batch, OTHER).square().sum()
    batch.data[12, 8] *= 1.01
    with pytest.raises(RecoveryError, match=r"A tensor \(24, 16\) that backward needs .*was changed after forward"):
        loss.backward()
