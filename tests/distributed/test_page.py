"""The commands of docs/distributed.md that start several processes are typed as they stand, on one machine."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "distributed.md").read_text()
BLOCKS = "".join(re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.M | re.S))
# Without those in which "..." is for the reader to fill in.
COMMANDS = re.findall(r"^(?:torchrun|accelerate launch) (?!.*\.\.\.).*?(?=  #|$)", BLOCKS, flags=re.M)
# A launcher as a module, with a port that nobody else has.
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone"],
    "accelerate": ["accelerate.commands.launch", "--main_process_port=0"],
}
SHORT = ["train.epochs=1", "schedule.warmup_epochs=0", "model.overrides=[stages.0.depth=1]"]


def launch(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Type a line, with a smaller network and fewer batches."""
    words = shlex.split(line.replace("accelerate launch", "accelerate"))
    if "--resume" not in words:
        words += SHORT if "data.batch_size" in line else [*SHORT, "data.batch_size=80"]
    command = [sys.executable, "-W", "ignore", "-m", *LAUNCHERS[words[0]], *(w for w in words[1:] if w != "--standalone")]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_commands_work(tmp_path):
    [configuration] = re.findall(r"^```yaml\n# fsdp2\.yaml\n(.*?)^```$", PAGE, flags=re.M | re.S)
    (tmp_path / "fsdp2.yaml").write_text(configuration)
    divided = []
    for line in COMMANDS:
        launched = launch(line, tmp_path)
        assert launched.returncode == 0, f"{line}\n{launched.stderr}"
        assert "top-1" in launched.stdout
        if "divided over 2 processes" in launched.stdout:
            divided.append(line)
    assert divided == [line for line in COMMANDS if "train.shard=full" in line or line.startswith("accelerate")]
    assert len(divided) == 3
    assert len(COMMANDS) == 6
