"""`train.compile`: the network is compiled, which is said, and a run can be resumed."""

import pytest
import torch
from torch import nn

import revzoo
from revzoo.training.loop import resume, train
from tests.runtime.test_compile import WARNINGS, needs_compiler
from tests.training.runs import interrupted, make_recipe

pytestmark = WARNINGS
SAID = "The network is compiled, in its first updates."


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_a_compiled_run_resumes(backend, tmp_path, monkeypatch, capsys):
    torch.compiler.reset()
    compiled, compile_ = [], nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: (compiled.append(self), compile_(self, backend=backend)))
    options = make_recipe("train.compile=true", "train.epochs=1", "model.schedule=[store,selective,invert,store,store]")
    assert make_recipe().train.compile is False
    with interrupted(1):
        train(options, tmp_path / "run")
    assert SAID in capsys.readouterr().out
    resume(tmp_path / "run")
    assert SAID in capsys.readouterr().out
    first, second = compiled
    assert first is not second
    assert isinstance(second, revzoo.Model)
    torch.compiler.reset()
