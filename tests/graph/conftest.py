"""Modules captured as graphs and run by a plan of the test's own."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from revzoo.graph.atoms import Atom, split_into_atoms
from revzoo.graph.spanned_graph import SpannedGraph
from revzoo.graph.spans import Spans
from revzoo.runtime.nested import tensors_in

Cut = Callable[[Sequence[Atom]], Spans]


def cut_every(length: int, keep: int = 0) -> Cut:
    """Cut spans of so many atoms. Besides what passes between spans, keep every keep-th result."""

    def cut(atoms: Sequence[Atom]) -> Spans:
        span = {node: i // length for i, atom in enumerate(atoms) for node in atom.nodes}
        kept = {node for i, atom in enumerate(atoms) for node in atom.reads if span.get(node, i // length) != i // length}
        kept |= {node for atom in atoms if not atom.is_repeatable for node in atom.makes}
        kept |= {node for i, atom in enumerate(atoms) for node in atom.makes if keep and i % keep == 0}
        inside = {i for i in range(len(atoms)) if keep and i % keep == 1}
        return Spans(atoms, [*range(length, len(atoms), length), len(atoms)], frozenset(kept), frozenset(inside))

    return cut


CUTS = {"one span": cut_every(10**6), "spans of three": cut_every(3), "kept subset": cut_every(5, keep=3)}
KEEP_ALL = "everything kept"


class Watching(TorchDispatchMode):
    """Knows what is alive of all that was allocated."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._made.extend(weakref.ref(t.untyped_storage()) for t in tensors_in(out))
        return out

    def count_alive(self, known: Iterable[Tensor]) -> int:
        """Return the bytes that are alive, but for those of known tensors."""
        assert len(self._made) > 20
        ids = {id(t.untyped_storage()) for t in known}
        return sum(s.nbytes() for each in self._made if (s := each()) is not None and id(s) not in ids)


@pytest.fixture
def watching() -> Iterator[Watching]:
    """Return a mode that watches, while no garbage is collected."""
    gc.collect()
    gc.disable()
    yield Watching()
    gc.enable()


class Captured:
    """A module whose graphs run by the plan that `cut` makes; `programs` has them in order of capture."""

    def __init__(self, module: Callable[..., Any], cut: str = "one span"):
        self.programs: list[SpannedGraph] = []
        self.inputs: Sequence[Any] = ()  # of the graph that ran last
        self._cut = CUTS[cut]
        self._run = torch.compile(module, backend=self._compile, dynamic=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def use(self, cut: str) -> None:
        """Cut differently from now on."""
        self._cut = cut_every(10**6, keep=1) if cut == KEEP_ALL else CUTS[cut]
        for program in self.programs:
            program.__init__(program.graph, self._cut(program.spans.atoms))  # type: ignore[misc]

    def _compile(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        program = SpannedGraph(graph, self._cut(split_into_atoms(graph, inputs)))
        self.programs.append(program)

        def run(*given: Any) -> Any:
            self.inputs = given
            return program(*given)

        return run


@pytest.fixture(scope="session")
def capture() -> type[Captured]:
    return Captured


def step(run: Callable[..., Any], module: nn.Module, batch: Any, loss: Callable[[Any], Tensor]) -> dict[str, Any]:
    """Return all that one training step leaves behind."""
    torch.manual_seed(1)
    inputs = [x.detach().clone().requires_grad_(x.requires_grad)
              if isinstance(x, Tensor) else x for x in (batch.values() if isinstance(batch, dict) else batch)]  # fmt: skip
    out = run(**dict(zip(batch, inputs, strict=True))) if isinstance(batch, dict) else run(*inputs)
    left: dict[str, Any] = {f"output {i}": t.detach().clone() for i, t in enumerate(tensors_in(out))}
    left["random stream of forward"] = torch.get_rng_state()
    loss(out).backward()
    left["random stream"] = torch.get_rng_state()
    left |= {f"gradient of input {i}": x.grad for i, x in enumerate(inputs) if isinstance(x, Tensor)}
    left |= {f"gradient of {name}": parameter.grad for name, parameter in module.named_parameters()}
    left |= {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
    return left


def square(out: Any) -> Tensor:
    """Return a loss of all outputs that have a gradient."""
    wanted = [t for t in tensors_in(out) if t.requires_grad]
    assert wanted
    return sum(((t.abs() ** 2).sum() if t.is_complex() else (t.double() ** 2).sum() for t in wanted), torch.zeros(()))


def assert_equal(left: dict[str, Any], expected: dict[str, Any]) -> None:
    assert left.keys() == expected.keys()
    for name, value in expected.items():
        got = left[name]
        if value is None:
            assert got is None, name
            continue
        if value.layout is not torch.strided:
            value, got = value.to_dense(), got.to_dense()
        assert got.dtype == value.dtype, name
        assert got.stride() == value.stride(), name
        assert torch.equal(got, value), name


@pytest.fixture
def same_step() -> Callable[..., None]:
    """Return a function that asserts that a step of a planned module leaves what one of the plain module leaves."""

    def compare(planned: nn.Module, plain: nn.Module, batch: Any, loss: Callable[[Any], Tensor] = square) -> None:
        inputs = batch if isinstance(batch, dict | tuple) else (batch,)
        assert_equal(*(step(module, module, inputs, loss) for module in (planned, plain)))

    return compare


@pytest.fixture
def check() -> Callable[..., None]:
    """Return a function that compares a step of a captured module with one of the plain module, however it is cut."""

    def compare(
        module: nn.Module, inputs: Sequence[Any], loss: Callable[[Any], Tensor] = square, graphs: int = 1, drops: bool = True
    ) -> None:
        plain = copy.deepcopy(module)
        expected = step(plain, plain, inputs, loss)
        state = copy.deepcopy(module.state_dict())
        captured = Captured(module)
        for name in CUTS:
            captured.use(name)
            module.load_state_dict(state)
            module.zero_grad()
            try:
                assert_equal(step(captured, module, inputs, loss), expected)
            except BaseException as error:
                error.add_note(name)
                raise
        assert len(captured.programs) == graphs
        if drops:
            assert any(recipe.atoms for program in captured.programs for recipe in program.recipes.values())

    return compare
