"""In-place ABN: the function, gradients, statistics and bytes of BatchNorm and activation, and what it refuses."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from revzoo.errors import InputError
from revzoo.runtime import CoupledConv2d, InPlaceABN2d, LayerChain, LiveBytes, ReversibleChain

SLOPES = [0.01, 0.5, 1.0]


class Twin(nn.BatchNorm2d):
    """BatchNorm and leaky ReLU by torch."""

    def __init__(self, channels, slope=0.01, **options):
        super().__init__(channels, **options)
        self.slope = slope

    def forward(self, x):
        return F.leaky_relu(super().forward(x), self.slope)


def pair(channels=6, slope=0.01, dtype=torch.float64, **options):
    """Return an in-place ABN and its twin, of the same random weights."""
    twin = Twin(channels, slope, **options)
    for parameter in twin.parameters():
        nn.init.normal_(parameter)
    layer = InPlaceABN2d(channels, slope, **options)
    layer.load_state_dict(twin.state_dict())
    return layer.to(dtype), twin.to(dtype)


def images(*shape, dtype=torch.float64):
    return torch.randn(shape or (3, 6, 4, 4), dtype=dtype) * 2 + 1


def compute_gradients(layer, x):
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    weights = torch.empty_like(y)  # in the strides of y; without weights, the gradient of a weight of 0 would be 0
    weights.copy_(torch.linspace(-1, 2, y.numel(), dtype=y.dtype).cos().view(y.shape))
    loss, wanted = (y.sin() * weights).sum(), [x, *layer.parameters()]
    gradients = torch.autograd.grad(loss, wanted, retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(loss, wanted), gradients))
    return y.detach(), gradients


def find_kept(layer, x):
    """Return the channels whose normalised input is kept, and that; None of both if there are none."""
    y = layer(x)  # held until they are read, since one of them is y
    return y.grad_fn.saved_tensors[-2:]


def largest_error(got, expected):
    return max(float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("shape", [(17, 6, 2, 3), (1, 6, 5, 5)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("part", [1, 150, 2**17])
def test_it_is_batch_norm_and_activation(slope, shape, memory_format, part, monkeypatch):
    monkeypatch.setattr("revzoo.inplace_abn.backward._PART", part)
    layer, twin = pair(6, slope)
    x = images(*shape).to(memory_format=memory_format)
    for _ in range(2):
        (y, got), (expected_y, expected) = compute_gradients(layer, x), compute_gradients(twin, x)
        assert torch.equal(y, expected_y)
        assert largest_error(got, expected) < 1e-10
        assert got[0].is_contiguous(memory_format=memory_format)
    assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), twin.buffers(), strict=True))
    assert torch.equal(layer.eval()(x), twin.eval()(x))
    assert largest_error(compute_gradients(layer, x)[1], compute_gradients(twin, x)[1]) < 1e-12


@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("part", [1, 120, 2**17])
def test_weights_that_are_0_negative_or_tiny_change_nothing(slope, dtype, tolerance, memory_format, part, monkeypatch):
    monkeypatch.setattr("revzoo.inplace_abn.backward._PART", part)
    layer, twin = pair(6, slope, dtype)
    for each in (layer, twin):
        each.weight.data = torch.tensor([0.0, 1e-12, -1e-6, -1.0, 2.0, 1e-3], dtype=dtype)
    x = images(dtype=dtype).to(memory_format=memory_format)
    (y, got), (expected_y, expected) = compute_gradients(layer, x), compute_gradients(twin, x)
    assert torch.equal(y, expected_y)
    assert largest_error(got, expected) < tolerance
    assert expected[1][0].abs() > 0.01  # the gradient that lets a weight leave 0
    channels, xhat = find_kept(layer, x)
    assert channels.tolist() == [0, 1, 2]
    assert xhat.shape == (3, 3, 4, 4)


@pytest.fixture
def accelerator(monkeypatch):
    """Take the CPU for a device that is not asked which channels are weak."""
    for module in ("weak", "backward"):
        monkeypatch.setattr(f"revzoo.inplace_abn.{module}.can_read_now", lambda x: False)


def set_weights(weights, *layers):
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.tensor(weights))


@pytest.mark.filterwarnings("ignore:In one step 2 channels of an in-place ABN")
@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("part", [1, 120, 2**17])
def test_on_an_accelerator_gradients_are_the_same(slope, memory_format, part, accelerator, monkeypatch):
    monkeypatch.setattr("revzoo.inplace_abn.backward._PART", part)
    monkeypatch.setattr("revzoo.inplace_abn.backward._MOST_PARTS", 6)
    layer, twin = pair(6, slope)
    x = images().to(memory_format=memory_format)
    counts = []
    for weights in ([1.0, 1e-12, 1.5, 0.0, 2.0, -1.0], [1.0, 1e-12, 1.5, 0.0, 2.0, -1.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]) * 2:
        set_weights(weights, layer, twin)
        (y, got), (expected_y, expected) = compute_gradients(layer, x), compute_gradients(twin, x)
        assert torch.equal(y, expected_y)
        has_jumped = len(counts) == 3  # to nearly 0: the gradients of these weights are too small once, and all others the same
        compared = slice(1 if has_jumped else None)
        assert largest_error(got[compared], expected[compared]) < (1e-3 if has_jumped else 1e-8)
        assert all(g.isfinite().all() for g in got)
        channels, _ = find_kept(layer, x)
        counts.append(0 if channels is None else len(channels))
    assert counts == [2, 2, 0, 2, 2, 0]  # as the call before has shown


def test_on_an_accelerator_a_weight_that_jumps_to_nearly_0_is_noticed(accelerator):
    layer, _ = pair(6)
    set_weights([1.0] * 6, layer)
    compute_gradients(layer, images())
    set_weights([1.0, 1.0, 1e-9, 1.0, 1.0, 1.0], layer)
    compute_gradients(layer, images())
    set_weights([1.0, 1.0, 1e-9, 1.0, 1.0, 1.5], layer)
    with pytest.warns(UserWarning, match="1 channels of an in-place ABN had weights that had jumped to nearly 0"):
        compute_gradients(layer, images())
    assert find_kept(layer, images())[0].tolist() == [2]


def test_on_an_accelerator_half_precision_keeps_few_channels(accelerator):
    layer, _ = pair(256, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.uniform_(0.05, 0.6)
        layer.bias.zero_()
    compute_gradients(layer, images(4, 256, 4, 4, dtype=torch.bfloat16))
    assert find_kept(layer, images(4, 256, 4, 4, dtype=torch.bfloat16))[0] is None


@pytest.mark.parametrize("options", [{"momentum": None}, {"track_running_stats": False}, {"affine": False}, {"momentum": 0.3}])
def test_options_of_batch_norm(options):
    layer, twin = pair(**options)
    for _ in range(3):
        x = images()
        (y, got), (expected_y, expected) = compute_gradients(layer, x), compute_gradients(twin, x)
        assert torch.equal(y, expected_y)
        assert largest_error(got, expected) < 1e-10
    assert list(layer.state_dict()) == list(twin.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), twin.buffers(), strict=True))
    assert torch.equal(layer.eval()(x), twin.eval()(x))


@pytest.mark.parametrize("frozen", ["weight", "bias", "x"])
@pytest.mark.parametrize("part", [1, 2**17])
def test_what_needs_no_gradient_gets_none(frozen, part, monkeypatch):
    monkeypatch.setattr("revzoo.inplace_abn.backward._PART", part)
    layer, twin = pair()
    grads = []
    for each in (layer, twin):
        torch.manual_seed(0)
        x = images().requires_grad_(frozen != "x")
        if frozen != "x":
            getattr(each, frozen).requires_grad_(False)
        each(x).sin().sum().backward()
        grads.append([t.grad for t in (x, each.weight, each.bias)])
    assert [a is None for a in grads[0]] == [b is None for b in grads[1]]
    assert grads[0].count(None) == 0 or sum(a is None for a in grads[0]) == 1
    assert largest_error(*([a for a in each if a is not None] for each in grads)) < 1e-10


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_with_float32_parameters(dtype, memory_format):
    """As under autocast. The error is that of the twin, whose input is rounded as coarsely."""
    layer, twin = pair(dtype=torch.float32)
    exact = copy.deepcopy(twin).double()
    x = images(16, 6, 8, 8, dtype=dtype).to(memory_format=memory_format)
    (y, got), (expected_y, expected) = compute_gradients(layer, x), compute_gradients(twin, x)
    assert y.dtype == got[0].dtype == dtype
    assert torch.equal(y, expected_y)
    truth = compute_gradients(exact, x.double())[1]
    assert largest_error(got, truth) < 1.5 * largest_error(expected, truth) + 0.1 * torch.finfo(dtype).eps


def test_autocast_gives_the_bits_that_batch_norm_gives():
    layer, twin = pair(dtype=torch.float32)
    conv = nn.Conv2d(3, 6, 3)
    x = images(2, 3, 8, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(conv(x)), twin(conv(x)))
    assert layer(conv(x)).dtype == torch.float32


def keep_and_peak(layer, x, follower):
    """Return the bytes kept between forward and backward, and at the peak, without parameters, their gradients and x."""
    live = LiveBytes()
    known = live.watch([*layer.parameters(), *layer.buffers(), *follower.parameters(), x])
    with live:
        loss = follower(layer(x * 1)).sum()
        kept = live.alive(without=known, at=live.now())
        loss.backward()
    known |= live.watch([p.grad for p in [*layer.parameters(), *follower.parameters(), x]])
    return kept, live.peak(without=known)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_kept_bytes_are_one_activation_instead_of_two(memory_format):
    layer, twin = pair(16, dtype=torch.float32)
    x = images(32, 16, 80, 80, dtype=torch.float32).to(memory_format=memory_format).requires_grad_()
    unit, statistics = x.numel() * 4, 16 * 4
    conv = nn.Conv2d(16, 16, 1, bias=False)
    kept, peak = keep_and_peak(layer, x, conv)
    loss = 4
    assert kept == unit + statistics + loss
    assert keep_and_peak(twin, x, conv)[0] == 3 * unit + 2 * statistics + loss  # leaky ReLU, not in place, keeps its input
    # y, the gradient of y, that of x, and parts of a 16th in backward: with fewer channels than 16, of one channel
    assert 3 * unit < peak <= 3 * unit + 3 * unit // 16 + 40 * statistics


def test_a_changed_output_is_noticed():
    layer, _ = pair()
    x = images().requires_grad_()
    y = layer(x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (lambda: InPlaceABN2d(4, slope=0.0), r"slope <= 0 cannot be undone\. Received: 0\.0\. Use 0\.01"),
        (lambda: InPlaceABN2d(6)(images(1, 6, 1, 1, dtype=torch.float32)), r"more than one value per channel.*\(1, 6, 1, 1\)"),
    ],
)
def test_refusals(do, message):
    with pytest.raises(InputError, match=message):
        do()


def test_second_derivatives_are_refused():
    layer, _ = pair()
    x = images().requires_grad_()
    with pytest.raises(InputError, match=r"no second derivative.*create_graph=True\. Use nn\.BatchNorm2d"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_transforms_of_torch_func_and_forward_mode_use_ordinary_batch_norm():
    layer, twin = pair(track_running_stats=False)
    x, tangent = images(), images()

    def loss(each, x):
        return each(x).sin().sum()

    for transform in (torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (tangent,))[1]):
        got, expected = (transform(lambda x, each=each: loss(each, x))(x) for each in (layer, twin))
        assert torch.allclose(got, expected, rtol=1e-12)


def test_no_conversion_takes_it_for_batch_norm_and_it_can_be_pickled():
    layer, twin = pair()
    net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(layer, twin))
    assert [type(each) for each in net] == [InPlaceABN2d, nn.SyncBatchNorm]
    again = pickle.loads(pickle.dumps(layer))
    x = images()
    assert torch.equal(again(x), layer(x))
    assert "slope=0.01" in repr(layer)


def build_layers():
    layers = [layer for _ in range(2) for layer in (CoupledConv2d(6), InPlaceABN2d(6, slope=0.2))]
    for layer in layers[1::2]:
        nn.init.uniform_(layer.weight, 0.5, 1.5)
        layer.weight.data[0] = 0.0
    return layers


@pytest.mark.parametrize("mode", ["selective", "recompute", "invert"])
def test_in_chains_gradients_are_the_stored_ones(mode):
    for chain in (LayerChain(*build_layers()), ReversibleChain([nn.Sequential(*build_layers()) for _ in range(4)])):
        chain.double()
        streams = [images().requires_grad_() for _ in range(1 + isinstance(chain, ReversibleChain))]
        results = []
        for chain.schedule in ("store", mode):
            ys = chain(*streams)
            loss = sum(y.sin().square().sum() for y in (ys if isinstance(ys, tuple) else (ys,)))
            results.append(torch.autograd.grad(loss, [*streams, *chain.parameters()]))
        assert largest_error(results[1], results[0]) < 1e-8
