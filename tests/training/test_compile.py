"""`train.compile`: the steps are compiled, which is said, and a run can be resumed."""

from functools import partial

import pytest
import torch

import revzoo
from revzoo.training import epochs
from revzoo.training.interrupt import Interrupted, StopSignal
from revzoo.training.loop import resume, train
from tests.runtime.test_compile import needs_compiler

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
]
SAID = "The 4 steps are compiled, each kind of step when it first runs."


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_a_compiled_run_resumes(backend, tmp_path, monkeypatch, recipe, capsys):
    torch.compiler.reset()
    compiled = []
    monkeypatch.setattr(epochs, "compile_steps", lambda model: compiled.append(model) or compile_steps(model))
    compile_steps = partial(revzoo.compile_steps, backend=backend)
    options = recipe("train.compile=true", "model.schedule=[store,selective,invert,recompute,invert,store,store]")
    assert recipe().train.compile is False
    with monkeypatch.context() as patch:
        polls = iter([0, 0, 15])
        patch.setattr(StopSignal, "poll", lambda _: next(polls))
        with pytest.raises(Interrupted):
            train(options, tmp_path / "run")
    assert SAID in capsys.readouterr().out
    resume(tmp_path / "run")
    assert SAID in capsys.readouterr().out
    first, second = compiled
    assert first is not second
    assert all(step._compiled_call_impl is not None for step in second.steps)
    torch.compiler.reset()


def test_it_is_off_by_default(tmp_path, recipe, capsys):
    train(recipe("train.epochs=1"), tmp_path / "run")
    assert "compiled" not in capsys.readouterr().out
    assert "compile: false" in (tmp_path / "run" / "config.yaml").read_text()
