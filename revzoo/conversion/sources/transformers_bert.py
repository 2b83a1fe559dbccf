"""Transformers' BERT and RoBERTa, which are post-norm: f is the whole attention sub-block, g the whole MLP sub-block.

A description is the configuration as a mapping (config.json, or `model.config.to_dict()`). Transformers leaves one fact out of
it: for a plain model without pooler add `add_pooling_layer: false`. Transformers itself is not imported.

The converted network takes no token types and no positions: all tokens are of type 0 (the table of types is kept whole), and
positions are counted. Without an attention mask it does not attend to padding, while Transformers does.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.mapping import TensorMapping, rename, rename_module
from revzoo.conversion.sources.base import Source, Tensors, find_mlp_ratio
from revzoo.errors import ConversionError, did_you_mean, join_names

Task = Literal["Model", "ForSequenceClassification", "ForMaskedLM"]
Config = Mapping[str, Any]

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"}
_DEFAULTS = {  # assumed by Transformers for keys that a configuration lacks
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
}
_ALLOWED = {  # the only values that can be converted
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "position_embedding_type": ("absolute", None),
    "pruned_heads": ({}, None),
}
_UNUSED = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.dense.weight", "pooler.dense.bias")


@dataclass(frozen=True)
class TransformersEncoder(Source):
    """One of the two families, BERT or RoBERTa.

    Args:
        name: for reports and messages.
        family: of the converted network's spec.
        prefix: what the encoder's keys begin with in a model with a head.
        classes: what the names of Transformers' classes begin with, by model_type.
        padding: id of the padding token, if the configuration has none.
        lm_keys: prefixes of the masked language model's dense layer, norm and bias, and of its last layer.
    """

    name: str
    family: str
    prefix: str
    classes: Mapping[str, str]
    padding: int
    lm_keys: tuple[str, str, str, str]

    def handles(self, description: Any) -> bool:
        """Return whether this is a configuration of the family."""
        return isinstance(description, Mapping) and description.get("model_type") in self.classes

    def recognises(self, tensors: Tensors) -> bool:
        """Return whether a file's keys are those of such an encoder."""
        return any(key.removeprefix(f"{self.prefix}.").startswith("encoder.layer.") for key in tensors)

    def complete(self, description: Config, tensors: Tensors) -> dict[str, Any]:
        """Return the configuration with what it lacks and the tensors show: its class, its pooler, the number of labels.

        Raises: ConversionError: the configuration names no class, and the keys fit none that can be converted.
        """
        names = {key.removeprefix(f"{self.prefix}.") for key in tensors}
        completed = dict(description)
        if not completed.get("architectures"):
            if any(name.startswith(self.lm_keys[0]) for name in names):
                task: Task = "ForMaskedLM"
            elif not any(name.startswith("classifier.") for name in names):
                task = "Model"
            elif "classifier.dense.weight" in names or "pooler.dense.weight" in names:
                task = "ForSequenceClassification"
            else:
                classifier = join_names(sorted(name for name in names if name.startswith("classifier.")))
                raise ConversionError(
                    "The configuration names no class, and the weights have a classifier of an unknown kind. Received: "
                    f'{classifier}. Write "architectures" into config.json.'
                )
            completed["architectures"] = [self.classes[description["model_type"]] + task]
        if names:
            completed.setdefault("add_pooling_layer", "pooler.dense.weight" in names)
        for key in ("classifier.weight", "classifier.out_proj.weight"):
            if key in tensors and "num_labels" not in completed and not completed.get("id2label"):
                completed["num_labels"] = len(tensors[key])
        return completed

    def make_spec(self, description: Config, choice: CouplingChoice) -> dict[str, Any]:
        """Return the converted network's spec: f and g are post-norm sub-blocks, and no norm follows the last one.

        Raises: ConversionError: a class, an activation or a setting that a spec cannot express.
        """
        config, task = self._resolve(description)
        width, eps, dropout = config["hidden_size"], config["layer_norm_eps"], config["hidden_dropout_prob"]
        length, padding = config["max_position_embeddings"], config["pad_token_id"]
        roberta, last = self.family == "rev_roberta", config["classifier_dropout"]
        last = dropout if last is None else last
        if roberta:
            length -= padding + 1  # the first rows of the table, up to that of padding, belong to no position
        heads = {
            "Model": {"type": "text_features", "of": "text" if config["add_pooling_layer"] else "tokens"},
            "ForMaskedLM": {"type": "masked_lm", "act": "gelu" if roberta else config["hidden_act"], "eps": eps},
            "ForSequenceClassification": {
                "type": "sequence_classification",
                "outputs": _count_labels(description),
                "dropout": last,
                **({"input_dropout": last} if roberta else {}),
            },
        }
        sub_block = {"norm_position": "post", "eps": eps, "dropout": dropout}
        attention = {"heads": config["num_attention_heads"], "attention_dropout": config["attention_probs_dropout_prob"]}
        return {
            "family": self.family,
            "input": {"kind": "text", "length": length, "vocabulary": config["vocab_size"], "padding": padding},
            "stem": {
                "type": "token_embed",
                "width": width,
                "position": "after_padding" if roberta else "learned",
                "types": config["type_vocab_size"],
                "norm": "layer_norm",
                "eps": eps,
                "dropout": dropout,
            },
            "split": "duplicate",
            "block": {
                "coupling": choice.describe(residual=False),
                "f": {"type": "self_attention", **attention, **sub_block},
                "g": {
                    "type": "feed_forward",
                    "ratio": find_mlp_ratio(config["intermediate_size"], width),
                    "act": config["hidden_act"],
                    **sub_block,
                },
            },
            "stages": [{"depth": config["num_hidden_layers"], "width": width}],
            "fuse": {"type": choice.fuse, "norm": "none"},
            "head": heads[task],
            "init": {"type": "normal", "std": config["initializer_range"]},
        }

    def map_tensors(self, description: Config) -> list[TensorMapping]:
        """Return the mapping of every tensor; the masked language model's `head.weight` is the table of embeddings."""
        config, task = self._resolve(description)
        return [*self._map_encoder(config, "" if task == "Model" else f"{self.prefix}."), *self._map_head(config, task)]

    def _map_encoder(self, config: Config, at: str) -> Iterator[TensorMapping]:
        for table in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
            yield rename(f"stem.{table}.weight", f"{at}embeddings.{table}.weight")
        yield from rename_module("stem.LayerNorm", f"{at}embeddings.LayerNorm")
        for i in range(config["num_hidden_layers"]):
            block, layer = f"stages.0.blocks.{i}", f"{at}encoder.layer.{i}"
            for name in ("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm"):
                yield from rename_module(f"{block}.f.{name}", f"{layer}.attention.{name}")
            for name in ("intermediate.dense", "output.dense", "output.LayerNorm"):
                yield from rename_module(f"{block}.g.{name}", f"{layer}.{name}")

    def _map_head(self, config: Config, task: Task) -> Iterator[TensorMapping]:
        if task == "Model":
            yield from rename_module("head.dense", "pooler.dense") if config["add_pooling_layer"] else ()
        elif task == "ForMaskedLM":
            dense, norm, bias, _ = self.lm_keys
            yield from rename_module("head.dense", dense)
            yield from rename_module("head.layer_norm", norm)
            yield rename("head.bias", bias)
        elif self.family == "rev_bert":
            yield from rename_module("head.dense", "bert.pooler.dense")
            yield from rename_module("head.out_proj", "classifier")
        else:
            yield from rename_module("head.dense", "classifier.dense")
            yield from rename_module("head.out_proj", "classifier.out_proj")

    def ignores(self, key: str) -> bool:
        """Return whether a tensor is a constant, a copy of a tied tensor, or part of a head that the class does not use.

        Unused are BERT's head for the next sentence, and the pooler of a model whose head reads the tokens.
        """
        bare = key.removeprefix(f"{self.prefix}.")
        return bare in _UNUSED or bare.startswith((f"{self.lm_keys[3]}.", "cls.seq_relationship."))

    def canonicalise(self, description: Config, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors under the keys of the configured class, also if another class or an old version wrote it.

        The notes list what of the original the converted network leaves out.

        Raises: ConversionError: the masked language model's last layer is not tied to the table of embeddings.
        """
        config, task = self._resolve(description)
        renamed: dict[str, Tensor] = {}
        for old, tensor in tensors.items():
            key = old
            for ours, theirs in (("weight", "gamma"), ("bias", "beta")):
                if key.endswith(f"LayerNorm.{theirs}"):
                    key = key.removesuffix(theirs) + ours
            key = key.removeprefix(f"{self.prefix}.")
            if task != "Model" and key.partition(".")[0] in ("embeddings", "encoder", "pooler"):
                key = f"{self.prefix}.{key}"
            renamed[key] = tensor
        if task == "ForMaskedLM":
            *_, bias, decoder = self.lm_keys
            plain = f"{self.classes[description['model_type']]}Model"
            if f"{decoder}.bias" in renamed:
                renamed.setdefault(bias, renamed[f"{decoder}.bias"])
            tied = {f"{decoder}.weight": f"{self.prefix}.embeddings.word_embeddings.weight", f"{decoder}.bias": bias}
            for copy, first in tied.items():
                if {copy, first} <= renamed.keys() and not _hold_same_values(renamed[copy], renamed[first]):
                    raise ConversionError(
                        f"{copy} is not the copy of {first} that it must be: the embeddings are untied, which the head "
                        f"masked_lm cannot express. Convert the model without its head, as {plain}."
                    )
        notes = ["Without an attention mask, padding is not attended to; Transformers attends to it."]
        if config["type_vocab_size"] > 1:
            notes.append("All tokens are of type 0: the table of types is kept whole, but only its first row is used.")
        if any(key.startswith("cls.seq_relationship.") for key in renamed):
            notes.append("The head for the next sentence is dropped.")
        return renamed, notes

    def _resolve(self, description: Config) -> tuple[dict[str, Any], Task]:
        """Return the configuration with all defaults filled in, and the task of its class, or raise ConversionError."""
        if not self.handles(description):
            raise self._make_error("model_type", description.get("model_type"), join_names(sorted(self.classes)))
        if absent := [key for key in _SIZES if not isinstance(description.get(key), int)]:
            raise self._make_error(join_names(absent), "none", "integers in the configuration")
        config = {key: description.get(key, default) for key, default in _DEFAULTS.items()} | {
            k: description[k] for k in _SIZES
        }
        config["pad_token_id"] = description.get("pad_token_id", self.padding)
        config["add_pooling_layer"] = description.get("add_pooling_layer", True)
        for key, allowed in _ALLOWED.items():
            if description.get(key) not in allowed:
                raise self._make_error(key, description[key], f"{allowed[0]!r}")
        if self.family == "rev_roberta" and config["pad_token_id"] is None:
            raise self._make_error("pad_token_id", None, "an id; positions are counted from it")
        act = config["hidden_act"]
        if act not in _ACTIVATIONS:
            raise self._make_error(
                "hidden_act", act, f"{join_names(sorted(_ACTIVATIONS))}.{did_you_mean(str(act), _ACTIVATIONS)}"
            )
        config["hidden_act"] = _ACTIVATIONS[act]
        task = self._find_task(description)
        if task == "ForMaskedLM" and description.get("tie_word_embeddings", True) is False:
            raise self._make_error("tie_word_embeddings", False, "true, with the head masked_lm")
        return config, task

    def _find_task(self, description: Config) -> Task:
        stem = self.classes[description["model_type"]]
        tasks: dict[str, Task] = {
            f"{stem}Model": "Model",
            f"{stem}ForSequenceClassification": "ForSequenceClassification",
            f"{stem}ForMaskedLM": "ForMaskedLM",
        }
        if self.family == "rev_bert":
            tasks["BertForPreTraining"] = "ForMaskedLM"
        name = (description.get("architectures") or [f"{stem}Model"])[0]
        if name not in tasks:
            raise self._make_error("architectures", name, f"{join_names(sorted(tasks))}.{did_you_mean(str(name), tasks)}")
        return tasks[name]

    def _make_error(self, key: str, received: object, allowed: str) -> ConversionError:
        return ConversionError(
            f"{self.name}: {key} cannot be converted. Received: {received!r}. Allowed: {allowed.rstrip('.')}."
        )


def _count_labels(config: Config) -> int:
    """Return the number of classes; a file lists their names in id2label, unless there are two."""
    return int(config.get("num_labels") or len(config.get("id2label") or "ab"))


def _hold_same_values(left: Tensor, right: Tensor) -> bool:
    return left.is_meta or right.is_meta or (left.shape == right.shape and torch.equal(left, right))


BERT = TransformersEncoder(
    name="Transformers BERT",
    family="rev_bert",
    prefix="bert",
    classes={"bert": "Bert"},
    padding=0,
    lm_keys=(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
        "cls.predictions.decoder",
    ),
)
ROBERTA = TransformersEncoder(
    name="Transformers RoBERTa",
    family="rev_roberta",
    prefix="roberta",
    classes={"roberta": "Roberta", "xlm-roberta": "XLMRoberta"},
    padding=1,
    lm_keys=("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder"),
)
