"""The whole comparison: which methods there are, their figures, and the matrix of checks."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import product
from typing import Any

from comparison.checks import CHECKS
from comparison.ddp import check_ddp
from comparison.measure import UNITS, Figure, count, time_machinery, time_methods
from comparison.method import METHODS, Method
from comparison.net import NETS, SMALL_NETS
from revzoo.errors import InputError


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        depths: numbers of blocks of every net whose memory and FLOPs are counted.
        timed: number of blocks of every net that is timed.
        rounds: number of rounds of every timing.
        full: whether to include what compiles and what takes two processes.
    """

    depths: dict[str, tuple[int, ...]]
    timed: dict[str, int]
    rounds: int
    full: bool


QUICK = Size({"transformer": (2, 4), "conv": (2, 4)}, {"transformer": 2, "conv": 2}, rounds=3, full=False)
FULL = Size({"transformer": (6, 48), "conv": (4, 32)}, {"transformer": 12, "conv": 8}, rounds=11, full=True)


@dataclass
class ComparisonReport:
    """What was measured.

    Args:
        methods: names, in the order of the tables.
        packages: versions of the other packages that were run.
        left_out: why a method was not run, by name.
        figures: all figures.
        checks: by row of the matrix, method and net, what is wrong: an empty text if nothing is.
    """

    methods: list[str]
    packages: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    checks: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)

    def find(self, what: str, net: str, method: str) -> dict[int, float]:
        """Return the values of a figure by number of blocks."""
        wanted = (what, net, method)
        return {f.blocks: f.value for f in self.figures if (f.what, f.net, f.method) == wanted}

    def count_passed(self, method: str) -> tuple[int, int]:
        """Return how many rows of the matrix a method passes on all nets, and how many were run."""
        rows = [row[method] for row in self.checks.values() if method in row]
        return sum(not any(row.values()) for row in rows), len(rows)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ComparisonReport":
        """Return the report that `to_dict` gave; other keys are ignored."""
        figures = [Figure(**figure) for figure in values["figures"]]
        return cls(values["methods"], values["packages"], values["left_out"], figures, values["checks"])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON can hold it, units included."""
        return {"units": UNITS, "stream_bytes": {net.name: net.stream_bytes for net in NETS}, **asdict(self)}


def compare_methods(size: Size = QUICK, announce: Callable[[str], object] = lambda _: None) -> ComparisonReport:
    """Run every method that is installed; return figures and matrix.

    Args:
        size: how much is measured.
        announce: function that is told what comes next.
    """
    report = ComparisonReport([method.name for method in METHODS])
    methods = _select(report, size)
    for net, method in product(NETS, methods):
        announce(f"memory and FLOPs of the {net.name} net, {method.name}")
        report.figures += count(net, method, size.depths[net.name])
    for net in NETS:
        announce(f"times of the {net.name} net")
        report.figures += time_methods(net, methods, size.timed[net.name], size.rounds)
    announce("machinery")
    not_compiled = [method for method in methods if method.make_timed is None]
    report.figures += time_machinery(not_compiled, blocks=12, rounds=5 * size.rounds)
    for check in CHECKS:
        if size.full or not check.is_slow:
            announce(check.name)
            report.checks[check.name] = {
                method.name: {net.name: check.run(method, net) for net in SMALL_NETS} for method in methods
            }
    if size.full:
        announce("DDP")
        report.checks |= check_ddp(methods)
    return report


def _select(report: ComparisonReport, size: Size) -> list[Method]:
    """Return the methods that can be run; the report says why the others cannot."""
    selected = []
    for method in METHODS:
        try:
            method.require()
        except InputError as error:
            report.left_out[method.name] = str(error)
        else:
            if method.make_timed is not None and not size.full:
                report.left_out[method.name] = "compiles: left out by --quick"
            else:
                selected.append(method)
                if method.package is not None:
                    report.packages[method.package] = version(method.package)
    return selected
