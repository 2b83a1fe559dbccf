"""Plans of any module on a CUDA device: the plain step's gradients, the promised bytes, and times by events."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import revzoo
from revzoo.graph import plan_module


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1) for i in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.dropout(F.relu(norm(conv(x)), inplace=True), 0.1, self.training)
        return x.mean((2, 3))


def step(module: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    loss = module(images).float().square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters()), *module.buffers(), torch.cuda.get_rng_state()]


@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_planned_step_is_the_plain_one(is_autocast: bool) -> None:
    planned, images = Net().cuda().train(), torch.randn(8, 3, 64, 64, device="cuda")
    plain = copy.deepcopy(planned)
    with torch.autocast("cuda", torch.bfloat16, enabled=is_autocast):
        plan = plan_module(planned, images, None)[0]
        assert plan.peak_bytes < plan.no_recompute_peak_bytes
        plan.apply(planned, images)
        results = [step(module, images) for module in (planned, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_allocator_sees_what_is_saved() -> None:
    planned, images = Net().cuda().train(), torch.randn(32, 3, 128, 128, device="cuda")
    plain = copy.deepcopy(planned)
    plan = plan_module(planned, images, None)[0]
    plan.apply(planned, images)
    peaks = []
    for module in (planned, plain):
        step(module, images)  # allocates gradients, and compiles
        module.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(module, images)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        module.zero_grad(set_to_none=True)
    saved = plan.no_recompute_peak_bytes - plan.peak_bytes
    assert peaks[1] - peaks[0] > 0.8 * saved > 0


def test_times_are_measured_with_events() -> None:
    net, images = Net().cuda().train(), torch.randn(8, 3, 64, 64, device="cuda")
    plan = revzoo.plan(net, images, "1TB", profile=True)
    assert 0 < plan.stored_seconds == plan.seconds < 10
