"""revzoo.compile_steps: every distinct step is compiled once, and modes keep in compiled code what they keep in eager code."""

import copy
import pickle
import random

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounterWithBackend

import revzoo
from revzoo.errors import InputError, RecoveryError
from revzoo.runtime import LiveBytes, ReversibleChain
from revzoo.runtime.coupling import dual_residual
from tests.runtime.test_compile import BACKENDS, WARNINGS

pytestmark = WARNINGS
MODES = ["store", "selective", "recompute", "invert"]
MIXED = ["selective", "invert", "invert", "selective", "store", "recompute", "selective", "invert"]


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def mlp(hidden: int = 12, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, 6))


def gate() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())


def make_chain(dropout: float = 0.0, **options: object) -> ReversibleChain:
    torch.manual_seed(0)
    return ReversibleChain([f() for _ in range(4) for f in (lambda: mlp(dropout=dropout), gate)], **options).double()


def differentiate(chain: ReversibleChain, schedule: object = None, batch: int = 5) -> list[Tensor]:
    """Return the gradients of the streams and parameters."""
    if schedule is not None:
        chain.schedule = schedule
    chain.zero_grad()
    torch.manual_seed(1)
    streams = [x.requires_grad_() for x in torch.randn(2, batch, 6, dtype=next(chain.parameters()).dtype).unbind()]
    y1, y2 = chain(*streams)
    drawn = torch.get_rng_state()
    (y1.square().sum() + y2.sin().sum()).backward()
    assert torch.equal(torch.get_rng_state(), drawn)
    return [x.grad for x in (*streams, *chain.parameters())]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_distinct_step_is_compiled_once(backend, error):
    chain, compiler = make_chain(), CompileCounterWithBackend(backend)
    expected = differentiate(chain, "store")
    keys, classes = list(chain.state_dict()), [type(step) for step in chain.steps]
    revzoo.compile_steps(chain, backend=compiler)
    assert list(chain.state_dict()) == keys
    assert [type(step) for step in chain.steps] == classes
    for schedule in ("store", "recompute", "invert"):
        assert error(differentiate(chain, schedule), expected) < 1e-12
        assert compiler.frame_count == 2  # 8 steps of 2 kinds
    for schedule in ("selective", MIXED):
        assert error(differentiate(chain, schedule), expected) < 1e-12
        assert compiler.frame_count == 4  # what is kept in mode selective is decided when a graph is made


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{"exact": True}, {"coupling": dual_residual(kept_bits=3)}], ids=["exact", "kept bits"])
def test_dropout_is_repeated_and_exact_steps_are_bit_identical(backend, options):
    chain, compiler = make_chain(dropout=0.5, **options), CompileCounterWithBackend(backend)
    revzoo.compile_steps(chain, backend=compiler)
    expected = differentiate(chain, "store")
    for schedule in ("recompute", "invert"):
        assert all(map(torch.equal, differentiate(chain, schedule), expected))
    if backend == "aot_eager":  # the other graph of mode selective may draw in another order
        assert all(map(torch.equal, differentiate(chain, "selective"), expected))
        assert all(map(torch.equal, differentiate(chain, MIXED), expected))
    plain = make_chain(**options)
    assert not torch.allclose(differentiate(plain, "store")[0], expected[0])  # there was dropout


@pytest.mark.filterwarnings("ignore:lookahead steps aside. a step draws")
def test_look_ahead_with_compiled_selective_steps():
    chain = make_chain(dropout=0.5, exact=True)
    revzoo.compile_steps(chain, backend="aot_eager")
    expected = differentiate(chain, "store")
    chain.lookahead = 1
    for schedule in (MIXED, "invert"):
        assert all(map(torch.equal, differentiate(chain, schedule), expected))


