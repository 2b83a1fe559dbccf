"""`inplace_abn_`: the same function, gradients, statistics and keys as before, in fewer bytes; what it leaves and refuses."""

import copy
import pickle
import random
from operator import iadd

import pytest
import timm
import torch
import torchvision
from timm.layers import BatchNormAct2d
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision.models.resnet import BasicBlock

import revzoo
from revzoo.errors import InputError, RecoveryError
from revzoo.inplace_abn.foldable_norm import FoldableBatchNorm2d, FoldableBatchNormAct2d, NormalisedTensor


class Block(nn.Module):
    """The end of a residual block, in as many ways as there are to write it."""

    def __init__(self, write, act=None, channels=6):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.down, self.bn_down = nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels)
        self.next = nn.Conv2d(channels, channels, 1)
        self.act = act or nn.LeakyReLU(0.1, inplace=True)
        self.write = write

    def forward(self, x):
        return self.write(self, x)


def normed(m, x):
    return m.bn(m.conv(x))


def plain(m, x):
    return m.next(m.act(normed(m, x)))


def add(m, x):
    return m.next(m.act(normed(m, x) + x))


def add_two_norms(m, x):
    z = normed(m, x)
    z += m.bn_down(m.down(x))
    return m.next(m.act(z))


def linear(m, x):
    return m.next(normed(m, x))


def linear_residual(m, x):
    z = normed(m, x) + x
    return m.next(z) + z


FOLDED = {  # how many, and how many with a shortcut
    "plain": (plain, 1, 0),
    "functional": (lambda m, x: m.next(F.elu(normed(m, x), alpha=0.5)), 1, 0),
    "add in place": (lambda m, x: m.next(m.act(iadd(normed(m, x), x))), 1, 1),
    "add": (add, 1, 1),
    "add from the right": (lambda m, x: m.next(F.leaky_relu(torch.add(x, normed(m, x)))), 1, 1),
    "add two norms": (add_two_norms, 2, 1),
    "linear": (linear, 1, 0),
    "linear residual": (linear_residual, 1, 1),
    "excite": (lambda m, x: m.next(m.act((z := normed(m, x)) * z.mean((2, 3), keepdim=True).sigmoid() + x)), 1, 0),
}


def scale_shortcut_later(m, x):
    shortcut = x * 1
    z = normed(m, x) + shortcut
    shortcut.mul_(3)
    return m.next(m.act(z)) + shortcut


def overwrite_input(m, x):
    x = m.conv(x) * 1
    z = m.bn(x * 1)
    x.zero_()
    return m.next(m.act(z)) + x


def hook_gradient(m, x):
    z = normed(m, x)
    z.register_hook(lambda gradient: 2 * gradient)
    return m.next(m.act(z))


def retain_gradient(m, x):
    z = m.bn(m.conv(x))
    z.retain_grad()
    m.kept = z
    return m.next(m.act(z))


def change_unseen(m, x):
    z = m.bn(m.conv(x))
    z.data.mul_(2)
    return m.next(m.act(z))


ODD = {
    "used twice": lambda m, x: m.next(F.leaky_relu(z := normed(m, x))) + z.tanh(),
    "a shortcut that is scaled later": scale_shortcut_later,
    "a change between": lambda m, x: m.next(m.act(normed(m, x).mul_(2))),
    "add twice": lambda m, x: m.next(m.act(normed(m, x) + x + x)),
    "add a row": lambda m, x: m.next(m.act(normed(m, x) + x[:1])),
    "an input that is overwritten": overwrite_input,
    "concatenate": lambda m, x: torch.cat([z := normed(m, x), z.relu()]) + m.next(m.act(z)).repeat(2, 1, 1, 1),
    "a hook on the gradient": hook_gradient,
    "a gradient that is kept": retain_gradient,
    "a change unseen": change_unseen,
}


ONLY = "of activations, only leaky ReLU and ELU with a slope > 0 can be undone"


def images(*shape, dtype=torch.float64):
    return torch.randn(shape or (3, 6, 4, 4), dtype=dtype)


def fold(model):
    """Make every BatchNorm foldable, whether it will be folded or not."""
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = FoldableBatchNorm2d
    return model


