"""Modules, batches and losses that cannot be planned: named, with what to type instead."""

import copy
import logging
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import revzoo
from revzoo.analysis.flops import count_flops
from revzoo.errors import InputError
from revzoo.graph import plan_module

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


class ReturnsNothing(Net):
    def forward(self, x):
        super().forward(x)


class Detaches(Net):
    def forward(self, x):
        return super().forward(x).detach()


class ReadsValues(Net):
    def forward(self, x):
        return super().forward(x) if x.sum().item() > 0 else self.first(x)


class Switches(Net):
    """Takes one branch or another."""

    branch = True

    def forward(self, x):
        for _ in range(4):
            x = F.gelu(self.first(x)) if self.branch else F.silu(self.first(x))
        return self.second(x)


class FailsCompiled(Net):
    """Takes another way under the compiler, as code of Transformers that drops a mask of ones where it can read it."""

    def forward(self, x):
        return super().forward(x[:, :7] if torch.compiler.is_compiling() else x)


class Branches(Net):
    """Decides by a value, in the graph."""

    def forward(self, x):
        return self.second(torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.first(x),)))


class Alternates(Switches):
    """Every other call takes another branch."""

    def forward(self, x):
        self.branch = not self.branch
        return super().forward(x)


def refuse(module, batch=BATCH, **options) -> str:
    torch._dynamo.reset()
    with pytest.raises(InputError) as refused:
        revzoo.plan(module, batch, "1GiB", **options)
    return str(refused.value)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (ReturnsNothing(), "The forward of ReturnsNothing returns no tensor.*Received: NoneType"),
        (Detaches(), r"Nothing that the forward of Detaches returns depends on a parameter.*Look for \.detach\(\)"),
        (Alternates(), "Two calls of Alternates with the same batch ran other operations.*Plan a submodule"),
        (FailsCompiled(), r"fails under torch.compile, though not without: a and b must .*is_compiling\(\)\. Plan a submodule"),
        (Branches(), "The forward of Branches calls the higher-order operator cond, .* Plan a submodule that calls none"),
        (nn.Sequential(Net(), torch.compile(Net())), "Received: compiled 1. Give it as it was"),
    ],
)
def test_modules_without_a_step_to_plan(module, message):
    assert re.search(message, refuse(module))


@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")
def test_what_torch_jit_has_compiled_is_refused_and_keeps_its_values():
    """Its tensors are not where those of other modules are."""
    module = nn.Sequential(Net(), torch.jit.trace(nn.Linear(8, 8), BATCH))
    before = [p.detach().clone() for p in module.parameters()]
    assert "Received: compiled 1. Give it as it was" in refuse(module)
    count_flops(module, BATCH)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))


@pytest.mark.parametrize("made_in", ["module", "batch", "call"])
def test_inference_mode(made_in):
    with torch.inference_mode():
        module, batch = Net(), BATCH + 1
    module, batch = module if made_in == "module" else Net(), batch if made_in == "batch" else BATCH
    with torch.inference_mode(made_in == "call"):
        assert "Nothing is differentiated in torch.inference_mode()" in refuse(module, batch)


def test_inference_mode_in_forward_leaves_pytorch_as_it_was():
    class Peeking(Net):
        def forward(self, x):
            with torch.inference_mode():
                size = x.abs().mean()
            return super().forward(x) / (1 + size)

    assert "or torch.inference_mode (in itself), which cannot be planned" in refuse(Peeking())
    assert nn.Linear(8, 8)(torch.ones(8)).requires_grad


def test_a_budget_above_all_is_planned_for_code_that_needs_values_outside_of_the_compiler():
    class Reading(Net):
        def forward(self, x):
            if not torch.compiler.is_compiling():
                x.sum().item()
            return super().forward(x)

    plan = revzoo.plan(Reading(), BATCH, "1GB")
    assert plan.peak_bytes <= plan.no_recompute_peak_bytes


def test_a_plan_is_not_applied_to_what_has_a_planned_part():
    inner = Net()
    outer = nn.Sequential(inner, Net())
    plans = [plan_module(each, BATCH.repeat(16, 1), None)[0] for each in (inner, outer)]
    plans[0].apply(inner)
    with pytest.raises(InputError, match=r"module\.0 has a plan already"):
        plans[1].apply(outer)
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module"):
        revzoo.release(3)


def test_a_plan_with_times_that_fails_leaves_the_module_as_it_was():
    module = nn.Sequential(nn.BatchNorm1d(8), FailsCompiled())
    assert "though not without" in refuse(module, profile=True)
    assert module[0].num_batches_tracked == 0


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(4, 9), r"fails with this batch \(\[4, 9\] float32\): a and b must .*Give one that module\(batch\) takes"),
        ((BATCH, BATCH), "cannot be called with this batch: too many positional arguments. A batch is a tensor, a tuple or"),
        ("images", "The batch must hold at least one tensor. Received: str"),
        (torch.zeros(0, 8), r"The batch must hold at least one example. Received: \[\(0, 8\)\]"),
    ],
)
def test_wrong_batches(batch, message, caplog):
    assert re.search(message, refuse(Net(), batch))
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]  # PyTorch logs a traceback of its own


@pytest.mark.parametrize(
    ("loss", "received"),
    [
        (lambda out: out, "a tensor of shape (4, 8)"),
        (lambda out: out.detach().sum(), "a tensor of shape () without a gradient"),
    ],
)
def test_wrong_losses(loss, received):
    assert f"Received: {received}. Return a mean" in refuse(Net(), loss=loss)


def test_errors_of_the_users_own_code_are_theirs():
    class Fails(Net):
        def forward(self, x):
            raise ValueError("my own words")

    torch._dynamo.reset()
    with pytest.raises(ValueError, match="^my own words$"):
        revzoo.plan(Fails(), BATCH, "1GiB")


def test_another_branch_is_stored_and_that_is_said():
    torch._dynamo.reset()
    torch.manual_seed(0)
    batch = BATCH.repeat(16, 1)
    module = Switches()
    plain = copy.deepcopy(module)
    peak = revzoo.plan(module, batch, "1GiB").no_recompute_peak_bytes
    plan = revzoo.plan(module, batch, peak - 1)
    assert plan.drops_something
    plan.apply(module, batch)
    for branch in (True, False):
        module.branch = plain.branch = branch
        if branch:
            out = module(batch)
        else:
            with pytest.warns(UserWarning, match="Or its forward has taken another branch") as caught:
                out = module(batch)
            assert caught[0].filename == __file__
        expected = plain(batch)
        out.square().sum().backward()
        expected.square().sum().backward()
        assert torch.equal(out, expected)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


def test_what_reads_values_needs_some():
    torch._dynamo.reset()
    notes = revzoo.plan(ReadsValues(), BATCH, "1GiB").notes
    assert (
        sum(
            note.startswith("It reads the values of tensors, or has sparse ones, so that planning had to compute")
            for note in notes
        )
        == 1
    )
    with torch.device("meta"):
        module = ReadsValues()
    assert "ReadsValues cannot run without values" in refuse(module, torch.empty(4, 8, device="meta"))
