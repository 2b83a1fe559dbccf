"""Memory and time of a training step of Llama and GPT-2: stored, with gradient checkpointing, and reversible in place.

Networks are random, tokens too; dropout is off. Bytes are counted, and neither weights nor their gradients are among them:

    kept      from forward to backward, with the loss
    peak      the most at any time of the step
    blocks    what is kept because of the blocks: less what the same network keeps that has none

Time is that of the process on one core. The methods take turns, and the median ratio to checkpointing of all rounds counts.
FLOPs are those of matrix products: checkpointing ends a block's second run at its last product, whose output backward does not
need; inversion needs it to get the state before.
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import revzoo
from revzoo.runtime import LiveBytes

METHODS: dict[str, dict[str, Any] | None] = {  # the arguments of `reversible_`, if it is called
    "stored": None,
    "checkpointed": None,
    "8 bits": {"kept_bits": 8},
    "4 bits": {"kept_bits": 4},
    "random bit": {"kept_bits": 1, "sign": "random"},
    "split, 4 bits": {"split": ("attention", "mlp"), "kept_bits": 4},
    "split, random bit": {"split": ("attention", "mlp"), "kept_bits": 1, "sign": "random"},
}
MOST_TIME = 1.05  # of a reversible step, relative to a checkpointed one
_VOCABULARY = 512
_HEADS = 4


@dataclass(frozen=True)
class Setting:
    """A network and a batch.

    Args:
        name: its architecture.
        path: of its blocks.
        width: of its states.
        shape: of the token ids.
        layers: number of blocks.
        dtype: of its parameters and states.
        most_mebibytes: most bytes that 8 bits may keep, and peak at.
        most_of_checkpointed: the most that the blocks may keep, relative to checkpointing, by method.
    """

    name: str
    path: str
    width: int
    shape: tuple[int, int]
    layers: int
    dtype: torch.dtype = torch.float32
    most_mebibytes: tuple[float, float] | None = None
    most_of_checkpointed: dict[str, float] = field(default_factory=dict)

    def make(self, layers: int | None = None) -> nn.Module:
        """Return the network in training mode, with another number of blocks if one is given."""
        logging.set_verbosity_error()  # it has no special tokens
        torch.manual_seed(0)
        network: Any = (_make_llama if self.name == "Llama" else _make_gpt2)(self.width, self.layers)
        if layers is not None:
            owner, _, name = self.path.rpartition(".")
            setattr(network.get_submodule(owner), name, network.get_submodule(self.path)[:layers])
        return network.to(self.dtype).train()  # type: ignore[no-any-return]

    def draw_ids(self) -> Tensor:
        """Return the token ids."""
        return torch.randint(_VOCABULARY, self.shape, generator=torch.Generator().manual_seed(1))


def list_settings(quick: bool) -> list[Setting]:
    """Return the networks of the float32 table and of the bfloat16 one."""
    networks = {"Llama": "model.layers", "GPT-2": "transformer.h"}
    if quick:  # no limits: they belong to the sizes below
        small = [Setting(name, path, 16, (2, 16), 4) for name, path in networks.items()]
        return [*small, Setting("Llama", "model.layers", 16, (2, 16), 4, torch.bfloat16)]
    mebibytes = {"Llama": (3.5, 10.2), "GPT-2": (3.2, 12.6)}
    single = [Setting(name, path, 128, (2, 256), 24, most_mebibytes=mebibytes[name]) for name, path in networks.items()]
    shares = {24: {"8 bits": 0.67, "4 bits": 0.43}, 48: {"8 bits": 0.59, "4 bits": 0.34}}
    half = [
        Setting(name, path, 256, (2, 512), layers, torch.bfloat16, most_of_checkpointed=shares[layers])
        for layers, (name, path) in itertools.product(shares, networks.items())
    ]
    return single + half


def measure_memory(setting: Setting) -> Iterator[dict[str, Any]]:
    """Yield a row for each method: what a step keeps, what its blocks keep, and its peak."""
    rest = count_step(setting.make(layers=0), setting.draw_ids())[0]
    checkpointed: dict[str, int] = {}
    for method in METHODS:
        network = setting.make()
        prepare(network, setting, method)
        kept, peak = count_step(network, setting.draw_ids())
        row: dict[str, Any] = {"method": method, "kept_bytes": kept, "peak_bytes": peak, "block_bytes": kept - rest}
        if method == "checkpointed":
            checkpointed = row
        if checkpointed:
            row["blocks_of_checkpointed"] = row["block_bytes"] / checkpointed["block_bytes"]
        row["missed"] = list(_find_missed(setting, row, checkpointed))
        yield row


def _find_missed(setting: Setting, row: dict[str, Any], checkpointed: dict[str, int]) -> Iterator[str]:
    if row["method"] == "8 bits" and setting.most_mebibytes is not None:
        for name, most in zip(("kept", "peak"), setting.most_mebibytes, strict=True):
            if round(row[f"{name}_bytes"] / 2**20, 1) > most:
                yield f"{name}: at most {most} MiB"
    most = setting.most_of_checkpointed.get(row["method"])
    if most is not None and row["blocks_of_checkpointed"] > most:
        yield f"blocks: at most {most} of checkpointed"
    if most is not None and row["peak_bytes"] >= checkpointed["peak_bytes"]:
        yield "peak: below checkpointed"


def prepare(network: Any, setting: Setting, method: str) -> None:
    """Have a network train by this method."""
    if method == "checkpointed":
        enable_checkpointing(network)
    elif (options := METHODS[method]) is not None:
        revzoo.reversible_(network, setting.path, batch=setting.draw_ids(), **options)


def enable_checkpointing(network: Any) -> None:
    """Switch on gradient checkpointing, by its name in new and old versions of Transformers."""
    enable = getattr(network, "activation_checkpointing_enable", network.gradient_checkpointing_enable)
    enable({"use_reentrant": False})


def count_step(network: nn.Module, ids: Tensor) -> tuple[int, int]:
    """Return the bytes that a training step keeps from forward to backward, and its peak, weights and gradients aside."""
    live = LiveBytes()
    lasting = live.watch([*network.parameters(), *network.buffers(), ids])
    with live:
        loss = network(input_ids=ids, labels=ids, use_cache=False).loss
        kept = live.alive(without=lasting)
        loss.backward()
        gradients = live.watch([p.grad for p in network.parameters()])
    network.zero_grad()
    return kept, live.peak(without=lasting | gradients)


def measure_time(setting: Setting, rounds: int) -> dict[str, Any]:
    """Return the seconds of a step by each method, the median of their ratios to checkpointing, and the ratio of the FLOPs."""
    ids, networks = setting.draw_ids(), {}
    for method in METHODS:
        networks[method] = setting.make()
        prepare(networks[method], setting, method)
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    with one_thread():
        for i, (method, network) in itertools.product(range(rounds + 1), networks.items()):
            start = time.process_time()
            network(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            if i:  # the first round warms up
                seconds[method].append(time.process_time() - start)
            network.zero_grad()
    flops = {method: _count_flops(network, ids) for method, network in networks.items()}
    base = seconds["checkpointed"]
    ratios = {name: statistics.median(a / b for a, b in zip(each, base, strict=True)) for name, each in seconds.items()}
    return {
        "rounds": rounds,
        "seconds": {method: statistics.median(each) for method, each in seconds.items()},
        "of_checkpointed": ratios,
        "flops_of_checkpointed": {method: count / flops["checkpointed"] for method, count in flops.items()},
        "missed": [f"{name}: at most {MOST_TIME}" for name in ("8 bits", "4 bits", "random bit") if ratios[name] > MOST_TIME],
    }


def _count_flops(network: Any, ids: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        network(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    network.zero_grad()
    return counter.get_total_flops()


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread in each operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _make_llama(width: int, layers: int) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=width,
            intermediate_size=8 * -(-width // 3),
            num_hidden_layers=layers,
            num_attention_heads=_HEADS,
        )
    )


def _make_gpt2(width: int, layers: int) -> nn.Module:
    off = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=_VOCABULARY, n_embd=width, n_layer=layers, n_head=_HEADS, **off))


def describe(setting: Setting) -> dict[str, Any]:
    """Return the settings of a row of the results."""
    return {
        "network": setting.name,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "layers": setting.layers,
        "width": setting.width,
        "shape": list(setting.shape),
    }