def randomise(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model.double()


def step(model, x):
    """Return outputs, gradients and buffers after a training step."""
    torch.manual_seed(1)
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y.sin().sum() * max(y.numel(), 1) ** -0.5).backward()
    grads = [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    return y.detach(), grads, [b.clone() for b in model.buffers()]


def assert_same_step(model, twin, x, tolerance=1e-9):
    (y, grads, buffers), (expected_y, expected, expected_buffers) = step(model, x), step(twin, x)
    assert torch.equal(y, expected_y)
    assert len(grads) == len(expected)
    assert max(float((a - b).norm() / b.norm().clamp(min=1e-3)) for a, b in zip(grads, expected, strict=True)) < tolerance
    assert all(torch.equal(a, b) for a, b in zip(buffers, expected_buffers, strict=True))


@pytest.mark.parametrize("name", FOLDED)
def test_whatever_way_a_block_is_written(name):
    write, *counts = FOLDED[name]
    twin = randomise(Block(write))
    model, x = copy.deepcopy(twin), images()
    report = revzoo.inplace_abn_(model, x)
    assert [len(report.folded), sum(norm.adds_shortcut for norm in report.folded)] == counts
    assert report.bytes_after < report.bytes_before or write is linear_residual
    assert report.difference == 0
    assert_same_step(model, twin, x)
    assert torch.equal(model.eval()(x), twin.eval()(x))
    assert list(model.state_dict()) == list(twin.state_dict())


@pytest.mark.parametrize("name", ODD)
def test_what_is_done_besides_is_right_too(name):
    write = ODD[name]
    twin = randomise(Block(write))
    model = fold(copy.deepcopy(twin))
    assert_same_step(model, twin, images())
    if write is retain_gradient:
        assert torch.allclose(model.kept.grad, twin.kept.grad, rtol=1e-9)


@pytest.mark.parametrize(
    "ask",
    [
        lambda z, y: z.register_hook(print),
        lambda z, y: torch.autograd.grad(y.sum(), inputs=[z], allow_unused=True),
    ],
)
def test_a_gradient_that_is_asked_for_too_late_is_refused(ask):
    norm = fold(nn.Sequential(nn.BatchNorm2d(6)))[0].double()
    z = norm(images())
    y = F.leaky_relu(z)
    with pytest.raises(RecoveryError, match="asked for after the activation"):
        ask(z, y)
    y.sum().backward()


class Branches(nn.Module):
    """RepVGG's block: three norms, summed. No single one follows from the result."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(3))
        self.next = nn.Conv2d(6, 6, 1)

    def forward(self, x):
        z = self.norms[0](self.convs[0](x)) + self.norms[1](self.convs[1](x))
        z += self.norms[2](x)
        return self.next(F.leaky_relu(z))


def test_of_sums_that_no_activation_undoes_no_term_is_kept():
    with pytest.raises(InputError, match="No BatchNorm can keep its output"):
        revzoo.inplace_abn_(Branches(), images(dtype=torch.float32))
    twin = randomise(Branches())
    assert_same_step(fold(copy.deepcopy(twin)), twin, images())
    with pytest.raises(InputError, match="No BatchNorm can keep its output"):  # two norms before a ReLU that stays
        revzoo.inplace_abn_(Block(add_two_norms, nn.ReLU()), images(dtype=torch.float32))


def test_torch_fx_is_told_what_to_do():
    model, x = nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.LeakyReLU()), images(dtype=torch.float32)
    assert len(revzoo.inplace_abn_(torch.fx.symbolic_trace(copy.deepcopy(model)), x).folded) == 1
    revzoo.inplace_abn_(model, x)
    with pytest.raises(InputError, match="leaf_modules=\\[FoldableBatchNorm2d\\]"):
        torch.fx.symbolic_trace(model)


def test_a_shortcut_whose_squares_overflow_in_half_precision():
    twin = Block(add).half()
    report = revzoo.inplace_abn_(twin, 20 * images(64, 6, 16, 16, dtype=torch.float16))
    assert [norm.weak_channels for norm in report.folded] == [0]


NETWORKS = {
    "torchvision": (lambda: torchvision.models.ResNet(BasicBlock, (1, 1, 1, 1), num_classes=10), 12, 4),
    "preactivated": (lambda: timm.create_model("resnetv2_50", num_classes=10, layers=(1, 1, 1, 1)), 13, 0),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_others_keep_at_least_40_percent_less(name):
    create, count, joins = NETWORKS[name]
    model, x = randomise(create()), images(4, 3, 32, 32)
    twin = copy.deepcopy(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    report = revzoo.inplace_abn_(model, x, relu_slope=0.01)
    assert (len(report.folded), sum(norm.adds_shortcut for norm in report.folded)) == (count, joins)
    assert report.left == ()
    assert report.bytes_after <= 0.6 * report.bytes_before
    assert 0 < report.difference < 1  # ReLU became leaky
    # no trace of the run
    assert torch.equal(torch_state, torch.get_rng_state())
    assert python_state == random.getstate()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert list(model.state_dict()) == list(state)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    for module in twin.modules():
        if type(module) is nn.ReLU:
            module.__class__, module.negative_slope = nn.LeakyReLU, 0.01
    assert_same_step(model, twin, x)
    again = pickle.loads(pickle.dumps(model))
    assert_same_step(again, model, x)


def test_the_bytes_that_are_kept_to_the_byte():
    """conv, BatchNorm, activation, three times: y alone, the statistics, and what convolutions keep."""
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.LeakyReLU(0.1, inplace=True))]
    model, x = nn.Sequential(*layers).double(), images(8, 6, 4, 4)
    unit, statistics = 8 * 6 * 16 * 8, 6 * 8
    report = revzoo.inplace_abn_(model, x)
    assert report.bytes_before == 3 * (2 * unit + 2 * statistics)
    assert report.bytes_after == 3 * (unit + statistics)


def test_timms_batch_norm_with_activation():
    twin = nn.Sequential(
        nn.Conv2d(6, 6, 1),
        BatchNormAct2d(6, act_layer=nn.LeakyReLU),
        nn.Conv2d(6, 6, 1),
        BatchNormAct2d(6, act_layer=nn.SiLU),
        nn.Conv2d(6, 6, 1),
        BatchNormAct2d(6, apply_act=False),
        nn.ELU(),
    ).double()
    model, x = copy.deepcopy(twin), images()
    report = revzoo.inplace_abn_(model, x)
    assert [(norm.name, norm.activation) for norm in report.folded] == [("1", "leaky_relu"), ("5", "elu")]
    assert report.left == (("3", f"followed by 3.act (SiLU(inplace=True)): {ONLY}"),)
    assert [type(model[i]) for i in (1, 3, 5)] == [FoldableBatchNormAct2d, BatchNormAct2d, FoldableBatchNormAct2d]
    assert_same_step(model, twin, x)


def test_a_weight_of_0_is_kept_and_said():
    twin = randomise(Block(add))
    twin.bn.weight.data[:4] = torch.tensor([0.0, -1.0, 1e-9, 2.0], dtype=torch.float64)
    model, x = copy.deepcopy(twin), images()
    report = revzoo.inplace_abn_(model, x)
    assert report.folded[0].weak_channels == 2
    assert "2 of 6 channels are so near 0" in str(report)
    assert_same_step(model, twin, x)


def test_it_says_what_it_did():
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.Tanh())
    report = revzoo.inplace_abn_(model, images(4, 3, 8, 8, dtype=torch.float32), relu_slope=0.01)
    text = str(report)
    assert text.startswith(
        "BatchNorms that keep no input: 1, 0 of them at the end of a residual block\nkept for backward on this batch: "
    )
    assert "ReLUs that are now leaky with slope 0.01, another function: 1" in text
    assert "outputs differ by at most " in text
    assert f"left: 4 (followed by 5 (Tanh()): {ONLY})" in text
    assert isinstance(model[2], nn.LeakyReLU)
    assert type(model[4]) is nn.BatchNorm2d


def test_frozen_hooked_and_foreign_norms_are_left():
    model = nn.Sequential()
    for _ in range(5):
        model.append(nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.LeakyReLU(0.1)))
    model[0][1].eval()
    model[1][1].register_forward_hook(lambda *_: None)
    model[2][1] = nn.SyncBatchNorm(6).eval()
    model[3][2] = nn.ReLU()
    model.double()
    report = revzoo.inplace_abn_(model, images())
    assert [norm.name for norm in report.folded] == ["4.1"]
    assert dict(report.left) == {
        "0.1": "in eval mode",
        "1.1": "has forward hooks, which see its output",
        "2.1": "a SyncBatchNorm, not nn.BatchNorm2d",
        "3.1": "followed by ReLU, which cannot be undone: relu_slope=0.01 makes it leaky",
    }
    assert not model[0][1].training


@pytest.mark.parametrize(
    ("follower", "reason"),
    [
        (nn.PReLU(), r"1.0 followed by 1.1 \(PReLU\(num_parameters=1\)\): of activations"),
        (nn.LeakyReLU(-0.1), r"1.0 followed by 1.1 \(LeakyReLU\(negative_slope=-0.1\)\): of activations, only leaky ReLU"),
        (None, "1.0 is not called with this batch"),
        (torch.sigmoid, "1.0 followed by code in which nothing keeps its output or is a leaky ReLU"),
    ],
)
def test_a_batch_norm_that_is_left_is_named_with_what_follows_it(follower, reason):
    class Tail(nn.Sequential):
        def forward(self, x):
            return x if follower is None else super().forward(x) if len(self) > 1 else follower(self[0](x))

    tail = Tail(nn.BatchNorm2d(6), *([follower] if isinstance(follower, nn.Module) else []))
    with pytest.raises(InputError, match=reason):
        revzoo.inplace_abn_(nn.Sequential(nn.Conv2d(3, 6, 1), tail), images(2, 3, 4, 4, dtype=torch.float32))


def test_a_hook_that_comes_later_sees_an_ordinary_tensor():
    twin = randomise(Block(plain))
    model, x = copy.deepcopy(twin), images()
    revzoo.inplace_abn_(model, x)
    seen = []
    model.bn.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    assert_same_step(model, twin, x)
    assert seen == [torch.Tensor]


class Blocks(nn.Sequential):
    """Blocks of which each is run in a checkpoint."""

    use_reentrant = None

    def forward(self, x):
        for block in self:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("write", [linear, add_two_norms], ids=lambda write: write.__name__)
def test_blocks_may_be_checkpointed(write, use_reentrant):
    """Also where the output of a BatchNorm goes from one block into the next."""
    twin = randomise(Blocks(nn.Sequential(Block(linear), nn.BatchNorm2d(6)), Block(write)))
    model = fold(copy.deepcopy(twin))
    for each in (model, twin):  # whose running statistics see each batch twice
        each.use_reentrant = use_reentrant
    assert_same_step(model, twin, images())


def test_what_keeps_no_memory_stays_ordinary():
    """Inference, eval mode with gradients, and what is compiled."""
    model = fold(nn.Sequential(nn.BatchNorm2d(6)).double())
    assert type(model(images())) is NormalisedTensor
    with torch.no_grad():
        assert type(model(images())) is torch.Tensor
    assert type(model.eval()(images())) is torch.Tensor


def test_sizes_are_read_from_models_that_say_them():
    model = timm.create_model("test_resnet", act_layer="leaky_relu").eval()
    assert len(revzoo.inplace_abn_(model).folded) > 5
    assert not any(module.training for module in model.modules())
    with pytest.raises(
        InputError, match=r"does not say the size of its input\. Received: no batch\. Use inplace_abn_\(model, batch\)"
    ):
        revzoo.inplace_abn_(nn.Sequential(nn.BatchNorm2d(6), nn.ELU()))


def test_a_network_without_values():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.LeakyReLU(0.1))
    report = revzoo.inplace_abn_(model, torch.empty(2, 6, 4, 4, device="meta"))
    assert (len(report.folded), report.difference) == (1, None)
    batch = torch.empty(8, 6, 4, 4, device="meta")
    real = copy.deepcopy(model).to_empty(device="cpu")
    nn.init.ones_(real[1].weight)
    nn.init.zeros_(real[1].bias)
    assert revzoo.measure_memory(model, batch) == revzoo.measure_memory(real, torch.randn(8, 6, 4, 4))


def overwrite_and_use(m, x):
    z = m.bn(m.conv(x))
    F.leaky_relu(z, 0.1, inplace=True)
    return m.next(z)


def test_using_what_an_activation_has_overwritten_is_refused():
    model = fold(Block(overwrite_and_use).double())
    with pytest.raises(RecoveryError, match=r"used after an activation with inplace=True .* Use what the activation returns"):
        model(images()).sum().backward()


def squeeze_and_overwrite(m, x):
    z = m.bn(m.conv(x))
    gate = z.mean((2, 3), keepdim=True)
    z *= gate
    return m.next(z)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Sequential(nn.BatchNorm2d(6), nn.ReLU()), {}, r"Received: 0 followed by ReLU.*relu_slope=0\.01 makes it leaky"),
        (
            nn.Sequential(nn.BatchNorm2d(6), nn.ReLU()),
            {"relu_slope": 0.0},
            r"slope > 0\. Received: relu_slope=0\.0\. Use 0\.01",
        ),
        (nn.Conv2d(6, 6, 1), {}, r"No BatchNorm can keep its output .* Received: the model has no BatchNorm2d"),
        (Block(squeeze_and_overwrite), {}, r"changes in place what an in-place ABN has to keep.*x = x \* gate"),
        (lambda x: x, {}, r"must be a torch\.nn\.Module"),
    ],
)
def test_refusals_change_nothing(model, options, message):
    classes = [type(m) for m in model.modules()] if isinstance(model, nn.Module) else []
    with pytest.raises(InputError, match=message):
        revzoo.inplace_abn_(model, images(dtype=torch.float32), **options)
    assert classes == ([type(m) for m in model.modules()] if isinstance(model, nn.Module) else [])


def test_second_calls_and_compiled_models_are_refused():
    model, x = nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.LeakyReLU(0.1)), images(dtype=torch.float32)
    revzoo.inplace_abn_(model, x)
    with pytest.raises(InputError, match=r"has already been called with this model.* Go on as it is"):
        revzoo.inplace_abn_(model, x)
    assert type(model[1]) is FoldableBatchNorm2d
    model.compile(backend="eager")
    with pytest.raises(InputError, match=r"Call inplace_abn_ before torch\.compile"):
        revzoo.inplace_abn_(model, x)


@pytest.mark.parametrize("change", [(revzoo.reversible_, revzoo.inplace_abn_), (revzoo.inplace_abn_, revzoo.reversible_)])
def test_blocks_that_reversible_changed_or_will_change(change):
    torch.manual_seed(0)
    blocks = (Block(lambda m, x: x + m.next(m.act(normed(m, x)))) for _ in range(3))
    model, x = randomise(nn.Sequential(*blocks)), images()
    reports = [each(model, batch=x) for each in change]
    chain = next(report for report in reports if not hasattr(report, "folded")).chains[0]
    results = []
    for mode in ("invert", "recompute", "store"):
        chain.schedule = mode
        results.append(step(model, x))
    assert all(torch.equal(a, b) for grads in (results[0][1], results[1][1]) for a, b in zip(grads, results[2][1], strict=True))
    assert [type(model[i].bn) for i in range(3)] == [FoldableBatchNorm2d] * 3


def test_steps_of_a_reversible_network():
    """In every mode: in-place ABN lowers what is held while a step is recovered."""
    torch.manual_seed(0)
    model = revzoo.create("revnet_digits", dtype=torch.float64, overrides=[f"stages.{i}.depth=1" for i in range(3)])
    report = revzoo.inplace_abn_(model, relu_slope=0.01)
    assert len(report.folded) > 10
    x, results = model.example_input(4), []
    for mode in ("store", "recompute", "selective", "invert"):
        model.schedule = mode
        results.append(step(model, x)[1])
    for grads in results[1:]:
        assert max(float((a - b).norm() / b.norm().clamp(min=1e-3)) for a, b in zip(grads, results[0], strict=True)) < 1e-8
