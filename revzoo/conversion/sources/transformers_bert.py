"""Transformers' BERT and RoBERTa, and those whose networks are the same: XLM-RoBERTa, CamemBERT."""

from revzoo.conversion.sources.transformers_base import Task, TransformersEncoder

_ATTENTION = ("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm")
MODULES = {
    **{f"f.{name}": f"attention.{name}" for name in _ATTENTION},
    **{f"g.{name}": name for name in ("intermediate.dense", "output.dense", "output.LayerNorm")},
}
DROPOUTS: dict[Task, str] = {
    "ForSequenceClassification": "classifier_dropout",
    "ForTokenClassification": "classifier_dropout",
}

_BERT_LM = {
    "head.dense": "cls.predictions.transform.dense",
    "head.layer_norm": "cls.predictions.transform.LayerNorm",
    "head.bias": "cls.predictions.bias",
}

BERT = TransformersEncoder(
    name="Transformers BERT",
    family="rev_bert",
    prefix="bert",
    classes={"bert": "Bert"},
    padding=0,
    blocks="encoder.layer",
    modules=MODULES,
    heads={
        "ForPreTraining": _BERT_LM,
        "ForMaskedLM": _BERT_LM,
        "ForSequenceClassification": {"head.dense": "bert.pooler.dense", "head.out_proj": "classifier"},
        "ForTokenClassification": {"head.linear": "classifier"},
        "ForQuestionAnswering": {"head.linear": "qa_outputs"},
    },
    lm_bias="cls.predictions.bias",
    lm_decoder="cls.predictions.decoder",
    unused={"ForPreTraining": ("bert.pooler.dense", "cls.seq_relationship")},
    dropouts=DROPOUTS,
    classifier={},
    has_pooler=True,
)
ROBERTA = TransformersEncoder(
    name="Transformers RoBERTa",
    family="rev_roberta",
    prefix="roberta",
    classes={"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"},
    padding=1,
    blocks="encoder.layer",
    modules=MODULES,
    heads={
        "ForMaskedLM": {"head.dense": "lm_head.dense", "head.layer_norm": "lm_head.layer_norm", "head.bias": "lm_head.bias"},
        "ForSequenceClassification": {"head.dense": "classifier.dense", "head.out_proj": "classifier.out_proj"},
        "ForTokenClassification": {"head.linear": "classifier"},
        "ForQuestionAnswering": {"head.linear": "qa_outputs"},
    },
    lm_bias="lm_head.bias",
    lm_decoder="lm_head.decoder",
    unused={},
    dropouts=DROPOUTS,
    classifier={"input_dropout": "dropout"},
    counts_after_padding=True,
    has_pooler=True,
    lm_act="gelu",
)
