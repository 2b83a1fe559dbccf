"""revzoo beside PyTorch alone and other packages: `revzoo bench --full`, kept as JSON and as a picture.

    python benchmarks/peers.py --out benchmarks/results/cpu     an hour or two on 2 CPU cores
    python benchmarks/peers.py --quick                          fewer blocks and rounds, nothing that compiles: minutes

docs/benchmark.md says what is measured, and how. Afterwards `python benchmarks/readme.py` puts the figures into the README.
"""

import argparse
import json
from pathlib import Path

import torch
from runtime import describe_environment

from revzoo.bench.report import FULL, QUICK, compare_methods
from revzoo.display.console import print_renderable, show_status
from revzoo.display.figures.bench import plot_bench
from revzoo.display.tables.bench import tabulate_bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for peers.json and peers.png (default: here)")
    parser.add_argument("--quick", action="store_true", help="what `revzoo bench` measures without --full")
    args = parser.parse_args()
    torch.set_num_threads(1)
    about = describe_environment()
    with show_status() as announce:
        report = compare_methods(QUICK if args.quick else FULL, announce)
    (args.out / "peers.json").write_text(json.dumps(about | report.to_dict(), indent=1) + "\n")
    plot_bench(report, args.out / "peers.png")
    print_renderable(tabulate_bench(report))


if __name__ == "__main__":
    main()
