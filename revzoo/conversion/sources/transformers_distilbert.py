"""Transformers' DistilBERT: BERT without token types and pooler, under names of its own."""

from revzoo.conversion.sources.transformers_base import TransformersEncoder

DISTILBERT = TransformersEncoder(
    name="Transformers DistilBERT",
    family="rev_bert",
    prefix="distilbert",
    classes={"distilbert": "DistilBert"},
    padding=0,
    blocks="transformer.layer",
    modules={
        "f.self.query": "attention.q_lin",
        "f.self.key": "attention.k_lin",
        "f.self.value": "attention.v_lin",
        "f.output.dense": "attention.out_lin",
        "f.output.LayerNorm": "sa_layer_norm",
        "g.intermediate.dense": "ffn.lin1",
        "g.output.dense": "ffn.lin2",
        "g.output.LayerNorm": "output_layer_norm",
    },
    heads={
        "ForMaskedLM": {
            "head.dense": "vocab_transform",
            "head.layer_norm": "vocab_layer_norm",
            "head.bias": "vocab_projector.bias",
        },
        "ForSequenceClassification": {"head.dense": "pre_classifier", "head.out_proj": "classifier"},
    },
    lm_bias="vocab_projector.bias",
    lm_decoder="vocab_projector",
    dropouts={
        "ForSequenceClassification": "seq_classif_dropout",
        "ForTokenClassification": "dropout",
        "ForQuestionAnswering": "qa_dropout",
    },
    classifier={"act": "relu"},
    attention_output_dropout=False,
    settings={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    },
    defaults={"type_vocab_size": 0, "seq_classif_dropout": 0.2, "qa_dropout": 0.1, "dropout": 0.1},
)
