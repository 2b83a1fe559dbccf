"""What well-known networks take on a card: docs/fits.json, from which the page "What fits my card?" computes.

    python benchmarks/fits.py 'ResNet*'
    python benchmarks/fits.py --methods '* tiles*'

Each network is counted stored, with its library's checkpoints, reversible in place, and by plans for a few budgets, as the
models of the zoo are (zoo_card.py), but with cross-entropy of its logits. Networks that match are counted again, or those of
their methods that match; a method that cannot be had has no row.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from ordinary_networks import UNet
from torch import nn
from zoo_card import (
    CHUNKED_SIZES,
    DTYPES,
    SHARES,
    SIZES,
    TILED_SIZES,
    Changes,
    autocast,
    count_chunked_loss,
    count_optimizers,
    count_timelines,
    fit_timeline,
)

from revzoo.analysis.dry_run import compute_usual_loss
from revzoo.errors import ConversionError, InputError
from revzoo.graph.atoms import Atom
from revzoo.graph.capture import capture
from revzoo.graph.counted_step import SpannedStep
from revzoo.graph.counted_step import count_step as count_planned
from revzoo.graph.front import find_front
from revzoo.graph.spans import Nest, Spans
from revzoo.graph.step_record import record
from revzoo.in_place.ways import CHUNKED, CUT, Way, list_ways, without_masks

Batch = Any
_PLANNED = 128  # examples: in small batches weights and gradients are most of a peak, and plans have little to spare


@dataclass(frozen=True)
class Network:
    """A network without values.

    Args:
        make: returns it.
        input: shape of an image, or the number of tokens.
        dtype: of the weights, if it is the only one to be counted; None counts float32 weights without and with autocast.
    """

    make: Callable[[], nn.Module]
    input: tuple[int, ...] | int = (3, 224, 224)
    dtype: str | None = None

    @property
    def dtypes(self) -> dict[str, str]:
        """What `autocast` gets, by the keys of the timelines: weights that are in bfloat16 need none."""
        return DTYPES if self.dtype is None else {self.dtype: "float32"}

    def make_batch(self, size: int) -> Batch:
        """Return a batch without values."""
        if isinstance(self.input, int):
            return {"input_ids": torch.zeros(size, self.input, dtype=torch.int64, device="meta")}
        return torch.zeros(size, *self.input, device="meta")

    def describe_input(self) -> str:
        """Return the input in words."""
        return f"{self.input:,} tokens" if isinstance(self.input, int) else " x ".join(map(str, self.input))


def _timm(name: str) -> nn.Module:
    import timm

    return timm.create_model(name)  # type: ignore[no-any-return]


def _transformers(architecture: str, **sizes: Any) -> nn.Module:
    network = getattr(transformers, architecture)
    return network(network.config_class(**sizes)).train()  # type: ignore[no-any-return]


_LARGE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "use_cache": False}
NETWORKS = {
    "ViT-B/16": Network(partial(_timm, "vit_base_patch16_224")),
    "ViT-L/16": Network(partial(_timm, "vit_large_patch16_224")),
    "ResNet-50": Network(partial(_timm, "resnet50")),
    "Swin-B": Network(partial(_timm, "swin_base_patch4_window7_224")),
    "ConvNeXt-B": Network(partial(_timm, "convnext_base")),
    "U-Net of 4 levels": Network(UNet, (3, 256, 256)),
    "BERT base": Network(partial(_transformers, "BertForMaskedLM"), 512),
    "GPT-2": Network(partial(_transformers, "GPT2LMHeadModel", use_cache=False), 1024),
    "Llama-3.1-8B": Network(
        partial(_transformers, "LlamaForCausalLM", **_LARGE, vocab_size=128256, intermediate_size=14336, num_hidden_layers=32),
        2048,
        "bfloat16",
    ),
    "Qwen3-8B": Network(
        partial(
            _transformers,
            "Qwen3ForCausalLM",
            **_LARGE,
            vocab_size=151936,
            intermediate_size=12288,
            num_hidden_layers=36,
            head_dim=128,
        ),
        2048,
        "bfloat16",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="*", help="networks to count")
    parser.add_argument("--methods", default="*", help="of them to count; others stay as they are")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs/fits.json")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    for name in filter(lambda name: fnmatch(name, args.pattern), NETWORKS):
        print(name, flush=True)
        rows[name] = count_row(NETWORKS[name], args.methods, rows.get(name))
        lines = [f"{json.dumps(name)}: {json.dumps(rows[name])}" for name in NETWORKS if name in rows]
        args.out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def count_row(network: Network, pattern: str = "*", before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what a row of docs/zoo.json says, as far as the page needs it.

    Args:
        network: to be counted.
        pattern: of the methods that are counted.
        before: its row, of which the others stay.
    """
    with torch.device("meta"):
        module = network.make().to(getattr(torch, network.dtype or "float32"))
    ways: dict[str, Way] = {"store": nullcontext} | list_ways(module, network.make_batch(1))
    plans = [f"plan {number}" for number in range(1, len(SHARES) + 1)]
    methods = {method["name"]: method for method in before["card"]["methods"]} if before else {}
    for name, change in ways.items():
        if not fnmatch(name, pattern):
            continue
        methods.pop(name, None)
        # Some networks have no such blocks, or blocks that mix examples.
        with suppress(ConversionError, InputError), without_masks(None), change(module):
            counted = module, network.make_batch, compute_usual_loss
            if name.endswith(CHUNKED):
                whole, sizes = methods[name.removesuffix(CHUNKED)], TILED_SIZES if CUT in name else CHUNKED_SIZES
                methods |= {method["name"]: method for method in count_chunked_loss(*counted, whole, network.dtypes, sizes)}
            else:
                sizes = TILED_SIZES if CUT in name else SIZES
                methods[name] = {"name": name, "modes": {}} | count_timelines(*counted, network.dtypes, sizes)
    if any(fnmatch(name, pattern) for name in plans):
        planned = {key: count_plans(module, network, dtype) for key, dtype in network.dtypes.items()}
        for number, name in enumerate(plans):
            flops, *_ = (planned[dtype][number][0] for dtype in network.dtypes)
            timelines = {dtype: fit_timeline(planned[dtype][number][1]) for dtype in network.dtypes}
            methods[name] = {"name": name, "modes": {}, "flops": flops} | timelines
    parameters = sum(p.numel() for p in module.parameters())
    card = {"methods": [methods[name] for name in (*ways, *plans) if name in methods], "optimizers": count_optimizers(module)}
    row = {"card": card, "input": network.describe_input(), "parameters": parameters}
    return row if network.dtype is None else row | {"dtype": network.dtype}


