"""BERT and its kin of Transformers: tiny random originals, converted, give equal logits, and their weights come back."""

import pytest
import torch
import transformers
import yaml
from torch import Tensor, nn

import revzoo
from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.sources.transformers_base import TransformersEncoder
from revzoo.conversion.sources.transformers_bert import BERT, ELECTRA, ROBERTA
from revzoo.conversion.sources.transformers_distilbert import DISTILBERT
from revzoo.errors import ConversionError, InputError
from tests.conversion.conftest import FAITHFUL, measure_distance

SIZES = {
    "vocab_size": 50,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 18,
    "attn_implementation": "eager",
}
CONFIGS = {
    "Bert": transformers.BertConfig(**SIZES, layer_norm_eps=1e-12),
    "Roberta": transformers.RobertaConfig(**SIZES, layer_norm_eps=1e-5, type_vocab_size=1),
    "XLMRoberta": transformers.XLMRobertaConfig(**SIZES, layer_norm_eps=1e-5),
    "Camembert": transformers.CamembertConfig(**SIZES, layer_norm_eps=1e-5, type_vocab_size=1),
    "Electra": transformers.ElectraConfig(**SIZES, embedding_size=8),
    "DistilBert": transformers.DistilBertConfig(
        vocab_size=50, dim=12, n_layers=2, n_heads=3, hidden_dim=40, max_position_embeddings=18, attn_implementation="eager"
    ),
}
SOURCES = dict.fromkeys(("Roberta", "XLMRoberta", "Camembert"), ROBERTA) | {
    "Bert": BERT, "Electra": ELECTRA, "DistilBert": DISTILBERT,
}  # fmt: skip
CASES = [  # every task of BERT, and what is another one in its kin
    ("BertModel", {"add_pooling_layer": False}),
    ("BertForSequenceClassification", {"num_labels": 3, "hidden_act": "relu"}),
    ("BertForMaskedLM", {"hidden_act": "silu"}),
    ("BertForPreTraining", {}),
    ("BertForTokenClassification", {"num_labels": 5, "hidden_act": "gelu_new"}),
    ("BertForQuestionAnswering", {}),
    ("RobertaModel", {}),
    ("RobertaForMaskedLM", {"hidden_act": "relu", "pad_token_id": 3}),
    ("RobertaForSequenceClassification", {}),
    ("RobertaForTokenClassification", {"num_labels": 3, "hidden_act": "gelu_pytorch_tanh"}),
    ("XLMRobertaForSequenceClassification", {"num_labels": 1, "intermediate_size": 47}),
    ("CamembertForMaskedLM", {"hidden_act": "gelu_fast"}),
    ("ElectraModel", {"embedding_size": 12}),
    ("ElectraForPreTraining", {"hidden_act": "relu"}),
    ("ElectraForMaskedLM", {}),
    ("ElectraForSequenceClassification", {"num_labels": 3}),
    ("ElectraForTokenClassification", {}),
    ("DistilBertModel", {"sinusoidal_pos_embds": True, "activation": "gelu_new"}),
    ("DistilBertForMaskedLM", {"activation": "relu"}),
    ("DistilBertForSequenceClassification", {"num_labels": 3}),
    ("DistilBertForQuestionAnswering", {}),
]
IDS = ["-".join([name, *(f"{key}={value}" for key, value in options.items())]) for name, options in CASES]


def original(name: str, options: dict) -> tuple[nn.Module, dict, TransformersEncoder]:
    """Return a network of Transformers whose parameters are all random, its configuration and its source."""
    options = dict(options)
    stem = name.partition("For")[0].removesuffix("Model")
    base = CONFIGS[stem]
    without = {"add_pooling_layer": options.pop("add_pooling_layer")} if "add_pooling_layer" in options else {}
    defaults = {key: value for key, value in base.to_dict().items() if key not in ("id2label", "label2id")}
    config = type(base).from_dict(defaults | options)  # Transformers prefers id2label to num_labels
    network = getattr(transformers, name)(config, **without).eval()
    for key, p in network.named_parameters():
        nn.init.normal_(p, mean=float(key.lower().endswith(("layernorm.weight", "layer_norm.weight"))), std=0.3)
    facts = network.config.to_dict() | {"architectures": [name]}
    return network, SOURCES[stem].complete(facts, network.state_dict()), SOURCES[stem]


