"""`revzoo.convert` and `revzoo.export` from end to end: files in, a folder out, and each refusal with its message."""

import json
from dataclasses import replace

import pytest
import torch
import torchvision
import transformers
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import revzoo
from revzoo.checkpoint import files
from revzoo.errors import CheckpointError, ConversionError, InputError, UnknownNameError
from revzoo.runtime import ReversibleChain
from revzoo.runtime.coupling import momentum
from revzoo.training.evaluate_checkpoint import evaluate_checkpoint
from tests.conversion.conftest import check_export


def convert_model(*arguments, **options):
    report = revzoo.convert(*arguments, **options)
    return report.model, report


@pytest.fixture
def vit():
    torch.manual_seed(0)
    network = VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=3, num_heads=4, num_classes=7)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return network.eval()


def change_file(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize("coupling", ["momentum", "dual_residual", "additive"])
def test_every_coupling_has_the_same_tensors(vit, coupling, tmp_path):
    report = revzoo.convert(vit, coupling=coupling, out=tmp_path / "rev")
    check_export(tmp_path / "rev", vit.state_dict())
    first, *others = report.comparisons
    assert len(others) == (0 if coupling == "additive" else 1)
    if coupling == "additive":
        assert first.largest_difference > 0.1
    else:
        assert first.largest_difference <= 1e-5
        assert others[0].cosine > {"momentum": 0.9999, "dual_residual": 0.999}[coupling]


def test_the_converted_network_is_the_function_it_says_and_trains_exactly(vit, rebuilds_exactly):
    model, report = convert_model(vit, kept_bits=3)
    x = torch.randn(4, 3, 16, 16)
    model.schedule = "store"
    with torch.no_grad():
        far = (model(x) - vit(x)).abs().max()
        model.set_coupling(kept_bits=8)
        near = (model(x) - vit(x)).abs().max()
    assert near < far / 8
    assert report.coupling == {"type": "momentum", "kept_bits": 3, "gain": 1.0, "residual": True}
    model.train()
    rebuilds_exactly(model, x)


def test_a_conversion_to_another_function_warns():
    """Class tokens of size 1e-6, as timm makes them, are 0 on the grid, and nothing else is read by the classifier."""
    fresh = VisionTransformer(
        img_size=16, patch_size=4, embed_dim=32, depth=3, num_heads=4, num_classes=7, no_embed_class=True, init_values=1e-6
    )
    with pytest.warns(UserWarning, match="VisionTransformer computes another function now: .* kept_bits=None, m=0.1"):
        revzoo.convert(fresh)
    assert revzoo.convert(fresh, kept_bits=None, m=0.1).comparisons[-1].cosine > 0.99


def test_weights_may_lie_elsewhere_and_outputs_may_be_others(vit, tmp_path):
    torch.save({"state_dict": {f"module.{key}": t for key, t in vit.state_dict().items()}}, tmp_path / "w.pth")
    model, _ = convert_model(vit, tmp_path / "w.pth", out=tmp_path / "rev")
    other = revzoo.create(tmp_path / "rev", num_outputs=3)
    assert other.num_outputs == 3
    assert torch.equal(other.stem.pos_embed, model.stem.pos_embed)
    assert next(revzoo.create(tmp_path / "rev", device="meta").parameters()).is_meta


def test_a_trained_checkpoint_goes_back_too(vit, tmp_path):
    model, _ = convert_model(vit, out=tmp_path / "rev")
    with torch.no_grad():
        model.head.linear.bias.fill_(3.0)
    files.save_weights(model, tmp_path / "tuned.safetensors")
    revzoo.export(tmp_path / "rev", tmp_path / "back.safetensors", tmp_path / "tuned.safetensors")
    assert (load_file(tmp_path / "back.safetensors")["head.bias"] == 3).all()
    with pytest.raises(ConversionError, match="is not a folder that revzoo convert wrote"):
        revzoo.export(tmp_path, tmp_path / "other.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(ConversionError, match=r"not for the network in .*stem.cls_token is missing"):
        revzoo.export(tmp_path / "rev", tmp_path / "other.safetensors", tmp_path / "a.safetensors")


def test_missing_and_extra_tensors_are_listed_and_refused_unless_strict_is_false(file, tmp_path):
    change_file(file, lambda t: [t.pop("norm.bias"), t.pop("blocks.1.norm1.weight"), t.update(more=torch.ones(2))])
    with pytest.raises(ConversionError, match=r"(?s)2 missing: blocks.1.norm1.weight, norm.bias\n  1 extra: more") as error:
        revzoo.convert("test_vit", file, out=tmp_path / "rev")
    assert "nothing was written" in str(error.value)
    assert "strict=False (--no-strict)" in str(error.value)
    assert not (tmp_path / "rev").exists()
    model, report = convert_model("test_vit", file, strict=False)
    assert {row.action: row.ours or row.theirs for row in report.rows if row.action != "renamed"} == {
        "initialised": ("fuse.norm.bias",), "dropped": ("more",),
    }  # fmt: skip
    assert report.counts["initialised"] == 2
    assert (model.fuse.norm.bias == 0).all()


def test_positions_of_another_resolution_are_interpolated_with_a_note(vit, tmp_path):
    torch.save(vit.state_dict(), tmp_path / "w.pth")
    larger = VisionTransformer(img_size=24, patch_size=4, embed_dim=32, depth=3, num_heads=4, num_classes=7)
    report = revzoo.convert(larger, tmp_path / "w.pth")
    assert [row.note for row in report.rows if row.action == "interpolated"] == ["from (1, 17, 32) to (1, 37, 32)"]
    assert "interpolated: pos_embed (from (1, 17, 32)" in str(report)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"coupling": "momentun"}, UnknownNameError, "Did you mean 'momentum'"),
        ({"kept_bits": 16}, InputError, "kept_bits is an integer from 0 to 15"),
        ({"kept_bits": None}, InputError, "momentum needs m. Received: kept_bits=None. Use for example m=0.1"),
        ({"kept_bits": None, "coupling": "dual_residual"}, InputError, "dual_residual needs beta.*beta=0.1, or kept_bits"),
        ({"m": 1}, InputError, "m is a number from 0 to below 1. Received: 1"),
        ({"m": 0.5, "coupling": "dual_residual"}, InputError, "dual_residual has no m. Received: m=0.5. Use beta=0.5 instead"),
        ({"beta": 0.5}, InputError, "momentum has no beta. Received: beta=0.5. Use m=0.5 instead"),
        ({"beta": 0.5, "coupling": "additive"}, InputError, "additive has no beta. Received: beta=0.5. Leave it out"),
        ({"out": "."}, InputError, "The current folder cannot be replaced .* Received: .. Name another"),
        ({"source": "vit_tny_patch16_224"}, ConversionError, "Did you mean 'vit_tiny_patch16_224'"),
        ({"source": "rev_vit_b"}, ConversionError, "rev_vit_b is reversible already. Give a published checkpoint"),
        ({"source": 3}, InputError, "A name, a folder or a module can be converted. Received: int"),
        ({"source": nn.Linear(2, 2)}, ConversionError, "Linear of torch cannot be converted. What can: timm ViT, timm Swin"),
        ({"source": nn.LazyLinear(2)}, ConversionError, "LazyLinear has parameters without a shape. Run it on a batch first"),
        (
            {"source": "test_convnext", "weights": "w"},
            ConversionError,
            r"test_convnext \(ConvNeXt of timm\) cannot be .* What can",
        ),
        ({"batch": torch.full((1, 3, 16, 16), torch.nan)}, ConversionError, "States .* reach nan on the batch. Do weights"),
        ({"weights": "nowhere.safetensors"}, CheckpointError, "No weights file at nowhere.safetensors"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message, vit, file):
    arguments = {"source": vit} | arguments
    if arguments.get("weights") == "w":
        arguments["weights"] = file
    with pytest.raises(error, match=message):
        revzoo.convert(**arguments)


