"""Transformers' ELECTRA, discriminators and generators: BERT's blocks, embeddings of another width, and heads of its own."""

from revzoo.conversion.sources.transformers_base import TransformersEncoder
from revzoo.conversion.sources.transformers_bert import DROPOUTS, MODULES

ELECTRA = TransformersEncoder(
    name="Transformers ELECTRA",
    family="rev_bert",
    prefix="electra",
    classes={"electra": "Electra"},
    padding=0,
    blocks="encoder.layer",
    modules=MODULES,
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
        "ForSequenceClassification": {"head.dense": "classifier.dense", "head.out_proj": "classifier.out_proj"},
        "ForTokenClassification": {"head.linear": "classifier"},
        "ForQuestionAnswering": {"head.linear": "qa_outputs"},
    },
    lm_bias="generator_lm_head.bias",
    lm_decoder="generator_lm_head",
    unused={},
    dropouts=DROPOUTS,
    classifier={"input_dropout": "dropout", "act": "gelu"},
    lm_act="gelu",
)
