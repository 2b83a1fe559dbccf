"""timm.create_model makes revzoo's image models; what a spec cannot express is refused by name."""

import re

import pytest
import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, resolve_data_config, resolve_model_data_config
from timm.models import get_pretrained_cfg
from torch import nn

import revzoo
import revzoo.timm
from revzoo.errors import InputError, UnknownNameError
from revzoo.spec.names import model_files

SMALL = (
    *("irevnet_digits", "resnext_digits", "rev_mvit_digits", "rev_swin_digits", "rev_vit_digits", "revnet_digits"),
    "revnext_digits",
)


def test_every_image_model_is_registered_and_no_other():
    texts = {"reformer", "rev_bert", "rev_gpt", "rev_roberta"}
    images = [name for name, file in model_files().items() if file.parent.name not in texts]
    assert len(images) > 45
    assert sorted(timm.list_models(module="timm_registry")) == images
    assert not any(timm.is_model(name) for name in set(model_files()) - set(images))
    assert timm.list_pretrained("*_digits") == [
        *("irevnet_digits", "rev_mvit_digits", "rev_swin_digits", "rev_vit_digits", "revnet_digits")
    ]
    cfg = get_pretrained_cfg("rev_vit_digits")
    assert (cfg.input_size, cfg.num_classes, cfg.architecture) == ((1, 8, 8), 10, "rev_vit_digits")


@pytest.mark.parametrize("name", SMALL)
def test_forward_and_backward_as_in_timms_tests(name):
    model = timm.create_model(name, num_classes=42)
    assert isinstance(model, revzoo.Model)
    cfg = model.default_cfg
    outputs = model(torch.randn(2, *cfg["input_size"]))
    assert (outputs.shape, model.num_classes, cfg["num_classes"]) == ((2, 42), 42, 42)
    outputs.mean().backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []
    assert not outputs.isnan().any()
    state = model.state_dict()
    assert f"{cfg['classifier']}.weight" in state
    assert cfg["first_conv"] is None if name == "irevnet_digits" else f"{cfg['first_conv']}.weight" in state
    assert isinstance(model.get_submodule(cfg["classifier"]), nn.Linear)


@pytest.mark.parametrize("name", ["rev_vit_digits", "revnet_digits"])
def test_data_are_prepared_as_the_model_needs_them(name):
    model = timm.create_model(name)
    config = resolve_data_config({}, model=model)
    assert config == resolve_model_data_config(model)
    assert (config["input_size"], len(config["mean"]), len(config["std"])) == ((1, 8, 8), 1, 1)
    assert config["mean"][0] == pytest.approx(sum(IMAGENET_DEFAULT_MEAN) / 3)
    transform = timm.data.create_transform(**resolve_data_config({}, model=revzoo.create("rev_vit_s", device="meta")))
    assert {type(step).__name__ for step in transform.transforms} >= {"Resize", "CenterCrop", "Normalize"}


def test_arguments_of_timm_are_values_of_the_spec():
    with torch.device("meta"):
        model = timm.create_model(
            "rev_vit_s", num_classes=7, img_size=(192, 256), in_chans=4, drop_path_rate=0.3, drop_rate=0.2, global_pool="max"
        )
    spec = model.spec
    assert (spec.input.channels, spec.input.size, spec.drop_path.max) == (4, (192, 256), 0.3)
    assert spec.head.arguments == {"pool": "max", "outputs": 7, "dropout": 0.2}
    assert model(model.example_input(2)).shape == (2, 7)
    assert model.pretrained_cfg["input_size"] == (4, 192, 256)
    assert (model.pretrained_cfg["pool_size"], len(model.pretrained_cfg["mean"])) == ((12, 16), 4)
    assert revzoo.create("rev_vit_s", device="meta").pretrained_cfg["mean"] == IMAGENET_DEFAULT_MEAN
    assert timm.create_model("rev_vit_digits", img_size=12).spec.input.size == (12, 12)
    assert timm.create_model("rev_vit_digits", img_size=None, num_classes=None).num_classes == 10, "timm leaves None out"


def test_an_override_of_what_an_argument_sets_is_refused():
    with pytest.raises(InputError, match=r"input\.size twice, .* Leave one out"):
        timm.create_model("rev_vit_digits", overrides=["input.size=[8,8]"], img_size=16)