def find_saved(y: Tensor, but: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that the graph behind y has saved, but for those of a module."""
    known = {t.untyped_storage()._cdata for t in (*but.parameters(), *but.buffers())}
    nodes, seen, saved = [y.grad_fn], set(), {}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        saved |= {t.untyped_storage()._cdata: t for t in getattr(node, "saved_tensors", ()) if t is not None}
        nodes += [following for following, _ in node.next_functions]
    return sorted(tuple(t.shape) for key, t in saved.items() if key not in known)


@pytest.mark.parametrize("backend", BACKENDS)
def test_selective_keeps_products_and_inputs_only(backend):
    steps = [mlp(), mlp()]
    chain = ReversibleChain(steps).double()
    chain.schedule = "selective"
    revzoo.compile_steps(chain, backend=backend)
    x1, x2 = torch.randn(2, 5, 6, dtype=torch.float64)
    y1, y2 = chain(x1.requires_grad_(), x2)
    # Inputs and outputs of the first products; nothing of norm and GELU, and no output that nothing depends on.
    assert find_saved(y1, but=chain) == [(5, 6), (5, 12)]
    assert find_saved(y2, but=chain) == [(5, 6), (5, 6), (5, 12), (5, 12)]
    torch.compiler.reset()
    chain.schedule = "store"
    assert sum(map(len, find_saved(chain(x1, x2)[1], but=chain))) > 8


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd:UserWarning")
def test_a_selective_backward_repeats_no_product():
    graphs = AotEagerAndRecordGraphs()
    chain = ReversibleChain([mlp(), mlp()]).double()
    revzoo.compile_steps(chain, backend=graphs)
    differentiate(chain, "selective")
    assert len(graphs.fw_graphs) == len(graphs.bw_graphs) == 1
    (backward,) = (graph.code for graph in graphs.bw_graphs)
    assert backward.count("aten.addmm") == 0
    assert backward.count("aten.mm.default(") == 4
    assert backward.count("aten.gelu.default(") == backward.count("aten.native_layer_norm.default(") == 1


class Branching(nn.Module):
    """A step that no compiler takes as one graph."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        torch._dynamo.graph_break()
        return out.tanh()


def test_selective_is_recompute_where_a_step_is_not_one_graph(error):
    torch.manual_seed(0)
    chain = ReversibleChain([Branching() for _ in range(3)]).double()
    expected = differentiate(chain, "store")
    revzoo.compile_steps(chain, backend="aot_eager")
    with pytest.warns(UserWarning, match="A Branching cannot be compiled as one graph, so in mode 'selective' it keeps only"):
        assert error(differentiate(chain, "selective"), expected) < 1e-12
    assert error(differentiate(chain, "selective"), expected) < 1e-12  # known by now, and said once


@torch.library.custom_op("revzoo_tests::draw_like", mutates_args=())
def draw_like(x: Tensor) -> Tensor:
    return torch.full_like(x, random.uniform(0.5, 2.0))


@draw_like.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Drawing(nn.Module):
    """A step with an operation that draws where no compiler sees it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() * draw_like(x.detach())


def test_a_selective_step_repeats_no_foreign_operation_and_the_tripwire_watches_compiled_steps(error):
    chain = ReversibleChain([Drawing() for _ in range(3)]).double()
    random.seed(0)
    expected = differentiate(chain, "store")
    revzoo.compile_steps(chain, backend="aot_eager")
    random.seed(0)
    assert error(differentiate(chain, "selective"), expected) < 1e-12
    for schedule in ("recompute", "invert"):
        with pytest.raises(RecoveryError, match="ran differently the second time"):
            differentiate(chain, schedule)


class Convolutions(nn.Module):
    """Products that are changed in place, and moving statistics."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm, self.conv2 = nn.Conv1d(5, 5, 3, padding=1), nn.BatchNorm1d(5), nn.Conv1d(5, 5, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.relu(self.norm(self.relu(self.conv1(x).mul_(2.0)))))


def test_in_place_operations_and_moving_statistics(error):
    torch.manual_seed(0)
    chain = ReversibleChain([Convolutions() for _ in range(2)]).double()
    other = copy.deepcopy(chain)
    revzoo.compile_steps(chain, backend="aot_eager")
    x1, x2 = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    for module, mode in ((chain, "selective"), (other, "store")):
        module.schedule = mode
        y1, y2 = module(x1.clone().requires_grad_(), x2)
        (y1 * y2).sum().backward()
    assert error([p.grad for p in chain.parameters()], [p.grad for p in other.parameters()]) < 1e-12
    torch.testing.assert_close(list(chain.buffers()), list(other.buffers()), rtol=1e-12, atol=1e-12)
    assert [int(norm.num_batches_tracked) for norm in (step.norm for step in chain.steps)] == [1, 1]


class Centered(nn.Module):
    """Subtracts a moving mean that it has just moved, or is about to move."""

    def __init__(self, *, moves_first: bool):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.moves_first = moves_first
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, w: Tensor) -> Tensor:
        if self.moves_first:
            self.move(w)
        out = self.linear(w).tanh() * (w - self.mean.clone())
        if not self.moves_first:
            self.move(w)
        return out

    @torch.no_grad()
    def move(self, w: Tensor) -> None:
        self.mean.lerp_(w.mean(0), 0.5)


