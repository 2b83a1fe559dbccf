"""The tests of GPUs run without one, on a CUDA runtime that computes nothing; skipped where it cannot be built."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_stub import stub

GPU_TESTS = Path(__file__).parents[1] / "gpu"
FILES = sorted(path.name for path in GPU_TESTS.glob("test_*.py"))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return stub.build(tmp_path_factory.mktemp("cuda_stub"))
    except stub.Unavailable as reason:
        pytest.skip(f"the CUDA stub cannot be built: {reason}")


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_on_the_stub(file, library):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(GPU_TESTS / file)]
    done = subprocess.run(command, env=stub.make_environment(library), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout


def test_all_files_are_found():
    names = ("capture", "counts", "cuda", "lookahead", "module_plan")
    assert set(FILES) == {f"test_{name}.py" for name in names}