def batch(padding: int) -> tuple[Tensor, Tensor]:
    """Return three texts of 11, 7 and 2 tokens, and their mask."""
    ids = torch.randint(4, 50, (3, 11))
    ids[1, 7:] = ids[2, 2:] = padding
    return ids, ids != padding


def output(network: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    outputs = network(ids, attention_mask=mask.long())
    if "start_logits" in outputs:
        return torch.stack((outputs.start_logits, outputs.end_logits), -1)
    if type(network) is transformers.ElectraForPreTraining:
        return outputs.logits[..., None]
    for name in ("logits", "prediction_logits", "pooler_output", "last_hidden_state"):
        if getattr(outputs, name, None) is not None:
            return getattr(outputs, name)
    raise AssertionError(outputs.keys())


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
@torch.no_grad()
def test_a_faithful_coupling_gives_the_originals_outputs_and_the_weights_come_back(name, options, make_converter):
    network, facts, source = original(name, options)
    tensors = network.state_dict()
    converter = make_converter(source)
    model = converter.convert(facts, tensors)
    ids, mask = batch(facts["pad_token_id"])
    expected, outputs = output(network, ids, mask), model(ids, mask)
    assert outputs.shape[-1] == model.num_outputs
    assert measure_distance(outputs, expected) <= 1e-5
    assert measure_distance(expected[:1], expected[1:2]) > 1e-2, "the texts differ"
    assert torch.equal(model(ids), outputs), "the mask is derived from the ids"
    longest = torch.randint(4, 50, (1, model.spec.input.length))
    assert measure_distance(model(longest), output(network, longest, longest > 0)) <= 1e-5
    converter.check_way_back(facts, model, tensors, PRETRAINING if name == "BertForPreTraining" else ())
    completed = source.complete(facts | {"architectures": None}, tensors)
    assert completed["architectures"] == [name], "inferred from the keys"
    assert [other for other in (BERT, ROBERTA, ELECTRA, DISTILBERT) if other.handles(completed)] == [source]
    assert source.recognises(tensors)
    assert not source.recognises({"blocks.0.attn.qkv.weight": torch.ones(1)})


PRETRAINING = [f"{layer}.{name}" for layer in ("bert.pooler.dense", "cls.seq_relationship") for name in ("weight", "bias")]


@pytest.mark.parametrize(
    "name",
    [
        "BertForTokenClassification",
        "ElectraForPreTraining",
        "ElectraForSequenceClassification",
        "DistilBertForQuestionAnswering",
        "DistilBertForSequenceClassification",
    ],
)
@torch.no_grad()
def test_dropout_is_where_the_original_has_it(name, make_converter):
    """In training mode, with the same random numbers, the steps in a row are the original."""
    network, facts, source = original(name, {"attn_implementation": "sdpa", "num_labels": 2})
    model = make_converter(source).convert(facts, network.state_dict()).train()
    ids, mask = batch(0)
    results = []
    for run in (lambda: output(network.train(), ids, mask), lambda: model.head(run_steps(model, ids, mask), mask)):
        torch.manual_seed(1)
        results.append(run())
    assert measure_distance(results[1], results[0]) <= 1e-5
    assert measure_distance(results[0], output(network.eval(), ids, mask)) > 1e-2


def run_steps(model: revzoo.Model, ids: Tensor, mask: Tensor) -> Tensor:
    x = model.stem(ids)
    for step in model.steps:
        x = step(x, mask)
    return x


@torch.no_grad()
def test_all_couplings_have_the_same_tensors_and_another_function(make_converter):
    network, facts, source = original("BertForSequenceClassification", {})
    converter, tensors, (ids, mask) = make_converter(source), network.state_dict(), batch(0)
    faithful, additive, dual, kept = (
        converter.convert(facts, tensors, choice)
        for choice in (FAITHFUL, CouplingChoice("additive"), CouplingChoice("dual_residual", None, 0.0), CouplingChoice())
    )
    assert measure_distance(additive(ids, mask), faithful(ids, mask)) > 1e-3
    assert additive.spec.fuse.type == "mean"
    assert torch.equal(dual(ids, mask), faithful(ids, mask))
    assert (kept.coupling.kept_bits, kept.coupling.a) == (8, -kept.coupling.b)


GOLDEN_NAMES = [
    "BertForPreTraining", "BertForTokenClassification", "BertModel", "RobertaForMaskedLM", "RobertaForSequenceClassification",
    "ElectraForMaskedLM", "ElectraForPreTraining", "DistilBertForMaskedLM", "DistilBertForSequenceClassification",
]  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_keys_are_golden(name, make_converter):
    _, facts, source = original(name, {"n_layers" if name.startswith("Distil") else "num_hidden_layers": 1})
    make_converter(source).check_keys(facts, f"transformers_{name}")


def test_everything_is_read_from_the_configuration():
    options = {
        "hidden_dropout_prob": 0.2,
        "attention_probs_dropout_prob": 0.3,
        "classifier_dropout": 0.4,
        "initializer_range": 0.05,
    }
    _, facts, source = original("RobertaForSequenceClassification", {**options, "num_labels": 4})
    spec = source.make_spec(facts, CouplingChoice())
    assert spec["input"] == {"kind": "text", "length": 16, "vocabulary": 50, "padding": 1}
    assert (spec["stem"]["dropout"], spec["stem"]["eps"], spec["stem"]["types"]) == (0.2, 1e-5, 1)
    assert (spec["block"]["f"]["dropout"], spec["block"]["f"]["attention_dropout"], spec["block"]["f"]["heads"]) == (
        0.2,
        0.3,
        3,
    )
    assert spec["block"]["g"]["dropout"] == 0.2
    assert spec["head"] == {"type": "sequence_classification", "outputs": 4, "dropout": 0.4, "input_dropout": 0.4}
    assert spec["init"] == {"type": "normal", "std": 0.05}
    silent = {key: facts[key] for key in ("model_type", "num_hidden_layers", "vocab_size", "hidden_size")}
    silent |= {"num_attention_heads": 3, "intermediate_size": 40, "model_type": "bert"}
    spec = BERT.make_spec(silent, CouplingChoice())
    assert (spec["stem"]["eps"], spec["stem"]["types"], spec["stem"]["dropout"], spec["input"]["padding"]) == (1e-12, 2, 0.1, 0)
    assert spec["head"] == {"type": "text_features", "of": "text"}


@pytest.mark.parametrize(
    ("zoo", "config", "task"),
    [
        ("rev_bert_base", transformers.BertConfig(), "BertForSequenceClassification"),
        ("rev_bert_base_mlm", transformers.BertConfig(), "BertForMaskedLM"),
        (
            "rev_roberta_base_post",
            transformers.RobertaConfig(
                vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5, pad_token_id=1
            ),
            "RobertaForSequenceClassification",
        ),
    ],
)
def test_published_sizes_become_the_zoos_own_specs(zoo, config, task, tmp_path):
    source = BERT if task.startswith("Bert") else ROBERTA
    facts = config.to_dict() | {"architectures": [task]}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({"name": zoo, **source.make_spec(facts, CouplingChoice("additive"))}))
    assert revzoo.load_spec(tmp_path).digest == revzoo.load_spec(zoo).digest
    keys = {key for mapping in source.map_tensors(facts) for key in mapping.ours}
    assert revzoo.create(zoo, device="meta").state_dict().keys() - keys <= {"head.weight"}