def test_a_truncated_file_is_refused(file):
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="truncated"):
        revzoo.convert("test_vit", file)


def test_an_unreachable_hub_is_named(monkeypatch):
    """And what to fetch, from where; what cannot be converted is refused before."""

    def unreachable(*_):
        raise OSError("no route to host\nmore")

    monkeypatch.setattr(revzoo.conversion.original, "fetch_files", unreachable)
    for name in ("test_vit", "timm:test_vit"):
        with pytest.raises(ConversionError, match=r"test_vit cannot .* \(no route to host\).*/timm/test_vit.* --weights FILE"):
            revzoo.convert(name)
    for name, reason in (("timm:convnext_atto", "What can: timm ViT"), ("vit_dwee_patch16_reg1_gap_256", "register")):
        with pytest.raises(ConversionError, match=rf"{reason}.*revzoo\.reversible_\(module\).*revzoo\.plan"):
            revzoo.convert(name)
    with pytest.raises(UnknownNameError, match=r"Unknown timm model 'test_vitt'\. Did you mean 'test_vit'"):
        revzoo.convert("timm:test_vitt")
    with pytest.raises(ConversionError, match=r"'google/vit-base'\. Did you mean 'hf:google/vit-base'\?"):
        revzoo.convert("google/vit-base")


def test_the_default_start_keeps_a_small_part_of_what_the_ordinary_network_stores():
    """On a transformer with 192 channels, 197 tokens and batch 8; checkpointing every block keeps 0.22."""
    depth = 12
    with torch.device("meta"):
        batch = torch.randn(2, 8, 197, 192).unbind()
    model = revzoo.create("rev_vit_ti", overrides=[f"stages.0.depth={depth}"], device="meta")
    chain = ReversibleChain(model.steps, coupling=momentum(kept_bits=8, gain=1.0))
    stored = revzoo.measure_memory(Ordinary(model.steps), batch)
    memory = revzoo.measure_memory(chain, batch)
    kept = (2 * depth - 1) * batch[0].numel()  # a byte per element and step; the first step needs none
    assert memory.after_forward_bytes - 2 * batch[0].nbytes == pytest.approx(kept, abs=100)
    assert memory.activation_bytes / stored.activation_bytes <= 0.15


