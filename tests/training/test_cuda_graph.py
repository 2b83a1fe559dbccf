"""`train.cuda_graph` where it cannot be: each setting that does not go with it is named, before anything runs.

What it does on a GPU: `tests/gpu/test_captured_training.py`.
"""

import pytest

from revzoo.errors import MissingValueError, SpecError
from revzoo.training import loop, memory
from revzoo.training.planned_step import PlannedStep
from revzoo.training.recipe import load_recipe
from revzoo.training.setup import build_run

GRAPH = "train.cuda_graph=true"


def test_a_cpu_has_no_graphs(tmp_path):
    with pytest.raises(SpecError, match=r"train\.cuda_graph: found true; allowed: false on cpu"):
        build_run(load_recipe("digits", [GRAPH]), tmp_path, resumed=False)


def test_a_step_that_asks_for_a_value_is_refused_before_the_first_one(tmp_path, monkeypatch):
    run = build_run(load_recipe("digits", []), tmp_path, resumed=False)
    run.recipe = load_recipe("digits", [GRAPH])

    def measure(step: PlannedStep, modes: object) -> None:
        raise MissingValueError("Received: a value that stages.0 (Asking) asks for.")

    monkeypatch.setattr(loop, "describe_memory", memory.describe_memory)
    monkeypatch.setattr(PlannedStep, "measure_modes", measure)
    with pytest.raises(SpecError, match=r"train\.cuda_graph: found true; allowed: false: .*stages\.0 \(Asking\)"):
        loop._print_memory(run)
