"""i-RevNet: the whole network against the paper's equations, its inverse, and the memory of its transitions."""

import re

import pytest
import torch
import torch.nn.functional as F

import revzoo
from revzoo.errors import InputError
from revzoo.parts.branches.convolution import IRevNetUnit
from revzoo.parts.context import BuildContext, Shape
from revzoo.parts.stems.convolution import PadStem, SpaceToDepthStem
from revzoo.parts.transitions.bijective import SpaceToDepthTransition

IMAGE = BuildContext(Shape(3, (6, 4), "image"), 3)
# Bijective and small: irevnet_300 with less of everything.
TINY = [
    "input.size=[32,32]",
    "stages=[{depth: 2, width: 24, transition: space_to_depth, f: {preactivate_first: false}},"
    "{depth: 1, width: 96, transition: space_to_depth},"
    "{depth: 2, width: 384, transition: space_to_depth}]",
    "head.outputs=10",
]


def psi(x):
    return torch.cat([x[:, :, dy::2, dx::2] for dy in range(2) for dx in range(2)], 1)


def unit(x, parameters, stride, preactivate):
    """Apply BatchNorm, ReLU and convolution three times; `parameters` are in the order of the unit's own."""
    left = iter(parameters)
    for i in range(3):
        if i > 0 or preactivate:
            x = F.relu(F.batch_norm(x, None, None, next(left), next(left), training=True, eps=1e-5))
        weight = next(left)
        x = F.conv2d(x, weight, stride=stride if i == 0 else 1, padding=weight.shape[-1] // 2)
    assert next(left, None) is None
    return x


def features(model, x1, x2, strides):
    """The paper's recurrence: F works on x2 before psi, and the streams swap in every block."""
    first = True
    for stage, stage_stride in zip(model.stages, strides, strict=True):
        for i, block in enumerate(stage.blocks):
            stride = stage_stride if i == 0 else 1
            out = unit(x2, block.f.parameters(), stride, not first)
            if stride == 2:
                x1, x2 = psi(x1), psi(x2)
            x1, x2 = x2, x1 + out
            first = False
    return torch.cat((x1, x2), 1)


@pytest.mark.parametrize("kernels", ["[3,3,3]", "[1,3,1]"])
def test_a_bijective_network_is_the_formula(kernels):
    model = revzoo.create("irevnet_300", overrides=[*TINY, f"block.f.kernels={kernels}"], dtype=torch.float64)
    x = model.example_input(3)
    expected = features(model, *psi(x).chunk(2, 1), (2, 2, 2))
    torch.testing.assert_close(model.forward_features(x), expected, rtol=1e-12, atol=1e-12)
    norm = model.head.norm
    pooled = F.relu(F.batch_norm(expected, None, None, norm.weight, norm.bias, True, eps=1e-5)).mean((2, 3))
    torch.testing.assert_close(model(x), model.head.linear(pooled), rtol=1e-10, atol=1e-10)


def test_an_injective_network_is_the_formula():
    overrides = ["stages.0.depth=2", "stages.1.depth=1", "stages.2.depth=2", "block.f.dropout=0.0"]
    model = revzoo.create("irevnet_cifar10", overrides=overrides, dtype=torch.float64)
    x = model.example_input(3)
    zeros = x.new_zeros(3, 16, 32, 32)
    x1, x2 = torch.cat((x[:, :2], zeros[:, :14]), 1), torch.cat((x[:, 2:], zeros[:, :15]), 1)
    torch.testing.assert_close(model.forward_features(x), features(model, x1, x2, (1, 2, 2)), rtol=1e-12, atol=1e-12)


def test_only_the_first_unit_behind_a_transition_unfolds():
    blocks = ["space_to_depth", "{type: space_to_depth, block: 4}"]
    stages = [f"{{depth: 2, width: {w}, transition: {t}}}" for w, t in zip((64, 1024), blocks, strict=True)]
    model = revzoo.create(
        "irevnet_digits", overrides=["input.size=[16,16]", f"stages=[{{depth: 2, width: 16}},{','.join(stages)}]"]
    )
    units = [block.f for stage in model.stages for block in stage.blocks]
    assert [(*unit.conv1.stride, unit.conv1.in_channels) for unit in units] == [
        (1, 1, 16), (1, 1, 16), (2, 2, 16), (1, 1, 64), (4, 4, 64), (1, 1, 1024)
    ]  # fmt: skip
    assert ["unfold" in dict(unit.named_children()) for unit in units] == [False, False, True, False, True, False]
    x = torch.randn(1, 64, 4, 4)
    assert torch.equal(units[4].unfold(model.stages[2].transition(x)), x)


def test_dropout_follows_the_second_convolution():
    unit = IRevNetUnit(BuildContext(Shape(8, (6, 4), "image"), 8), dropout=0.2)
    names = "norm1 conv1 norm2 conv2 dropout norm3 conv3 drop_path"
    assert [name for name, _ in unit.named_children()] == names.split()
    assert unit.dropout.p == 0.2


@pytest.mark.parametrize(("name", "overrides"), [("irevnet_300", TINY), ("irevnet_digits", [])])
def test_the_inverse_returns_the_image(name, overrides):
    model = revzoo.create(name, overrides=overrides)
    with torch.no_grad():
        model(model.example_input(4))  # BatchNorm statistics other than 0 and 1
    model.eval()
    x = model.example_input(2)
    with torch.no_grad():
        returned = model.inverse(model.forward_features(x))
    torch.testing.assert_close(returned, x, rtol=0, atol=1e-4)
    assert not torch.equal(returned, x), "without rounding errors, the next assertion would prove nothing"
    model.exact = True
    pixels = torch.randint(256, x.shape) / 256
    with torch.no_grad():
        assert torch.equal(model.inverse(model.forward_features(pixels)), pixels)


def test_the_inverse_is_refused_where_it_cannot_be():
    model = revzoo.create("irevnet_digits")
    with pytest.raises(InputError, match=re.escape("Call model.eval() first")):
        model.inverse(torch.zeros(1, 128, 2, 2))
    lossy = {
        "fuse (Concat)": ["fuse.norm=batch_norm"],
        "split (Duplicate)": ["split=duplicate", "stem.width=16", "stem.block=2"],
    }
    for part, overrides in lossy.items():
        model = revzoo.create("irevnet_digits", overrides=overrides).eval()
        with pytest.raises(InputError, match=re.escape(f"its {part} loses information")):
            model.inverse(torch.zeros(1, 128, 2, 2))
    with pytest.raises(InputError, match=re.escape("its stages.0.transition (ResidualPair) loses information")):
        revzoo.create("revnet_digits").eval().inverse(torch.zeros(1, 112, 2, 2))


def test_transitions_keep_nothing():
    """Two transitions or none: the same bytes are kept for backward, except in the head, which receives more channels."""

    def measure(stages):
        model = revzoo.create("irevnet_digits", overrides=["input.size=[16,16]", f"stages=[{stages}]"])
        return revzoo.measure_memory(model, model.example_input(5)).after_forward_bytes

    flat = measure("{depth: 3, width: 16}")
    fold = "transition: space_to_depth"
    folded = measure(f"{{depth: 1, width: 16}}, {{depth: 1, width: 64, {fold}}}, {{depth: 1, width: 256, {fold}}}")
    head = (512 - 32) * 4 * (5 + 2)  # pooled features of 5 examples; mean and deviation that BatchNorm saves
    assert folded - flat == head


def test_bijections_and_their_inverses():
    x = torch.randn(2, 3, 6, 4)
    fold = SpaceToDepthStem(IMAGE)
    assert torch.equal(fold(x), psi(x))
    assert torch.equal(fold.inverse(psi(x)), x)
    assert fold.out_shape == Shape(12, (3, 2), "image")
    transition = SpaceToDepthTransition(BuildContext(IMAGE.shape, 12))
    assert torch.equal(transition(x), psi(x))
    assert transition.out_shape == fold.out_shape
    pad = PadStem(IMAGE, width=8)
    assert torch.equal(pad(x)[:, [0, 1, 4]], x)
    assert not pad(x)[:, [2, 3, 5, 6, 7]].any()
    assert torch.equal(pad.inverse(pad(x)), x)
    folded = PadStem(IMAGE, width=16, block=2)
    assert torch.equal(folded(x), torch.cat([F.pad(half, (0, 0, 0, 0, 0, 2)) for half in psi(x).chunk(2, 1)], 1))
    assert torch.equal(folded.inverse(folded(x)), x)
    assert folded.out_shape == Shape(16, (3, 2), "image")
