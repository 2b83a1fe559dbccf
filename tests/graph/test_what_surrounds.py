"""Planned modules and what is around them: tensors that they hold, hooks, dispatch modes, several backwards of one forward."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.flop_counter import FlopCounterMode

import revzoo
from revzoo.errors import BudgetError

BATCH = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
CONSTANT = torch.linspace(0.5, 1.5, 32)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Scaling(Net):
    """One with tensors that are neither parameters nor buffers; one of them has a gradient."""

    def __init__(self):
        super().__init__()
        self.scale, self.shifts = torch.rand(8), [torch.rand(8).requires_grad_()]

    def forward(self, x):
        hidden = F.gelu(self.layers[0][0](x * self.scale)) * CONSTANT
        return super().forward(self.layers[0][2](hidden) * self.shifts[0])


class Branching(nn.Sequential):
    """One whose later branches free what the recovery of an earlier one starts from."""

    def forward(self, x):
        for layer in self:
            h = layer(x)
            x = (h * 2).sin().cos() + h.cos()
        return x


def apply_half(module: nn.Module, batch: Tensor = BATCH) -> revzoo.ModulePlan:
    """Apply a plan for a budget between the smallest peak and that of storing everything."""
    stored = revzoo.plan(module, batch, "1TB").peak_bytes
    plan = revzoo.plan(module, batch, (revzoo.plan(module, batch, stored - 1).min_peak_bytes + stored) // 2)
    assert plan.drops_something
    plan.apply(module, batch)
    return plan


def test_tensors_that_are_neither_parameters_nor_buffers(same_step):
    module = Scaling()
    plain = copy.deepcopy(module)
    plan = apply_half(module)
    assert (type(module.scale), module.shifts[0].grad) == (Tensor, None)
    same_step(module, plain, BATCH)
    assert torch.equal(module.shifts[0].grad, plain.shifts[0].grad)
    held = sum(t.nbytes for t in (module.scale, module.shifts[0], CONSTANT))
    assert plan.peak_bytes == revzoo.measure_memory(module, BATCH).peak_bytes + held


def test_every_backward_of_a_retained_graph_is_the_same():
    module, batch = Branching(*(nn.Linear(16, 16) for _ in range(4))), BATCH.view(16, 16)
    plain = copy.deepcopy(module)
    apply_half(module, batch)
    gradients = []
    for each in (plain, module):
        loss = each(batch).square().sum()
        for retain_graph in (True, True, False):
            gradients.append(torch.autograd.grad(loss, list(each.parameters()), retain_graph=retain_graph))
    assert all(torch.equal(a, b) for each in gradients for a, b in zip(gradients[0], each, strict=True))


@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_that_come_after_the_first_call(everywhere, same_step):
    module = Net()
    plain = copy.deepcopy(module)
    apply_half(module)
    same_step(module, plain, BATCH)

    def double(layer, given):
        return (given[0] * 2,)

    layers = [each.layers[1][0] for each in (module, plain)]
    add = [register_module_forward_pre_hook] if everywhere else [each.register_forward_pre_hook for each in layers]
    handles = [each(double) for each in add]
    try:
        with pytest.warns(UserWarning, match="the module, its hooks or what requires a gradient"):
            same_step(module, plain, BATCH)
    finally:
        for handle in handles:
            handle.remove()
    same_step(module, plain, BATCH)


def test_full_backward_hooks_are_named(same_step):
    module = Net()
    plain = copy.deepcopy(module)
    apply_half(module)
    for each in (module, plain):
        each.layers[1][0].register_full_backward_hook(lambda layer, inputs, outputs: (inputs[0] * 2,))
    hooks = r"full backward hooks of layers\.1\.0\. Remove them"
    with pytest.warns(UserWarning, match=f"The plan of Net steps aside.*{hooks}"):
        same_step(module, plain, BATCH)
    with pytest.raises(BudgetError, match=hooks):
        revzoo.plan(plain, BATCH, "1KiB")


def test_plans_that_step_aside_say_so_once(same_step):
    module = Net()
    plain = copy.deepcopy(module)
    plan = apply_half(module)
    with FlopCounterMode(display=False), pytest.warns(UserWarning, match="Net steps aside.*dispatch mode _?FlopCounterMode"):
        same_step(module, plain, BATCH)
    with FlopCounterMode(display=False):
        same_step(module, plain, BATCH)
        with pytest.raises(BudgetError, match="under the dispatch mode _?FlopCounterMode. Leave it"):
            revzoo.plan(plain, BATCH, "1KiB")
    plan.apply(module)
    with torch.compiler.set_stance("force_eager"), pytest.warns(UserWarning, match="steps aside.*torch.compile is off"):
        same_step(module, plain, BATCH)


def test_everything_is_stored_where_hooks_on_saved_tensors_are_disabled(same_step):
    module = Net()
    plain = copy.deepcopy(module)
    apply_half(module)
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        with pytest.warns(
            UserWarning, match=r"Everything is stored inside torch\.autograd\.graph\.disable_saved_tensors_hooks"
        ):
            loss = module(BATCH).square().sum()
        loss.backward()
    plain(BATCH).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
