"""`train.compile`: the steps are compiled, which is said, and a run can be resumed."""

from functools import partial

import pytest
import torch

import revzoo
from revzoo.training import epochs
from revzoo.training.loop import resume, train
from tests.runtime.test_compile import WARNINGS, needs_compiler
from tests.training.runs import interrupted, make_recipe

pytestmark = WARNINGS
SAID = "The 2 steps are compiled, each kind of step when it first runs."


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_a_compiled_run_resumes(backend, tmp_path, monkeypatch, capsys):
    torch.compiler.reset()
    compiled = []
    monkeypatch.setattr(epochs, "compile_steps", lambda model: compiled.append(model) or compile_steps(model))
    compile_steps = partial(revzoo.compile_steps, backend=backend)
    options = make_recipe("train.compile=true", "train.epochs=1", "model.schedule=[store,selective,invert,store,store]")
    assert make_recipe().train.compile is False
    with interrupted(1):
        train(options, tmp_path / "run")
    assert SAID in capsys.readouterr().out
    resume(tmp_path / "run")
    assert SAID in capsys.readouterr().out
    first, second = compiled
    assert first is not second
    assert all(step._compiled_call_impl is not None for step in second.steps)
    torch.compiler.reset()
