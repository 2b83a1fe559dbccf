"""The byte counter against bytes that can be worked out by hand."""

import copy
import gc

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from revzoo.runtime.live_bytes import LiveBytes

A = 512 * 256 * 4  # one activation of the perceptron
SCALARS = 8  # the loss and its gradient


def forward_backward(model: nn.Module, x: Tensor) -> tuple[int, int, int]:
    """Return bytes alive after forward, at the peak, and at the peak with gradients, weights and input left in."""
    with LiveBytes() as live:
        lasting = live.watch([model.parameters(), x])
        loss = model(x).sum()
        forward = live.alive(without=lasting)
        loss.backward()
        gradients = live.watch(p.grad for p in model.parameters())
    return forward, live.peak(without=lasting | gradients), live.peak()


def test_perceptron_equals_theory(perceptron):
    x = torch.randn(512, 256)
    weights = 2 * 256 * 256 * 4
    # Kept: the ReLU's output. Peak: that, the gradient that reaches it and the one that leaves it, when one of the two
    # weight gradients exists already.
    assert forward_backward(perceptron, x) == (A + 4, 3 * A + SCALARS, weights + A + 3 * A + weights // 2 + SCALARS)


def test_a_row_of_operations_keeps_one_tensor_each():
    x = torch.randn(1000, requires_grad=True)
    with LiveBytes() as live:
        lasting = live.watch(x)
        y = x
        for _ in range(5):
            y = y.sigmoid()  # saves its output
        after_forward = live.alive(without=lasting)
        y.backward(torch.ones_like(y))
        gradients = live.watch(x.grad)
    assert after_forward == 5 * 4000
    # In the second step of backward: all outputs (the caller holds the last), the caller's ones, a gradient in, one out.
    assert live.peak(without=lasting | gradients) == 8 * 4000


def test_real_and_fake_count_alike(perceptron, convolutions):
    def measured() -> list[tuple[int, int, int]]:
        return [forward_backward(perceptron, torch.randn(8, 256)), forward_backward(convolutions, torch.randn(5, 3, 6, 6))]

    real = measured()
    mode = FakeTensorMode()
    for module in [*perceptron.modules(), *convolutions.modules()]:
        for name, p in [(name, p) for name, p in module._parameters.items() if p is not None]:
            module._parameters[name] = nn.Parameter(mode.from_tensor(p.detach()))
        for name, b in list(module._buffers.items()):
            module._buffers[name] = mode.from_tensor(b)
    with mode:
        assert measured() == real


class Listener(TorchDispatchMode):
    """Notes every operation that reaches it."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations.append(func)
        return func(*args, **(kwargs or {}))


def test_autograd_asks_no_other_mode_for_the_device_of_a_fake_tensor():
    with FakeTensorMode(), Listener() as listener, LiveBytes():
        x = torch.ones(3, requires_grad=True)
        (2 * x).sum().backward()
        assert x.grad.device == torch.device("cpu")
    assert torch.ops.aten.mul.Tensor in listener.operations
    assert torch.ops.prim.device.default not in listener.operations


def test_views_share_one_storage():
    with LiveBytes() as live:
        x = torch.zeros(100)
        views = [x.view(10, 10), x[3:], x.detach(), x.expand(4, 100)]
        assert live.alive() == 400
        del x
        assert live.alive() == 400
        views.clear()
        assert live.alive() == 0
    assert live.peak() == 400


def test_resized_storages_are_followed():
    with LiveBytes() as live:
        x = torch.zeros(100)
        x.untyped_storage().resize_(0)
        assert live.alive() == 0
        x.untyped_storage().resize_(40)
        assert live.alive() == 40
        x.resize_(1000)
        assert live.alive() == 4000
        del x
        assert live.alive() == 0
    assert live.peak() == 4000


def test_the_way_storages_are_resized_is_put_back():
    before = torch.UntypedStorage.resize_
    with LiveBytes() as outer, LiveBytes() as inner:
        torch.zeros(10).untyped_storage().resize_(8)
    assert outer.peak() == inner.peak() == 40
    assert torch.UntypedStorage.resize_ is before
    assert "resize_" not in vars(torch.UntypedStorage)


def test_tensors_from_before_count_when_told():
    x = torch.zeros(100)
    with LiveBytes() as live:
        y = x + 1
        assert live.alive() == 400
        known = live.watch({"nested": [x, (x[:5],)], "other": "text"})
        assert len(known) == 1
        assert live.size(known) == 400
        assert live.alive() == 800
        assert live.alive(without=known) == 400
        del y
    assert live.peak() == 800
    assert live.peak(without=known) == 400


def test_moments_and_births():
    with LiveBytes() as live:
        x = torch.zeros(10)
        first = live.now()
        y, z = torch.zeros(20), torch.zeros(30)
        second = live.now()
        del x, z
    assert live.alive(at=first) == 40
    assert live.alive(at=second) == 240
    assert live.alive() == 80
    assert live.alive_by_birth([0, first, second], (), second) == [40, 200, 0]
    assert live.alive_by_birth([0, first, second], (), live.now()) == [0, 80, 0]
    assert live.alive_by_birth([first], live.watch(y), second) == [120]


def test_sparse_gradients_count_indices_and_values():
    table = nn.Embedding(100, 8, sparse=True)
    with LiveBytes() as live:
        known = live.watch(table.weight)
        table(torch.tensor([3, 5, 3])).sum().backward()
        assert live.size(live.watch(table.weight.grad)) == 3 * 8 + 3 * 8 * 4
        assert live.size(known) == 3200


def test_nothing_is_kept_alive_and_no_result_changes(convolutions):
    twin, x = copy.deepcopy(convolutions), torch.randn(5, 3, 6, 6)
    torch.manual_seed(1)
    expected = twin(x)
    expected.sum().backward()
    torch.manual_seed(1)
    with LiveBytes() as live:
        y = convolutions(x)
        y.sum().backward()
    assert torch.equal(y, expected)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(convolutions.parameters(), twin.parameters(), strict=True))
    gc.disable()
    try:
        convolutions.zero_grad()
        del y
        assert live.alive(without=live.watch([convolutions.parameters(), convolutions.buffers(), x])) == 0
    finally:
        gc.enable()


def test_gradients_that_autograd_adds_up_in_place_are_counted_so():
    x = torch.randn(1000, requires_grad=True)
    gradients = [torch.ones(1000) for _ in range(3)]
    with LiveBytes() as live:
        lasting = live.watch([x, gradients])
        y = x * 1.0
        outputs = [y * 2.0, y * 3.0, y * 4.0]
        before = live.alive(without=lasting)
        torch.autograd.backward(outputs, gradients)
    # Two gradients of y at once, of which the first takes the sum; no third one.
    assert live.peak(without=lasting) - before == 2 * 4000


def test_a_gradient_that_somebody_else_needs_takes_no_sum():
    x = torch.randn(1000, requires_grad=True)
    gradient = torch.ones(1000)
    with LiveBytes() as live:
        lasting = live.watch([x, gradient])
        a = x * 1.0
        b = x * 1.0
        c = b * 2.0
        outputs = [(a + b) * 1.0, c]
        before = live.alive(without=lasting)
        torch.autograd.backward(outputs, [gradient, gradient])
    # The gradient of a + b is that of a, which is still to come, and of b. To it comes that through c, and the sum.
    assert live.peak(without=lasting) - before == 3 * 4000
