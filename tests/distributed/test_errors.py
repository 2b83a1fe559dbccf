"""Errors of one process, which the others must not wait for: two processes on the CPU."""

import pytest

# Each process says what it caught; one that waits for the other is killed by the test's limit.
SCRIPT = """
import sys
import torch
from types import SimpleNamespace
from accelerate import Accelerator
from revzoo.errors import RevzooError, UnknownNameError
from revzoo.training.divergence import add_losses
from revzoo.training.processes import call_on_all, call_on_main
from revzoo.training.origin import Origin, require_same

accelerator = Accelerator()
rank = accelerator.process_index

def fail_in(process):
    if rank == process:
        raise RevzooError(f"from {process}")
    return rank

def check():
    options = SimpleNamespace(lr=1.0, warmup_epochs=0, clip_grad=None, mixed_precision="no", name="x")
    recipe = SimpleNamespace(optimizer=options, schedule=options, train=options, model=options)
    progress = SimpleNamespace(loss_sum=0.0, epoch=0, updates=1)
    folder = SimpleNamespace(list_states=lambda: [])
    run = SimpleNamespace(recipe=recipe, progress=progress, folder=folder)
    run.upload = SimpleNamespace(settle=lambda: None)
    add_losses(run, losses := torch.tensor(2.5 + rank))
    assert progress.loss_sum == 6.0 and losses == 0.0
    add_losses(run, torch.tensor([1.0, float("nan")][rank]))

class Strange(Exception):
    def __init__(self, one, two):
        super().__init__(one)

def fail_strangely():
    if rank == 1:
        raise Strange("from", "1")

def fail_with_more():
    if rank == 1:
        raise UnknownNameError("recipe", "x", ["y"])

def compare():
    examples = {"training": {"count": 4 + rank, "digest": "a"}}
    require_same(Origin({"train": {"seed": rank}}, {}, None, examples, 8), Origin.list_changes)

caught = []
on_all, on_main = lambda: call_on_all(accelerator, lambda: fail_in(1)), lambda: call_on_main(accelerator, lambda: fail_in(0))
more = lambda: call_on_all(accelerator, fail_with_more)
strange = lambda: call_on_all(accelerator, fail_strangely)
for work in (on_all, on_main, check, more, strange, compare):
    try:
        work()
    except (RevzooError, RuntimeError, Strange) as error:
        caught.append(str(error).partition(" in epoch")[0].removeprefix("Strange: "))
assert caught[:-1] == ["from 1", "from 0", "The training loss is nan", "Unknown recipe 'x'. Allowed: y.", "from"], caught
assert "and process 1 has other train.seed, training examples than process 0." in caught[-1], caught
assert call_on_all(accelerator, lambda: fail_in(2)) == rank
assert call_on_main(accelerator, lambda: fail_in(2)) == 0
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_an_error_of_one_process_is_raised_in_both(tmp_path, launch):
    (tmp_path / "script.py").write_text(SCRIPT)
    launch("torchrun --nproc-per-node 2 script.py")
