"""The house does not grow unnoticed: how many lines of code each package may have."""

from pathlib import Path

from benchmarks.lines import count_code

ROOT = Path(__file__).parents[2]
LEDGER = Path(__file__).with_name("ledger.txt")
ROOM = 20  # lines that a package may be below its number


def test_every_package_has_the_lines_that_the_ledger_says():
    """`python -m tests.house.test_ledger` writes the numbers anew. A commit that raises one says what it bought."""
    allowed = {name: int(lines) for name, lines in map(str.split, LEDGER.read_text().splitlines())}
    counted = count_packages()
    assert len(counted) > 35
    assert counted.keys() == allowed.keys()
    assert {name: lines for name, lines in counted.items() if not 0 <= allowed[name] - lines <= ROOM} == {}


def count_packages():
    """Return the lines of code of each package by its path; of loose files, by that of their folder."""
    counted = {}
    for folder in ("revzoo", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = "/".join(path.relative_to(ROOT).parts[:-1][:2])
            counted[name] = counted.get(name, 0) + count_code(path)
    return counted


if __name__ == "__main__":
    LEDGER.write_text("".join(f"{name} {lines}\n" for name, lines in count_packages().items()))
