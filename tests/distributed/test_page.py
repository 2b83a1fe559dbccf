"""The commands of docs/distributed.md that start several processes are typed as they stand, on one machine."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
BLOCKS = "".join(re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.M | re.S))
# Without those in which "..." is for the reader to fill in.
COMMANDS = re.findall(r"^(?:torchrun|accelerate launch) (?!.*\.\.\.).*?(?=  #|$)", BLOCKS, flags=re.M)
SHORT = " train.epochs=1 schedule.warmup_epochs=0 model.overrides=[stages.0.depth=1]"


def shorten(line: str) -> str:
    """Return a line with a smaller network and fewer batches."""
    if "--resume" in line:
        return line
    return line + SHORT + " data.batch_size=80" * ("data.batch_size" not in line)


@pytest.mark.slow
def test_the_commands_work(tmp_path, launch):
    [configuration] = re.findall(r"^```yaml\n# fsdp2\.yaml\n(.*?)^```$", PAGE, flags=re.M | re.S)
    (tmp_path / "fsdp2.yaml").write_text(configuration)
    printed = launch(*map(shorten, COMMANDS))
    assert all("top-1" in output for output in printed)
    divided = [line for line, output in zip(COMMANDS, printed, strict=True) if "divided over 2 processes" in output]
    assert divided == [line for line in COMMANDS if "train.shard=full" in line or line.startswith("accelerate")]
    assert len(divided) == 2
    assert len(COMMANDS) == 5
