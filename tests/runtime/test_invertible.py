"""Layers with an inverse: their formulas, their inverses, what they refuse, and how much noise their inverses amplify."""

import pytest
import torch
from torch import nn

from revzoo.errors import InputError
from revzoo.runtime import (
    Coupled,
    CoupledConv2d,
    InvertibleBatchNorm2d,
    InvertibleLeakyReLU,
    PixelUnshuffle,
    SpaceToBatch,
    SpaceToDepth,
)


def batch_norm(channels=6, eps_i=0.1):
    norm = InvertibleBatchNorm2d(channels, eps_i).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


def images(*shape, dtype=torch.float64):
    return torch.randn(shape or (3, 6, 4, 4), dtype=dtype)


def test_batch_norm_is_the_published_formula():
    norm, x = batch_norm(), images() * 3 + 1
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
    scale, bias = (norm.weight.abs() + 0.1).view(1, -1, 1, 1), norm.bias.view(1, -1, 1, 1)
    assert torch.allclose(norm(x), scale * (x - mean) / (variance + 1e-5).sqrt() + bias, rtol=1e-12)


def test_batch_norm_with_a_floor_of_zero_is_that_of_torch():
    """Function, gradients and running statistics, in training and in eval mode."""
    ours, theirs = InvertibleBatchNorm2d(6, eps_i=0.0).double(), nn.BatchNorm2d(6).double()
    theirs.load_state_dict(ours.state_dict())
    for _ in range(2):
        x = images().requires_grad_()
        assert torch.equal(ours(x), theirs(x))
        wanted = [torch.autograd.grad(norm(x).sin().sum(), [x, *norm.parameters()]) for norm in (ours, theirs)]
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))
    assert ours.num_batches_tracked == 4
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_inverses_give_the_input_back(dtype, memory_format):
    layers = [batch_norm(), InvertibleLeakyReLU(0.1), InvertibleLeakyReLU(3.0), CoupledConv2d(6), Coupled(nn.Tanh(), nn.Tanh())]
    for layer in layers:
        x = images(dtype=dtype).to(memory_format=memory_format)
        layer.to(dtype)
        with torch.no_grad():
            if isinstance(layer, InvertibleBatchNorm2d):
                y, *kept = layer.forward_keeping(x)
            else:
                y, kept = layer(x), ()
            rebuilt = layer.inverse(y, *kept)
        assert y.dtype == rebuilt.dtype == dtype
        assert (rebuilt - x).abs().max() < (1e-13 if dtype == torch.float64 else 3e-6), layer


@pytest.mark.parametrize("pool", [SpaceToDepth(2), PixelUnshuffle(2), PixelUnshuffle(3), SpaceToBatch(2), SpaceToBatch(3)])
def test_pooling_is_undone_bit_for_bit(pool):
    x = images(2, 3, 6, 12)
    y = pool(x)
    assert y.numel() == x.numel()
    assert y.shape[2:] == (6 // pool.block, 12 // pool.block)
    assert torch.equal(pool.inverse(y), x)


def test_space_to_depth_has_the_order_of_i_revnet():
    x = images(2, 3, 4, 6)
    y = SpaceToDepth()(x)
    for dy in range(2):
        for dx in range(2):
            assert torch.equal(y.unflatten(1, (4, 3))[:, 2 * dy + dx], x[:, :, dy::2, dx::2])


def test_channels_of_one_channel_stay_side_by_side():
    x = images(2, 4, 4, 6)
    y = PixelUnshuffle()(x)
    assert torch.equal(y, nn.PixelUnshuffle(2)(x))
    assert torch.equal(y, torch.cat([PixelUnshuffle()(half) for half in x.chunk(2, 1)], 1))
    assert y.is_contiguous()
    assert PixelUnshuffle().inverse(y).is_contiguous()


def test_batch_pooling_stacks_the_neighbours_of_a_pixel():
    x = images(5, 3, 4, 4)
    y = SpaceToBatch()(x)
    assert y.shape == (20, 3, 2, 2)
    for dy in range(2):
        for dx in range(2):
            assert torch.equal(y.unflatten(0, (4, -1))[2 * dy + dx], x[:, :, dy::2, dx::2])


def test_a_coupled_convolution_is_a_block_of_two_convolutions():
    layer, x = CoupledConv2d(6).double(), images()
    x1, x2 = x.chunk(2, 1)
    y1 = x1 + layer.f(x2)
    assert torch.equal(layer(x), torch.cat([y1, x2 + layer.g(y1)], 1))
    assert [tuple(p.shape) for p in layer.parameters()] == [(3, 3, 3, 3)] * 2


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (lambda: CoupledConv2d(5), r"halves its channels, so their number is even\. Received: 5\."),
        (lambda: CoupledConv2d(4, 2), r"kernel of an odd size .* Received: 2\."),
        (lambda: Coupled(nn.Tanh(), nn.Tanh())(images(2, 5, 4, 4)), r"even number of channels\. Received: 5\."),
        (lambda: InvertibleLeakyReLU(0.0), r"slope <= 0 cannot be undone\. Received: 0\.0\. Use 0\.1"),
        (lambda: InvertibleLeakyReLU(-0.1), r"slope <= 0 cannot be undone\. Received: -0\.1\."),
        (lambda: InvertibleBatchNorm2d(4, eps_i=-0.1), r"at least 0\. Received: -0\.1\."),
        (lambda: batch_norm()(images(1, 6, 1, 1)), r"more than one value per channel.*\(1, 6, 1, 1\)\. Use a larger batch"),
        (lambda: batch_norm().eval().forward_keeping(images()), r"in eval mode .* Call model\.train\(\)"),
        (lambda: SpaceToDepth()(images(1, 2, 3, 4)), r"2 x 2 pixels\. Received: 3 x 4 pixels\. Pad or crop"),
        (lambda: PixelUnshuffle()(images(1, 2, 3, 4)), r"2 x 2 pixels\. Received: 3 x 4 pixels\. Pad or crop"),
        (lambda: SpaceToBatch()(images(1, 2, 4, 5)), r"2 x 2 pixels\. Received: 4 x 5 pixels\. Pad or crop"),
    ],
)
def test_refusals(do, message):
    with pytest.raises(InputError, match=message):
        do()


def test_a_weight_of_zero_needs_a_floor():
    norm = batch_norm(eps_i=0.0)
    norm.weight.data[:2] = 0
    norm(images())  # it is the inverse that needs the floor
    with pytest.raises(InputError, match=r"eps_i = 0 .* 2 of 6 weights at 0\. Use eps_i > 0"):
        norm.forward_keeping(images())
    norm.eps_i = 0.1
    assert norm.forward_keeping(images())[0].isfinite().all()


def test_no_conversion_takes_the_batch_norm_for_another():
    net = nn.Sequential(batch_norm(), nn.BatchNorm2d(6))
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    assert [type(layer) for layer in converted] == [InvertibleBatchNorm2d, nn.SyncBatchNorm]
