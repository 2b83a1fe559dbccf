"""Activations rebuilt layer by layer: gradients equal those of the stored run, and bytes and FLOPs are what they should be."""

import copy
import gc
import math
import warnings
import weakref
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from revzoo import device
from revzoo.analysis.flops import FlopCounter
from revzoo.errors import InputError, RecoveryError, ScheduleError
from revzoo.runtime import (
    Bijection,
    Coupled,
    CoupledConv2d,
    InvertibleBatchNorm2d,
    InvertibleLeakyReLU,
    LayerChain,
    LiveBytes,
    ReversibleChain,
    SpaceToBatch,
    SpaceToDepth,
    call_watch,
    fingerprint,
    layer_call,
)
from revzoo.runtime.fingerprint import take_fingerprint
from revzoo.runtime.layer_call import LayerCall, find_alpha
from revzoo.runtime.layer_rules import find_layers, has_inverse
from revzoo.runtime.recorded_call import RecordedCall
from revzoo.runtime.segment import InvertedSegment
from revzoo.runtime.tripwire import Watch

MODES = ("store", "selective", "recompute", "invert")
SHAPE = (2, 4, 4, 4)


class Affine(nn.Module):
    """A layer of somebody else."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * self.weight.exp() + 1

    def inverse(self, y):
        return (y - 1) / self.weight.exp()


def norm():
    layer = InvertibleBatchNorm2d(4)
    nn.init.uniform_(layer.weight, -1, 1)
    nn.init.normal_(layer.bias)
    return layer


class Flip(Bijection):
    def forward(self, x):
        return x.flip(1)

    def inverse(self, y):
        return y.flip(1)


LAYERS = {
    "convolution": lambda: [CoupledConv2d(4)],
    "norm": lambda: [norm(), nn.Softsign()],  # of two norms in a row, the first has gradients of nothing but rounding
    "leaky_relu": lambda: [InvertibleLeakyReLU(0.1)],
    "coupled": lambda: [Coupled(nn.Tanh(), nn.Conv2d(2, 2, 1))],
    "foreign": lambda: [Affine()],
    "bijection": lambda: [Flip(), Affine()],
}


def unit():
    return [CoupledConv2d(4), norm(), InvertibleLeakyReLU(0.1)]


def units(depth):
    return [layer for _ in range(depth) for layer in unit()]


def make_hybrid(depth, layers=2):
    return ReversibleChain([nn.Sequential(*units(layers)) for _ in range(depth)]).double()


NETWORKS = [lambda: LayerChain(*units(2)).double(), lambda: make_hybrid(2)]


def inputs(net, shape=SHAPE, dtype=torch.float64):
    count = 2 if isinstance(net, ReversibleChain) else 1
    return [torch.randn(shape, dtype=dtype).requires_grad_() for _ in range(count)]


def differentiate(net, xs, schedule, **kwargs):
    """Return the gradients of a loss over the outputs."""
    net.schedule = schedule
    torch.manual_seed(1)
    return torch.autograd.grad(loss_of(net, xs), [*xs, *net.parameters()], **kwargs)


def assert_stored_gradients(net, error, most=1e-8, shape=SHAPE):
    """Check the gradients of mode `invert` against those of `store`."""
    xs = inputs(net, shape)
    assert error(differentiate(net, xs, "invert"), differentiate(net, xs, "store")) < most


def loss_of(net, xs):
    ys = net(*xs)
    ys = ys if isinstance(ys, tuple) else (ys,)
    return sum((y.sin() * torch.linspace(0, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() for y in ys)


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("kind", LAYERS)
def test_every_layer_in_every_mode_at_every_depth(kind, depth, error):
    layers = [layer for _ in range(depth) for layer in LAYERS[kind]()]
    in_steps = [nn.Sequential(*unit(), *(layer for layer in LAYERS[kind]() if has_inverse(layer))) for _ in range(depth)]
    for net in (LayerChain(*layers).double(), ReversibleChain(in_steps).double()):
        xs = inputs(net)
        expected = differentiate(net, xs, "store")
        for mode in MODES:
            assert error(differentiate(net, xs, mode), expected) < 1e-8, mode
        mixed = [MODES[(i + depth) % 4] for i in range(len(net.schedule))]
        assert error(differentiate(net, xs, mixed), expected) < 1e-8


def test_a_network_with_pools_and_layers_without_an_inverse(error):
    deep = [CoupledConv2d(16), InvertibleBatchNorm2d(16), InvertibleLeakyReLU()]
    net = LayerChain(nn.Conv2d(3, 4, 3, padding=1), *unit(), SpaceToDepth(), *deep, nn.Dropout(0.5), SpaceToBatch(), *deep)
    net.double()
    xs = inputs(net, (2, 3, 8, 8))
    expected = differentiate(net, xs, "store")
    for mode in ("invert", "recompute"):
        assert error(differentiate(net, xs, mode), expected) < 1e-8


@pytest.mark.parametrize("schedule", ["invert", ["invert", "store", "invert"], ["recompute", "invert", "selective"]])
@pytest.mark.parametrize("ahead", [0, 1])
def test_layerwise_steps_between_others(schedule, ahead, error):
    steps = [nn.Sequential(*units(2)), nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()), nn.Sequential(*unit())]
    net = ReversibleChain(steps, "leapfrog").double()
    xs = inputs(net)
    expected = differentiate(net, xs, "store")
    net.lookahead = ahead
    assert error(differentiate(net, xs, schedule), expected) < 1e-8


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("make", NETWORKS)
def test_graphs_may_be_retained_and_interleaved(make, ahead, error):
    net = make()
    net.lookahead = ahead
    sets = [inputs(net), inputs(net)]
    wanted = [differentiate(net, xs, "store") for xs in sets]
    net.schedule = "invert"
    losses = [loss_of(net, xs) for xs in sets]
    for i in (1, 0, 1, 0):
        got = torch.autograd.grad(losses[i], [*sets[i], *net.parameters()], retain_graph=True)
        assert error(got, wanted[i]) < 1e-8
    # A part of the graph alone, from the middle.
    last = list(net.parameters())[-1]
    assert error(torch.autograd.grad(losses[0], [last], retain_graph=True), wanted[0][-1:]) < 1e-8
    assert error(torch.autograd.grad(losses[0], sets[0]), wanted[0][: len(sets[0])]) < 1e-8


def test_second_derivatives(error):
    net = make_hybrid(2, 1)
    xs = inputs(net)

    def differentiate_twice(schedule):
        first = differentiate(net, xs, schedule, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [*xs, *net.parameters()])

    assert error(differentiate_twice("invert"), differentiate_twice("store")) < 1e-8


@pytest.mark.parametrize("make", NETWORKS)
def test_running_statistics_move_once(make):
    net = make()
    before = copy.deepcopy(net.state_dict())
    xs = inputs(net)
    differentiate(net, xs, "store")
    expected = copy.deepcopy(net.state_dict())
    for mode in ("invert", "recompute"):
        net.load_state_dict(before)
        differentiate(net, xs, mode)
        torch.testing.assert_close(net.state_dict(), expected, rtol=1e-9, atol=0)
        assert all(b == 1 for key, b in net.named_buffers() if key.endswith("num_batches_tracked"))


def list_recorded():
    return [o for o in gc.get_objects() if type(o) in (RecordedCall, LayerCall, InvertedSegment)]


def test_everything_is_freed_with_the_graph():
    net = make_hybrid(2)
    gc.collect()
    gc.disable()
    try:
        for has_backward in (False, True):
            others = list_recorded()  # of graphs that other tests hold
            loss = loss_of(net, inputs(net))
            held = [weakref.ref(o) for o in list_recorded() if o not in others]
            assert len(held) > 4
            if has_backward:
                loss.backward()
            del loss, others
            assert not any(find() for find in held)
    finally:
        gc.enable()


# Bytes and FLOPs, with images of one size. A unit is the layers' state, or one stream.
C, B, SIZE = 8, 4, 16
UNIT = 4 * B * C * SIZE * SIZE
HALF_CONVOLUTION = 2 * 9 * (C // 2) ** 2 * B * SIZE * SIZE
WIDE = (B, C, SIZE, SIZE)


def wide(count):
    return [each for _ in range(count) for each in (CoupledConv2d(C), InvertibleBatchNorm2d(C), InvertibleLeakyReLU())]


def count_bytes(net, schedule):
    """Return the bytes (at the peak, after forward) of one forward and backward, without small tensors."""
    net.schedule = schedule
    xs = inputs(net, WIDE, torch.float32)
    weights = [torch.randn(WIDE) for _ in xs]
    with LiveBytes() as live:
        known = live.watch([*net.parameters(), *net.buffers(), *xs, *weights])
        ys = net(*xs)
        ys = ys if isinstance(ys, tuple) else (ys,)
        loss = sum((y * w).sum() for y, w in zip(ys, weights, strict=True))  # linear: saves nothing of y
        del ys
        after_forward = live.alive(without=known)
        loss.backward()
        known |= live.watch([p.grad for p in net.parameters()])
    return live.peak(without=known) // (UNIT // 16) / 16, after_forward // (UNIT // 16) / 16


def count_extra_convolutions(net):
    """Return the FLOPs of recovery, in convolutions of half the channels."""
    flops = []
    for schedule in ("store", "invert"):
        net.schedule = schedule
        with FlopCounter() as counter:
            loss_of(net, inputs(net, WIDE, torch.float32)).backward()
        flops.append(counter.forward + counter.backward)
    return (flops[1] - flops[0]) / HALF_CONVOLUTION


def test_bytes_of_a_chain_of_layers_do_not_depend_on_depth():
    # The state, the gradient of a layer's output and that of its input.
    assert {count_bytes(LayerChain(*wide(depth)), "invert") for depth in (2, 5)} == {(1 + 1 + 1, 1.0)}
    assert count_bytes(LayerChain(*wide(4)), "store") == (14.0, 12.0)


@pytest.mark.parametrize("depth", [1, 4])
def test_a_chain_of_layers_costs_one_forward_less_the_first_convolution(depth):
    assert count_extra_convolutions(LayerChain(*wide(depth))) == 2 * depth - 1


def test_bytes_of_layerwise_steps_do_not_depend_on_their_depth():
    def steps(depth, layers):
        return ReversibleChain([nn.Sequential(*wide(layers)) for _ in range(depth)])

    # Streams 2, gradients 2 and, in the first step, a copy of one for the input that wants it; then this step is run again,
    # which ends with two halves and what joins them.
    assert {count_bytes(steps(depth, layers), "invert") for depth, layers in ((2, 1), (2, 4), (4, 2))} == {(2 + 3 + 2, 2.0)}
    assert count_bytes(steps(2, 4), ["invert", "recompute"])[0] == 2 * 8  # all within a step at once


@pytest.mark.parametrize(("depth", "layers"), [(1, 1), (1, 3), (3, 2)])
def test_layerwise_steps_cost_two_forwards_less_the_first_convolution_of_each(depth, layers):
    net = ReversibleChain([nn.Sequential(*wide(layers)) for _ in range(depth)])
    assert count_extra_convolutions(net) == depth * (4 * layers - 1)


class Wrong(Affine):
    """A layer whose inverse is another one's."""

    def inverse(self, y):
        return super().inverse(y) * 1.01


