"""`benchmarks/gpu.py` runs whole on the stub, loses nothing when it is killed, and has the counted bytes of all its cases."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "gpu.py"


def start(*arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # as from a checkout that is not installed
    return subprocess.Popen(
        [sys.executable, str(FILE), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    return output


def read_cases(folder: Path) -> dict[str, Any]:
    file = folder / "gpu.json"
    return json.loads(file.read_text())["cases"] if file.exists() else {}


def require_stub() -> None:
    spec = importlib.util.spec_from_file_location("cuda_stub", Path(__file__).with_name("stub.py"))
    stub = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stub)
    try:
        stub.build(stub.SOURCE.parent / "build")
    except stub.Unavailable as reason:
        pytest.skip(f"the CUDA stub cannot be built: {reason}")


def test_the_job_runs_whole_and_a_killed_one_is_resumed(tmp_path):
    require_stub()
    output = finish(start("--fake", "--out", tmp_path / "whole"))
    whole = read_cases(tmp_path / "whole")
    assert all(case["fake"] for case in whole.values())
    failed = {key: case["error"] for key, case in whole.items() if "error" in case}
    assert all("/expandable/" in key for key in failed), failed  # the stub cannot map addresses, and such a process dies
    assert f"{len(whole)} cases, {len(failed)} with an error" in output
    pictures = [sys.executable, str(FILE.with_name("gpu_figure.py")), str(tmp_path / "whole" / "gpu.json")]
    subprocess.run(pictures, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert sorted(file.name for file in (tmp_path / "whole").glob("*.png")) == ["gpu_memory.png", "gpu_time.png"]

    most = random.randrange(1, len(whole) - 10)
    process = start("--fake", "--out", tmp_path / "killed")
    while len(read_cases(tmp_path / "killed")) < most:
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()  # ends when the processes that it has started have ended, too
    before = read_cases(tmp_path / "killed")
    assert most <= len(before) < len(whole)
    finish(start("--fake", "--out", tmp_path / "killed", "--resume"))
    after = read_cases(tmp_path / "killed")
    assert after.keys() == whole.keys(), f"killed after {most} cases"
    assert {key: after[key] for key in before} == before


def test_without_a_gpu_it_says_so():
    process = subprocess.run(
        [sys.executable, str(FILE)], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert process.returncode == 2
    assert process.stderr.startswith("There is no GPU here")
    assert process.stderr.count("\n") == 1


def test_every_timed_step_has_been_counted(monkeypatch):
    monkeypatch.syspath_prepend(str(FILE.parent))
    from gpu_cases import GPU, SECTIONS

    counts = {case.key: case.count for each in SECTIONS.values() for case in each.list_cases(GPU, ROOT) if case.count}
    written = json.loads((FILE.parent / "results" / "counted.json").read_text())
    assert list(written["counted"]) == list(counts), f"run {written['command']}"
    for key in ("speed/rev_vit_s/bf16/32/store", "speed/rev_vit_s/fp32/8/ahead"):
        assert counts[key]() == written["counted"][key], f"run {written['command']}"
