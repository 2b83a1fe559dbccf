"""Plans for any module: gradients to the bit, the promised bytes, and a module that stays what it is."""

import copy
import random
import warnings
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import revzoo
from revzoo.errors import BudgetError, InputError, PlanError
from revzoo.graph import front, plan_module
from revzoo.runtime import ReversibleChain


class Residual(nn.Module):
    """A block as they are usually written: in-place activations, a sum in place, dropout."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        y = self.norm2(self.conv2(self.drop(F.relu(self.norm1(self.conv1(x)), inplace=True))))
        y += x
        return F.relu(y, inplace=True)


class Net(nn.Module):
    def __init__(self, blocks: int = 2, width: int = 8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().train()


@pytest.fixture
def net() -> Net:
    return make_net()


IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def budget_between(module, batch, share: float, **options) -> int:
    """Return a budget between the smallest peak that is found and that of storing everything."""
    return choose_budget(plan_below_stored(module, batch, **options), share)


def plan_below_stored(module, batch, **options) -> revzoo.ModulePlan:
    """Return a plan that has to drop something. Where everything fits, the smallest peak is not searched."""
    stored = revzoo.plan(module, batch, "1TB", **options)
    assert stored.min_peak_bytes is None
    return revzoo.plan(module, batch, stored.no_recompute_peak_bytes - 1, **options)


def choose_budget(plan: revzoo.ModulePlan, share: float) -> int:
    return plan.min_peak_bytes + round(share * (plan.no_recompute_peak_bytes - plan.min_peak_bytes))


@cache
def plan_everything() -> revzoo.ModulePlan:
    with torch.random.fork_rng():
        return revzoo.plan(make_net(), IMAGES, "1TB")


@cache
def plan_net_below_stored() -> revzoo.ModulePlan:
    with torch.random.fork_rng():
        return plan_below_stored(make_net(), IMAGES)


def budget_of_net(share: float) -> int:
    """Return such a budget for the fixture `net` and IMAGES."""
    return choose_budget(plan_net_below_stored(), share)


@pytest.fixture
def apply_and_compare(same_step):
    """Return a function that applies the plan for a budget between the smallest peak and that of storing everything."""

    def apply(module, batch, share, budget=None, **options):
        plain = copy.deepcopy(module)
        plan = revzoo.plan(module, batch, budget or budget_between(module, batch, share, **options), **options)
        assert plan.min_peak_bytes <= plan.peak_bytes <= plan.budget_bytes < plan.no_recompute_peak_bytes
        assert plan.drops_something
        plan.apply(module, batch)
        for _ in range(2):
            same_step(module, plain, batch, **options)
        if not options:
            assert revzoo.measure_memory(module, batch).peak_bytes == plan.peak_bytes
            assert revzoo.measure_memory(plain, batch).peak_bytes == plan.no_recompute_peak_bytes
        return plan

    return apply


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_planned_step_is_the_plain_one_in_the_promised_bytes(net, share, apply_and_compare):
    plan = apply_and_compare(net, IMAGES, share, budget_of_net(share))
    assert 0 <= plan.extra_flops < plan.total_flops / 2
    assert type(net) is Net
    revzoo.release(net)
    assert revzoo.measure_memory(net, IMAGES).peak_bytes == plan.no_recompute_peak_bytes


class UNet(nn.Module):
    """Two levels with a skip, which a norm, an activation in place and dropout make of a convolution's result."""

    def __init__(self):
        super().__init__()
        self.down, self.deep, self.up = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(16, 8, 3, padding=1),
        )
        self.norm, self.head = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        skip = F.dropout(F.relu(self.norm(self.down(x)), inplace=True), 0.1, self.training)
        x = F.gelu(self.deep(F.max_pool2d(skip, 2)))
        return self.head(F.gelu(self.up(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))))


def test_a_skip_is_made_again_where_it_is_read_and_where_it_was_made(same_step):
    torch.manual_seed(0)
    net = UNet().train()
    plain = copy.deepcopy(net)
    plan, details = plan_module(net, IMAGES, budget_between(net, IMAGES, 0.35))
    reruns = {call.name: call.num_reruns for call in details.calls if call.num_reruns}
    assert reruns == {"relu": 2, "dropout": 1}  # dropout's own gradient needs its mask, which is kept
    assert plan.extra_flops == 0
    assert plan.peak_bytes == max(phase.bytes for phase in details.phases)
    plan.apply(net, IMAGES)
    assert revzoo.measure_memory(net, IMAGES).peak_bytes == plan.peak_bytes
    same_step(net, plain, IMAGES)


class Holding(nn.Sequential):
    def forward(self, x):
        large = x.new_zeros(100, 1000)
        return super().forward(x) * (1 + large.mean())  # `large` lives until forward returns


