"""Transformers' BERT and RoBERTa, and those whose blocks are the same: XLM-RoBERTa, CamemBERT, ELECTRA."""

from revzoo.conversion.sources.transformers_base import TransformersEncoder

_BERT_LM = {
    "head.dense": "cls.predictions.transform.dense",
    "head.layer_norm": "cls.predictions.transform.LayerNorm",
    "head.bias": "cls.predictions.bias",
}
_CLASSIFIER = {"head.dense": "classifier.dense", "head.out_proj": "classifier.out_proj"}

BERT = TransformersEncoder(
    name="Transformers BERT",
    family="rev_bert",
    prefix="bert",
    classes={"bert": "Bert"},
    padding=0,
    heads={
        "ForPreTraining": _BERT_LM,
        "ForMaskedLM": _BERT_LM,
        "ForSequenceClassification": {"head.dense": "bert.pooler.dense", "head.out_proj": "classifier"},
    },
    lm_bias="cls.predictions.bias",
    lm_decoder="cls.predictions.decoder",
    unused={"ForPreTraining": ("bert.pooler.dense", "cls.seq_relationship")},
    has_pooler=True,
)
ROBERTA = TransformersEncoder(
    name="Transformers RoBERTa",
    family="rev_roberta",
    prefix="roberta",
    classes={"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"},
    padding=1,
    heads={
        "ForMaskedLM": {"head.dense": "lm_head.dense", "head.layer_norm": "lm_head.layer_norm", "head.bias": "lm_head.bias"},
        "ForSequenceClassification": _CLASSIFIER,
    },
    lm_bias="lm_head.bias",
    lm_decoder="lm_head.decoder",
    classifier={"input_dropout": "dropout"},
    counts_after_padding=True,
    has_pooler=True,
    lm_act="gelu",
)
ELECTRA = TransformersEncoder(  # discriminators and generators, with embeddings of another width
    name="Transformers ELECTRA",
    family="rev_bert",
    prefix="electra",
    classes={"electra": "Electra"},
    padding=0,
    heads={
        "ForPreTraining": {
            "head.dense": "discriminator_predictions.dense",
            "head.linear": "discriminator_predictions.dense_prediction",
        },
        "ForMaskedLM": {
            "head.dense": "generator_predictions.dense",
            "head.layer_norm": "generator_predictions.LayerNorm",
            "head.bias": "generator_lm_head.bias",
        },
        "ForSequenceClassification": _CLASSIFIER,
    },
    lm_bias="generator_lm_head.bias",
    lm_decoder="generator_lm_head",
    classifier={"input_dropout": "dropout", "act": "gelu"},
    lm_act="gelu",
)