class Ordinary(nn.Module):
    """The same steps as a residual network."""

    def __init__(self, steps):
        super().__init__()
        self.steps = nn.ModuleList(steps)

    def forward(self, _, x):
        for step in self.steps:
            x = x + step(x)
        return x


def test_reports_are_plain_data(vit):
    report = revzoo.convert(vit)
    assert json.loads(json.dumps(report.to_dict()))["coupling"]["kept_bits"] == 8
    assert str(replace(report, notes=("a note",))).count("Note: a note") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"head.bias": t["head.bias"].int()}), "head.bias of torch.int32 instead of torch.float32"),
        (lambda t: t.update({"head.bias": t["head.bias"] / 0}), "Values that are not finite are in head.bias"),
        (lambda t: t.update({"pos_embed": torch.ones(2, 17, 32)}), r"pos_embed \(2, 17, 32\) instead of \(1, 17, 32\)"),
    ],
)
def test_tensors_of_another_kind_are_refused(change, message, vit, tmp_path):
    tensors = vit.state_dict()
    change(tensors)
    torch.save(tensors, tmp_path / "w.pth")
    with pytest.raises(ConversionError, match=message):
        revzoo.convert(vit, tmp_path / "w.pth")


def test_half_of_the_tensors_are_needed_without_strict(vit, tmp_path):
    tensors = list(vit.state_dict().items())
    torch.save(dict(tensors[:21]) | {"foo": torch.ones(1)}, tmp_path / "w.pth")
    with pytest.raises(ConversionError, match=r"Only 21 of 44 tensors match; at least half are needed. Is this check"):
        revzoo.convert(vit, tmp_path / "w.pth", strict=False)
    torch.save(dict(tensors[:22]), tmp_path / "w.pth")
    assert revzoo.convert(vit, tmp_path / "w.pth", strict=False).counts == {"renamed": 22, "initialised": 22}


