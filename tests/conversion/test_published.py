"""Published reversible networks keep their function: compared with their forward pass, written again over their state dict."""

import re
from math import prod
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from timm.layers import resample_abs_pos_embed
from torch import Tensor

import revzoo
from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.sources.mmpretrain import MMPretrain
from revzoo.conversion.sources.published import PublishedNetwork
from revzoo.conversion.sources.pyslowfast import PySlowFast
from revzoo.errors import ConversionError, UnknownNameError
from tests.conversion.conftest import check_export

GOLDEN = Path(__file__).parent / "golden"
ADDITIVE = CouplingChoice("additive")
V2 = {"relative_position": True, "residual_pooling": True}


class Layer:
    """One layer of the library: width, heads and, for Rev-MViT, strides; `wider` marks a transition to twice the channels."""

    def __init__(self, width, heads, kv=None, wider=False, fuse=None, v2=False):
        self.width, self.heads, self.kv, self.wider, self.fuse, self.v2 = width, heads, kv, wider, fuse, v2


VIT = [Layer(64, 4) for _ in range(6)]


def mvit(fuse, v2):
    return [Layer(32, 1, 2, v2=v2), Layer(64, 2, 1, wider=True, fuse=fuse, v2=v2), *[Layer(64, 2, 1, v2=v2) for _ in range(3)]]


def draw(source, name):
    """Return random tensors of a network under the library's names, as the mappings say: norms around 1, linear layers that
    keep the size of activations. Their names and shapes are checked by the forward passes here and the golden lists."""
    own, tensors = revzoo.create(name, device="meta").state_dict(), {}
    for mapping in source.map_tensors(name):
        for key, t in zip(mapping.theirs, mapping.to_theirs([own[key] for key in mapping.ours]), strict=True):
            scale = 0.3 if t.dim() == 1 or "pos" in key else prod(t.shape[1:]) ** -0.5
            tensors[key] = torch.randn(t.shape) * scale + bool(re.search(r"(norm\w*|ln\d)\.weight$", key))
    if isinstance(source, MMPretrain):
        tensors["backbone.cls_token"] = torch.randn(1, 1, 64)
        tensors["backbone.pos_embed"][:, 0] = 1  # as in the published files
    return tensors


def affine(w, name, x):
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def normalise(w, name, x):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)


def pool(w, at, name, x, side, stride):
    """Return (B, M, N, C / M) pooled on its grid by a kernel over one frame, and the new side; the same without a kernel."""
    if f"{at}.pool_{name}.weight" not in w:
        return x, side
    kernel = w[f"{at}.pool_{name}.weight"]
    frames = x.flatten(0, 1).transpose(1, 2).unflatten(2, (1, side, side))
    out = F.conv3d(frames, kernel, stride=(1, stride, stride), padding=(0, 1, 1), groups=len(kernel))
    tokens = out.flatten(2).transpose(1, 2).unflatten(0, x.shape[:2])
    return normalise(w, f"{at}.norm_{name}", tokens), out.shape[-1]


def distances(w, at, q, q_side, k_side):
    """Return what MViTv2 adds to the scores: each query's product with the embeddings of its distances along H and W."""
    i, j = torch.arange(q_side)[:, None], torch.arange(k_side)[None]
    steps = i * max(k_side / q_side, 1) - j * max(q_side / k_side, 1) + (k_side - 1) * max(q_side / k_side, 1)
    grid = q.unflatten(2, (q_side, q_side))  # (B, M, Y, X, C)
    rows = torch.einsum("bmyxc,yhc->bmyxh", grid, w[f"{at}.rel_pos_h"][steps.long()])
    columns = torch.einsum("bmyxc,xwc->bmyxw", grid, w[f"{at}.rel_pos_w"][steps.long()])
    return (rows[..., :, None] + columns[..., None, :]).flatten(4).flatten(2, 3)


def attention(w, at, x, layer, side):
    q, k, v = (affine(w, f"{at}.{name}", x).unflatten(2, (layer.heads, -1)).transpose(1, 2) for name in "qkv")
    q, q_side = pool(w, at, "q", q, side, 2 if layer.wider else 1)
    k, k_side = pool(w, at, "k", k, side, layer.kv)
    v, _ = pool(w, at, "v", v, side, layer.kv)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if layer.v2:
        scores = scores + distances(w, at, q, q_side, k_side)
    mixed = scores.softmax(-1) @ v
    if layer.v2:
        mixed = mixed + q
    return affine(w, f"{at}.proj", mixed.transpose(1, 2).flatten(2))


def g(w, at, x):
    return affine(w, f"{at}.mlp.fc2", F.gelu(affine(w, f"{at}.mlp.fc1", normalise(w, f"{at}.norm", x))))


