"""Networks made reversible in place compute one function: without gradients, in inference mode, compiled; export is refused."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import revzoo
from revzoo.errors import InputError, ScheduleError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(*(Block() for _ in range(4))), nn.Linear(8, 2))


def compute(network, x):
    with torch.no_grad():
        return network(x)


def test_inference_mode(network):
    x = torch.randn(3, 4)
    ordinary = compute(network, x)
    revzoo.reversible_(network, kept_bits=2)
    expected = compute(network, x)
    assert (expected - ordinary).abs().max() > 1e-3  # so few bits change the function
    with torch.inference_mode():
        assert torch.equal(network(x), expected)
    assert torch.equal(network(x), expected)  # with gradients


def test_compiled(network):
    x = torch.randn(3, 4)
    revzoo.reversible_(network, kept_bits=2)
    expected = compute(network, x)
    assert torch.equal(compute(torch.compile(network, backend="eager"), x), expected)


@pytest.fixture
def failing_export(monkeypatch):
    """PyTorch 2.11 leaves a hook behind when an export fails, at which torch.compile breaks the graphs of other modules."""
    monkeypatch.setattr(nn.modules.module, "_global_buffer_registration_hooks", OrderedDict())


@pytest.mark.usefixtures("failing_export")
def test_export_and_a_foreign_schedule_are_refused(network):
    x = torch.randn(3, 4)
    (chain,) = revzoo.reversible_(network).chains
    with pytest.raises(InputError, match=r"Export the ordinary network: revzoo\.ordinary_"):
        torch.export.export(network, (x,), strict=False)
    with pytest.raises(ScheduleError, match=r"The schedule of 1 is a list of modes"):
        chain.schedule = revzoo.plan(revzoo.create("rev_vit_digits"), torch.zeros(2, 1, 8, 8), budget="1GiB")
    revzoo.ordinary_(network)
    assert torch.export.export(network, (x,), strict=False) is not None
