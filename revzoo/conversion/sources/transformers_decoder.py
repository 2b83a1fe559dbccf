"""Transformers' GPT-2 and Llama with their language heads: attention becomes f, the MLP becomes g.

A description is the configuration as a mapping. Transformers itself is not imported.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor

from revzoo.conversion.choice import CouplingChoice
from revzoo.conversion.mapping import TensorMapping, rename, rename_module
from revzoo.conversion.sources.base import Source, Tensors, find_mlp_ratio
from revzoo.conversion.sources.transformers_base import ACTIVATIONS, Config, hold_same_values
from revzoo.errors import join_names

_Parts = tuple[dict[str, Any], dict[str, Any], dict[str, Any], str, int, int]
_EPS = {1e-5: "_1e-5", 1e-6: ""}  # ends of the names of norms


class TransformersDecoder(Source):
    """What both families share.

    Attributes:
        model_type: of the configuration.
        network_class: of Transformers.
        prefix: what the keys of all but the head begin with.
        table: their table of embeddings, of which the head's weight may be a copy.
        is_tied: whether it is one, if the configuration does not say it.
        fixed: settings that a spec does not have, with the values that it stands for.
    """

    model_type: ClassVar[str]
    network_class: ClassVar[str]
    prefix: ClassVar[str]
    table: ClassVar[str]
    is_tied: ClassVar[bool]
    fixed: ClassVar[Mapping[str, Any]]

    def handles(self, description: Any) -> bool:
        """Return whether this is a configuration of the family."""
        return isinstance(description, Mapping) and description.get("model_type") == self.model_type

    def complete(self, description: Config, tensors: Tensors) -> dict[str, Any]:
        """Return the configuration with its class."""
        return {**description, "architectures": description.get("architectures") or [self.network_class]}

    def canonicalise(self, description: Config, tensors: Tensors) -> tuple[dict[str, Tensor], list[str]]:
        """Return a file's tensors under the keys of the class with a head, and what the converted network leaves out.

        Raises: ConversionError: the head's weight is no copy of the embeddings, although the configuration says that it is.
        """
        named = {key if key.startswith((self.prefix, "lm_head.")) else self.prefix + key: t for key, t in tensors.items()}
        table = named.get(self.table)
        if self._is_tied(description) and table is not None:
            head = named.setdefault("lm_head.weight", table)
            if not hold_same_values(head, table):
                raise self.make_error("tie_word_embeddings", True, "false, where lm_head has other values than the embeddings")
        rates = {key: rate for key, rate in description.items() if key.endswith(("_pdrop", "attention_dropout")) and rate}
        return named, [f"Dropout is left out: {join_names(list(rates))}."] if rates else []

    def ignores(self, key: str) -> bool:
        """Return whether a tensor is a constant of an older version: causal masks, rates of rotary positions."""
        return key.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))

    def make_spec(self, description: Config, choice: CouplingChoice) -> dict[str, Any]:
        """Return the converted network's spec.

        Raises: ConversionError: another class, or a setting that a spec cannot express.
        """
        self._require("architectures", description["architectures"], [[self.network_class]])
        for key, value in self.fixed.items():
            self._require(key, description.get(key, value), [value])
        stem, f, g, norm, depth, length = self._describe(description)
        vocabulary, width = description["vocab_size"], stem["width"]
        return {
            "family": "rev_gpt",
            "input": {"kind": "text", "length": length, "vocabulary": vocabulary},
            "stem": {"type": "token_embed", **stem, "norm": "none"},
            "split": "duplicate",
            "block": {
                "coupling": choice.describe(residual=True),
                "f": {"type": "causal_attention", **f, "norm": norm},
                "g": {"type": "mlp", **g, "norm": norm},
            },
            "stages": [{"depth": depth, "width": width}],
            "fuse": {"type": choice.fuse, "norm": "none"},
            "head": {
                "type": "token_linear",
                "outputs": vocabulary,
                "norm": norm,
                "bias": False,
                "tied": self._is_tied(description),
            },
            "init": {"type": "normal", "std": description.get("initializer_range", 0.02)},
        }

    def map_tensors(self, description: Config) -> list[TensorMapping]:
        """Return the mapping of every tensor."""
        table = "stem.word_embeddings.weight"
        if self._is_tied(description):
            ends = [TensorMapping((table,), (self.table, "lm_head.weight"), "tied")]
        else:
            ends = [rename(table, self.table), rename("head.linear.weight", "lm_head.weight")]
        return [*ends, *self._map_blocks(description)]

    @abstractmethod
    def _describe(self, config: Config) -> _Parts:
        """Return what is the family's own: stem, f and g without norms, the norm, depth and length."""

    @abstractmethod
    def _map_blocks(self, config: Config) -> Iterator[TensorMapping]:
        """Yield the mapping of every tensor but embeddings of ids and the head."""

    def _is_tied(self, config: Config) -> bool:
        return bool(config.get("tie_word_embeddings", self.is_tied))

    def _require(self, key: str, value: object, allowed: list[Any]) -> None:
        if value not in allowed:
            raise self.make_error(key, value, " or ".join(map(repr, allowed)))

    def _find_norm(self, key: str, norm: str, eps: float) -> str:
        self._require(key, eps, list(_EPS))
        return norm + _EPS[eps]

    def _find_act(self, key: str, act: Any) -> str:
        self._require(key, act, list(ACTIVATIONS))
        return ACTIVATIONS[act]