def count_plans(module: nn.Module, network: Network, dtype: str) -> list[tuple[int, list[Changes]]]:
    """Return FLOPs for an example, and every change of live bytes in both sizes, of plans that are made for a large batch."""
    with autocast(dtype):
        with capture(module, network.make_batch(_PLANNED)) as captured:
            step = record(captured, compute_usual_loss)
            front = find_front(step)
            least, most = front.list_points()[0][0], step.peak_bytes
            plans = [front.make_spans(front.choose(least + int(share * (most - least))) or ()) for share in SHARES]
        counted = list[list[SpannedStep]]()
        for size in SIZES:
            with capture(module, network.make_batch(size)) as captured:
                atoms = record(captured, compute_usual_loss).atoms
                counted.append([count_planned(captured, _move(spans, atoms), compute_usual_loss) for spans in plans])
    small, large = counted
    return [(a.flops // SIZES[0], [np.diff(a.alive), np.diff(b.alive)]) for a, b in zip(small, large, strict=True)]


def _move(spans: Spans, atoms: Sequence[Atom]) -> Spans:
    """Return the same spans of the step with another batch."""
    nodes = {node.name: node for atom in atoms for node in atom.makes}
    nests = [Nest(nest.first, nest.end, frozenset(nodes[node.name] for node in nest.handed)) for nest in spans.nests]
    return Spans(atoms, spans.ends, frozenset(nodes[node.name] for node in spans.kept), spans.kept_inside, nests)


if __name__ == "__main__":
    main()