def test_a_plan_that_stores_everything_promises_what_the_modules_own_code_takes(same_step):
    x = torch.linspace(-1, 1, 2048).view(32, 64)
    module = Holding(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())))
    stored = revzoo.plan(module, x, "1TB")
    assert not stored.drops_something
    assert stored.peak_bytes == revzoo.measure_memory(module, x).peak_bytes > stored.no_recompute_peak_bytes
    captured = revzoo.plan(module, x, stored.peak_bytes - 1)  # fits where the captured graph runs, which frees it
    assert captured.peak_bytes == stored.no_recompute_peak_bytes
    plain = copy.deepcopy(module)
    captured.apply(module)
    assert revzoo.measure_memory(module, x).peak_bytes == captured.peak_bytes
    same_step(module, plain, x)


def test_planning_leaves_the_module_as_it_was(net):
    before = copy.deepcopy(net.state_dict())
    state = torch.random.get_rng_state()
    plan_everything().apply(net)  # for which nothing is left to do
    assert net._compiled_call_impl is None
    revzoo.plan(net, IMAGES, budget_of_net(0.5)).apply(net)
    assert list(net.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is None for p in net.parameters())


def test_the_optimizer_is_part_of_the_peak(net):
    without = plan_everything()
    assert (without.extra_flops, without.drops_something) == (0, False)
    assert "everything stored" in str(without)
    with_adam = revzoo.plan(net, IMAGES, "1TB", optimizer=torch.optim.AdamW(net.parameters()))
    steps = sum(4 for _ in net.parameters())
    assert with_adam.peak_bytes - without.peak_bytes == 2 * sum(p.nbytes for p in net.parameters()) + steps


def test_hooks_and_evaluation_go_on(net, same_step):
    plan = revzoo.plan(net, IMAGES, budget_of_net(0.5))
    plan.apply(net)
    seen = []
    net.head.register_forward_hook(lambda module, given, out: seen.append(out.shape))
    plain = copy.deepcopy(net)  # a copy has no plan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a hook makes another graph, which stores everything
        same_step(net, plain, IMAGES)
    assert seen == [(4, 10), (4, 10)]
    with torch.no_grad():
        assert torch.equal(net.eval()(IMAGES[:1]), plain.eval()(IMAGES[:1]))


def test_another_batch_is_stored_and_that_is_said(net, same_step):
    plan = revzoo.plan(net, IMAGES, budget_of_net(0.5))
    plain = copy.deepcopy(net)
    plan.apply(net)
    with pytest.warns(UserWarning, match="differs from the one that was planned.*stores what is not in the plan") as caught:
        same_step(net, plain, IMAGES[:2])
    assert caught[0].filename == same_step.__code__.co_filename  # the line that called the network


def test_a_saved_plan_is_the_same(net, tmp_path, same_step):
    plan = revzoo.plan(net, IMAGES, budget_of_net(0.3))
    plan.save(tmp_path / "plan.json")
    loaded = revzoo.ModulePlan.load(tmp_path / "plan.json")
    assert loaded == plan
    plain, again = copy.deepcopy(net), copy.deepcopy(net)
    loaded.apply(again)
    same_step(again, plain, IMAGES)
    with pytest.raises(PlanError, match="training mode: True in the plan, False now"):
        loaded.apply(net.eval())
    with pytest.raises(PlanError, match="no saved plan|not a saved plan"):
        revzoo.ModulePlan.load(tmp_path / "none.json")
    with pytest.raises(PlanError, match=r"plan\.json is not a saved plan \(.*which revzoo\.ModulePlan\.load reads\)"):
        revzoo.Plan.load(tmp_path / "plan.json")
    chain = ReversibleChain([nn.Linear(4, 4), nn.Linear(4, 4)])
    revzoo.plan(chain, (torch.rand(2, 4), torch.rand(2, 4)), "1GiB").save(tmp_path / "chain.json")
    with pytest.raises(PlanError, match=r"chain\.json is not a saved plan for a module \(.*which revzoo\.Plan\.load reads\)"):
        revzoo.ModulePlan.load(tmp_path / "chain.json")


def test_reforward_plans_and_applies(same_step):
    net = Net(blocks=4).train()
    plain = copy.deepcopy(net)
    stored = revzoo.measure_memory(net, IMAGES).activation_bytes
    assert revzoo.reforward(net, IMAGES) is net
    assert revzoo.measure_memory(net, IMAGES).activation_bytes < 0.5 * stored
    same_step(net, plain, IMAGES)


def test_keyword_arguments_and_a_loss_of_ones_own(net, apply_and_compare):
    class Labelled(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, images, labels=None):
            logits = self.net(images)
            return {"logits": logits, "loss": F.cross_entropy(logits, labels)}

    batch = {"images": IMAGES, "labels": torch.tensor([0, 1, 2, 3])}
    apply_and_compare(Labelled(net), batch, 0.4, loss=lambda out: out["loss"])