class TransformersGPT2(TransformersDecoder):
    """Convert GPT2LMHeadModel; its one matrix for queries, keys and values stays one, transposed."""

    name = "Transformers GPT-2"
    model_type, network_class, prefix, table = "gpt2", "GPT2LMHeadModel", "transformer.", "transformer.wte.weight"
    is_tied = True
    fixed: ClassVar = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}

    def _describe(self, config: Config) -> _Parts:
        width = config["n_embd"]
        act = self._find_act("activation_function", config.get("activation_function", "gelu_new"))
        norm = self._find_norm("layer_norm_epsilon", "layer_norm", config.get("layer_norm_epsilon", 1e-5))
        g = {"ratio": find_mlp_ratio(config.get("n_inner") or 4 * width, width), "act": act}
        stem = {"width": width, "position": "learned"}
        return stem, {"heads": config["n_head"]}, g, norm, config["n_layer"], config["n_positions"]

    def _map_blocks(self, config: Config) -> Iterator[TensorMapping]:
        yield rename("stem.position_embeddings.weight", "transformer.wpe.weight")
        for i in range(config["n_layer"]):
            ours, theirs = f"stages.0.blocks.{i}", f"transformer.h.{i}"
            yield from rename_module(f"{ours}.f.norm", f"{theirs}.ln_1")
            yield from rename_module(f"{ours}.g.norm", f"{theirs}.ln_2")
            for ours_name, name in (
                ("f.qkv", "attn.c_attn"), ("f.proj", "attn.c_proj"), ("g.mlp.fc1", "mlp.c_fc"), ("g.mlp.fc2", "mlp.c_proj"),
            ):  # fmt: skip
                yield TensorMapping((f"{ours}.{ours_name}.weight",), (f"{theirs}.{name}.weight",), "transposed")
                yield rename(f"{ours}.{ours_name}.bias", f"{theirs}.{name}.bias")
        yield from rename_module("head.norm", "transformer.ln_f")


class TransformersLlama(TransformersDecoder):
    """Convert LlamaForCausalLM, with plain rotary positions or those of Llama 3."""

    name = "Transformers Llama"
    model_type, network_class, prefix, table = "llama", "LlamaForCausalLM", "model.", "model.embed_tokens.weight"
    is_tied = False
    fixed: ClassVar = {"attention_bias": False, "mlp_bias": False}

    def _describe(self, config: Config) -> _Parts:
        width, heads = config["hidden_size"], config["num_attention_heads"]
        self._require("head_dim", config.get("head_dim") or width // heads, [width // heads])
        # Transformers 5 has one mapping; before, the base stood apart, and plain positions had no mapping.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        self._require("rope_type", kind, ["default", "llama3"])
        if kind == "llama3":
            for key, value in {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}.items():
                self._require(key, rope[key], [value])
        norm = self._find_norm("rms_norm_eps", "rms_norm", config.get("rms_norm_eps", 1e-6))
        f = {
            "heads": heads,
            "kv_heads": config.get("num_key_value_heads") or heads,
            "rotary_base": rope.get("rope_theta") or config.get("rope_theta", 10000.0),
            "rotary_factor": rope.get("factor", 1.0),
            "bias": False,
        }
        g = {
            "ratio": find_mlp_ratio(config["intermediate_size"], width),
            "act": self._find_act("hidden_act", config.get("hidden_act", "silu")),
            "gated": True,
            "bias": False,
        }
        stem = {"width": width, "position": "none"}
        return stem, f, g, norm, config["num_hidden_layers"], config["max_position_embeddings"]

    def _map_blocks(self, config: Config) -> Iterator[TensorMapping]:
        width, heads = config["hidden_size"], config["num_attention_heads"]
        shared = (config.get("num_key_value_heads") or heads) * (width // heads)
        for i in range(config["num_hidden_layers"]):
            ours, theirs = f"stages.0.blocks.{i}", f"model.layers.{i}"
            qkv = tuple(f"{theirs}.self_attn.{name}_proj.weight" for name in "qkv")
            shapes = tuple((rows, width) for rows in (width, shared, shared))
            yield TensorMapping((f"{ours}.f.qkv.weight",), qkv, "merged", original_shapes=shapes)
            for ours_name, name in (
                ("f.norm", "input_layernorm"), ("f.proj", "self_attn.o_proj"), ("g.norm", "post_attention_layernorm"),
                ("g.mlp.fc1_g", "mlp.gate_proj"), ("g.mlp.fc1_x", "mlp.up_proj"), ("g.mlp.fc2", "mlp.down_proj"),
            ):  # fmt: skip
                yield rename(f"{ours}.{ours_name}.weight", f"{theirs}.{name}.weight")
        yield rename("head.norm.weight", "model.norm.weight")