@pytest.mark.parametrize("place", [1, 3])
def test_an_inverse_that_does_not_fit_is_noticed(place):
    layers = unit()
    layers.insert(place, Wrong())
    for net, name in ((LayerChain(*layers), place), (ReversibleChain([nn.Sequential(*layers)]), rf"steps\.0\.{place}")):
        net.double()
        with pytest.raises(RecoveryError, match=f"^{name} ran differently the second time: the state rebuilt from its output"):
            differentiate(net, inputs(net), "invert")


def test_a_parameter_changed_before_backward_is_named():
    for net in (LayerChain(*unit()).double(), make_hybrid(2)):
        net.schedule = "invert"
        loss = loss_of(net, inputs(net))
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1.5)
        with pytest.raises(RecoveryError, match=r"was changed in place between forward and backward"):
            loss.backward()


class Failing(Affine):
    errors: ClassVar = [ValueError("once")]  # of the class: what a second run does to a layer's own list is undone

    def inverse(self, y):
        if self.errors:
            raise self.errors.pop()
        return super().inverse(y)


def test_after_an_error_in_backward_the_next_one_is_right(error):
    net = LayerChain(*unit(), Affine(), Failing(), Affine(), *unit()).double()
    xs = inputs(net)
    expected = differentiate(net, xs, "store")
    net.schedule = "invert"
    loss = loss_of(net, xs)
    with pytest.raises(ValueError, match="once"):
        torch.autograd.grad(loss, xs, retain_graph=True)
    assert error(torch.autograd.grad(loss, [*xs, *net.parameters()]), expected) < 1e-8


