"""How a captured graph is split: which calls belong together, and which may run again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from revzoo.errors import RecoveryError
from revzoo.graph.spanned_graph import SpannedGraph
from revzoo.graph.spans import Spans


@pytest.fixture(autouse=True)
def _capture_anew() -> None:
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norms = nn.ModuleDict({"first": nn.BatchNorm1d(4)})

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)  # of classes with a method of that name, the compiler reads `__dict__`

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms["first"](self.fc[0](x))
        y += x
        return F.dropout(self.fc[1](y.relu_()), 0.5)


def split(capture: Callable[..., Any], module: Callable[..., Any], *inputs: Tensor) -> Any:
    """Return the atoms of a module's only graph."""
    captured = capture(module)
    captured(*inputs)
    (program,) = captured.programs
    return program.spans.atoms


def test_changes_in_place_join_what_they_change(capture: Callable[..., Any]):
    atoms = split(capture, Block(), torch.randn(3, 4))
    assert [
        [node.target if isinstance(node.target, str) else node.target.__name__ for node in atom.nodes] for atom in atoms
    ] == [["linear"], ["add_"], ["batch_norm", "iadd", "relu_"], ["linear"], ["dropout"]]
    assert [atom.name for atom in atoms] == ["fc.0 (linear)", "norms.first (add_)", "relu_", "fc.1 (linear)", "dropout"]
    assert [atom.is_repeatable for atom in atoms] == [True, False, True, True, True]
    assert [atom.draws for atom in atoms] == [False, False, False, False, True]
    assert [len(atom.statistics) for atom in atoms] == [0, 0, 2, 0, 0]


def test_statistics_that_do_not_move_are_read(capture: Callable[..., Any]):
    atoms = split(capture, Block().eval(), torch.randn(3, 4))
    assert [len(atom.statistics) for atom in atoms] == [0] * 4
    assert [len(atom.reads) for atom in atoms] == [3, 6, 3, 1]


def test_what_reads_an_input_that_changes_later_is_not_repeatable(capture: Callable[..., Any]):
    mean = torch.zeros(4)

    def run(x: Tensor) -> Tensor:
        before = mean.view(2, 2).flatten() * x
        mean.add_(x.mean(0))
        return before * (mean * x)

    atoms = split(capture, run, torch.randn(3, 4))
    assert {atom.name: atom.is_repeatable for atom in atoms} == {
        "view": False,
        "flatten": False,
        "mul": True,
        "mean": True,
        "add_": False,
    }
    # Three products; the first of them reads what changes.
    assert [atom.is_repeatable for atom in atoms if atom.name == "mul"] == [False, True, True]


def test_checkpoints_become_calls_of_the_graph(capture: Callable[..., Any]):
    def inner(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), F.dropout(x, 0.5)

    def middle(x: Tensor) -> Tensor:
        a, b = checkpoint(inner, x.cos(), use_reentrant=False)
        return a * b

    def run(x: Tensor) -> Tensor:
        return checkpoint(middle, x, use_reentrant=False).exp()

    atoms = split(capture, run, torch.randn(3, 4))
    assert [atom.name for atom in atoms] == ["cos", "sin", "dropout", "mul", "exp"]


def test_a_plan_that_would_repeat_a_change_is_refused(capture: Callable[..., Any]):
    count = torch.zeros(4)

    def run(x: Tensor) -> Tensor:
        return (count.add_(1) * x).sin().sin()

    captured = capture(run)
    x = torch.randn(3, 4).requires_grad_()
    captured(x)
    (program,) = captured.programs
    atoms = program.spans.atoms
    forgetful = SpannedGraph(program.graph, Spans(atoms, [len(atoms)], frozenset(), frozenset()))
    with pytest.raises(RecoveryError, match=r"add_ changes a tensor or setting of others and cannot run again"):
        forgetful(*captured.inputs)
