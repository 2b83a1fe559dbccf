"""Every table and figure of the five papers that revzoo comes from, beside what the results say, and a verdict on each.

    python benchmarks/papers.py                         all of them; writes docs/papers.md
    python benchmarks/papers.py --paper revnet          one paper
    python benchmarks/papers.py --paper revnet --run    runs again what takes a CPU core at most five minutes, and compares

`papers.yaml` says what is printed and where revzoo's figure is. What is counted comes out the same on every machine; `--run`
ends with status 1 if it does not.
"""

import argparse
import json
import operator
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "cpu", ROOT / "docs" / "papers.md"
PAPERS: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "benchmarks" / "papers.yaml").read_text(encoding="utf-8"))
_read = cache(lambda path: json.loads(path.read_text(encoding="utf-8")))
_UNITS = {"MB": 1e6, "GB": 1e9, "MiB": 2**20, "GiB": 2**30, "M": 1e6}
_BOUNDS = {"<=": operator.le, ">=": operator.ge}
_INTRO = """\
# Reproduce a paper

Every table and figure of the five papers that revzoo comes from: what is printed, what revzoo has, and the command that makes
it. `python benchmarks/papers.py` writes this page from `benchmarks/papers.yaml` and the results; it needs a checkout. A figure
is *equal* within 5 % of the printed one; *better* and *worse* are beyond that. *In kind* means that the effect is at least as
large, but at another size or on another machine, as the lines below a table say. A drawing is *in the code* that a line names.
A bound such as "<= 20" stands for what a picture or a sentence says.
"""


class Figure(NamedTuple):
    """A figure beside the printed one, in the unit of its item."""

    what: str
    printed: float | str | None
    value: float
    verdict: str


def resolve(data: Any, pointer: str) -> float:
    """Return what a pointer of papers.yaml stands for. LookupError: nothing is there, or no number."""
    total = 0.0
    for term in pointer.split(" + "):
        factor, _, path = term.rpartition(" * ")
        at = [data]
        for part in path.split("/"):
            at = [each for one in at for each in _step(one, part)]
        numbers = [each for each in at if isinstance(each, int | float)]
        if not numbers:
            raise LookupError(f"{path!r} leads to no number")
        total += float(factor or 1) * max(numbers)
    return total


def _step(at: Any, part: str) -> list[Any]:
    if isinstance(at, dict):
        return [at[part]] if part in at else []
    if "=" not in part:
        return list(at) if part == "*" else [at[int(part)]]
    wanted = [each.split("=", 1) for each in part.split("&")]
    return [row for row in at if all(str(row[key]) == value for key, value in wanted)]


def judge(value: float, printed: float | str | None, better: str, tolerance: float) -> str:
    """Return the verdict on a value: "not printed", "equal", "better" or "worse"."""
    if printed is None:
        return "not printed"
    if isinstance(printed, str):
        sign, limit = printed.split()
        return "equal" if _BOUNDS[sign](value, float(limit)) else "worse"
    if abs(value - printed) <= tolerance * abs(printed):
        return "equal"
    return "better" if better == ("lower" if value < printed else "higher") else "worse"


def list_figures(item: dict[str, Any], folder: Path | None = None) -> Iterator[Figure]:
    """Yield the figures of an item, from the results or from another folder with a file of that name."""
    if "figures" not in item:
        return
    name, unit = item["file"], item.get("unit")
    data = _read(folder / Path(name).name if folder else ROOT / name if "/" in name else RESULTS / name)
    for what, printed, pointer, *divisor in item["figures"]:
        value = resolve(data, pointer) / (resolve(data, divisor[0]) if divisor else _UNITS.get(unit, 1))
        value = 100 * (value - 1) if unit == "% more" else value
        if isinstance(printed, str) and printed.split()[0] not in _BOUNDS:
            printed = resolve(data, printed)
        verdict = judge(value, printed, item.get("better", "same"), item.get("tolerance", 0.05))
        yield Figure(what, printed, value, "in kind" if item.get("elsewhere") and verdict in ("better", "equal") else verdict)


def sum_up(item: dict[str, Any], figures: list[Figure]) -> str:
    """Return the verdict on an item."""
    if "figures" not in item:
        return "in the code" if "code" in item else "missing" if "missing" in item else "needs a GPU"
    verdicts = [figure.verdict for figure in figures if figure.verdict != "not printed"] or ["not printed"]
    kinds = sorted(set(verdicts))
    return kinds[0] if len(kinds) == 1 else ", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds)


