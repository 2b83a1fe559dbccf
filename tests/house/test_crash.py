"""A test whose process was ended by a crash runs once more, and the summary says so; other failures stay what they are."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = """
import subprocess
import sys
from pathlib import Path

def count(name):
    with Path(__file__).with_name(name).open("a") as file:
        return file.write("x") and file.tell()

def run(code):
    done = subprocess.run([sys.executable, "-c", f"import os, sys; {code}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

def test_once():
    run(f"{count('once')} > 1 or os.kill(os.getpid(), 11)")

def test_always():
    count("always")
    run("os.abort()")

def test_forked():
    assert count("forked") > 1, "process 0: EOFError: \\nprocess 1: ended by SIGSEGV\\n"

def test_ordinary():
    count("ordinary")
    run("sys.exit('SIGSEGV')")
"""


@pytest.mark.slow
def test_only_a_crash_is_repeated(tmp_path):
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_file.py").write_text(FILE)
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", str(tmp_path)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    repeated = {"once", "always", "forked"}
    assert set(re.findall(r"^RAN ONCE MORE \S+::test_(\w+): .*(?:-11|-6|SIG).*$", printed, re.MULTILINE)) == repeated, printed
    assert set(re.findall(r"^FAILED \S+::test_(\w+)", printed, re.MULTILINE)) == {"always", "ordinary"}
    runs = {name: len((tmp_path / name).read_text()) for name in (*repeated, "ordinary")}
    assert runs == {name: 2 if name in repeated else 1 for name in runs}