def slowfast(w, layers, images, patch):
    """Return the logits of PySlowFast's reversible networks, in eval mode and without their softmax."""
    stride, padding = {2: (2, 0), 3: (1, 1)}[patch]
    embedded = F.conv2d(images, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=stride, padding=padding)
    x = embedded.flatten(2).transpose(1, 2) + w["pos_embed"]
    x1, x2, side = x, x, embedded.shape[-1]
    for i, layer in enumerate(layers):
        at = f"rev_backbone.layers.{i}"
        if not layer.wider:
            y1 = x1 + attention(w, f"{at}.F.attn", normalise(w, f"{at}.F.norm", x2), layer, side)
            x1, x2 = y1, x2 + g(w, f"{at}.G", y1)
            continue
        x = (x1 + x2) / 2 if layer.fuse == "mean" else torch.cat((x1, x2), -1)
        if layer.fuse == "mlp":
            name = f"{at}.pre_q_fuse.fuse_fn"
            x = x + affine(w, f"{name}.fc2", F.gelu(affine(w, f"{name}.fc1", x)))
        shortcut = affine(w, f"{at}.res_proj", x) if layer.fuse == "mean" else x
        shortcut, _ = pool(w, f"{at}.F.attn", "q", shortcut.unflatten(2, (layer.heads, -1)).transpose(1, 2), side, 2)
        x = shortcut.transpose(1, 2).flatten(2) + attention(w, f"{at}.F.attn", normalise(w, f"{at}.F.norm", x), layer, side)
        x1 = x2 = x + g(w, f"{at}.G", x)
        side //= 2
    return affine(w, "head.projection", normalise(w, "norm", torch.cat((x1, x2), -1)).mean(1))


def mmpretrain(w, images):
    """Return the logits of mmpretrain's Rev-ViT, which adds a class token and removes it before the layers."""
    patches = F.conv2d(images, w["backbone.patch_embed.projection.weight"], w["backbone.patch_embed.projection.bias"], stride=2)
    x = torch.cat((w["backbone.cls_token"].expand(len(images), -1, -1), patches.flatten(2).transpose(1, 2)), 1)
    x = (x + w["backbone.pos_embed"])[:, 1:]
    first, second = x, x
    for i in range(6):
        at = f"backbone.layers.{i}"
        qkv = affine(w, f"{at}.attn.qkv", normalise(w, f"{at}.ln1", second))
        q, k, v = qkv.unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        first = first + affine(w, f"{at}.attn.proj", mixed)
        hidden = F.gelu(affine(w, f"{at}.ffn.layers.0.0", normalise(w, f"{at}.ln2", first)))
        second = second + affine(w, f"{at}.ffn.layers.1", hidden)
    return affine(w, "head.fc", normalise(w, "backbone.ln1", torch.cat((first, second), -1)).mean(1))


def variant(folder, fuse, v2):
    """Write a small Rev-MViT with another transition, or MViTv2's attention, next to the zoo's own; return its file."""
    extra = V2 if v2 else {}
    spec = {
        "name": "variant",
        "base": "rev_mvit_digits",
        "block": {"f": {"type": "pooling_attention", "pool_query": v2, **extra}},
        "stages": [
            {"depth": 1, "width": 32, "f": {"heads": 1, "kv_stride": 2}},
            {
                "depth": 3,
                "width": 64,
                "f": {"heads": 2},
                "transition": {"type": "fuse_pool_split", "heads": 2, "fuse": fuse, "fuse_ratio": 2, **extra},
            },
        ],
        "expect": {},
    }
    (folder / "variant.yaml").write_text(yaml.safe_dump(spec))
    return folder / "variant.yaml"


@pytest.mark.parametrize(
    ("fuse", "v2"), [(None, False), ("mlp", False), ("concat", False), ("mean", False), ("mlp", True), ("mean", True)]
)
@torch.no_grad()
def test_pyslowfasts_networks_keep_their_function(fuse, v2, tmp_path, make_converter):
    source, images = PySlowFast(), torch.randn(3, 1, 8, 8)
    converter = make_converter(source)
    layers, patch = (VIT, 2) if fuse is None else (mvit(fuse, v2), 3)
    original = "rev_vit_digits" if fuse is None else variant(tmp_path, fuse, v2)
    weights = draw(source, original)
    model = converter.convert(original, weights, ADDITIVE)
    check(model(images), slowfast(weights, layers, images, patch))
    converter.check_way_back(original, model, weights)
    assert source.recognises(weights)
    assert source.complete(original, weights) == PublishedNetwork(revzoo.load_spec(original))
    assert not MMPretrain().recognises(weights)


