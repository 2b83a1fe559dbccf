"""revzoo, PyTorch alone and other packages on the same blocks: memory, FLOPs, time, and 35 checks of what else has to work.

    python benchmarks/peers.py --out benchmarks/results/cpu     an hour or two on 2 CPU cores
    python benchmarks/peers.py --quick                          fewer blocks and rounds, nothing that compiles: minutes

docs/benchmark.md says what is measured, and how. Afterwards `python benchmarks/readme.py` puts the figures there.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from comparison.figure import plot_comparison
from comparison.report import FULL, QUICK, compare_methods
from comparison.table import tabulate_comparison
from rich.console import Console
from runtime import describe_environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for peers.json and peers.png (default: here)")
    parser.add_argument("--quick", action="store_true", help="2 and 4 blocks, and nothing that compiles or starts processes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    about, console = describe_environment(), Console(width=None if sys.stdout.isatty() else 200)
    with console.status("comparing") as status:
        report = compare_methods(QUICK if args.quick else FULL, status.update)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "peers.json").write_text(json.dumps(about | report.to_dict(), indent=1) + "\n")
    plot_comparison(report, args.out / "peers.png")
    console.print(tabulate_comparison(report))


if __name__ == "__main__":
    main()
