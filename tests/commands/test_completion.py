"""What a shell is offered while a command is typed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("argcomplete")


def ask(line: str, folder: Path) -> list[str]:
    """Return what fits at the end of a line."""
    answer = folder / "answer"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "COMP_TYPE": "9"}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-m", "revzoo"], cwd=folder, env=os.environ | asked, check=True)
    return [word.strip() for word in answer.read_text().split("\n")]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("revzoo sh", {"show"}),
        ("revzoo show rev_vit_", {f"rev_vit_{size}" for size in ("digits", "ti", "s", "b", "l", "h")}),
        ("revzoo train digits optimizer.l", {"optimizer.lr=", "optimizer.layer_decay="}),
        ("revzoo eval my_", {"my_run/"}),
    ],
)
def test_what_is_typed_is_completed(tmp_path, line, expected):
    (tmp_path / "my_run").mkdir()
    assert set(ask(line, tmp_path)) == expected
