"""BERT and RoBERTa of Transformers, whose sub-blocks are normed behind: f and g are whole sub-blocks.

A configuration as a mapping (config.json, or `model.config.to_dict()`) tells the architecture; `add_pooling_layer: false`,
which Transformers leaves out of it, says that a plain model has no pooler. Transformers itself is not imported.

Differs from the original in what cannot be given to it: all tokens are of type 0 (the table of types is kept whole), positions
are counted, and without an attention mask padding is not attended to.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from revzoo.conversion.mapping import Entry, module, renamed
from revzoo.conversion.sources.base import Choice, Tensors
from revzoo.conversion.sources.timm_modules import ratio
from revzoo.errors import ConversionError, did_you_mean, listing

Task = Literal["Model", "ForSequenceClassification", "ForMaskedLM"]
Config = Mapping[str, Any]

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"}
_DEFAULTS = {  # what Transformers' configurations assume where a file is silent
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
}
_ORDINARY = {  # what a configuration must say, where it says anything
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "position_embedding_type": ("absolute", None),
    "pruned_heads": ({}, None),
}
_UNUSED = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.dense.weight", "pooler.dense.bias")


@dataclass(frozen=True)
class TransformersEncoder:
    """One of the two families; `BERT` and `ROBERTA` are the sources.

    Args:
        name: as the report says it.
        family: of the spec.
        prefix: in front of the encoder's keys in a model with a head.
        classes: stems of the names of Transformers' classes, by model_type.
        padding: the id that fills up texts, where the configuration is silent.
        lm: prefixes of the masked language model's dense layer, norm and bias, and of its last layer.
    """

    name: str
    family: str
    prefix: str
    classes: Mapping[str, str]
    padding: int
    lm: tuple[str, str, str, str]
    published: ClassVar[bool] = False  # ordinary networks, not reversible ones

    def fits(self, original: Any) -> bool:
        """Return whether this is a configuration of the family."""
        return isinstance(original, Mapping) and original.get("model_type") in self.classes

    def recognises(self, tensors: Tensors) -> bool:
        """Return whether a file's keys are of an encoder such as these."""
        return any(key.removeprefix(f"{self.prefix}.").startswith("encoder.layer.") for key in tensors)

    def completed(self, original: Config, tensors: Tensors) -> dict[str, Any]:
        """Return the configuration with what a file's keys show and it leaves out: the class, the pooler, the labels.

        Raises: ConversionError: no class is named, and the keys are of none that is converted.
        """
        names = {key.removeprefix(f"{self.prefix}.") for key in tensors}
        found = dict(original)
        if not found.get("architectures"):
            if any(name.startswith(self.lm[0]) for name in names):
                task: Task = "ForMaskedLM"
            elif not any(name.startswith("classifier.") for name in names):
                task = "Model"
            elif "classifier.dense.weight" in names or "pooler.dense.weight" in names:
                task = "ForSequenceClassification"
            else:
                classifier = listing(sorted(name for name in names if name.startswith("classifier.")))
                raise ConversionError(
                    "The configuration names no class, and the weights have a classifier of an unknown kind. Received: "
                    f'{classifier}. Write "architectures" into config.json.'
                )
            found["architectures"] = [self.classes[original["model_type"]] + task]
        if names:
            found.setdefault("add_pooling_layer", "pooler.dense.weight" in names)
        for key in ("classifier.weight", "classifier.out_proj.weight"):
            if key in tensors and "num_labels" not in found and not found.get("id2label"):
                found["num_labels"] = len(tensors[key])
        return found

    def spec(self, original: Config, choice: Choice) -> dict[str, Any]:
        """Return the converted network's spec: post-norm sub-blocks as f and g, and no norm behind the last.

        Raises: ConversionError: a class, an activation or a setting that cannot be expressed.
        """
        config, task = self._checked(original)
        width, eps, dropout = config["hidden_size"], config["layer_norm_eps"], config["hidden_dropout_prob"]
        length, padding = config["max_position_embeddings"], config["pad_token_id"]
        roberta, last = self.family == "rev_roberta", config["classifier_dropout"]
        last = dropout if last is None else last
        if roberta:
            length -= padding + 1  # the rows of padding, and of what is in front of it, are no positions
        heads = {
            "Model": {"type": "text_features", "of": "text" if config["add_pooling_layer"] else "tokens"},
            "ForMaskedLM": {"type": "masked_lm", "act": "gelu" if roberta else config["hidden_act"], "eps": eps},
            "ForSequenceClassification": {
                "type": "sequence_classification",
                "outputs": _labels(original),
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
                "coupling": choice.part(residual=False),
                "f": {"type": "self_attention", **attention, **sub_block},
                "g": {
                    "type": "feed_forward",
                    "ratio": ratio(config["intermediate_size"], width),
                    "act": config["hidden_act"],
                    **sub_block,
                },
            },
            "stages": [{"depth": config["num_hidden_layers"], "width": width}],
            "fuse": {"type": choice.fuse, "norm": "none"},
            "head": heads[task],
            "init": {"type": "normal", "std": config["initializer_range"]},
        }

    def entries(self, original: Config) -> list[Entry]:
        """Return where every tensor goes; `head.weight` of a masked language model is the table of embeddings."""
        config, task = self._checked(original)
        return [*self._encoder(config, "" if task == "Model" else f"{self.prefix}."), *self._head(config, task)]

    def _encoder(self, config: Config, at: str) -> Iterator[Entry]:
        for table in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
            yield renamed(f"stem.{table}.weight", f"{at}embeddings.{table}.weight")
        yield from module("stem.LayerNorm", f"{at}embeddings.LayerNorm")
        for i in range(config["num_hidden_layers"]):
            block, layer = f"stages.0.blocks.{i}", f"{at}encoder.layer.{i}"
            for name in ("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm"):
                yield from module(f"{block}.f.{name}", f"{layer}.attention.{name}")
            for name in ("intermediate.dense", "output.dense", "output.LayerNorm"):
                yield from module(f"{block}.g.{name}", f"{layer}.{name}")

    def _head(self, config: Config, task: Task) -> Iterator[Entry]:
        if task == "Model":
            yield from module("head.dense", "pooler.dense") if config["add_pooling_layer"] else ()
        elif task == "ForMaskedLM":
            dense, norm, bias, _ = self.lm
            yield from module("head.dense", dense)
            yield from module("head.layer_norm", norm)
            yield renamed("head.bias", bias)
        elif self.family == "rev_bert":
            yield from module("head.dense", "bert.pooler.dense")
            yield from module("head.out_proj", "classifier")
        else:
            yield from module("head.dense", "classifier.dense")
            yield from module("head.out_proj", "classifier.out_proj")

    def ignored(self, key: str) -> bool:
        """Return whether a key is a constant, a copy of the tied tensors, or a head that is not used.

        Those are a pooler in front of which another head stands, and BERT's head for the next sentence.
        """
        bare = key.removeprefix(f"{self.prefix}.")
        return bare in _UNUSED or bare.startswith((f"{self.lm[3]}.", "cls.seq_relationship."))

    def resized(self, key: str, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return None: positions of a text are not interpolated."""
        return None

    def canonical(self, original: Config, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors under the names that `entries` has, whatever model and version wrote it, and notes.

        The notes say what of the original the converted network leaves out, or cannot be given.

        Raises: ConversionError: the masked language model's last layer is not tied to the table of embeddings.
        """
        config, task = self._checked(original)
        found: dict[str, Tensor] = {}
        for old, tensor in tensors.items():
            key = old
            for ours, theirs in (("weight", "gamma"), ("bias", "beta")):
                if key.endswith(f"LayerNorm.{theirs}"):
                    key = key.removesuffix(theirs) + ours
            key = key.removeprefix(f"{self.prefix}.")
            if task != "Model" and key.partition(".")[0] in ("embeddings", "encoder", "pooler"):
                key = f"{self.prefix}.{key}"
            found[key] = tensor
        if task == "ForMaskedLM":
            *_, bias, decoder = self.lm
            plain = f"{self.classes[original['model_type']]}Model"
            if f"{decoder}.bias" in found:
                found.setdefault(bias, found[f"{decoder}.bias"])
            tied = {f"{decoder}.weight": f"{self.prefix}.embeddings.word_embeddings.weight", f"{decoder}.bias": bias}
            for copy, first in tied.items():
                if {copy, first} <= found.keys() and not _same(found[copy], found[first]):
                    raise ConversionError(
                        f"{copy} is not the copy of {first} that it must be: these embeddings are untied, which the head "
                        f"masked_lm cannot express. Convert the model without its head, as {plain}."
                    )
        notes = ["Without an attention mask, ids of padding are not attended to; Transformers attends to them."]
        if config["type_vocab_size"] > 1:
            notes.append("All tokens are of type 0: the table of types is kept whole, but a second text's row is not used.")
        if any(key.startswith("cls.seq_relationship.") for key in found):
            notes.append("The head for the next sentence is dropped.")
        return found, notes

    def _checked(self, original: Config) -> tuple[dict[str, Any], Task]:
        """Return the configuration with every default written, and what the class is for, or raise ConversionError."""
        if not self.fits(original):
            raise self._refusal("model_type", original.get("model_type"), listing(sorted(self.classes)))
        if absent := [key for key in _SIZES if not isinstance(original.get(key), int)]:
            raise self._refusal(listing(absent), "none", "integers in the configuration")
        found = {key: original.get(key, default) for key, default in _DEFAULTS.items()} | {k: original[k] for k in _SIZES}
        found["pad_token_id"] = original.get("pad_token_id", self.padding)
        found["add_pooling_layer"] = original.get("add_pooling_layer", True)
        for key, allowed in _ORDINARY.items():
            if original.get(key) not in allowed:
                raise self._refusal(key, original[key], f"{allowed[0]!r}")
        if self.family == "rev_roberta" and found["pad_token_id"] is None:
            raise self._refusal("pad_token_id", None, "an id, behind which positions are counted")
        act = found["hidden_act"]
        if act not in _ACTIVATIONS:
            raise self._refusal("hidden_act", act, f"{listing(sorted(_ACTIVATIONS))}.{did_you_mean(str(act), _ACTIVATIONS)}")
        found["hidden_act"] = _ACTIVATIONS[act]
        task = self._task(original)
        if task == "ForMaskedLM" and original.get("tie_word_embeddings", True) is False:
            raise self._refusal("tie_word_embeddings", False, "true, with the head masked_lm")
        return found, task

    def _task(self, original: Config) -> Task:
        stem = self.classes[original["model_type"]]
        tasks: dict[str, Task] = {
            f"{stem}Model": "Model",
            f"{stem}ForSequenceClassification": "ForSequenceClassification",
            f"{stem}ForMaskedLM": "ForMaskedLM",
        }
        if self.family == "rev_bert":
            tasks["BertForPreTraining"] = "ForMaskedLM"
        name = (original.get("architectures") or [f"{stem}Model"])[0]
        if name not in tasks:
            raise self._refusal("architectures", name, f"{listing(sorted(tasks))}.{did_you_mean(str(name), tasks)}")
        return tasks[name]

    def _refusal(self, key: str, found: object, allowed: str) -> ConversionError:
        return ConversionError(f"{self.name}: {key} cannot be converted. Received: {found!r}. Allowed: {allowed.rstrip('.')}.")


def _labels(config: Config) -> int:
    """Return the number of classes, which a file has as a table of names unless there are two."""
    return int(config.get("num_labels") or len(config.get("id2label") or "ab"))


def _same(left: Tensor, right: Tensor) -> bool:
    return left.is_meta or right.is_meta or (left.shape == right.shape and torch.equal(left, right))


BERT = TransformersEncoder(
    name="Transformers BERT",
    family="rev_bert",
    prefix="bert",
    classes={"bert": "Bert"},
    padding=0,
    lm=(
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
    lm=("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder"),
)
