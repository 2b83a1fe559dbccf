"""Steps cut into tiles against whole ones: memory, arithmetic, time.

    python benchmarks/tiles.py --out tiles.json     on idle CPU cores
    python benchmarks/tiles.py --quick              the same figures at small sizes, in about 2 minutes

Chains are the transformer of runtime.py, its attention cut along examples and its MLP along tokens, and one of convolutions
with GroupNorm, cut along examples. Bytes are counted, without weights and their gradients; of networks of Transformers on the
meta device, with a chunked loss. Times are those of the process on one core, the methods in turn.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from runtime import Figure, Net, nets, report
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import revzoo
from revzoo.analysis.dry_run import compute_usual_loss
from revzoo.analysis.flops import count_flops
from revzoo.in_place.ways import checkpoint_blocks, chunk_loss_of, make_blocks_reversible, without_masks
from revzoo.runtime import ReversibleChain

TILES = (1, 2, 8, 32)
_TIMED = 8
_BIT: dict[str, Any] = {"kept_bits": 1, "sign": "random"}
_SPLIT = ("attention", "mlp")


def name_tiles(tiles: int) -> str:
    return "whole" if tiles == 1 else f"{tiles} tiles"


def make_group_norm_block(channels: int) -> list[nn.Module]:
    """Return F and G of a block without batch statistics."""

    def half() -> list[nn.Module]:
        return [nn.GroupNorm(8, channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1, bias=False)]

    return [nn.Sequential(*half(), *half()) for _ in range(2)]


def list_nets(quick: bool) -> list[Net]:
    transformer, conv = nets(quick)
    channels = conv.shape[1]
    return [transformer, replace(conv, name="conv, GroupNorm", make=lambda: make_group_norm_block(2 * channels), shape=(
        conv.shape[0], 2 * channels, *conv.shape[2:]))]  # fmt: skip


def cut(net: Net, depth: int, tiles: int) -> ReversibleChain:
    chain = net.chain(depth, "invert")
    for i, step in enumerate(chain.steps):
        step.acts_on = "tokens" if net.name == "transformer" and i % 2 else "examples"  # type: ignore[assignment]
    chain.tiles = tiles
    return chain


def memory(net: Net) -> Iterator[Figure]:
    unit, batch = net.batch()[0].nbytes, net.batch()
    for depth, tiles in itertools.product(net.depths, TILES):
        counted = revzoo.measure_memory(cut(net, depth, tiles), batch)
        yield Figure("peak activation memory, in streams", net.name, name_tiles(tiles), depth, counted.activation_bytes / unit)


def flops(net: Net) -> Iterator[Figure]:
    depth, batch = net.depths[0], net.batch()
    stored = count_flops(net.chain(depth, "store"), batch)
    for tiles in TILES:
        ratio = count_flops(cut(net, depth, tiles), batch) / stored
        yield Figure("FLOPs over stored", net.name, name_tiles(tiles), depth, ratio, 4 / 3)  # one forward more, however cut


def seconds(net: Net, rounds: int) -> Iterator[Figure]:
    depth, batch, weights = net.depths[0], net.batch(), net.batch()
    chains = {tiles: cut(net, depth, tiles) for tiles in TILES}
    durations: dict[int, list[float]] = {tiles: [] for tiles in TILES}
    for i, (tiles, chain) in itertools.product(range(rounds + 1), chains.items()):
        chain.zero_grad()
        start = time.process_time()
        torch.autograd.backward(chain(*batch), weights)
        if i:  # the first round warms up
            durations[tiles].append(time.process_time() - start)
    for tiles, each in durations.items():
        ratio = statistics.median(t / whole for t, whole in zip(each, durations[1], strict=True))
        most = 1.10 if tiles == _TIMED and rounds > 1 else None
        yield Figure("time over whole steps, one thread", net.name, name_tiles(tiles), depth, ratio, most)


def language_models(quick: bool) -> Iterator[Figure]:
    """Count training steps of networks of Transformers: gradient checkpointing, whole blocks, and blocks in tiles."""
    mini = BertConfig(hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12)
    small = _make_llama_config(24, 256, 688, 512, 4, 4)
    yield from _count("MiniLM-L6, 8 x 512", lambda: BertModel(mini), torch.float32, (8, 512), {"kept_bits": 8}, None, 150)
    yield from _count("small Llama, 2 x 256", lambda: LlamaForCausalLM(small), torch.bfloat16, (2, 256), _BIT, _SPLIT, None)
    if not quick:
        large = _make_llama_config(32, 4096, 14336, 128256, 32, 8)
        name = "Llama-3.1-8B, head frozen, 1 x 32768"
        make, most = lambda: _freeze_head(LlamaForCausalLM(large)), 4.5 * 2**10
        yield from _count(name, make, torch.bfloat16, (1, 2**15), _BIT, _SPLIT, most)


def _make_llama_config(blocks: int, width: int, hidden: int, words: int, heads: int, keys: int) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=blocks,
        hidden_size=width,
        intermediate_size=hidden,
        vocab_size=words,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        use_cache=False,
    )


def _freeze_head(model: LlamaForCausalLM) -> LlamaForCausalLM:
    model.lm_head.requires_grad_(False)
    return model


def _count(
    name: str,
    make: Callable[[], nn.Module],
    dtype: torch.dtype,
    shape: tuple[int, int],
    options: dict[str, Any],
    split: tuple[str, str] | None,
    most: float | None,
) -> Iterator[Figure]:
    with torch.device("meta"):
        batch = {"input_ids": torch.empty(shape, dtype=torch.int64)}
        network = make().to(dtype).train()
    blocks = network.config.num_hidden_layers  # type: ignore[union-attr]
    options = options | ({} if split is None else {"split": split, "batch": batch})
    ways: dict[str, Any] = {
        "checkpointed": checkpoint_blocks,
        **{name_tiles(n): lambda model, n=n: make_blocks_reversible(model, **options, tiles=n) for n in TILES},
    }
    chunk = chunk_loss_of if isinstance(network, LlamaForCausalLM) else lambda _: nullcontext()
    for way, change in ways.items():
        with without_masks(batch), chunk(network), change(network):
            counted = revzoo.measure_memory(network, batch, loss=compute_usual_loss)
        limit = most if way == name_tiles(TILES[-1]) else None
        yield Figure("peak activation memory, in MiB", name, way, blocks, counted.activation_bytes / 2**20, limit)


def largest_batches(quick: bool) -> Iterator[Figure]:
    """Compute the largest batch within 6 GB from the peaks of two batches."""
    for depth, tiles in itertools.product((2,) if quick else (12, 96), TILES):
        model = revzoo.create("rev_vit_s", overrides=[f"stages.0.depth={depth}"], tiles=tiles, device="meta")
        few, many = (revzoo.measure_memory(model, model.example_input(n)).peak_bytes for n in (256, 512))
        rate = (many - few) / 256
        batch = int((6e9 - few) // rate + 256)
        yield Figure("largest batch in 6 GB", "rev_vit_s", name_tiles(tiles), depth, batch)


PIECES: dict[str, Callable[[bool], Iterator[Figure]]] = {
    "memory": lambda quick: itertools.chain.from_iterable(map(memory, list_nets(quick))),
    "flops": lambda quick: itertools.chain.from_iterable(map(flops, list_nets(quick))),
    "seconds": lambda quick: itertools.chain.from_iterable(seconds(net, 1 if quick else 9) for net in list_nets(quick)),
    "language_models": language_models,
    "largest_batches": largest_batches,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tiles.json"), help="JSON file with all figures (default: tiles.json)")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    parser.add_argument("--only", nargs="+", choices=PIECES, default=[*PIECES], help="pieces to measure")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report(itertools.chain.from_iterable(PIECES[name](args.quick) for name in args.only), args.out)


if __name__ == "__main__":
    main()