def test_an_output_may_be_left_out_of_the_loss(same_step):
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.unused = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            x = self.body(x).relu()
            return self.head(x).sigmoid().tanh(), self.unused(x).sigmoid().tanh()

    def loss(out):
        return out[0].sum()

    module, batch = TwoHeads(), torch.randn(32, 8)
    plain = copy.deepcopy(module)
    plan = revzoo.plan(module, batch, None, loss=loss)
    assert plan.peak_bytes < plan.no_recompute_peak_bytes
    plan.apply(module, batch)
    same_step(module, plain, batch, loss)
    assert module.unused.weight.grad is None


def test_nothing_is_computed_on_the_meta_device():
    with torch.device("meta"):
        net = Net()
    images = torch.empty(4, 3, 16, 16, device="meta")
    plan = revzoo.plan(net, images, budget_of_net(0.5))
    assert plan.no_recompute_peak_bytes == plan_everything().no_recompute_peak_bytes
    assert plan.peak_bytes <= plan.budget_bytes


def test_what_too_many_plans_may_cost_is_told(monkeypatch):
    """No dropped plan takes less work than the note says."""
    torch.manual_seed(0)
    net, x = Widening((32, 48, 40, 56, 24)), torch.randn(512, 16)
    budget = budget_between(net, x, 0.5)
    least = revzoo.plan(net, x, budget)
    monkeypatch.setattr(front, "_POINTS", 3)
    few = revzoo.plan(net, x, budget)
    (note,) = (note for note in few.notes if "Plans were too many" in note)
    percent = float(note.split("at most ")[1].split(" %")[0])
    assert not any("Plans were too many" in note for note in least.notes)
    assert few.peak_bytes <= budget
    assert 0 <= few.extra_flops - least.extra_flops <= percent / 100 * least.total_flops


class Widening(nn.Module):
    """Perceptrons, of which one is 32 times as wide as the others."""

    def __init__(self, widths: tuple[int, ...]):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, w), nn.GELU(), nn.Linear(w, 16)) for w in widths)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_what_sets_the_smallest_budget_is_named():
    """The span of the wide perceptron, by the paths of its calls."""
    net, x = Widening((32, 1024, 32)), torch.randn(512, 16)
    with pytest.raises(BudgetError, match=r"bytes\) are needed, in .*layers\.1\.[012] \((linear|gelu)\).*\. Of these"):
        revzoo.plan(net, x, 1000)


def test_what_cannot_be_planned_is_named(net):
    with pytest.raises(BudgetError, match=r"No plan fits 97\.7 KiB: at least .* are weights"):
        revzoo.plan(net, IMAGES, 100_000)
    with pytest.raises(InputError, match="lookahead=0"):
        revzoo.plan(net, IMAGES, "1GiB", lookahead=1)
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module"):
        revzoo.plan(len, IMAGES, "1GiB")
    planned = copy.deepcopy(net)
    revzoo.reforward(planned, IMAGES)
    with pytest.raises(InputError, match=r"module has a plan already. Call revzoo.release\(module\) first"):
        revzoo.plan(planned, IMAGES, "1GiB")


class Transforming(nn.Linear):
    """One that uses a transform of torch.func."""

    def forward(self, x):
        return torch.vmap(torch.sin)(super().forward(x)).tanh()


def test_transforms_are_refused_and_leave_no_trace():
    with pytest.raises(InputError, match=r"Transforming uses vmap, grad or another transform of torch\.func"):
        revzoo.plan(Transforming(8, 8), torch.randn(64, 8), "1MiB")
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    assert revzoo.plan(net, torch.randn(64, 8), "1MiB").peak_bytes == revzoo.measure_memory(net, torch.randn(64, 8)).peak_bytes


