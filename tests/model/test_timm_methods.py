"""timm's manners: classifier, head and features of every family, as timm's own tests ask for them."""

import re

import pytest
import torch
from torch import nn

import revzoo
from revzoo.errors import InputError

IMAGES = ("irevnet_digits", "resnext_digits", "rev_mvit_digits", "rev_swin_digits", "rev_vit_digits", "revnet_digits")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", IMAGES)
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
    meta = revzoo.create("rev_vit_digits", device="meta")
    meta.reset_classifier(0)
    meta.reset_classifier(4)
    assert meta.get_classifier().weight.is_meta


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


def test_gradients_without_a_classifier(gradients):
    model = revzoo.create("rev_vit_digits", dtype=torch.float64, overrides=["stages.0.depth=2"])
    model.reset_classifier(0)
    x = model.example_input(2)
    expected = gradients.compute(model, "store", x)
    assert gradients.largest_error(gradients.compute(model, "invert", x), expected) < 1e-10


@pytest.mark.parametrize(("name", "classes"), [("rev_bert_mini", 2), ("rev_roberta_mini", 260), ("reformer_mini", 256)])
def test_text_heads_have_features_before_the_classifier(name, classes):
    model = revzoo.create(name).eval()
    ids = model.example_input(2)
    features = model.forward_features(ids)
    assert model.num_classes == classes
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


def test_features_of_texts_are_no_classes():
    model = revzoo.create("rev_bert_mini", overrides=["head={type: text_features}"], device="meta")
    assert (model.num_classes, model.num_outputs, model.head_hidden_size) == (0, 64, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "num_classes is an integer >= 0. Received: -1"),
        ((True,), "num_classes is an integer >= 0. Received: True"),
        ((2.0,), "num_classes is an integer >= 0. Received: 2.0"),
        ((5, "avgmax"), "global_pool of the head pooled_linear is 'avg', 'max', 'token', ''. Received: 'avgmax'"),
        ((5, ""), "The head pooled_linear cannot be changed. pool: found 'none'; allowed: mean or max, or outputs: 0"),
        ((5, "token"), "The head pooled_linear cannot be changed. pool: found 'first'; allowed: mean or max for images"),
    ],
)
def test_a_classifier_that_cannot_be(arguments, message):
    model = revzoo.create("revnet_digits")
    spec, head = model.spec, model.head
    with pytest.raises(InputError, match=re.escape(message)):
        model.reset_classifier(*arguments)
    assert model.spec is spec, "nothing has changed"
    assert model.head is head
