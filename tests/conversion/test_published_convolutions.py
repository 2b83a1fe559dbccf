"""Published RevNets and i-RevNets keep their function: compared with their forward pass, written again over their tensors."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

import revzoo
from revzoo.conversion.sources.irevnet import IRevNet
from revzoo.conversion.sources.revnet import RevNet
from revzoo.errors import CheckpointError, ConversionError
from tests.conversion.conftest import check_export, measure_distance

SMALL = {  # a RevNet with all that the networks for ImageNet have
    "name": "small",
    "base": "revnet_56",
    "input": {"size": [48, 48]},
    "stem": {"width": 16},
    "stages": [
        {"depth": 1, "width": 16, "transition": {"type": "residual_pair", "layout": "bottleneck", "preactivate": False}},
        {"depth": 2, "width": 32, "transition": {"type": "residual_pair", "layout": "bottleneck", "stride": 2}},
    ],
    "head": {"outputs": 10},
    "expect": {},
}


def draw(source, name):
    """Return random tensors of a network under the library's names, without counts of batches."""
    own, tensors = revzoo.create(name, device="meta").state_dict(), {}
    for mapping in source.map_tensors(name):
        (key,), (t,) = mapping.theirs, mapping.to_theirs([own[mapping.ours[0]]])
        fan = t.shape[:-1] if isinstance(source, RevNet) else t.shape[1:]
        values = torch.randn(t.shape) * (0.3 if t.dim() == 1 else fan.numel() ** -0.5)
        if not key.endswith("num_batches_tracked"):
            tensors[key] = 1 + values.abs() if "var" in key or "gamma" in key else values
    return tensors


def norm(w, at, x, eps):
    names = ("ema_mean", "ema_var", "gamma", "beta") if eps == 1e-3 else ("running_mean", "running_var", "weight", "bias")
    separator = "/" if eps == 1e-3 else "."
    return F.relu(F.batch_norm(x, *(w[f"{at}{separator}{name}"] for name in names), eps=eps))