def test_half_precision_is_widened_and_given_back(vit, tmp_path):
    report = revzoo.convert(vit.half(), out=tmp_path / "rev")
    assert "Tensors of float16 became float32." in report.notes
    assert report.comparisons[0].largest_difference <= 1e-5
    assert next(report.model.parameters()).dtype == torch.float32
    check_export(tmp_path / "rev", vit.state_dict())


def test_large_states_get_a_coarser_grid(vit, tmp_path, rebuilds_exactly):
    with torch.no_grad():
        vit.patch_embed.proj.bias.add_(300)
    report = revzoo.convert(vit, out=tmp_path / "rev")
    (note,) = report.notes
    assert "so the grid is 2^-13 instead of 2^-16" in note
    model = revzoo.create(tmp_path / "rev")
    assert model.coupling.fraction_bits == 13
    x = torch.randn(2, 3, 16, 16)
    rebuilds_exactly(model, x)


def test_hooks_of_the_original_are_not_explained_by_rounding(vit):
    vit.blocks[0].mlp.fc1.register_forward_hook(lambda module, inputs, out: 2 * out)
    with pytest.warns(UserWarning, match="VisionTransformer computes another function now"):
        first, _ = revzoo.convert(vit).comparisons
    assert first.largest_difference > 1e-3
    assert first.note.startswith("MORE than the order of sums explains")
    nn.utils.parametrizations.weight_norm(vit.blocks[1].mlp.fc1)
    with pytest.raises(ConversionError, match="has other parameters than a timm ViT: .*remove_parametrizations"):
        revzoo.convert(vit)


def test_wrong_folders_and_files_are_refused(vit, tmp_path):
    folder = tmp_path / "rev"
    revzoo.convert(vit, out=folder)
    with pytest.raises(InputError, match="is the converted network itself"):
        revzoo.export(folder, folder / "model.safetensors")
    with pytest.raises(InputError, match="exported as safetensors. Received: .*x.pth"):
        revzoo.export(folder, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match="does not say on which data to evaluate it"):
        evaluate_checkpoint(folder)
    with pytest.raises(InputError, match=r"Exact arithmetic \(exact=True, kept_bits\) needs float32 or float64"):
        revzoo.create(folder, dtype=torch.bfloat16)
    for out, message in ((folder / "spec.yaml" / "deeper", "No folder can be made at"), (folder, "is not an empty folder")):
        with pytest.raises(InputError, match=rf"{message}.* Name another"):
            revzoo.convert(vit, out=out)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="its model.safetensors is missing. Convert again"):
        revzoo.create(folder)
    (folder / "report.json").write_text('{"rows": [[1]]}')
    with pytest.raises(ConversionError, match="is not a folder that revzoo convert wrote"):
        revzoo.export(folder, tmp_path / "y.safetensors")


@pytest.mark.parametrize(("depth", "bits"), [(12, 8), (12, 0), pytest.param(48, 4, marks=pytest.mark.slow)])
def test_a_converted_network_is_rebuilt_bit_for_bit_at_any_depth(depth, bits, rebuilds_exactly):
    deep = VisionTransformer(img_size=8, patch_size=4, in_chans=1, embed_dim=8, depth=depth, num_heads=2, num_classes=3)
    with torch.no_grad():
        for block in deep.blocks:  # with b = 1 differences between states add up over the steps: keep them small
            block.attn.proj.weight.mul_(0.01)
            block.mlp.fc2.weight.mul_(0.01)
    model, x = revzoo.convert(deep, kept_bits=bits).model.train(), torch.randn(2, 1, 8, 8)
    rebuilds_exactly(model, x)


