"""`benchmarks/gpu.py` runs whole on the stub, and has the counted bytes of all its cases."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "gpu.py"


def test_the_job_runs_whole(tmp_path):
    build = [sys.executable, "-c", "import stub; stub.build(stub.SOURCE.parent / 'build')"]
    built = subprocess.run(build, cwd=Path(__file__).parent, capture_output=True, text=True)
    if "Unavailable" in built.stderr:
        pytest.skip(f"the CUDA stub cannot be built: {built.stderr.splitlines()[-1]}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # as from a checkout that is not installed
    job = [sys.executable, str(FILE), "--fake", "--out", str(tmp_path)]
    done = subprocess.run(job, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads((tmp_path / "gpu.json").read_text())["cases"]
    failed = {key: case["error"] for key, case in cases.items() if "error" in case}
    assert all("/expandable/" in key for key in failed), failed  # the stub cannot map addresses, and such a process dies
    pictures = [sys.executable, str(FILE.with_name("gpu_figure.py")), str(tmp_path / "gpu.json")]
    subprocess.run(pictures, check=True, env=environment)
    assert sorted(file.name for file in tmp_path.glob("*.png")) == ["gpu_memory.png", "gpu_time.png"]


def test_every_timed_step_has_been_counted(monkeypatch):
    monkeypatch.syspath_prepend(str(FILE.parent))
    from gpu_cases import GPU, SECTIONS

    counts = {case.key: case.count for each in SECTIONS.values() for case in each.list_cases(GPU, ROOT) if case.count}
    written = json.loads((FILE.parent / "results" / "counted.json").read_text())
    assert list(written["counted"]) == list(counts), f"run {written['command']}"
    for key in ("speed/rev_vit_s/bf16/32/store", "speed/rev_vit_s/fp32/8/ahead"):
        assert counts[key]() == written["counted"][key], f"run {written['command']}"