def list_rows(name: str) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a paper's table: one for an item, with its name, and one for each of its figures, without."""
    for item in PAPERS[name]["items"]:
        figures = list(list_figures(item))
        yield item["item"], item["shows"], "", "", sum_up(item, figures)
        for what, printed, value, verdict in figures:
            yield "", what, _format(printed, item), _format(value, item), verdict


def write_page() -> str:
    """Return docs/papers.md."""
    lines = [_INTRO]
    for name, paper in PAPERS.items():
        lines += [f"## {paper['paper']}", "", f"`python benchmarks/papers.py --paper {name} --run`", ""]
        lines += ["| | | paper | revzoo | verdict |", "|---|---|---:|---:|---|"]
        lines += [f"| {' | '.join([f'**{head}**' if head else '', *cells])} |" for head, *cells in list_rows(name)]
        lines += [""]
        texts: dict[str, list[str]] = {}
        for item in paper["items"]:
            texts.setdefault(_explain(item), []).append(item["item"])
        for text, names in texts.items():
            lines += textwrap.wrap(f"- {', '.join(names)}: {text}", 127, subsequent_indent="  ", break_on_hyphens=False)
        lines += [""]
    return "\n".join(lines)


def _explain(item: dict[str, Any]) -> str:
    """Return how an item is made, and how it differs."""
    if place := item.get("code") or item.get("missing"):
        return f"`{place}`" if "code" in item else place
    notes = [{"gpu": "on a GPU", "data": "measured, with its data", "idle": "measured", "cpu": "counted"}[item["needs"]]]
    notes += [f"{item['minutes']} min, {item['file']}"] if "file" in item else []
    return f"`{item['command']}` ({', '.join(notes)}){': ' + item['differs'] if 'differs' in item else ''}"


def _format(value: float | str | None, item: dict[str, Any]) -> str:
    if not isinstance(value, int | float):
        return value or ""
    unit = item.get("unit", "").removesuffix(" more")
    return f"{value:,.0f} {unit}".strip() if abs(value) >= 1000 else f"{value:.4g} {unit}".strip()


def run_again(paper: str, minutes: float, console: Console) -> int:
    """Run the commands of a paper that need a CPU and so many minutes; return how many figures are not those of the results."""
    differ, done = 0, {}
    for item in [each for each in PAPERS[paper]["items"] if "figures" in each]:
        if item["needs"] != "cpu" or item["minutes"] > minutes:
            console.print(f"{item['item']}: not run: {_explain(item).partition(': ')[0]}", style="dim", markup=False)
            continue
        if item["command"] not in done:
            done[item["command"]] = folder = tempfile.mkdtemp(prefix="papers-")
            console.print(f"$ {item['command']}", style="bold", markup=False)
            command = [sys.executable, *shlex.split(item["command"])[1:], "--out", folder]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        for old, new in zip(list_figures(item), list_figures(item, Path(done[item["command"]])), strict=True):
            differ += new.value != old.value
            beside = "as before" if new.value == old.value else f"instead of {_format(old.value, item)}"
            console.print(f"{item['item']}, {new.what}: {_format(new.value, item)}, {beside}")
    return differ


def make_table(name: str) -> Table:
    """Return the table of a paper for a terminal."""
    printed, ours = Column("paper", justify="right"), Column("revzoo", justify="right")
    table = Table("", "what", printed, ours, "verdict", title=PAPERS[name]["paper"], title_justify="left", box=SIMPLE_HEAD)
    for row in list_rows(name):
        table.add_row(*map(escape, row), style="bold" if row[0] else None)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", choices=PAPERS, help="one paper")
    parser.add_argument("--run", action="store_true", help="run again what a CPU core does in a few minutes, and compare")
    parser.add_argument("--minutes", type=float, default=5, help="the longest that a command may take with --run (default: 5)")
    args = parser.parse_args()
    console, names = Console(width=None if sys.stdout.isatty() else 160), [args.paper] if args.paper else list(PAPERS)
    console.print(*map(make_table, names))
    PAGE.write_text(write_page(), encoding="utf-8")
    if args.run and sum(run_again(name, args.minutes, console) for name in names):
        sys.exit(1)


if __name__ == "__main__":
    main()