def test_an_argument_of_timm_is_about_the_head_that_an_override_names():
    model = timm.create_model("rev_vit_digits", num_classes=3, overrides=["head={type: pooled_linear, dropout: 0.3}"])
    assert (model.num_classes, model.spec.head.arguments["dropout"]) == (3, 0.3)


def test_arguments_of_revzoo_are_taken_too():
    model = timm.create_model(
        "rev_vit_digits", schedule="recompute", exact=True, lookahead=1, dtype=torch.float64, overrides=["stages.0.depth=2"]
    )
    assert (len(model.steps), model.exact, model.lookahead, model.fuse.norm.weight.dtype) == (4, True, 1, torch.float64)
    assert model.schedule[1] == "recompute"
    assert timm.create_model("rev_vit_s", device="meta").stem.pos_embed.is_meta


def test_shipped_weights():
    expected = revzoo.create("rev_vit_digits", pretrained=True).eval()
    x = expected.example_input(4)
    model = timm.create_model("rev_vit_digits", pretrained=True, drop_path_rate=0.1).eval()
    assert torch.equal(model(x), expected(x))
    headless = timm.create_model("rev_vit_digits", pretrained=True, num_classes=0).eval()
    assert torch.equal(headless(x), expected.forward_head(expected.forward_features(x), pre_logits=True))
    whole = timm.create_model("rev_vit_digits", pretrained=True, num_classes=0, global_pool="").eval()
    assert torch.equal(whole(x), expected.forward_features(x))
    other = timm.create_model("rev_vit_digits", pretrained=True, num_classes=3, in_chans=3, img_size=16)
    assert other(torch.randn(2, 3, 16, 16)).shape == (2, 3)
    assert torch.equal(other.fuse.norm.weight, expected.fuse.norm.weight)
    largest = timm.create_model("rev_vit_digits", pretrained=True, global_pool="max").eval()
    assert torch.equal(largest.head.linear.weight, expected.head.linear.weight)


def test_weights_of_a_file(tmp_path):
    source = revzoo.create("rev_vit_digits", num_outputs=5)
    source.save_pretrained(tmp_path)
    loaded = timm.create_model("rev_vit_digits", num_classes=5, checkpoint_path=str(tmp_path / "model.safetensors"))
    assert torch.equal(loaded.head.linear.weight, source.head.linear.weight)
    same = revzoo.create("rev_vit_digits")
    same.save_pretrained(tmp_path / "same")
    overlay = {"file": str(tmp_path / "same" / "model.safetensors"), "mean": (0.3,), "std": (0.4,)}
    model = timm.create_model("rev_vit_digits", pretrained=True, num_classes=3, pretrained_cfg_overlay=overlay)
    assert torch.equal(model.fuse.norm.weight, same.fuse.norm.weight)
    assert torch.equal(model.stem.pos_embed, same.stem.pos_embed)
    assert model.num_classes == 3
    config = resolve_data_config({}, model=model)
    assert (config["mean"], config["std"]) == ((0.3,), (0.4,))


@pytest.mark.parametrize("name", ["rev_vit_digits", "revnext_digits"])
def test_features_only(name):
    net = timm.create_model(name, features_only=True)
    x = torch.randn(2, 1, 8, 8)
    features = net(x)
    assert [each.shape[1] for each in features] == net.feature_info.channels()
    assert [each.shape[2] for each in features] == [8 // reduction for reduction in net.feature_info.reduction()]
    assert len(features) == (3 if name == "rev_vit_digits" else len(net.model.stages))
    assert net.model.num_classes == 0
    first = timm.create_model(name, features_only=True, out_indices=(0, -1))
    assert len(first(x)) == 2
    sum(each.sum() for each in features).backward()
    assert all(parameter.grad is not None for parameter in net.model.stages.parameters())


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        ("rev_vit_s", {"drop_path": 0.1}, InputError, "'drop_path'"),
        ("rev_vit_s", {"global_pool": "avgmax"}, InputError, "Received: 'avgmax'"),
        ("rev_vit_s.tag", {}, InputError, "'tag'"),
        ("rev_vit_s", {"pretrained": True}, UnknownNameError, "Unknown shipped weights 'rev_vit_s'"),
        (
            "rev_vit_s",
            {"pretrained": True, "pretrained_cfg_overlay": {"hf_hub_id": "a/b"}},
            InputError,
            "Received: hf_hub_id. Use pretrained_cfg_overlay={'file': PATH}",
        ),
    ],
)
def test_what_a_spec_cannot_express_is_refused(name, arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        timm.create_model(name, **arguments)
