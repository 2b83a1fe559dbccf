"""What layer-wise recovery does not do: run again what is at hand, take memory twice, change what somebody else holds."""

from collections import Counter
from weakref import ref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from revzoo.errors import RecoveryError
from revzoo.runtime import (
    Coupled,
    CoupledConv2d,
    InvertibleBatchNorm2d,
    InvertibleLeakyReLU,
    LayerChain,
    LiveBytes,
    PixelUnshuffle,
    ReversibleChain,
    SpaceToBatch,
    SpaceToDepth,
)
from tests.runtime.test_layerwise import SHAPE, assert_stored_gradients, differentiate, inputs, loss_of


def unit(width=4):
    return [CoupledConv2d(width), InvertibleBatchNorm2d(width), InvertibleLeakyReLU(0.2)]


class Operations(TorchDispatchMode):
    """Count operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("make", "norms", "convolutions"),
    [
        # Forward, in halves; every half of a convolution but the first is run again, as its inverse.
        (lambda: LayerChain(*unit(), *unit()), 4, 4 + 3),
        # The step is inverted as well. Its own output is not needed in front of the first step.
        (lambda: ReversibleChain([nn.Sequential(*unit(), *unit()) for _ in range(2)]), 8 + 8, 8 + 8 + 6),
    ],
)
def test_no_norm_runs_again_for_its_gradient(make, norms, convolutions):
    net = make().double()
    with Operations() as operations:
        loss_of(net, inputs(net)).backward()
    assert (operations.counts["native_batch_norm"], operations.counts["convolution"]) == (norms, convolutions)


class Counted(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f
        self.note = list[torch.Size]().append  # a list of its own would be as it was after a second run

    def forward(self, x):
        self.note(x.shape)
        return self.f(x)


def test_a_call_that_saves_inputs_and_parameters_alone_is_not_run_again(error):
    convolution, deep = Counted(nn.Conv2d(4, 4, 1)), Counted(nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh()))
    net = LayerChain(convolution, deep).double()
    xs = inputs(net)
    got = differentiate(net, xs, "recompute")
    assert (len(convolution.note.__self__), len(deep.note.__self__)) == (1, 2)
    assert error(got, differentiate(net, xs, "store")) == 0


class KeepsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(y := x.tanh())
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y)


class Tanh(nn.Module):
    """A layer that saves its output alone."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return KeepsOutput.apply(x)

    def inverse(self, y):
        return y.atanh()


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_layer_that_saves_its_output_has_it_handed_over(ahead, error):
    layers = [CoupledConv2d(4), Tanh(), InvertibleLeakyReLU(0.2), CoupledConv2d(4), Tanh()]
    net = LayerChain(*layers).double()
    net.lookahead = ahead
    assert_stored_gradients(net, error, 1e-10)
    assert layers[1].calls == 2  # one in each mode
    steps = ReversibleChain([nn.Sequential(*layers), nn.Sequential(CoupledConv2d(4), Tanh())], lookahead=ahead).double()
    assert_stored_gradients(steps, error, 1e-10)


def override(kind, forward=lambda y: y, inverse=None, method="forward"):
    """Return a subclass that changes what a layer returns, and undoes that in its inverse if that is given."""

    def own_forward(self, x):
        return forward(getattr(super(changed, self), method)(x))

    methods = {method: own_forward}
    if inverse is not None:
        methods["inverse"] = lambda self, y: super(changed, self).inverse(inverse(y))
    changed = type(f"Other{kind.__name__}", (kind,), methods)
    return changed


def flip(x):
    return x.flip(1)


def double(x):
    return x * 2


@pytest.mark.parametrize(
    "layer",
    [
        lambda: override(InvertibleLeakyReLU, flip, flip)(0.2),  # no longer channel by channel
        lambda: override(CoupledConv2d, double, lambda y: y / 2)(4),  # no longer a sum
        lambda: override(InvertibleBatchNorm2d, double)(4),
        lambda: override(InvertibleBatchNorm2d, double, method="__call__")(4),
        lambda: override(CoupledConv2d, double)(4),
    ],
)
def test_subclasses_that_do_something_else_are_taken_as_they_are_or_stored(layer, error):
    assert_stored_gradients(LayerChain(*unit(), layer(), *unit()).double(), error, 1e-10)


def test_a_method_of_one_layer_alone_counts_as_that_of_a_subclass(error):
    relu, norm = InvertibleLeakyReLU(0.2), InvertibleBatchNorm2d(4)
    relu.forward = lambda x: InvertibleLeakyReLU.forward(relu, x).flip(1)
    relu.inverse = lambda y: InvertibleLeakyReLU.inverse(relu, y.flip(1))
    norm.forward = lambda x: InvertibleBatchNorm2d.forward(norm, x) * 2
    assert_stored_gradients(LayerChain(*unit(), relu, *unit(), norm, *unit()).double(), error, 1e-10)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    ("pool", "channels", "width"),
    [(PixelUnshuffle, 4, 16), (PixelUnshuffle, 3, 12), (SpaceToBatch, 4, 4)],  # three channels have no halves
)
def test_norms_and_pools_before_the_first_convolution_in_halves(pool, channels, width, ahead, error):
    net = LayerChain(InvertibleBatchNorm2d(channels), InvertibleLeakyReLU(), pool(), *unit(width), pool()).double()
    x = torch.randn(4, channels, 8, 8, dtype=torch.float64, requires_grad=True)
    grads = []
    for schedule in ("store", "invert"):
        net.schedule, net.lookahead = schedule, ahead
        grads.append(torch.autograd.grad(net(x).sin().sum(), [x, *net.parameters()]))
    assert error(grads[1], grads[0]) < 1e-10
    with Operations() as operations:
        net(x).sum().backward()
    halves = 2 if channels % 2 == 0 else 1
    assert operations.counts["native_batch_norm"] == halves + 2


