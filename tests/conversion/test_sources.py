"""Every source through `revzoo.convert`: a tiny random original, the default coupling, and the way back."""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from timm.models.resnet import BasicBlock, ResNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForQuestionAnswering,
    ElectraConfig,
    ElectraForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForTokenClassification,
)

import revzoo
from revzoo.checkpoint.files import save_weights
from revzoo.conversion.sources import SOURCES
from tests.conversion.conftest import check_export

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 60,
    "max_position_embeddings": 40,
}
MVIT = MultiScaleVitCfg(depths=(1, 2), embed_dim=16, num_heads=2, stride_q=((1, 1), (2, 2)))


def resnet():
    original = ResNet(BasicBlock, (2, 2, 2, 2), num_classes=5, channels=(8, 8, 16, 16))
    original.pretrained_cfg = {"input_size": (3, 64, 64)}  # without it the images have 224x224 pixels
    return original


ORIGINALS = {
    "timm ViT": lambda: VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=5),
    "timm Swin": lambda: SwinTransformer(
        img_size=32, patch_size=2, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4, num_classes=5
    ),
    "timm MViTv2": lambda: MultiScaleVit(MVIT, img_size=32, num_classes=5),
    "timm ResNet": resnet,
    "Transformers BERT": lambda: BertForSequenceClassification(BertConfig(**SIZES)),
    "Transformers RoBERTa": lambda: RobertaForMaskedLM(RobertaConfig(**SIZES)),
    "Transformers ELECTRA": lambda: ElectraForPreTraining(ElectraConfig(**SIZES, embedding_size=16)),
    "Transformers DistilBERT": lambda: DistilBertForQuestionAnswering(
        DistilBertConfig(vocab_size=60, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=40)
    ),
    "Transformers GPT-2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=40)),
    "Transformers Llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)),
}


def test_every_ordinary_source_has_an_original_here():
    assert {source.name for source in SOURCES if not source.published} == set(ORIGINALS)


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_conversion_begins_as_the_original_and_comes_back(name, tmp_path, rebuilds_exactly):
    original = ORIGINALS[name]().eval()
    with torch.no_grad():
        for p in original.parameters():
            p.add_(0.02 * torch.randn_like(p))
    report = revzoo.convert(original, out=tmp_path / "rev")
    assert report.kind == name
    same, start = report.comparisons
    assert same.largest_difference <= 1e-5
    assert start.cosine >= 0.9999
    check_export(tmp_path / "rev", original.state_dict())  # tied tensors under all of their keys
    model = revzoo.create(tmp_path / "rev")
    rebuilds_exactly(model, model.example_input(2))


def test_the_exported_file_loads_as_it_is(tmp_path):
    """Tied tensors are in it under all of their keys, and what the converted network does not use is in it, too."""
    original, other = (BertForPreTraining(BertConfig(**SIZES)).eval() for _ in range(2))
    report = revzoo.convert(original.half(), out=tmp_path / "rev")
    assert report.counts["unused"] == 4
    tuned = revzoo.create(tmp_path / "rev")
    with torch.no_grad():
        tuned.stem.word_embeddings.weight.fill_(2.0)
    save_weights(tuned, tmp_path / "tuned.safetensors")
    expected = original.state_dict()
    for weights in (None, tmp_path / "tuned.safetensors"):
        revzoo.export(tmp_path / "rev", tmp_path / "back.safetensors", weights)
        other.load_state_dict(load_file(tmp_path / "back.safetensors"))
        tied = other.get_output_embeddings().weight
        assert weights is None or (tied == 2).all()
        changed = {key for key, tensor in other.state_dict().items() if not torch.equal(tensor, expected[key].float())}
        assert {other.state_dict()[key].data_ptr() for key in changed} == (set() if weights is None else {tied.data_ptr()})


@pytest.mark.parametrize(
    ("original", "config", "result", "fresh"),
    [
        (BertModel, BertConfig, "BertForSequenceClassification", ("out_proj",)),
        (BertForMaskedLM, BertConfig, "BertForSequenceClassification", ("dense", "out_proj")),
        (RobertaForTokenClassification, RobertaConfig, "RobertaForTokenClassification", ("linear",)),
    ],
)
def test_text_encoders_get_a_classifier(original, config, result, fresh, tmp_path):
    """As Transformers makes one: what the file has of it is kept, and the rest starts at random."""
    network = original(config(**SIZES)).eval()
    report = revzoo.convert(network, num_outputs=7, out=tmp_path / "rev")
    assert len(report.comparisons) == 2, "made with the original's own head"
    new = [f"head.{layer}.{name}" for layer in fresh for name in ("weight", "bias")]
    assert [key for row in report.rows if row.action == "initialised" for key in row.ours] == new
    assert report.notes[-1].endswith(f"has 7 outputs. Initialised at random: {', '.join(new)}.")
    assert revzoo.create(tmp_path / "rev").num_outputs == 7
    revzoo.export(tmp_path / "rev", tmp_path / "back.safetensors")
    classifier = getattr(transformers, result)(config(**SIZES, num_labels=7))
    classifier.load_state_dict(load_file(tmp_path / "back.safetensors"))
    expected = {key.removeprefix("bert."): tensor for key, tensor in network.state_dict().items()}
    own = {key.removeprefix("bert."): tensor for key, tensor in classifier.state_dict().items()}
    common = [key for key in own if key in expected and own[key].shape == expected[key].shape]
    assert len(common) >= len(own) - 4
    assert all(torch.equal(own[key], expected[key]) for key in common if not key.startswith("classifier"))