def test_another_number_of_outputs_makes_a_new_last_layer(vit, tmp_path):
    plain, report = convert_model(vit)
    model, report = convert_model(vit, num_outputs=3, out=tmp_path / "rev")
    initialised = [row for row in report.rows if row.action == "initialised"]
    assert [row.ours for row in initialised] == [("head.linear.weight",), ("head.linear.bias",)]
    (note,) = report.notes
    assert note == "The head pooled_linear has 3 outputs. Initialised at random: head.linear.weight, head.linear.bias."
    assert len(report.comparisons) == 2, "made with the original's own head"
    created = revzoo.create(tmp_path / "rev")
    assert created.num_outputs == created.spec.head.arguments["outputs"] == 3
    for key, tensor in created.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[key])
        assert key.startswith("head.linear") or torch.equal(tensor, plain.state_dict()[key])
    revzoo.export(tmp_path / "rev", tmp_path / "back.safetensors")
    assert {key: t.shape[0] for key, t in load_file(tmp_path / "back.safetensors").items() if "head" in key} == {
        "head.weight": 3, "head.bias": 3,
    }  # fmt: skip
    same, report = convert_model(vit, num_outputs=7)
    assert report.counts == {"renamed": 44}
    assert torch.equal(same.head.linear.weight, vit.head.weight)


def test_a_file_without_a_head_needs_a_number_of_outputs(vit, tmp_path):
    tensors = {key: tensor for key, tensor in vit.state_dict().items() if not key.startswith("head.")}
    torch.save(tensors, tmp_path / "w.pth")
    with pytest.raises(ConversionError, match=r"2 missing: head.weight, head.bias\nThe head is missing: .*--outputs N"):
        revzoo.convert(vit, tmp_path / "w.pth")
    model, report = convert_model(vit, tmp_path / "w.pth", num_outputs=3)
    assert (model.num_outputs, report.comparisons) == (3, ())
    torch.save(tensors | {"more": torch.ones(1)}, tmp_path / "more.pth")
    with pytest.raises(ConversionError, match=r"1 extra: more"):
        revzoo.convert(vit, tmp_path / "more.pth", num_outputs=3)
    with pytest.raises(InputError, match="Received: 0"):
        revzoo.convert(vit, num_outputs=0)


class Adapter(nn.Module):
    """A layer as peft wraps it."""

    __module__ = "peft.tuners.lora.layer"

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.lora_A = base_layer, nn.ModuleDict({"default": nn.Linear(128, 2)})


def test_adapters_of_peft_are_to_be_merged_first(vit, tmp_path):
    """In a module, in its file, and in a folder of adapters alone."""
    vit.blocks[0].mlp.fc2 = Adapter(vit.blocks[0].mlp.fc2)
    torch.save(vit.state_dict(), tmp_path / "w.pth")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for arguments, received in (
        ((vit,), "VisionTransformer"),
        (("test_vit", tmp_path / "w.pth"), "w.pth"),
        ((tmp_path / "adapter",), "adapter"),
    ):
        with pytest.raises(ConversionError, match=rf"Received: .*{received}\. Merge them first: .*merge_and_unload\(\)"):
            revzoo.convert(*arguments)


TEXTS = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9, "hidden_size": 8}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=1, reg_tokens=1, num_heads=4), "register"),
        (lambda: nn.Linear(2, 2), "What can: timm ViT"),
        (lambda: torchvision.models.resnet18(), r"ResNet of torchvision .*timm's ResNet can: .*list_models\(module='resnet'\)"),
        (
            lambda: transformers.BertForQuestionAnswering(transformers.BertConfig(**TEXTS, num_labels=5)),
            "run on the batch itself",
        ),
        (lambda: transformers.GPTNeoXModel(transformers.GPTNeoXConfig(**TEXTS)), "gpt_neox.* What can"),
        (lambda: transformers.BertForMultipleChoice(transformers.BertConfig(**TEXTS)), "architectures cannot be converted"),
    ],
    ids=["part", "class", "library", "does not run", "family", "task"],
)
def test_what_cannot_be_converted_can_become_reversible_in_place(make, message):
    with pytest.raises(ConversionError, match=rf"{message}.* reversible in place.* revzoo\.reversible_\(module\)"):
        revzoo.convert(make())