@torch.no_grad()
def test_mmpretrains_network_keeps_its_function(make_converter):
    source, images = MMPretrain(), torch.randn(3, 1, 8, 8)
    converter, weights = make_converter(source), draw(source, "rev_vit_digits")
    model = converter.convert("rev_vit_digits", weights, ADDITIVE)
    check(model(images), mmpretrain(weights, images))
    converter.check_way_back("rev_vit_digits", model, weights)
    assert [key for key in weights if source.ignores(key)] == ["backbone.cls_token"]
    assert source.recognises(weights)
    note = "The first row of positions is dropped: it belongs to the class token, which reaches no layer."
    completed = PublishedNetwork(revzoo.load_spec("rev_vit_digits"), (note,))
    assert source.complete("rev_vit_digits", weights) == completed
    del weights["backbone.cls_token"]
    assert source.complete("rev_vit_digits", weights) == completed
    assert not PySlowFast().recognises(weights)


def test_an_exported_file_has_ones_for_the_class_tokens_position(tmp_path):
    weights = draw(MMPretrain(), "rev_vit_digits")
    torch.save(weights, tmp_path / "w.pth")
    report = revzoo.convert("rev_vit_digits", tmp_path / "w.pth", out=tmp_path / "rev")
    assert report.expect == "The published network: the same function with other keys."
    assert report.counts == {"renamed": len(weights) - 2, "shortened": 1, "dropped": 1}
    check_export(tmp_path / "rev", {key: tensor for key, tensor in weights.items() if key != "backbone.cls_token"})


def check(outputs: Tensor, expected: Tensor) -> None:
    assert outputs.shape == expected.shape == (3, 10)
    assert (expected[0] - expected[1]).abs().max() > 1e-2 * expected.abs().max(), "the images differ"
    assert (outputs - expected).abs().max() / expected.abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("source", "name", "parameters"),
    [
        (PySlowFast(), "rev_vit_s", 22_434_664),
        (PySlowFast(), "rev_mvit_b", 39_689_320),
        pytest.param(PySlowFast(), "rev_mvit_b_mean", 35_814_568, marks=pytest.mark.slow),
        (MMPretrain(), "rev_vit_s", 22_435_432 - 384),
    ],
)
def test_published_sizes_have_the_published_numbers_of_parameters(source, name, parameters):
    """mmpretrain's are those of its metafile, less the class token."""
    own = revzoo.create(name, device="meta").state_dict()
    theirs = {}
    for mapping in source.map_tensors(name):
        made = mapping.to_theirs([own[key] for key in mapping.ours])
        again = mapping.to_ours(list(made))
        assert [t.shape for t in again] == [own[key].shape for key in mapping.ours]
        theirs |= zip(mapping.theirs, made, strict=True)
    assert sum(t.numel() for t in theirs.values()) == parameters
    if name == "rev_mvit_b":
        assert theirs["rev_backbone.layers.0.F.attn.pool_k.weight"].shape == (96, 1, 1, 3, 3)
        assert {i for i in range(16) if f"rev_backbone.layers.{i}.pre_q_fuse.fuse_fn.fc1.weight" in theirs} == {1, 3, 14}


@pytest.mark.parametrize(
    ("source", "name"), [(PySlowFast(), "rev_vit_s"), (PySlowFast(), "rev_mvit_b"), (MMPretrain(), "rev_vit_s")]
)
def test_keys_are_golden(source, name, make_converter):
    make_converter(source).check_keys(name, f"{type(source).__name__.lower()}_{name}")


def test_positions_of_another_grid_are_interpolated():
    positions = torch.randn(1, 16, 8)
    larger = PySlowFast().resize("pos_embed", positions, (1, 36, 8))
    assert larger.shape == (1, 36, 8)
    with_first = MMPretrain().resize("backbone.pos_embed", torch.cat((torch.ones(1, 1, 8), positions), 1), (1, 37, 8))
    assert torch.equal(with_first[:, 1:], larger)
    assert with_first[:, 0].unique().tolist() == [1]
    distances = torch.arange(7.0)[:, None].expand(7, 4)
    wider = PySlowFast().resize("rev_backbone.layers.0.F.attn.rel_pos_h", distances, (15, 4))
    assert wider.shape == (15, 4)
    assert wider[7].tolist() == [3] * 4
    for key, shape in (("pos_embed", (1, 35, 8)), ("pos_embed", (1, 36, 9)), ("norm.weight", (1, 36, 8))):
        assert PySlowFast().resize(key, positions, shape) is None
    assert PySlowFast().resize("x.rel_pos_w", distances, (15, 5)) is None


def test_names_that_fit_and_those_that_do_not():
    assert PySlowFast().handles("rev_mvit_b")
    assert PySlowFast().handles("rev_vit_b")
    assert MMPretrain().handles("rev_vit_b")
    assert not any(map(MMPretrain().handles, ("rev_mvit_b", "no_such_model", {"model_type": "bert"})))
    assert not any(map(PySlowFast().handles, ("rev_swin_t", "vit_base_patch16_224", torch.nn.Identity())))