def test_a_pool_that_mixes_halves_is_run_on_all_channels(error):
    for pool in (override(PixelUnshuffle, flip, flip)(), SpaceToDepth()):
        assert_stored_gradients(LayerChain(*unit(), pool, *unit(16)).double(), error, 1e-10)


class SaveView(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x[:, :1])
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        (view,) = ctx.saved_tensors
        return gradient * (2 + 0 * view)


class SavingView(nn.Module):
    def forward(self, x):
        return SaveView.apply(x)

    def inverse(self, y):
        return y / 2


def test_a_small_view_does_not_keep_what_it_views():
    net = LayerChain(*[SavingView() for _ in range(4)])
    x = torch.randn(2, 32, 4, 4, requires_grad=True)
    live = LiveBytes()
    known = live.watch([x])
    with live:
        y = net(x)
        assert live.alive(without=known, at=live.now()) == y.nbytes
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2**4))


class Scale(nn.Module):
    """Treats each channel by itself, with a number of its own."""

    is_channelwise = True

    def __init__(self, channels):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(channels, 1, 1) + 0.5)

    def forward(self, x):
        return x * self.scale

    def inverse(self, y):
        return y / self.scale


@pytest.mark.parametrize("channels", [1, 2])
def test_numbers_of_single_channels_see_all_channels(channels, error):
    """A half of two channels would be spread over both."""
    net = LayerChain(CoupledConv2d(2), Scale(channels), CoupledConv2d(2)).double()
    assert_stored_gradients(net, error, 1e-10, shape=(2, 2, 4, 4))


class Holding(nn.Module):
    """Holds what it gets and returns, as a hook that collects features does."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 2, 1)
        self.hold = [].extend  # a list of its own would be as it was after a second run

    @property
    def held(self):
        return self.hold.__self__

    def forward(self, x):
        y = self.convolution(x)
        self.hold([(x, x.detach().clone()), (y, y.detach().clone())])
        return y


@pytest.mark.parametrize("make", [LayerChain, lambda *layers: ReversibleChain([nn.Sequential(*layers) for _ in range(2)])])
def test_what_somebody_else_holds_is_not_changed(make, error):
    holding = [Holding() for _ in range(4)]
    net = make(Coupled(*holding[:2]), InvertibleLeakyReLU(0.2), Coupled(*holding[2:])).double()

    xs, grads = inputs(net), []
    for net.schedule in ("store", "invert"):
        for each in holding:
            each.held.clear()
        loss = loss_of(net, xs) + sum(x.sin().square().sum() for each in holding for x, _ in each.held)
        grads.append(torch.autograd.grad(loss, [*xs, *net.parameters()]))
    assert error(grads[1], grads[0]) < 1e-10
    held = [pair for each in holding for pair in each.held]
    assert len(held) > 2 * 4  # of the second runs too
    assert all(torch.equal(x, copy) for x, copy in held)


def test_a_state_changed_in_place_is_not_taken_for_the_right_one_after_an_error():
    class Wrong(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = 1.0

        def forward(self, x):
            return x.sin() * self.factor

    wrong = Wrong()
    net = LayerChain(*unit(), Coupled(nn.Tanh(), wrong), *unit()).double()
    loss = net(torch.randn(SHAPE, dtype=torch.float64)).sin().sum()
    wrong.factor = 2.0
    with pytest.raises(RecoveryError, match=r"^3\.g ran differently the second time"):
        loss.backward(retain_graph=True)
    wrong.factor = 1.0
    with pytest.raises(RecoveryError, match="An earlier backward through this graph has failed. Run the forward again"):
        loss.backward()


ALL = slice(None)


class Statistics(InvertibleBatchNorm2d):
    """Notes the statistics that its inverse is told."""

    known = ()

    def forward_keeping(self, x, channels=ALL):
        y, *kept = super().forward_keeping(x, channels)
        self.known.append(ref(kept[0]))
        return y, *kept

    def inverse(self, y, *kept, **channels):
        return super().inverse(y, *kept, **channels)


@pytest.mark.parametrize(("retains", "left"), [(False, 1), (True, 5)])
def test_statistics_are_freed_as_soon_as_no_backward_can_ask_for_them(monkeypatch, retains, left):
    monkeypatch.setattr(Statistics, "known", [])
    net = LayerChain(*(layer for _ in range(5) for layer in (Statistics(4), InvertibleLeakyReLU(0.5)))).double()
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    alive = []
    x.register_hook(lambda _: alive.append(sum(statistics() is not None for statistics in Statistics.known)))
    y = net(x)
    assert sum(statistics() is not None for statistics in Statistics.known) == 5
    loss = y.sin().sum()
    first = torch.autograd.grad(loss, [x, *net.parameters()], retain_graph=retains)
    assert alive == [left]  # the first layer has not been passed
    if retains:
        second = torch.autograd.grad(loss, [x, *net.parameters()])
        torch.testing.assert_close(second, first, rtol=1e-9, atol=1e-12)  # from a state that was computed again
        assert alive == [5, 1]
