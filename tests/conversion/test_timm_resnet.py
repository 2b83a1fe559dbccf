"""timm's ResNet becomes a reversible one and is the same function, running statistics included."""

import pytest
import timm
import torch
from timm.layers import BlurPool2d
from timm.models.resnet import BasicBlock, Bottleneck, ResNet

from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.sources.timm_resnet import TimmResNet
from revzoo.errors import ConversionError

SOURCE = TimmResNet()


def tiny(block=BasicBlock, layers=(1, 2, 2, 2), size=(32, 32), **options):
    options = {"channels": (64 // block.expansion, 8, 12, 16), "num_classes": 5, "in_chans": 3} | options
    original = ResNet(block, layers, **options)
    original.pretrained_cfg = {"input_size": (options["in_chans"], *size)}
    return original


VARIANTS = {
    "basic": {},
    "bottleneck": {"block": Bottleneck, "layers": (2, 2, 3, 2), "channels": (4, 8, 12, 16)},
    "groups": {"block": Bottleneck, "layers": (2, 2, 2, 2), "channels": (8, 8, 8, 8), "cardinality": 2, "base_width": 16},
    "wide": {"block": Bottleneck, "layers": (2, 2, 2, 2), "channels": (4, 8, 8, 8), "base_width": 128},
    "odd sides and one channel": {"size": (37, 50), "in_chans": 1},
    "maximum": {"global_pool": "max"},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_the_converted_network_is_the_original(converter, randomise, options):
    original = randomise(tiny(**options), scale=0.1)
    x = torch.randn(2, *original.pretrained_cfg["input_size"])
    assert converter.measure_difference(original, x) <= 1e-5
    assert converter.measure_difference(original, x, CouplingChoice("dual_residual", kept_bits=None, b=0.0)) <= 1e-5
    assert converter.measure_difference(original, x, CouplingChoice("additive")) > 1e-3  # the same tensors, another function
    converter.check_round_trip(original)


def test_statistics_of_a_training_step_are_the_originals(converter, randomise):
    original = randomise(tiny(), scale=0.1)
    model = converter.convert(original).train()
    x = torch.randn(4, 3, 32, 32)
    expected, outputs = original.train()(x), model(x)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    ours, theirs = model.state_dict(), original.state_dict()
    for mapping in SOURCE.map_tensors(original):
        torch.testing.assert_close(ours[mapping.ours[0]], theirs[mapping.theirs[0]], rtol=1e-4, atol=1e-5)


def test_every_tensor_goes_where_the_golden_list_says(converter):
    converter.check_keys(tiny(), "timm_resnet")
    converter.check_keys(tiny(Bottleneck, (2, 2, 2, 2), channels=(4, 8, 12, 16)), "timm_resnet_bottleneck")


@pytest.mark.parametrize(
    ("name", "tensors", "steps"),
    [
        ("resnet18", 122, 5),
        ("resnet50", 320, 12),
        pytest.param("resnext50_32x4d", 320, 12, marks=pytest.mark.slow),
        pytest.param("wide_resnet50_2", 320, 12, marks=pytest.mark.slow),
    ],
)
def test_named_models_are_read_without_weights(converter, name, tensors, steps):
    original = timm.create_model(name, device="meta", drop_path_rate=0.2)
    with torch.device("meta"):
        model = converter.build(original, CouplingChoice())
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    theirs = original.state_dict()
    assert {e.ours[0]: theirs[e.theirs[0]].shape for e in SOURCE.map_tensors(original)} == shapes
    assert (len(shapes), len(model.steps)) == (tensors, steps)
    assert model.steps[-1].drop_path.drop_prob == pytest.approx(0.2)
    assert model.spec.input.size == tuple(original.pretrained_cfg["input_size"][1:])


def test_gradients_of_a_conversion_that_can_be_inverted_equal_stored_ones(converter, randomise):
    original = randomise(tiny(Bottleneck, (2, 2, 3, 2), channels=(4, 8, 12, 16)), scale=0.1)
    model = converter.build(original, CouplingChoice("momentum", kept_bits=None, b=0.5)).double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)

    def gradients(schedule):
        model.schedule = schedule
        model.zero_grad()
        model(x).square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    expected, inverted = gradients("store"), gradients("invert")
    assert max(float((inverted[k] - g).norm() / (1e-12 + g.norm())) for k, g in expected.items()) < 1e-9


REFUSED = {
    "a deep stem": {"stem_type": "deep"},
    "avg_down": {"avg_down": True},
    "attention in its blocks": {"block_args": {"attn_layer": "se"}},
    "replace_stem_pool, aa_layer": {"aa_layer": BlurPool2d},
    "replace_stem_pool": {"replace_stem_pool": True},
    "dilation": {"output_stride": 8},
    "drop_block_rate": {"drop_block_rate": 0.1},
    "block_reduce_first": {"block": Bottleneck, "layers": (2, 2, 2, 2), "block_reduce_first": 2},
    "down_kernel_size": {"down_kernel_size": 3},
    "layer2 whose only block": {"layers": (2, 1, 2, 2)},
    "layer1 whose only block": {"block": Bottleneck, "channels": (4, 8, 8, 8)},
    "the activation SiLU": {"act_layer": torch.nn.SiLU},
    "norms of class": {"norm_layer": "groupnorm", "channels": (64, 64, 64, 64)},
    "pooling 'catavgmax'": {"global_pool": "catavgmax"},
    "num_classes=0": {"num_classes": 0},
}


@pytest.mark.parametrize(("named", "options"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_expressed_is_refused_by_name(named, options):
    original = tiny(**options)
    assert SOURCE.handles(original)
    with pytest.raises(ConversionError, match=named):
        SOURCE.make_spec(original, CouplingChoice())


def test_counts_that_an_old_file_lacks_are_zero():
    expected = tiny().state_dict()
    file = {key: value for key, value in expected.items() if not key.endswith("num_batches_tracked")}
    filled, notes = SOURCE.canonicalise(tiny(), file)
    assert filled.keys() == expected.keys()
    assert all(filled[key].shape == () and filled[key].dtype == torch.long for key in filled.keys() - file.keys())
    assert notes == ["18 counts of batches (num_batches_tracked) are not in the file and were set to 0"]
    assert SOURCE.canonicalise(tiny(), expected) == (expected, [])
    assert not SOURCE.ignores("fc.weight")
    assert SOURCE.resize("fc.weight", torch.zeros(5, 16), (5, 8)) is None
