"""Two processes on the CPU, as `accelerate launch` starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from revzoo.training.evaluation import evaluate_checkpoint
from revzoo.training.loop import resume

ROOT = Path(__file__).parents[2]
# A RevNet, for the statistics of its BatchNorms; 355 test images do not divide by two processes of 80.
FAST = ["data.batch_size=80", "train.epochs=2", "train.accumulate=2", "ema={decay: 0.9}", "schedule.warmup_epochs=1"]
FAST += ["model.overrides=[stages.0.depth=1,stages.1.depth=1,stages.2.depth=1]"]
LAUNCH = "accelerate launch --multi_gpu --num_processes=2 --num_machines=1 --mixed_precision=no --dynamo_backend=no"


@pytest.mark.slow
def test_two_processes(tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH.split()[2:], "--main_process_port=0"]
    command += ["-m", "zoo_cli", "train", "digits_revnet", *FAST]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launched = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert launched.returncode == 0, launched.stderr
    output, run = launched.stdout, tmp_path / "runs" / "digits_revnet"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["digits_revnet"]
    assert output.count("Memory of a training step") == output.count("epoch 1/2") == output.count("top-1") - 2 == 1
    assert sorted(path.name for path in run.iterdir()) == [
        "best.safetensors",
        "classes.json",
        "config.yaml",
        "curves.png",
        "last.safetensors",
        "log",
        "metrics.jsonl",
        "spec.yaml",
        "state",
    ]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["updates"] for record in records] == [5, 10]  # 9 batches of 2 x 80 images
    assert records[1]["train_loss"] < records[0]["train_loss"] < 2.5
    progress = json.loads((run / "state" / "00002-0000000" / "progress.json").read_text())
    assert (progress["processes"], progress["loss_sum"]) == (2, 0.0)
    resume(run)  # by one, which has nothing left to do
    assert (run / "log" / "process-1.txt").read_text() == ""
    alone = evaluate_checkpoint(run / "last.safetensors")  # every test image exactly once, on either side
    assert (alone.metrics["top1"], alone.metrics["top5"], alone.count) == (records[1]["top1"], records[1]["top5"], 355)
    assert alone.loss == pytest.approx(records[1]["loss"], rel=1e-5)