def test_what_would_not_be_the_published_network_is_refused(tmp_path):
    (tmp_path / "mean.yaml").write_text(yaml.safe_dump({"name": "mean", "base": "rev_vit_digits", "fuse": {"type": "mean"}}))
    with pytest.raises(ConversionError, match=r"whose fuse is concat\. Received: mean, whose fuse is mean"):
        PySlowFast().map_tensors(tmp_path / "mean.yaml")


def mm_without_token():
    """The layout since mmpretrain 1.0.0rc7: no class token, one position per patch; and the same network in the older one."""
    older = draw(MMPretrain(), "rev_vit_digits")
    newer = {key: tensor for key, tensor in older.items() if key != "backbone.cls_token"}
    return newer | {"backbone.pos_embed": older["backbone.pos_embed"][:, 1:]}, older


@pytest.mark.parametrize("prefix", ["", "backbone."])
@torch.no_grad()
def test_mmpretrains_layout_without_class_token(tmp_path, prefix):
    weights, older = mm_without_token()
    saved = {key if key.startswith("head") else key.replace("backbone.", prefix): tensor for key, tensor in weights.items()}
    torch.save(saved, tmp_path / "w.pth")
    report = revzoo.convert("rev_vit_digits", tmp_path / "w.pth", out=tmp_path / "rev")
    assert report.counts == {"renamed": len(weights)}
    assert report.notes == ("The original was not run: no library here has it, or it has no values.",)
    assert report.expect == "The published network: the same function with other keys."
    images = torch.randn(3, 1, 8, 8)
    check(report.model(images), mmpretrain(older, images))
    check_export(tmp_path / "rev", weights)


LARGER = {"name": "larger", "base": "rev_vit_digits", "input": {"size": [12, 12]}, "expect": {}}


@pytest.mark.parametrize("kind", ["pyslowfast", "mmpretrain", "mmpretrain since 1.0.0rc7"])
@torch.no_grad()
def test_other_classes_are_kept_and_other_resolutions_said(tmp_path, kind):
    weights = {
        "pyslowfast": draw(PySlowFast(), "rev_vit_digits"),
        "mmpretrain": draw(MMPretrain(), "rev_vit_digits"),
        "mmpretrain since 1.0.0rc7": mm_without_token()[0],
    }[kind]
    head = "head.projection" if kind == "pyslowfast" else "head.fc"
    weights |= {f"{head}.weight": torch.randn(7, 128), f"{head}.bias": torch.randn(7)}
    torch.save(weights, tmp_path / "w.pth")
    (tmp_path / "larger.yaml").write_text(yaml.safe_dump(LARGER))
    (tmp_path / "wider.yaml").write_text(yaml.safe_dump({**LARGER, "name": "wider", "input": {"size": [12, 16]}}))
    kept = revzoo.convert("rev_vit_digits", tmp_path / "w.pth")
    assert (kept.model.num_outputs, kept.expect) == (7, "The published network: the same function with other keys.")
    assert torch.equal(kept.model.head.linear.weight, weights[f"{head}.weight"])
    assert kept.notes[0] == "The head has 7 outputs, as in the file; rev_vit_digits has 10."
    wider = revzoo.convert(tmp_path / "wider.yaml", tmp_path / "w.pth")
    positions = weights["pos_embed" if kind == "pyslowfast" else "backbone.pos_embed"]
    expected = resample_abs_pos_embed(positions[:, -16:], [6, 8], num_prefix_tokens=0)  # without a class token's
    assert torch.equal(wider.model.stem.pos_embed, expected)
    larger = revzoo.convert(tmp_path / "larger.yaml", tmp_path / "w.pth")
    assert larger.model(torch.randn(1, 1, 12, 12)).shape == (1, 7)
    assert larger.model.spec.name == "larger"
    assert larger.counts["interpolated"] == 1
    assert larger.expect.startswith("The published network at another resolution: its positions were interpolated")


def test_missing_tensors_of_a_published_network_are_said(tmp_path):
    weights = draw(PySlowFast(), "rev_vit_digits")
    torch.save({key: tensor for key, tensor in weights.items() if not key.startswith("head.")}, tmp_path / "w.pth")
    report = revzoo.convert("rev_vit_digits", tmp_path / "w.pth", strict=False)
    assert report.expect.endswith("once what is missing is trained.")


def test_a_spec_file_needs_weights_and_has_to_exist(tmp_path):
    (tmp_path / "larger.yaml").write_text(yaml.safe_dump(LARGER))
    with pytest.raises(ConversionError, match=r"larger\.yaml is reversible already\. Give a published checkpoint of it"):
        revzoo.convert(tmp_path / "larger.yaml")
    with pytest.raises(UnknownNameError, match="no_such"):
        revzoo.convert(tmp_path / "no_such.yaml", tmp_path / "w.pth")