def pad(x, kernel, stride, value=0.0):
    """Pad as TensorFlow's SAME: what is odd goes below and to the right."""
    missing = max((-(-x.shape[-1] // stride) - 1) * stride + kernel - x.shape[-1], 0)
    return F.pad(x, (missing // 2, missing - missing // 2) * 2, value=value)


def convolve(w, at, x, stride=1):
    kernel = w[f"{at}/w"].permute(3, 2, 0, 1)
    return F.conv2d(pad(x, kernel.shape[-1], stride), kernel, stride=stride)


def residual(w, at, x, stride=1):
    for i in range(1, 4):
        if f"{at}/sub{i}/conv{i}/w" in w:
            x = norm(w, f"{at}/sub{i}/bn{i}", x, 1e-3) if f"{at}/sub{i}/bn{i}/gamma" in w else x
            x = convolve(w, f"{at}/sub{i}/conv{i}", x, stride if i == 1 else 1)
    return x


def shortcut(w, at, x, stride, width):
    if f"{at}/project/w" in w or "unit_1_0/f/sub3/conv3/w" in w:  # bottlenecks
        return convolve(w, f"{at}/project", x, stride) if f"{at}/project/w" in w else x
    more = (width - x.shape[1]) // 2
    return F.pad(F.avg_pool2d(x, stride), (0, 0, 0, 0, more, more))


def revnet_public(w, images, stem_stride):
    """Return the logits of revnet-public's graph."""
    x = norm(w, "init/init_bn", convolve(w, "init/init_conv", images, stem_stride), 1e-3)
    if stem_stride == 2:
        x = F.max_pool2d(pad(x, 3, 2, value=-torch.inf), 3, 2)
    x1, x2 = x.chunk(2, 1)
    for at in sorted({key.split("/")[0] for key in w if key.startswith("unit_") and "last" not in key}):
        stride = 2 if at.endswith("_0") and not at.startswith("unit_1") else 1
        change = residual(w, f"{at}/f", x2, stride)
        y1 = shortcut(w, f"{at}/x1_bottleneck", x1, stride, change.shape[1]) + change
        x1, x2 = y1, shortcut(w, f"{at}/x2_bottleneck", x2, stride, change.shape[1]) + residual(w, f"{at}/g", y1)
    pooled = norm(w, "unit_last/final_bn", torch.cat((x1, x2), 1), 1e-3).mean((2, 3))
    return pooled @ w["logit/w"] + w["logit/b"]


def fold(x):
    return torch.cat([x[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)], 1)


def pytorch_i_revnet(w, images, strides, width):
    """Return the logits of pytorch-i-revnet, whose zeros all stand behind the image."""
    x = fold(images)
    x1, x2 = F.pad(x, (0, 0, 0, 0, 0, width - x.shape[1])).chunk(2, 1)
    for i, stride in enumerate(strides):
        at, x = f"stack.{i}.bottleneck_block", x2
        for j in range(10 if i else 8):
            if f"{at}.{j}.running_mean" in w:
                x = norm(w, f"{at}.{j}", x, 1e-5)
            elif f"{at}.{j}.weight" in w:
                x = F.conv2d(x, w[f"{at}.{j}.weight"], stride=stride if j == 2 and i else 1, padding=1)
        x1, x2 = (x2, x1 + x) if stride == 1 else (fold(x2), fold(x1) + x)
    pooled = norm(w, "bn1", torch.cat((x1, x2), 1), 1e-5).mean((2, 3))
    return F.linear(pooled, w["linear.weight"], w["linear.bias"])


@pytest.fixture
def save_tensorflow(tmp_path, monkeypatch):
    """Return a function that saves a checkpoint of TensorFlow, which a stand-in for TensorFlow reads."""

    def save(variables):
        for suffix in ("index", "meta", "data-00000-of-00001"):
            (tmp_path / f"model.ckpt-600000.{suffix}").touch()
        reader = SimpleNamespace(get_variable_to_shape_map=lambda: variables, get_tensor=lambda name: variables[name])
        readers = {str(tmp_path / "model.ckpt-600000"): reader}
        tensorflow = SimpleNamespace(train=SimpleNamespace(load_checkpoint=readers.__getitem__))
        monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
        return tmp_path / "model.ckpt-600000"

    return save


def in_scope(weights):
    """Return the variables of a checkpoint as the authors' training saves them."""
    training = {"learn_rate": np.float32(0.1), "Model/global_step": np.float32(6e5), "Model/logit/b/Momentum": np.zeros(10)}
    return {f"Model/{key}": tensor.numpy() for key, tensor in weights.items()} | training


@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
@torch.no_grad()
def test_tensorflows_revnets_keep_their_function(kind, tmp_path, save_tensorflow):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    name, stride = ("revnet_digits", 1) if kind == "basic" else (tmp_path / "small.yaml", 2)
    weights = draw(RevNet(), name)
    path = save_tensorflow(in_scope(weights))
    report = revzoo.convert(name, path, out=tmp_path / "out")
    images = torch.randn(3, *((1, 8, 8) if kind == "basic" else (3, 48, 48)))
    assert measure_distance(report.model(images), revnet_public(weights, images, stride)) < 1e-5
    assert report.counts["dropped"] == 3
    back = report.model.state_dict()
    counts = {m.theirs[0]: back[m.ours[0]] for m in RevNet().map_tensors(name) if m.theirs[0].endswith("tracked")}
    check_export(tmp_path / "out", weights | counts)
    assert report.model.data_config.get("mean") == (None if kind == "basic" else (0.5, 0.5, 0.5))


@pytest.mark.parametrize("prefix", ["", "module."])
@torch.no_grad()
def test_i_revnets_keep_their_function(prefix, tmp_path):
    weights = draw(IRevNet(), "irevnet_digits")
    state = {f"{prefix}{key}": tensor for key, tensor in weights.items()}
    content = {"epoch": 9, "arch": "irevnet", "state_dict": state, "best_prec1": torch.tensor(74.0), "optimizer": {"state": {}}}
    torch.save(content, tmp_path / "best.pth.tar")
    report = revzoo.convert("irevnet_digits", tmp_path / "best.pth.tar")
    images = torch.randn(3, 1, 8, 8)
    expected = pytorch_i_revnet(weights, images, [1] * 4 + [2] + [1] * 3, 32)
    assert measure_distance(report.model(images), expected) < 1e-5
    assert report.notes[0].startswith("24 counts of batches (num_batches_tracked) are not in the file")


@pytest.mark.parametrize(("source", "name"), [(RevNet(), "revnet_digits"), (IRevNet(), "irevnet_digits")])
def test_keys_are_golden(source, name, make_converter):
    make_converter(source).check_keys(name, f"{type(source).__name__.lower()}_digits")


def test_the_released_i_revnet_has_the_authors_number_of_tensors():
    """Parameters, running statistics and counts of 300 norms; 300 convolutions; the classifier."""
    keys = [key for mapping in IRevNet().map_tensors("irevnet_300") for key in mapping.theirs]
    assert len({*keys}) == len(keys) == 300 * 5 + 300 + 2
    assert {"stack.0.bottleneck_block.7.weight", "stack.99.bottleneck_block.9.weight", "bn1.running_var"} <= {*keys}


def test_a_checkpoint_of_tensorflow_that_cannot_be_read(tmp_path, save_tensorflow, monkeypatch):
    weights = in_scope(draw(RevNet(), "revnet_digits"))
    path = save_tensorflow({key: value for key, value in weights.items() if "unit_2_1/g" not in key})
    with pytest.raises(ConversionError, match=r"12 missing: unit_2_1/g/sub1/bn1/gamma"):
        revzoo.convert("revnet_digits", f"{path}.meta")
    with pytest.raises(CheckpointError, match=r"Did you mean '\S+model\.ckpt-600000'\?"):
        revzoo.convert("revnet_digits", tmp_path / "model.ckpt-60000")
    (tmp_path / "model.ckpt-7.index").touch()
    with pytest.raises(CheckpointError, match=r"Copy all of its files again: model\.ckpt-7\.index and model\.ckpt-7\.data"):
        revzoo.convert("revnet_digits", tmp_path / "model.ckpt-7")
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(CheckpointError, match="pip install tensorflow"):
        revzoo.convert("revnet_digits", path)
