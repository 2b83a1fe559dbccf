"""Training throughput over the batch size: stored, inverted, inverted with look-ahead, and the ordinary twin.

    python benchmarks/pareprop.py                       on a CPU a quarter of an hour; on a GPU hours, see below
    python benchmarks/pareprop.py --only rev_swin_b     some networks; what the file has of others stays
    python benchmarks/pareprop.py --quick               toy networks on a CPU, which show nothing, in seconds

Source: PaReprop (Zhu and Mangalam 2023), figures 1, 5 and 6: Rev-ViT, Rev-MViT, Rev-Swin and Rev-RoBERTa. Figure 7, the
memory, is counted by published_memory.py. As there, a step is forward, cross-entropy, backward and AdamW in float32, and on a
GPU the batch sizes are powers of two up to 1024 as far as memory goes, with 50 steps to warm up and 30 timed ones. It differs
in that random batches are on the device already, and gradients are not clipped. Twins are those of the specs.

On a GPU the result is samples per second and the allocator's peak. All variants of rev_swin_b together take as long as about
330,000 of its training examples (at the 150 images a second of the authors' A100, 40 minutes). Rev-Swin-G, for which 43 GiB
are counted with 32 images in float32, is trained on one card of 80 GB by

    python benchmarks/pareprop.py --only rev_swin_g
    revzoo train rev_vit_b_imagenet model.name=rev_swin_g data.root=/data/imagenet data.batch_size=32

On a CPU the small members of the families run with one intra-op thread (look-ahead has a second thread of its own, and needs an
idle second core). The variants of a network take turns, and the result is the throughput relative to that of the stored run.
Dropout and drop path are 0 there: on a CPU, steps that draw random numbers are recovered one by one, and gain nothing.

Writes pareprop.json, pareprop_vision.png (figure 5), pareprop_text.png (figure 6) and pareprop_swin.png (figure 1).
"""

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pareprop_figure import plot_gain, plot_throughput
from pareprop_timing import VARIANTS, Protocol, measure_network
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from runtime import describe_environment


@dataclass(frozen=True)
class Network:
    """A network to time.

    Args:
        label: its name in the table and the pictures.
        family: decides the picture that it is drawn in.
        source: its model name.
        overrides: of its spec.
    """

    label: str
    family: str
    source: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """What is measured on a kind of machine: networks by the names for `--only`, batch sizes, and how steps are run."""

    networks: dict[str, Network]
    batches: tuple[int, ...]
    protocol: Protocol


def _key_by_source(*networks: Network) -> dict[str, Network]:
    return {network.source: network for network in networks}


def _list_family(family: str, source: str, sizes: str, overrides: tuple[str, ...] = ()) -> tuple[Network, ...]:
    return tuple(Network(f"{family}-{size.capitalize()}", family, f"{source}_{size}", overrides) for size in sizes.split())


_TEXT = "Rev-RoBERTa"
_GPU = Setting(  # figure 5 has three sizes of each; which ones of ViT is not in the text
    _key_by_source(
        *_list_family("Rev-ViT", "rev_vit", "s b l"),
        *_list_family("Rev-MViT", "rev_mvit", "t s b l h"),
        *_list_family("Rev-Swin", "rev_swin", "t s b l h g"),
        Network("base, 512 tokens", _TEXT, "rev_roberta_base"),
        Network("base, 1024 tokens", _TEXT, "rev_roberta_base_1024"),
        Network("large, 512 tokens", _TEXT, "rev_roberta_large"),
        Network("large, 1024 tokens", _TEXT, "rev_roberta_large_1024"),
    ),
    tuple(2**i for i in range(11)),
    Protocol(turns=1, warm_up=50, steps=30, together=False),
)


_NO_DROP_PATH = ("block.drop_path.max=0", "twin.arguments.drop_path_rate=0")
_NO_DROPOUT = (
    *("stem.dropout=0", "head.dropout=0", "head.input_dropout=0"),
    *("block.f.attention_dropout=0", "block.f.dropout=0", "block.g.dropout=0"),
    *("twin.arguments.hidden_dropout_prob=0", "twin.arguments.attention_probs_dropout_prob=0"),
)


def _shrink_roberta(depth: int, tokens: int, vocabulary: int) -> tuple[str, ...]:
    spec = (f"stages.0.depth={depth}", f"input.length={tokens}", f"input.vocabulary={vocabulary}")
    return (*spec, f"twin.arguments.num_hidden_layers={depth}", f"twin.arguments.vocab_size={vocabulary}")