def test_what_counts_as_layers():
    def names(f):
        layers = find_layers(f)
        return None if layers is None else [layer.name for layer in layers if layer.is_inverted]

    assert names(nn.Sequential(*unit())) == ["0", "1", "2"]
    assert names(nn.Sequential(nn.Sequential(*unit()), Affine())) == ["0.0", "0.1", "0.2", "1"]
    assert names(nn.Sequential(nn.ReLU(), *unit())) == ["1", "2", "3"]
    assert names(nn.Sequential(nn.ReLU(), SpaceToDepth())) is None
    assert names(Affine()) is None
    hooked = nn.Sequential(*unit())
    hooked[1].register_forward_hook(lambda module, args, out: out * 2)
    assert names(hooked) == ["0", "2"]
    hooked.register_forward_pre_hook(lambda module, args: None)
    assert names(hooked) is None

    class Doubled(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * 2

    assert names(Doubled(*unit())) is None


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("order", ["first", "middle", "last", "nested", "repeated"])
def test_steps_with_some_layers_without_an_inverse(order, ahead, error):
    def make():
        plain = [nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]
        plain.append(nn.Dropout(0.0 if ahead else 0.3))  # nothing draws ahead of backward
        if order == "first":
            return nn.Sequential(*plain, *unit())
        if order == "last":
            return nn.Sequential(*unit(), *plain)
        if order == "nested":
            return nn.Sequential(nn.Sequential(*unit()), nn.Sequential(*plain, nn.Sequential(*unit())), *plain[:2])
        middle = unit()
        return nn.Sequential(*middle, *plain, *(middle if order == "repeated" else unit()))

    net = ReversibleChain([make() for _ in range(3)]).double()
    xs = inputs(net)
    before, grads, buffers = copy.deepcopy(net.state_dict()), [], []
    for net.schedule, net.lookahead in (("store", 0), ("invert", ahead)):
        torch.manual_seed(1)
        net.load_state_dict(before)
        loss = loss_of(net, xs)
        grads += [torch.autograd.grad(loss, [*xs, *net.parameters()], retain_graph=True) for _ in range(2)]
        buffers.append(copy.deepcopy(list(net.buffers())))
    assert max(error(grads[2], grads[0]), error(grads[3], grads[0])) < 1e-8
    torch.testing.assert_close(*buffers, rtol=1e-9, atol=0)


def test_layers_of_a_step_that_draws_are_not_recovered_ahead():
    """To start from the last of them the step has to run again, which sets random streams."""
    net = ReversibleChain([nn.Sequential(*unit(), nn.Dropout(0.5), *unit()) for _ in range(2)], lookahead=1).double()
    with pytest.warns(UserWarning, match="lookahead steps aside: a step draws random numbers"):
        loss_of(net, inputs(net)).backward()


def test_what_lies_between_is_all_that_a_step_holds_besides_its_layers():
    def peak(layers):
        return count_bytes(ReversibleChain([nn.Sequential(*layers) for _ in range(3)]), "invert")[0]

    def convolution():
        return nn.Conv2d(C, C, 3, padding=1)

    # Each convolution between keeps its input, and the run before it starts from that.
    one = peak([*wide(2), convolution(), *wide(2)])
    two = peak([*wide(2), convolution(), *wide(2), convolution(), *wide(2)])
    assert 1 <= two - one < 1.2  # and gradients of weights and statistics
    assert one <= peak([*wide(4), convolution(), *wide(4)]) < one + 0.2


def test_a_hook_that_changes_the_output_of_a_layer_counts(error):
    net = LayerChain(*units(2)).double()
    net[2].register_forward_hook(lambda module, args, out: out * 2)
    assert_stored_gradients(net, error)


def test_exact_chains_stay_bit_identical():
    net = ReversibleChain([nn.Sequential(*wide(2)) for _ in range(3)], exact=True)
    xs = inputs(net, WIDE, torch.float32)
    wanted = differentiate(net, xs, "store")
    assert all(torch.equal(a, b) for a, b in zip(differentiate(net, xs, "invert"), wanted, strict=True))


def test_autocast(error):
    for net in (LayerChain(*wide(2)), ReversibleChain([nn.Sequential(*wide(2)) for _ in range(2)])):
        xs, grads = inputs(net, WIDE, torch.float32), []
        for net.schedule in ("store", "invert"):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(net, xs)
            grads.append(torch.autograd.grad(loss, [*xs, *net.parameters()]))
        assert error(grads[1], grads[0]) < 0.02


def test_without_gradients_nothing_is_recorded():
    net = LayerChain(*units(2)).double()
    with torch.no_grad():
        net(*inputs(net))
        net.eval()(*inputs(net))
    with pytest.raises(InputError, match=r"^1: BatchNorm in eval mode"):
        net(*inputs(net))
    net.schedule = "store"
    assert net(*inputs(net)).requires_grad


def test_refusals():
    with pytest.raises(InputError, match="at least one layer"):
        LayerChain()
    net = LayerChain(*unit(), SpaceToDepth())
    assert net.schedule == ["invert"] * 3
    with pytest.raises(ScheduleError, match="one mode for each of 3 units"):
        net.schedule = ["invert"] * 4
    with pytest.raises(InputError, match=r"floating tensor\. Received: torch\.int64"):
        net(torch.zeros(SHAPE, dtype=torch.int64))
    net.append(InvertibleLeakyReLU())
    with pytest.raises(ScheduleError, match=r"for 3 layers\. Received: 4\."):
        net(torch.zeros(SHAPE))
    wrong = LayerChain(Coupled(nn.Identity(), nn.Conv2d(2, 4, 1)))
    with pytest.raises(InputError, match=r"0\.g must return a tensor shaped like the half"):
        wrong(torch.zeros(SHAPE))


class InPlace(Affine):
    def forward(self, x):
        return x.add_(1).exp()

    def inverse(self, y):
        return y.log() - 1


class Pair(Affine):
    def inverse(self, y):
        return super().inverse(y), 0.0


class Shapeless(Affine):
    def inverse(self, y):
        return super().inverse(y).sum(0)


def test_what_a_layer_cannot_take_is_said_with_its_name():
    with pytest.raises(InputError, match=r"^1: Pooling takes whole squares of 2 x 2 pixels\. Received: 4 x 3 pixels"):
        LayerChain(Affine(), SpaceToDepth())(torch.zeros(2, 4, 4, 3))
    with pytest.raises(InputError, match=r"^1\.0: Two halves need an even number of channels\. Received: 3\."):
        LayerChain(Affine(), nn.Sequential(CoupledConv2d(4)))(torch.zeros(2, 3, 4, 4))
    net = ReversibleChain([nn.Sequential(Affine(), InvertibleBatchNorm2d(4))]).eval()
    with pytest.raises(InputError, match=r"^steps\.0\.1: BatchNorm in eval mode"):
        net(torch.zeros(SHAPE), torch.zeros(SHAPE))


def test_layers_that_do_not_keep_to_the_rules_are_named():
    with pytest.raises(InputError, match=r"^1 changes its input in place"):
        LayerChain(Affine(), InPlace())(torch.zeros(SHAPE))
    with pytest.raises(InputError, match=r"^steps\.0\.1 changes its input in place"):
        ReversibleChain([nn.Sequential(Affine(), nn.ReLU(inplace=True))])(torch.zeros(SHAPE), torch.zeros(SHAPE))
    for layer, received in ((Pair(), "tuple"), (Shapeless(), r"\(4, 4, 4\)")):
        loss = LayerChain(Affine(), layer)(torch.zeros(SHAPE)).sum()
        with pytest.raises(RecoveryError, match=rf"^The inverse of 1 must return .* \(2, 4, 4, 4\)\. Received: {received}\."):
            loss.backward()


def noisy(slope, depth, seed=0):
    torch.manual_seed(seed)
    net = LayerChain(*[each for _ in range(depth) for each in (*wide(1)[:2], InvertibleLeakyReLU(slope))])
    for norm in net[1::3]:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return net


def test_noise_that_reaches_the_signal_is_announced_once_with_anchors(error):
    net = noisy(0.05, 6)
    xs = inputs(net, WIDE, torch.float32)
    message = (
        r"Rebuilding 18 layers in torch\.float32, one by one from the output of 17, .* until the input of 0 has a "
        r"signal-to-noise ratio of 2e-05 .*\. Set the mode of 5 to 'recompute'"
    )
    with pytest.warns(UserWarning, match=message):
        net(*xs)
    loss_of(net, xs).backward()  # as predicted, so it is no error; and not announced again
    anchored = ["recompute" if name == "5" else "invert" for name, _ in net.named_children()]
    assert error(differentiate(net, xs, anchored), differentiate(net, xs, "store")) < 0.1


def test_noise_within_a_step_names_the_step():
    net = ReversibleChain([nn.Identity(), nn.Sequential(*noisy(0.05, 6).children())])
    with pytest.warns(
        UserWarning, match=r"one by one from the output of steps\.1\.17.*Set the schedule of steps\.1 to 'recompute'"
    ):
        net(*inputs(net, WIDE, torch.float32))


def test_noise_of_few_layers_is_not_announced():
    net = noisy(0.1, 3)
    loss_of(net, inputs(net, WIDE, torch.float32)).backward()


@pytest.mark.parametrize("seed", range(2))
def test_the_bound_of_the_tripwire_is_the_predicted_growth(seed, monkeypatch):
    """What is rebuilt differs by no more than predicted, and by more than without what the layers amplify."""
    judged = []
    compare = Watch.compare

    def spy(self, name, expected, rebuilt, tolerance, explained=0.0, **kwargs):
        actual = take_fingerprint(rebuilt).values
        judged.append((math.dist(actual, expected.values) / math.hypot(*expected.values), tolerance, float(explained)))
        return compare(self, name, expected, rebuilt, tolerance, explained, **kwargs)

    monkeypatch.setattr(Watch, "compare", spy)
    net = noisy(0.2, 7, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        loss_of(net, inputs(net, WIDE, torch.float32)).backward()
    assert len(judged) == 7 * 6  # each half of each layer
    assert all(error < max(tolerance, explained) / 2 for error, tolerance, explained in judged)
    error, tolerance, explained = judged[-2]
    assert tolerance < error < explained / 2  # would not have passed a constant bound


@pytest.mark.parametrize(("dtype", "depth"), [(torch.float32, 12), (torch.float64, 24)])
def test_noise_that_drowns_the_signal_is_announced_and_no_error(dtype, depth):
    net = LayerChain(*wide(depth)).to(dtype)
    with pytest.warns(UserWarning, match=r"until the input of 0 has a signal-to-noise ratio of .*Set the mode of \d+ to"):
        loss = loss_of(net, inputs(net, WIDE, dtype))
    loss.backward()


class Elu(nn.ELU):
    """Somebody's layer with a number that is called alpha, too."""

    def inverse(self, y):
        return torch.where(y > 0, y, (y / self.alpha).log1p())


def test_a_number_called_alpha_is_no_formula(error):
    net = LayerChain(Affine(), Elu(), CoupledConv2d(4)).double()
    assert_stored_gradients(net, error)
    assert [find_alpha(layer) for layer in net] == [None] * 3


class Unpredicted(InvertibleLeakyReLU):
    """Somebody's layer that does not say how much it amplifies."""

    alpha = None


def test_errors_that_nobody_predicted_and_that_grow_are_not_called_another_run():
    net = noisy(0.05, 6)
    for i in range(2, 18, 3):
        net[i] = Unpredicted(0.05)
    loss = loss_of(net, inputs(net, WIDE, torch.float32))
    message = r"^Errors have grown from state to state until 2: the state .* by [\d.]+ of its size, .* to 'recompute'"
    with pytest.raises(RecoveryError, match=message):
        loss.backward()


@pytest.mark.parametrize("place", [4, 24])
def test_in_a_chain_that_amplifies_an_inverse_that_does_not_fit_is_noticed(place):
    layers = wide(8)
    layers.insert(place, Wrong())
    net = LayerChain(*layers).double()
    loss = loss_of(net, inputs(net, WIDE))
    with pytest.raises(RecoveryError, match=rf"^{place} ran differently the second time"):
        loss.backward()


def test_on_a_device_the_predicted_growth_is_not_read(monkeypatch):
    """Played by a CPU whose numbers nobody reads before they have been copied to the host."""
    for module in (call_watch, fingerprint, device, layer_call):
        monkeypatch.setattr(module, "can_read_now", lambda x: False)
    monkeypatch.setattr(device, "_record_event", lambda device: Mock())
    judged = []
    judge = Watch.judge
    monkeypatch.setattr(Watch, "judge", lambda self, *args: (judged.append(args[0].name), judge(self, *args)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        net = noisy(0.2, 7)
        loss_of(net, inputs(net, WIDE, torch.float32)).backward()
    assert len(judged) > 20  # and none has raised
    net = LayerChain(Affine(), Wrong(), *unit()).double()
    with pytest.raises(RecoveryError, match=r"^1 ran differently the second time"):
        loss_of(net, inputs(net)).backward()
