"""timm's manners: classifier, head and features of every family, as timm's own tests ask for them."""

import re

import pytest
import torch
from timm.models import FeatureInfo
from torch import nn

import revzoo
from revzoo.errors import InputError
from revzoo.runtime import LiveBytes

IMAGES = ("irevnet_digits", "resnext_digits", "rev_mvit_digits", "rev_swin_digits", "rev_vit_digits", "revnet_digits")


@pytest.mark.parametrize("name", ["resnext_digits", "rev_vit_digits", "revnet_digits"])
def test_the_classifier_is_removed_and_put_back(name):
    """As in timm's test_model_default_cfgs: without classifier the pooled features, without pooling all of them."""
    model = revzoo.create(name).eval()
    x = model.example_input(2)
    features = model.forward_features(x)
    channel = 1 if features.dim() == 4 else 2
    assert (model.num_classes, model.num_features, model.head_hidden_size) == (10, features.shape[channel], model.num_features)
    assert isinstance(model.get_classifier(), nn.Linear)
    assert model.get_classifier().in_features == model.head_hidden_size
    assert torch.equal(model.forward_head(features), model(x))
    pre_logits = model.forward_head(features, pre_logits=True)
    model.reset_classifier(0)
    assert isinstance(model.get_classifier(), nn.Identity)
    assert (model.num_classes, model.num_outputs) == (0, model.num_features)
    assert torch.equal(model(x), pre_logits)
    model.reset_classifier(0, "")
    assert model(x).shape == features.shape
    assert torch.equal(model(x).flatten(2).mean(2) if channel == 1 else model(x).mean(1), pre_logits)
    model.reset_classifier(42, "max")
    assert (model(x).shape, model.num_classes, model.spec.head.arguments["pool"]) == ((2, 42), 42, "max")
    again = revzoo.build(model.spec)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(x), model(x))


def test_a_model_without_classes_is_saved_and_gets_them_back(tmp_path):
    model = revzoo.create("rev_vit_digits", num_outputs=3, dtype=torch.float64)
    model.reset_classifier(0)
    assert "head.linear.weight" not in model.state_dict()
    model.save_pretrained(tmp_path)
    loaded = revzoo.create(tmp_path, num_outputs=7, dtype=torch.float64)
    assert (loaded.num_classes, loaded.get_classifier().weight.dtype) == (7, torch.float64)
    model.reset_head(5)
    assert (model.num_classes, model.get_classifier().weight.dtype) == (5, torch.float64)


def test_a_new_classifier_leaves_the_rest_of_the_head_alone():
    model = revzoo.create("revnext_digits", overrides=["head.bias=false", "head.scale=0.5"])
    norm = model.head.norm
    dropout = model.head.dropout
    model.reset_classifier(5)
    assert model.head.norm is norm
    assert model.head.dropout is dropout
    assert model.head.linear.bias is None
    x = model.example_input(2)
    with torch.no_grad():
        features = model.forward_features(x)
        logits = model.forward_head(features)
        assert torch.equal(logits, 0.5 * model.head.linear(model.forward_head(features, pre_logits=True)))
        model.reset_classifier(0)
        assert torch.equal(model.forward_head(features), model.forward_head(features, pre_logits=True)), "not scaled"
    model.eval().reset_classifier(3)
    assert not model.head.training


@pytest.mark.parametrize(("name", "classes"), [("rev_bert_mini", 2), ("rev_roberta_mini", 260), ("reformer_mini", 256)])
def test_text_heads_have_features_before_the_classifier(name, classes):
    model = revzoo.create(name).eval()
    ids = model.example_input(2)
    features = model.forward_features(ids)
    assert (model.num_classes, model.pretrained_cfg) == (classes, {})
    torch.testing.assert_close(model.forward_head(features), model(ids))
    assert model.forward_head(features, pre_logits=True).shape[-1] == model.head_hidden_size
    if name == "rev_roberta_mini":
        message = r"The head masked_lm has no classifier\. .*sequence_classification"
        with pytest.raises(InputError, match=message):
            model.reset_classifier(0)
        with pytest.raises(InputError, match=message):
            model.get_classifier()
    else:
        model.reset_classifier(0)
        assert (model.num_classes, model(ids).shape[-1]) == (0, model.head_hidden_size)
        with pytest.raises(InputError, match=r"global_pool of the head \w+ is None\. Received: 'avg'"):
            model.reset_classifier(2, "avg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "Received: -1"),
        ((True,), "Received: True"),
        ((5, "avgmax"), "Received: 'avgmax'"),
        ((5, ""), "pool: found 'none'"),
        ((5, "token"), "pool: found 'first'"),
    ],
)
def test_a_classifier_that_cannot_be(arguments, message):
    model = revzoo.create("revnet_digits")
    spec, head = model.spec, model.head
    with pytest.raises(InputError, match=re.escape(message)):
        model.reset_classifier(*arguments)
    assert model.spec is spec, "nothing has changed"
    assert model.head is head


