"""What long texts take: the counted bytes of a Llama by formula, and published figures by the counter.

T tokens, d channels, f of the MLP, V ids, H heads and K of keys, each of d / H channels; L blocks. Weights are bfloat16.
"""

from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import pytest
import torch
import transformers
from torch import nn

import revzoo
from revzoo.analysis.dry_run import compute_cross_entropy, compute_usual_loss
from revzoo.in_place.ways import checkpoint_blocks, chunk_loss_of, make_blocks_reversible, without_masks


class Llama(NamedTuple):
    L: int
    d: int
    f: int
    V: int
    H: int
    K: int


one_bit = partial(make_blocks_reversible, kept_bits=1, sign="random")
WAYS = {
    "stored": (nullcontext, nullcontext),
    "checkpointed": (checkpoint_blocks, nullcontext),
    "checkpointed, chunked loss": (checkpoint_blocks, chunk_loss_of),
    "reversible": (make_blocks_reversible, nullcontext),
    "random signs, chunked loss": (one_bit, chunk_loss_of),
}
LLAMA_8B = Llama(L=32, d=4096, f=14336, V=128256, H=32, K=8)
SMALL = [Llama(4, 64, 192, 64, 4, 2), Llama(3, 128, 512, 64, 4, 1)]  # their peaks are in different places


def compute_bytes(T: int, llama: Llama) -> dict[str, int]:
    """Return activations at the peak: in backward of the loss where all logits exist, else in that of the last block."""
    L, d, f, V, H, K = llama
    norm = (4 + 2 + 2) * T * d + 4 * T  # in float32, rounded and scaled; and its denominators
    attention = 2 * T * (2 * d + 2 * K * d // H) + 4 * T * H
    block = 2 * norm + attention + 4 * 2 * T * f  # gate, its SiLU, up, product
    mlp = 2 * 2 * T * f  # in backward of the product: gradients of both factors
    loss = norm + 12 * T * V  # the softmax, its gradient, and that of the logits, in float32
    rotary, positions = 2 * 2 * T * d // H, 8 * T
    pair = gradients = 2 * 4 * T * d
    inversion = (2 * 4 + 2) * T * d  # of the last block: what it has returned, also in float32, and the sum
    return {
        "stored": rotary + L * block + loss,
        "checkpointed": rotary + positions + L * 2 * T * d + loss,
        "checkpointed, chunked loss": rotary + positions + L * 2 * T * d + block + mlp + 2 * T * d,
        "reversible": rotary + positions + (L - 1) * T * d + pair + loss,
        "random signs, chunked loss": rotary + positions + pair + gradients + 2 * T * d + block
        # Inverted, it has used its bits up. The first block keeps none.
        + max((L - 1) * T * d // 8 + inversion, (L - 2) * T * d // 8 + mlp),
    }  # fmt: skip


def count_step(T: int, llama: Llama, way: str) -> revzoo.MemoryReport:
    config = transformers.LlamaConfig(
        hidden_size=llama.d,
        intermediate_size=llama.f,
        num_hidden_layers=llama.L,
        num_attention_heads=llama.H,
        num_key_value_heads=llama.K,
        vocab_size=llama.V,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
        batch = {"input_ids": torch.empty(1, T, dtype=torch.int64)}
    change, chunk = WAYS[way]
    with without_masks(batch), chunk(model), change(model):
        return revzoo.measure_memory(model, batch, loss=compute_usual_loss)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("llama", SMALL)
def test_a_llama_takes_what_the_formula_says(way, llama):
    """To the byte for 512 tokens more, so in every term; some bytes are of no token."""
    llama = llama._replace(V=64 if "chunked" in way else 4096)
    few, many = (count_step(T, llama, way).activation_bytes for T in (512, 1024))
    assert many - few == compute_bytes(1024, llama)[way] - compute_bytes(512, llama)[way]


def test_the_formula_for_8b():
    """The table of docs/language.md, in GiB."""
    figures = [244.1, 56.0, 16.1, 52.9, 10.6]
    assert [round(n / 2**30, 1) for n in compute_bytes(2**15, LLAMA_8B).values()] == figures


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_8b_takes_what_the_formula_says(way):
    assert count_step(2**15, LLAMA_8B, way).activation_bytes == pytest.approx(compute_bytes(2**15, LLAMA_8B)[way], rel=1e-6)


def test_a_llama_without_values_is_split_and_cut():
    """On the meta device, as `revzoo fits` counts it: the inside of an MLP is a sixteenth, and that of attention the peak."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, vocab_size=64, use_cache=False
    )
    peaks = {}
    for tiles in (1, 4, 16):
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).train()
            batch = {"input_ids": torch.empty(1, 2048, dtype=torch.int64)}
        with without_masks(batch):
            revzoo.reversible_(model, batch=batch, split=("attention", "mlp"), tiles=tiles, kept_bits=1, sign="random")
            peaks[tiles] = revzoo.measure_memory(model, batch, loss=compute_usual_loss).activation_bytes
    hidden = 4 * 2048 * 1024
    assert peaks[1] - peaks[4] > 3 * hidden
    assert peaks[16] < peaks[4]


@pytest.mark.parametrize(
    ("blocks", "d", "tokens", "published"),
    [
        pytest.param(36, 4096, 2**17, 36 * 2**30, id="transformers#48444, Qwen3-8B"),
        pytest.param(8, 1024, 2**13, 128 * 2**20, id="transformers#48444, its test"),
        pytest.param(28, 1024, 2**17, 7.52e9, id="accelerate#4175, Qwen3-0.6B on 8 ranks"),
        pytest.param(1, 2560, 96 * 2**10, 0.469 * 2**30, id="trl#7003, Qwen3-4B, a block"),
    ],
)
def test_published_bytes_of_checkpoints(blocks, d, tokens, published):
    few, more = (count_step(tokens, Llama(L, d, d, 64, 8, 8), "checkpointed, chunked loss").after_forward_bytes for L in (2, 3))
    assert blocks * (more - few) == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize(
    ("tokens", "ids", "copies", "published"),
    [
        pytest.param(8192, 151936, 1, 4.638, id="Megatron-LM-FL#132"),
        pytest.param(1024, 151936, 1, 0.580, id="Megatron-LM-FL#132, a chunk"),
        pytest.param(16384, 128256, 2, 15.66, id="ALST (arXiv:2506.13996), Llama-8B, which says over 14"),
    ],
)
def test_published_bytes_of_logits(tokens, ids, copies, published):
    """In float32; of two copies one is the gradient."""
    with torch.device("meta"):
        head, hidden = nn.Linear(1, ids, bias=False), torch.empty(tokens, 1)
    kept = revzoo.measure_memory(head, hidden, loss=compute_cross_entropy).after_forward_bytes
    assert copies * kept / 2**30 == pytest.approx(published, rel=2e-3)


def test_published_peak_of_torchtitan():
    """Llama-3.1-8B on 8 ranks, checkpointed: 83.9 GiB, with the allocator's gaps and the buffers of collectives.

    Source: torchtitan, benchmarks/llama3_h100_202412.
    """
    parameters = 8.03e9
    states = parameters / 8 * (4 + 4 + 8)  # weights, gradients and AdamW in float32
    assert 0.8 < (states + compute_bytes(2**15, LLAMA_8B)["checkpointed"]) / 2**30 / 83.9 < 1