class Tapped(Net):
    """One that prints, so to speak, before each of its blocks: these are calls of the same graph."""

    def __init__(self):
        super().__init__(blocks=3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            torch._dynamo.graph_break()
            x = block(x)
        return self.head(x.mean((2, 3)))


class Reversing(nn.Module):
    """One with a reversible chain between two layers."""

    def __init__(self, **options):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.chain = ReversibleChain([nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(6)], **options)

    def forward(self, x):
        return self.head(torch.cat(self.chain(*self.stem(x).chunk(2, 1)), 1))


def test_reversible_parts_are_planned_too(same_step):
    """A chain that inverts has the smallest peak. With half of what that saves, half of it stores."""
    module, batch = Reversing().train(), torch.randn(64, 8)
    stored, half = copy.deepcopy(module), copy.deepcopy(module)
    stored.chain.schedule, half.chain.schedule = "store", ["invert"] * 3 + ["store"] * 3
    least, most = (revzoo.measure_memory(each, batch).peak_bytes for each in (module, stored))
    plan = revzoo.plan(module, batch, (least + most) // 2)
    assert (plan.min_peak_bytes, plan.no_recompute_peak_bytes) == (least, most)
    assert plan.schedules == (("chain", tuple(half.chain.schedule)),)
    assert module.chain.schedule == ["invert"] * 6
    plan.apply(module)
    same_step(module, half, batch)
    assert revzoo.measure_memory(module, batch).peak_bytes == plan.peak_bytes <= plan.budget_bytes
    revzoo.release(module)
    assert module.chain.schedule == ["invert"] * 6


def test_a_module_that_is_a_chain_itself_is_planned():
    chain = ReversibleChain([nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)])
    plan = plan_module(chain, tuple(torch.rand(2, 3, 8)), "1TB")[0]
    assert plan.schedules == (("", ("store", "store")),)
    plan.apply(chain)
    assert chain.schedule == ["store", "store"]


def test_a_chain_on_a_grid_keeps_its_schedule():
    module, batch = Reversing(exact=True), torch.randn(64, 8)
    plan = revzoo.plan(module, batch, "1TB")
    assert (plan.schedules, plan.peak_bytes) == ((), revzoo.measure_memory(module, batch).peak_bytes)


class Reading(Net):
    """One that decides by the value of a tensor what to compute."""

    def forward(self, x):
        x = self.blocks(self.stem(x))
        if x.sum() > 1e9:
            x = x / 2
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize(("make", "graphs"), [(Tapped, 3), (Reading, 2)])
def test_several_graphs_are_planned_together(make, graphs, apply_and_compare):
    torch.manual_seed(0)
    plan = apply_and_compare(make().train(), IMAGES, 0.3)
    assert len(plan.graphs) == graphs
    assert f"is {graphs} graphs" in str(plan)


class Remembering(Net):
    """One that keeps what it has computed, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.seen, self.last = [], None

    def forward(self, x):
        y = self.blocks(self.stem(x))
        self.seen.append(y.detach().mean())
        self.last = y
        return self.head(y.mean((2, 3)))


def test_planning_leaves_nothing_in_a_module_that_remembers():
    module = Remembering().train()
    revzoo.plan(module, IMAGES, "1GiB")
    assert (module.seen, module.last) == ([], None)


_generators = np.random.default_rng(0), np.random.RandomState(0), random.Random(0)


class Drawing(Net):
    """One that draws from generators of its own, which are held where no module is."""

    def forward(self, x):
        numbers = _generators[0].random(), _generators[1].rand(), _generators[2].random()
        return self.head((self.blocks(self.stem(x)) * sum(numbers)).mean((2, 3)))


@pytest.mark.parametrize("profile", [False, True])
def test_planning_leaves_generators_where_they_are(profile):
    expected = [copy.deepcopy(each).random(3).tolist() for each in _generators[:2]] + [copy.deepcopy(_generators[2]).random()]
    revzoo.plan(Drawing().train(), IMAGES, "1GiB", profile=profile)
    drawn = [copy.deepcopy(each).random(3).tolist() for each in _generators[:2]] + [copy.deepcopy(_generators[2]).random()]
    assert drawn == expected


class Scattering(nn.Module):
    """One whose calls run in another order than they were made in, because some change a tensor in place."""

    def __init__(self):
        super().__init__()
        self.f, self.g = (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2))

    def forward(self, x):
        even = torch.arange(8) * 2
        z = x.new_zeros(16, 8)
        z[even] = self.g(x)[even]
        z.index_put_((even + 1,), self.f(x)[even].sigmoid(), accumulate=True)
        return self.g(z)


class Spectrum(nn.Module):
    """One that changes a buffer where gradients are switched off, and returns complex numbers."""

    def __init__(self):
        super().__init__()
        linears = [nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(3)]
        self.layers = nn.Sequential(*(layer for linear in linears for layer in (linear, nn.GELU())))

    def forward(self, x):
        return torch.fft.rfft(self.layers(x))


@pytest.mark.parametrize("make", [Scattering, Spectrum])
def test_calls_that_change_something(make, apply_and_compare):
    torch.manual_seed(0)
    apply_and_compare(make().train(), torch.randn(16, 8), 0.3)


def test_backward_that_reads_values_is_computed():
    module, read = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), []
    module[1].register_full_backward_hook(lambda *gradients: read.append(gradients[2][0].sum().item()))
    plan = revzoo.plan(module, torch.randn(4, 8), "1GiB")
    assert read
    assert any("reads the values of tensors" in note for note in plan.notes)
