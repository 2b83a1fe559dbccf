"""Table 1 of the Re-forwarding paper, with plans beside the paper's columns.

    python benchmarks/reforwarding.py                 fifteen networks, a few minutes on a CPU core
    python benchmarks/reforwarding.py --quick         two of them with a batch of two
    python benchmarks/reforwarding.py --only resnet50

Bytes and FLOPs are counted in FakeTensors: the same everywhere, and nothing is computed. `reforwarding_table.py` has the
columns, and says how peaks are measured. Writes reforwarding.json. Fronts of ordinary networks are a row of `planning.py`.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from reforwarding_table import ROWS, measure_row
from runtime import describe_environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=[row.name for row in ROWS], help="one network")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "reforwarding.json"
    known = {row["name"]: row for row in json.loads(path.read_text())["table"]} if path.exists() else {}
    rows = [replace(row, batch=2) for row in ROWS if row.name in ("alexnet", "resnet18")] if args.quick else ROWS
    for row in rows:
        if args.only in (None, row.name):
            known[row.name] = measured = measure_row(row)
            stored, planned, equation, floor = (
                measured[f"{key}_bytes"] / 2**20 for key in ("stored", "planned", "by_equation_1", "floor")
            )
            print(
                f"{row.name}, batch {row.batch}: published {row.regular} -> {row.published} MiB, best cuts {row.best_cuts}, by "
                f"equation 1 {equation:.0f}, stored {stored:.0f} -> planned {planned:.0f} MiB @ {measured['flops']:.3f}, "
                f"floor {floor:.0f} MiB",
                flush=True,
            )
        table = [known[each.name] for each in ROWS if each.name in known]
        path.write_text(json.dumps(describe_environment() | {"table": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
