"""What Transformers' post-norm encoders share: f is the whole attention sub-block, g the whole MLP sub-block.

A description is the configuration as a mapping (config.json, or `model.config.to_dict()`). Transformers leaves one fact out of
it: for a plain model without pooler add `add_pooling_layer: false`. Transformers itself is not imported.

The converted network takes no token types and no positions: all tokens are of type 0 (the table of types is kept whole), and
positions are counted. Without an attention mask it does not attend to padding, while Transformers does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.mapping import TensorMapping, rename, rename_module
from revzoo.conversion.sources.base import Source, Tensors, find_mlp_ratio
from revzoo.errors import ConversionError, did_you_mean, join_names

# What a class is for: the end of its name. Where a file's keys may be those of several classes, the first of these counts.
Task = Literal[
    "ForPreTraining", "ForMaskedLM", "ForQuestionAnswering", "ForSequenceClassification", "ForTokenClassification", "Model"
]
Config = Mapping[str, Any]

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_DEFAULTS = {  # assumed by Transformers for keys that a configuration lacks
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
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
_ATTENTION = ("self.query", "self.key", "self.value", "output.dense", "output.LayerNorm")
_MODULES = {
    **{f"f.{name}": f"attention.{name}" for name in _ATTENTION},
    **{f"g.{name}": name for name in ("intermediate.dense", "output.dense", "output.LayerNorm")},
}
_CLASSIFIERS: tuple[Task, ...] = ("ForSequenceClassification", "ForTokenClassification")
_HEADS: dict[Task, dict[str, str]] = {
    "ForTokenClassification": {"head.linear": "classifier"},
    "ForQuestionAnswering": {"head.linear": "qa_outputs"},
}
_TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")
_UNUSED = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.dense.weight", "pooler.dense.bias")


@dataclass(frozen=True)
class TransformersEncoder(Source):
    """One family of encoders.

    "Their" keys and modules are without the family's prefix in `blocks` and `modules`, and whole everywhere else. What has a
    default here is as in BERT, if a family does not say otherwise.

    Args:
        name: for reports and messages.
        family: of the converted network's spec.
        prefix: what the encoder's keys begin with in a model with a head.
        classes: what the names of Transformers' classes begin with, by model_type.
        padding: id of the padding token, if the configuration has none.
        blocks: their list of blocks.
        modules: their modules of a block, by ours.
        heads: their modules of the head, by ours, for every task that can be converted, besides those that all name alike.
        lm_bias: their key of the masked language model's bias.
        lm_decoder: their last layer of it, whose weight is the table of embeddings.
        unused: their modules, by task, that the converted network has no place for and that `revzoo export` gives back.
        counts_after_padding: whether positions are counted from the id of padding.
        has_pooler: whether a plain model may have a pooler.
        lm_act: activation of the masked language model's head; None: that of the blocks.
        classifier: arguments of the head `sequence_classification` that differ from BERT's; the value "dropout" stands for the
            dropout of the configuration.
        dropouts: settings with the dropout before the last layer, by task; there is none for the tasks left out.
        attention_output_dropout: whether there is dropout after the attention's last layer.
        settings: their names of settings, by BERT's.
        defaults: of settings.
    """

    name: str
    family: str
    prefix: str
    classes: Mapping[str, str]
    padding: int
    heads: Mapping[Task, Mapping[str, str]]
    lm_bias: str
    lm_decoder: str
    blocks: str = "encoder.layer"
    modules: Mapping[str, str] = field(default_factory=lambda: _MODULES)
    dropouts: Mapping[Task, str] = field(default_factory=lambda: dict.fromkeys(_CLASSIFIERS, "classifier_dropout"))
    unused: Mapping[Task, Sequence[str]] = field(default_factory=dict)
    classifier: Mapping[str, str] = field(default_factory=dict)
    counts_after_padding: bool = False
    has_pooler: bool = False
    lm_act: str | None = None
    attention_output_dropout: bool = True
    settings: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", {**_HEADS, **self.heads})

    def handles(self, description: Any) -> bool:
        """Return whether this is a configuration of the family."""
        return isinstance(description, Mapping) and description.get("model_type") in self.classes

    def recognises(self, tensors: Tensors) -> bool:
        """Return whether a file's keys are those of such an encoder."""
        return any(key.removeprefix(f"{self.prefix}.").startswith(f"{self.blocks}.") for key in tensors)

    def complete(self, description: Config, tensors: Tensors) -> dict[str, Any]:
        """Return the configuration with what it lacks and the tensors show: its class, its pooler, the number of labels."""
        names = {key.removeprefix(f"{self.prefix}.") for key in tensors}
        completed = dict(description)
        if not completed.get("architectures"):
            present = (task for task in get_args(Task) if self._has_head(task, names))
            completed["architectures"] = [self.classes[description["model_type"]] + next(present, "Model")]
        if names:
            completed.setdefault("add_pooling_layer", "pooler.dense.weight" in names)
        for key in ("classifier.weight", "classifier.out_proj.weight", "qa_outputs.weight"):
            if key in tensors and "num_labels" not in completed and not completed.get("id2label"):
                completed["num_labels"] = len(tensors[key])
        return completed

    def _has_head(self, task: Task, names: set[str]) -> bool:
        modules = [*self.heads.get(task, {}).values(), *self.unused.get(task, ())]
        bare = [module.removeprefix(f"{self.prefix}.") for module in modules]
        return bool(bare) and all(module in names or f"{module}.weight" in names for module in bare)

    def classify(self, description: Config, outputs: int) -> dict[str, Any]:
        """Return the configuration with a classifier: of tokens if the class is for that, else of texts."""
        _, task = self._resolve(description)
        task = task if task == "ForTokenClassification" else "ForSequenceClassification"
        stem = self.classes[description["model_type"]]
        return {**description, "architectures": [f"{stem}{task}"], "num_labels": outputs, "id2label": None}

    def make_spec(self, description: Config, choice: CouplingChoice) -> dict[str, Any]:
        """Return the converted network's spec: f and g are post-norm sub-blocks, and no norm follows the last one.

        Raises: ConversionError: a class, an activation or a setting that a spec cannot express.
        """
        config, task = self._resolve(description)
        width, eps, dropout = config["hidden_size"], config["layer_norm_eps"], config["hidden_dropout_prob"]
        length, padding = config["max_position_embeddings"], config["pad_token_id"]
        if self.counts_after_padding:
            length -= padding + 1  # the first rows of the table, up to that of padding, belong to no position
        embedding = config["embedding_size"]
        sub_block = {"norm_position": "post", "eps": eps}
        attention = {"heads": config["num_attention_heads"], "attention_dropout": config["attention_probs_dropout_prob"]}
        return {
            "family": self.family,
            "input": {"kind": "text", "length": length, "vocabulary": config["vocab_size"], "padding": padding},
            "stem": {
                "type": "token_embed",
                "width": width,
                **({} if embedding == width else {"embedding_width": embedding}),
                "position": "after_padding" if self.counts_after_padding else "learned",
                "types": config["type_vocab_size"],
                "norm": "layer_norm",
                "eps": eps,
                "dropout": dropout,
            },
            "split": "duplicate",
            "block": {
                "coupling": choice.describe(residual=False),
                "f": {
                    "type": "self_attention",
                    **attention,
                    **sub_block,
                    "dropout": dropout if self.attention_output_dropout else 0.0,
                },
                "g": {
                    "type": "feed_forward",
                    "ratio": find_mlp_ratio(config["intermediate_size"], width),
                    "act": config["hidden_act"],
                    **sub_block,
                    "dropout": dropout,
                },
            },
            "stages": [{"depth": config["num_hidden_layers"], "width": width}],
            "fuse": {"type": choice.fuse, "norm": "none"},
            "head": self._describe_head(description, config, task),
            "init": {"type": "normal", "std": config["initializer_range"]},
        }

    def _describe_head(self, description: Config, config: Config, task: Task) -> dict[str, Any]:
        if task == "Model":
            return {"type": "text_features", "of": "text" if config["add_pooling_layer"] else "tokens"}
        if "head.bias" in self.heads[task]:
            return {"type": "masked_lm", "act": self.lm_act or config["hidden_act"], "eps": config["layer_norm_eps"]}
        rate = self._read(description, self.dropouts[task]) if task in self.dropouts else 0.0
        rate = config["hidden_dropout_prob"] if rate is None else rate
        outputs = 1 if task == "ForPreTraining" else _count_labels(description)
        if task == "ForSequenceClassification":
            own = {key: rate if value == "dropout" else value for key, value in self.classifier.items()}
            return {"type": "sequence_classification", "outputs": outputs, "dropout": rate, **own}
        act = {"act": config["hidden_act"]} if "head.dense" in self.heads[task] else {}
        return {"type": "token_linear", "outputs": outputs, "norm": "none", "dropout": rate, **act}

    def map_tensors(self, description: Config) -> list[TensorMapping]:
        """Return the mapping of every tensor; the masked language model's `head.weight` is the table of embeddings."""
        config, task = self._resolve(description)
        pooler = rename_module("head.dense", "pooler.dense") if task == "Model" and config["add_pooling_layer"] else ()
        return [*self._map_encoder(config, task), *pooler, *self._map_head(task)]

    def _map_encoder(self, config: Config, task: Task) -> Iterator[TensorMapping]:
        at = "" if task == "Model" else f"{self.prefix}."
        for table in _TABLES if config["type_vocab_size"] else _TABLES[:2]:
            key = f"{at}embeddings.{table}.weight"
            if table == _TABLES[0] and self._scores_ids(task):
                yield TensorMapping((f"stem.{table}.weight",), (key, f"{self.lm_decoder}.weight"), "tied")
            else:
                yield rename(f"stem.{table}.weight", key)
        yield from rename_module("stem.LayerNorm", f"{at}embeddings.LayerNorm")
        if config["embedding_size"] != config["hidden_size"]:
            yield from rename_module("stem.embeddings_project", f"{at}embeddings_project")
        for i in range(config["num_hidden_layers"]):
            for ours, theirs in self.modules.items():
                yield from rename_module(f"stages.0.blocks.{i}.{ours}", f"{at}{self.blocks}.{i}.{theirs}")

    def _map_head(self, task: Task) -> Iterator[TensorMapping]:
        for ours, theirs in self.heads.get(task, {}).items():
            if ours != "head.bias":
                yield from rename_module(ours, theirs)
            elif theirs == f"{self.lm_decoder}.bias":
                yield rename(ours, theirs)
            else:
                yield TensorMapping((ours,), (theirs, f"{self.lm_decoder}.bias"), "tied")
        for module in self.unused.get(task, ()):
            yield from (TensorMapping((), (f"{module}.{name}",), "unused") for name in ("weight", "bias"))

    def _scores_ids(self, task: Task) -> bool:
        """Return whether the head of a task scores the ids of the vocabulary, with the table of embeddings."""
        return "head.bias" in self.heads.get(task, {})

    def ignores(self, key: str) -> bool:
        """Return whether a tensor is a constant, or part of a head that the class does not use.

        The second are BERT's head for the next sentence, and the pooler of a model whose head reads the tokens.
        """
        bare = key.removeprefix(f"{self.prefix}.")
        return bare in _UNUSED or bare.startswith("cls.seq_relationship.")

    def canonicalise(self, description: Config, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors under the keys of the configured class, also if another class or an old version wrote it.

        The notes list what of the original the converted network leaves out.

        Raises: ConversionError: the masked language model's last layer is not tied to the table of embeddings.
        """
        config, task = self._resolve(description)
        renamed: dict[str, Tensor] = {}
        roots = ("embeddings", "embeddings_project", self.blocks.partition(".")[0], "pooler")
        for old, tensor in tensors.items():
            key = old
            for ours, theirs in (("weight", "gamma"), ("bias", "beta")):
                if key.endswith(f"LayerNorm.{theirs}"):
                    key = key.removesuffix(theirs) + ours
            key = key.removeprefix(f"{self.prefix}.")
            if task != "Model" and key.partition(".")[0] in roots:
                key = f"{self.prefix}.{key}"
            renamed[key] = tensor
        if self._scores_ids(task):
            self._add_tied_tensors(renamed, f"{self.classes[description['model_type']]}Model")
        notes = ["Without an attention mask, padding is not attended to; Transformers attends to it."]
        if config["type_vocab_size"] > 1:
            notes.append("All tokens are of type 0: the table of types is kept whole, but only its first row is used.")
        if description.get("sinusoidal_pos_embds"):
            notes.append("The table of sinusoidal positions is trained like any other; Transformers leaves it as it is.")
        if any(key.startswith("cls.seq_relationship.") for key in renamed):
            kept = "set aside for revzoo export" if self.unused.get(task) else "dropped"
            notes.append(f"The head for the next sentence is {kept}.")
        return renamed, notes

    def _add_tied_tensors(self, tensors: dict[str, Tensor], plain: str) -> None:
        """Add the copies of tied tensors that a file lacks; raise ConversionError if one that it has is no copy.

        Args:
            tensors: under canonical keys.
            plain: the class without a head, for messages.
        """
        decoder, table = self.lm_decoder, f"{self.prefix}.embeddings.word_embeddings.weight"
        if f"{decoder}.bias" in tensors:
            tensors.setdefault(self.lm_bias, tensors[f"{decoder}.bias"])
        for copy, first in ((f"{decoder}.weight", table), (f"{decoder}.bias", self.lm_bias)):
            if first in tensors and not hold_same_values(tensors.setdefault(copy, tensors[first]), tensors[first]):
                raise ConversionError(
                    f"{copy} is not the copy of {first} that it must be: the embeddings are untied, which the head "
                    f"masked_lm cannot express. Convert the model without its head, as {plain}."
                )

    def _resolve(self, description: Config) -> tuple[dict[str, Any], Task]:
        """Return the configuration under BERT's names, with all defaults, and the task of its class; or raise an error."""
        if absent := [self._name(key) for key in _SIZES if not isinstance(self._read(description, key), int)]:
            raise self.make_error(join_names(absent), "none", "integers in the configuration")
        config = {key: self._read(description, key) for key in (*_SIZES, *_DEFAULTS)}
        config["embedding_size"] = description.get("embedding_size", config["hidden_size"])
        config["pad_token_id"] = description.get("pad_token_id", self.padding)
        config["add_pooling_layer"] = self.has_pooler and description.get("add_pooling_layer", True)
        for key, allowed in _ALLOWED.items():
            if description.get(key) not in allowed:
                raise self.make_error(key, description[key], f"{allowed[0]!r}")
        if self.counts_after_padding and config["pad_token_id"] is None:
            raise self.make_error("pad_token_id", None, "an id; positions are counted from it")
        act = config["hidden_act"]
        if act not in ACTIVATIONS:
            allowed_acts = f"{join_names(sorted(ACTIVATIONS))}.{did_you_mean(str(act), ACTIVATIONS)}"
            raise self.make_error(self._name("hidden_act"), act, allowed_acts)
        config["hidden_act"] = ACTIVATIONS[act]
        task = self._find_task(description)
        if self._scores_ids(task) and description.get("tie_word_embeddings", True) is False:
            raise self.make_error("tie_word_embeddings", False, "true, with the head masked_lm")
        return config, task

    def _name(self, key: str) -> str:
        """Return the family's name of one of BERT's settings."""
        return self.settings.get(key, key)

    def _read(self, description: Config, key: str) -> Any:
        """Return the value of one of BERT's settings, by default that of Transformers."""
        return description.get(self._name(key), {**_DEFAULTS, **self.defaults}.get(key))

    def _find_task(self, description: Config) -> Task:
        stem = self.classes[description["model_type"]]
        tasks: dict[str, Task] = {f"{stem}{task}": task for task in get_args(Task) if task == "Model" or task in self.heads}
        name = (description.get("architectures") or [f"{stem}Model"])[0]
        if name not in tasks:
            raise self.make_error("architectures", name, f"{join_names(sorted(tasks))}.{did_you_mean(str(name), tasks)}")
        return tasks[name]


def _count_labels(config: Config) -> int:
    """Return the number of classes; a file lists their names in id2label, unless there are two."""
    return int(config.get("num_labels") or len(config.get("id2label") or "ab"))


def hold_same_values(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors that are to be one have the same values, as far as they have any."""
    return left.is_meta or right.is_meta or (left.shape == right.shape and torch.equal(left, right))