@pytest.mark.parametrize(("mode", "moves_first"), [("selective", True), ("selective", False), ("recompute", False)])
def test_a_step_that_changes_its_buffers_is_refused(mode, moves_first):
    """A graph would compute again with what the buffer holds after the step."""
    chain = ReversibleChain([Centered(moves_first=moves_first) for _ in range(2)]).double()
    revzoo.compile_steps(chain, backend="aot_eager")
    with pytest.raises(RecoveryError, match=r"steps\.0 changes its 'mean' in forward"):
        differentiate(chain, mode)
    assert len(differentiate(chain, "store")) == 6


def test_more_kinds_of_steps_than_dynamo_compiles_of_a_function(error):
    torch.manual_seed(0)
    chain = ReversibleChain([mlp(hidden) for hidden in range(6, 16)]).double()
    expected, compiler = differentiate(chain, "store"), CompileCounterWithBackend("eager")
    revzoo.compile_steps(chain, backend=compiler)
    assert error(differentiate(chain, "invert"), expected) < 1e-12
    assert compiler.frame_count == 10


def test_rates_of_drop_path_share_a_graph():
    model = revzoo.create("rev_vit_digits", overrides=["block.drop_path.max=0.2", "stages.0.depth=4"])
    compiler = CompileCounterWithBackend("eager")
    revzoo.compile_steps(model, backend=compiler)
    x = model.example_input(64)
    torch.manual_seed(0)
    model(x).sum().backward()
    assert compiler.frame_count == 4  # attention and MLP, without drop path in the first block and with it
    dropped = model.stages[0].blocks[3].g.drop_path(torch.ones(1000, 3))
    assert (dropped == 0).all(1).float().mean() == pytest.approx(0.2, abs=0.05)


def test_copies_are_not_compiled_and_pickling_works(error):
    chain = make_chain()
    expected = differentiate(chain, "invert")
    revzoo.compile_steps(chain, backend="aot_eager")
    for other in (copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))):
        assert all(step._compiled_call_impl is None for step in other.steps)
        assert all(map(torch.equal, differentiate(other), expected))


def test_options_reach_the_compiler(error):
    chain, compiler = ReversibleChain([gate()] * 2).double(), CompileCounterWithBackend("aot_eager")
    expected = differentiate(chain, "store", batch=7)
    revzoo.compile_steps(chain, backend=compiler, dynamic=True)
    differentiate(chain, "invert", batch=5)
    compiled = compiler.frame_count
    assert error(differentiate(chain, "invert", batch=7), expected) < 1e-12
    assert compiler.frame_count == compiled > 0


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x).tanh() * scale


def test_side_inputs_have_gradients(error):
    torch.manual_seed(0)
    chain = ReversibleChain([Scaled() for _ in range(3)]).double()
    x1, x2, scale = torch.randn(3, 5, 6, dtype=torch.float64)
    scale.requires_grad_()
    y1, y2 = chain(x1, x2, scale)
    expected = torch.autograd.grad((y1 * y2).sum(), [scale, *chain.parameters()])
    revzoo.compile_steps(chain, backend="aot_eager")
    chain.schedule = ["selective", "invert", "invert"]
    y1, y2 = chain(x1, x2, scale)
    assert error(list(torch.autograd.grad((y1 * y2).sum(), [scale, *chain.parameters()])), list(expected)) < 1e-12


def test_autocast_is_seen_by_selective_steps(error):
    chain = ReversibleChain([mlp(), gate()])
    with torch.autocast("cpu", torch.bfloat16):
        expected = differentiate(chain, "store")
        revzoo.compile_steps(chain, backend="aot_eager")
        assert error(differentiate(chain, "selective"), expected) < 1e-2
    assert error(differentiate(chain, "selective"), expected) > 1e-3


def test_a_dispatch_mode_is_no_reason_for_other_gradients(error):
    chain = make_chain()
    expected = differentiate(chain, "store")
    revzoo.compile_steps(chain, backend="aot_eager")
    with LiveBytes():
        assert error(differentiate(chain, MIXED), expected) < 1e-12


@pytest.mark.parametrize("model", [nn.Linear(2, 2), "rev_vit_digits"])
def test_without_steps_it_is_refused(model):
    with pytest.raises(InputError, match=r"compile_steps takes a revzoo.Model, .* Received: (Linear|str)\. Use torch.compile"):
        revzoo.compile_steps(model)