def test_files_of_other_versions_and_other_models_are_understood():
    network, facts, source = original("BertForMaskedLM", {})
    new = network.state_dict()
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for key, t in new.items()
    }
    bare = {key.removeprefix("bert."): tensor for key, tensor in new.items()}
    decoder = {key.replace("predictions.bias", "predictions.decoder.bias"): tensor for key, tensor in new.items()}
    constants = {**new, "bert.embeddings.position_ids": torch.arange(18)[None], "bert.pooler.dense.bias": torch.ones(12)}
    untied = {key: tensor for key, tensor in new.items() if "decoder" not in key}  # as safetensors saves them
    for file in (new, old, bare, decoder, constants, untied):
        renamed = {key: t for key, t in source.canonicalise(facts, file)[0].items() if not source.ignores(key)}
        assert sorted(renamed) == sorted(new)
        assert all(torch.equal(renamed[key], tensor) for key, tensor in new.items())
    plain, facts, source = original("BertModel", {})
    prefixed = {f"bert.{key}": tensor for key, tensor in plain.state_dict().items()}
    assert sorted(source.canonicalise(facts, prefixed)[0]) == sorted(plain.state_dict())


def test_labels_are_counted_where_they_are_written():
    _, facts, source = original("BertForSequenceClassification", {})
    silent = {key: value for key, value in facts.items() if key not in ("num_labels", "id2label", "label2id")}
    assert source.make_spec(silent, CouplingChoice())["head"]["outputs"] == 2
    assert source.make_spec(silent | {"id2label": {"0": "a", "1": "b", "2": "c"}}, CouplingChoice())["head"]["outputs"] == 3
    assert source.complete(silent, {"classifier.weight": torch.ones(5, 12)})["num_labels"] == 5