_CPU = Setting(
    _key_by_source(
        *_list_family("Rev-ViT", "rev_vit", "ti"),
        *_list_family("Rev-MViT", "rev_mvit", "t", _NO_DROP_PATH),
        *_list_family("Rev-Swin", "rev_swin", "t", _NO_DROP_PATH),
        Network("base, 4 layers, 128 tokens", _TEXT, "rev_roberta_base", (*_shrink_roberta(4, 128, 1000), *_NO_DROPOUT)),
    ),
    (1, 2, 4, 8),
    Protocol(turns=5, warm_up=1, steps=1, together=True),
)
_QUICK = Setting(
    _key_by_source(
        Network("ViT", "Rev-ViT", "rev_vit_ti", ("stages.0.depth=1", "input.size=[32,32]", "twin.arguments={depth: 1}")),
        Network("MViT", "Rev-MViT", "rev_mvit_digits"),
        Network("Swin", "Rev-Swin", "rev_swin_digits"),
        Network("RoBERTa", _TEXT, "rev_roberta_base", _shrink_roberta(1, 8, 100)),
    ),
    (1, 2),
    Protocol(turns=2, warm_up=0, steps=1, together=True),
)


def find_gains(network: Mapping[str, Any]) -> dict[int, float]:
    """Return by batch size the throughput of look-ahead over that of inverting, where both were measured."""
    speeds = {(row["variant"], row["batch"]): row["speed"] for row in network["rows"]}
    batches = [batch for variant, batch in speeds if variant == "look-ahead" and ("inverted", batch) in speeds]
    return {batch: speeds["look-ahead", batch] / speeds["inverted", batch] for batch in batches}


def draw(networks: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Draw the figures for which there is something in the results."""
    text = {each["label"]: each for each in networks.values() if each["family"] == _TEXT}
    vision = {each["label"]: each for each in networks.values() if each["family"] != _TEXT}
    if vision:
        plot_throughput(vision, "Training throughput: vision", folder / "pareprop_vision.png")
    if text:
        plot_throughput(text, f"Training throughput: {_TEXT}", folder / "pareprop_text.png")
    swin = {each["label"]: find_gains(each) for each in vision.values() if each["family"] == "Rev-Swin"}
    if gains := {label: gain for label, gain in swin.items() if gain}:
        plot_gain(gains, folder / "pareprop_swin.png")


def make_tables(networks: Mapping[str, Mapping[str, Any]]) -> Iterator[Table]:
    """Yield the throughput of all variants over the batch size, a table for each network."""
    for network in networks.values():
        table = Table(title=f"{network['label']}: throughput, {network['unit']}", title_justify="left", box=SIMPLE_HEAD)
        for head in ("batch", *(variant.label for variant in VARIANTS), "look-ahead over inverted"):
            table.add_column(head, justify="right")
        speeds = {(row["variant"], row["batch"]): row["speed"] for row in network["rows"]}
        gains = find_gains(network)
        for batch in sorted({batch for _, batch in speeds}):
            cells = [speeds.get((variant.label, batch)) for variant in VARIANTS] + [gains.get(batch)]
            table.add_row(str(batch), *("-" if cell is None else f"{cell:.4g}" for cell in cells))
        if network["missing"]:
            table.caption = "; ".join(f"{variant}: {why}" for variant, why in network["missing"].items())
        yield table


def choose_setting(quick: bool) -> tuple[str, Setting]:
    """Return the device, and what is measured on it."""
    if quick:
        return "cpu", _QUICK
    return ("cuda", _GPU) if torch.cuda.is_available() else ("cpu", _CPU)


def main() -> None:
    warnings.filterwarnings("ignore", "lookahead steps aside: a step draws")  # said above
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = Path(__file__).parent / "results" / ("cuda" if torch.cuda.is_available() else "cpu")
    known = ", ".join(choose_setting(quick=False)[1].networks)
    parser.add_argument("--only", nargs="+", metavar="MODEL", help=f"of {known}")
    parser.add_argument("--out", type=Path, default=home, help=f"folder for pareprop.json and pictures (default: {home})")
    parser.add_argument("--quick", action="store_true", help="toy networks")
    args = parser.parse_args()
    device, setting = choose_setting(args.quick)
    chosen = args.only or list(setting.networks)
    if unknown := set(chosen) - setting.networks.keys():
        parser.error(f"not measured on this machine: {', '.join(sorted(unknown))}. Choose of {', '.join(setting.networks)}")
    if device == "cpu":
        torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    about, file = describe_environment(), args.out / "pareprop.json"
    networks = json.loads(file.read_text())["networks"] if file.is_file() else {}
    console = Console(width=None if sys.stdout.isatty() else 140)
    measured = {name: network for name, network in setting.networks.items() if name in chosen}
    for name, network in measured.items():
        with console.status(network.label):
            result = measure_network(network.source, network.overrides, setting.batches, setting.protocol, device)
        networks[name] = asdict(network) | result | {"commit": about["commit"]}
        ordered = {key: networks[key] for key in setting.networks if key in networks}
        file.write_text(json.dumps(about | {"protocol": asdict(setting.protocol), "networks": ordered}, indent=1) + "\n")
        draw(ordered, args.out)
    console.print(*make_tables({name: networks[name] for name in measured}), about)


if __name__ == "__main__":
    main()