def compute_all_gradients(model, schedule, x, indices, **options):
    """Return the gradients of a loss of the final features and of the intermediate ones."""
    model.schedule = schedule
    model.zero_grad()
    torch.manual_seed(1)
    final, features = model.forward_intermediates(x, indices, **options)
    outputs = [model.forward_head(final), *features]
    generator = torch.Generator().manual_seed(2)
    grads = [torch.randn(out.shape, generator=generator, dtype=out.dtype) for out in outputs]
    torch.autograd.backward(outputs, grads)
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", IMAGES)
def test_intermediate_features_are_what_feature_info_says(name):
    """As in timm's test_model_forward_intermediates."""
    model = revzoo.create(name).eval()
    info = FeatureInfo(model.feature_info, len(model.feature_info))
    x = model.example_input(2)
    final, features = model.forward_intermediates(x)
    assert torch.equal(final, model.forward_features(x))
    assert len(features) == len(info.info) == (len(model.stages) if len(model.stages) > 1 else 6)
    for feature, channels, reduction in zip(features, info.channels(), info.reduction(), strict=True):
        assert feature.shape == (2, channels, 8 // reduction, 8 // reduction)
    assert [module.split(".")[0] for module in info.module_name()] == ["stages"] * len(features)
    assert all(model.get_submodule(module) for module in info.module_name())
    last = model.forward_intermediates(x, [-1], norm=True, intermediates_only=True)[0]
    if model.fuse.norm is not None:
        torch.testing.assert_close(last if final.dim() == 4 else last.flatten(2).mT, final)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("rev_mvit_digits", "invert"),
        ("rev_vit_digits", "recompute"),
        ("revnet_digits", "stage_inputs"),
        ("revnext_digits", "invert"),
    ],
)
def test_gradients_of_intermediate_features_equal_stored_ones(name, schedule, gradients):
    model = revzoo.create(name, dtype=torch.float64, overrides=["stages.0.depth=2"])
    gradients.make_streams_unequal(model) if model.has_streams else None
    x = model.example_input(3)
    indices = [0, -1]
    expected = compute_all_gradients(model, "store", x, indices)
    assert all(g is not None for g in expected.values()), "every parameter takes part"
    assert gradients.largest_error(compute_all_gradients(model, schedule, x, indices), expected) < 1e-10


@pytest.mark.parametrize(("coupling", "lookahead"), [("additive", 1), ("{type: momentum, kept_bits: 4}", 0)])
def test_exact_gradients_of_intermediate_features_are_bit_identical(coupling, lookahead, gradients):
    model = revzoo.create("rev_vit_digits", exact=coupling == "additive", overrides=[f"block.coupling={coupling}"])
    model.lookahead = lookahead
    x = model.example_input(3)
    expected = compute_all_gradients(model, "store", x, None, norm=True)
    assert gradients.differing(compute_all_gradients(model, "invert", x, None, norm=True), expected) == []


def test_a_feature_keeps_one_pair_of_streams_and_itself():
    model = revzoo.create("rev_vit_digits")
    x = model.example_input(16)
    kept = {}
    for count in (0, 1, 3):
        with LiveBytes() as live:
            outputs = model.forward_intermediates(x, list(range(count))) if count else model.forward_features(x)
            kept[count] = live.alive()
        del outputs
    stream = 4 * 16 * 16 * 64
    pair_and_feature = 2 * stream + 2 * stream
    assert kept[3] - kept[1] == 2 * pair_and_feature


def test_what_is_behind_the_last_feature_is_not_computed():
    model = revzoo.create("rev_vit_digits").eval()
    x = model.example_input(2)
    calls = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    features = model.forward_intermediates(x, [1, 2], stop_early=True, intermediates_only=True)
    ran = list(calls)
    assert "stages.0.blocks.2.g" in ran
    assert not [name for name in ran if name.startswith(("stages.0.blocks.3", "fuse", "head"))]
    _, everything = model.forward_intermediates(x)
    assert all(torch.equal(a, b) for a, b in zip(features, everything[1:3], strict=True))
    assert [len(model.forward_intermediates(x, n, intermediates_only=True)) for n in (None, 6, 2, [-1, -1])] == [6, 6, 2, 1]


def test_a_class_token_is_no_place_of_the_image():
    model = revzoo.create("rev_vit_digits", overrides=["stem.class_token=true", "head.class_token=true"]).eval()
    x = model.example_input(2)
    final, features = model.forward_intermediates(x, 1, norm=True)
    assert (final.shape, features[0].shape) == ((2, 17, 128), (2, 128, 4, 4))
    torch.testing.assert_close(features[0].flatten(2).mT, final[:, 1:])
    tokens = model.forward_intermediates(x, 1, norm=True, output_fmt="NLC", intermediates_only=True)[0]
    torch.testing.assert_close(tokens, final[:, 1:])


def test_intermediate_features_of_texts_heed_padding():
    model = revzoo.create("rev_roberta_mini").eval()
    ids = model.example_input(2)
    ids[0, 10:] = model.spec.input.padding
    shorter = ids[:1, :10]
    whole = model.forward_intermediates(ids, output_fmt="NLC", intermediates_only=True)
    part = model.forward_intermediates(shorter, output_fmt="NLC", intermediates_only=True)
    assert len(whole) == len(model.stages[0].blocks)
    for a, b in zip(whole, part, strict=True):
        torch.testing.assert_close(a[:1, :10], b)
    with pytest.raises(InputError, match=r"output_fmt of rev_roberta_mini is NLC\. Received: 'NCHW'"):
        model.forward_intermediates(ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_early": True}, "Use intermediates_only=True too"),
        ({"output_fmt": "NHWC"}, "output_fmt of rev_vit_digits is NCHW or NLC. Received: 'NHWC'"),
    ],
)
def test_features_that_cannot_be(options, message):
    model = revzoo.create("rev_vit_digits")
    with pytest.raises(InputError, match=re.escape(message)):
        model.forward_intermediates(model.example_input(1), **options)