def test_notes_say_what_is_left_out():
    notes = {}
    for name in ("BertForPreTraining", "BertModel", "RobertaModel"):
        network, facts, source = original(name, {})
        notes[name] = source.canonicalise(facts, network.state_dict())[1]
    assert [len(each) for each in notes.values()] == [3, 2, 1]
    assert notes["BertForPreTraining"][-1] == "The head for the next sentence is set aside for revzoo export."
    network, facts, source = original("BertForPreTraining", {})
    facts |= {"architectures": ["BertForMaskedLM"]}
    assert source.canonicalise(facts, network.state_dict())[1][-1] == "The head for the next sentence is dropped."
    network, facts, source = original("DistilBertModel", {"sinusoidal_pos_embds": True})
    assert source.canonicalise(facts, network.state_dict())[1][-1].startswith("The table of sinusoidal positions is trained")


@pytest.mark.parametrize(
    ("source", "change", "message"),
    [
        (BERT, {"architectures": ["BertLMHeadModel"]}, r"architectures cannot .* 'BertLMHeadModel'\. .*Did you mean"),
        (DISTILBERT, {"activation": "mish"}, r"activation cannot .*'mish'"),
        (BERT, {"is_decoder": True}, r"is_decoder cannot be converted\. Received: True\. Allowed: False\."),
        (BERT, {"position_embedding_type": "relative_key"}, r"position_embedding_type .*'relative_key'\. Allowed: 'absolute'"),
        (BERT, {"hidden_act": "gelu_10"}, r"hidden_act .*'gelu_10'\. Allowed: gelu, .* Did you mean 'gelu"),
        (BERT, {"architectures": ["BertForMaskedLM"], "tie_word_embeddings": False}, r"tie_word_embeddings .*Allowed: true"),
        (BERT, {"hidden_size": None, "vocab_size": "many"}, r"vocab_size, hidden_size cannot be converted"),
    ],
)
def test_what_cannot_be_expressed_is_named(source, change, message):
    stem = next(stem for stem, each in SOURCES.items() if each is source)
    facts = CONFIGS[stem].to_dict() | {"architectures": None} | change
    for ask in (lambda: source.make_spec(facts, CouplingChoice()), lambda: source.map_tensors(facts)):
        with pytest.raises(ConversionError, match=message):
            ask()


def test_untied_embeddings_are_refused_wherever_they_show():
    network, facts, source = original("RobertaForMaskedLM", {})
    tensors = dict(network.state_dict())
    for key in ("lm_head.decoder.weight", "lm_head.decoder.bias"):
        with pytest.raises(ConversionError, match=rf"{key} is not the copy of .* as RobertaModel\."):
            source.canonicalise(facts, tensors | {key: tensors[key] + 1})


def test_features_have_no_outputs_to_replace(make_converter):
    network, facts, source = original("BertModel", {})
    with pytest.raises(InputError, match=r"12 features .* Received: 5 outputs.*sequence_classification, outputs: 5"):
        make_converter(source).convert(facts, network.state_dict()).reset_head(5)
