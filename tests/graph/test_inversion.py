"""Reversible chains under torch.compile: one graph each way, gradients of the same backend stored, memory of one step."""

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx import GraphModule
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import revzoo
from revzoo.graph import compiler
from revzoo.graph.inversion import invert
from revzoo.graph.joint_graph import JointGraph
from revzoo.runtime import PixelUnshuffle, ReversibleChain, compiling
from revzoo.runtime.coupling import Coupling, dual_residual, momentum
from revzoo.runtime.live_bytes import LiveBytesOfReplacedCalls

WIDTH = 32
STREAM_BYTES = 64 * WIDTH * 8
STREAMS = torch.randn(2, 64, WIDTH, dtype=torch.float64).unbind()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    """One that counts its calls, and whose activations take six streams."""

    def __init__(self, dropout: float = 0.0, choose: bool = False):
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout, self.choose, self.calls = nn.Dropout(dropout), choose, 0

    def forward(self, x: Tensor, side: Tensor | None = None) -> Tensor:
        self.calls += 1
        out = self.dropout(self.layers(x)) * 0.5
        if self.choose:
            out = out.scatter_add(-1, x.topk(2).indices, x.topk(2).values)
        return out if side is None else out * side


class Images(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def make_chain(coupling: str | Coupling = "additive", depth: int = 5, exact: bool = False, **options: Any) -> ReversibleChain:
    torch.manual_seed(1)
    return ReversibleChain([Block(**options) for _ in range(depth)], coupling=coupling, exact=exact).double()


MIXED = ["selective", "invert", "invert", "recompute", "store"]
CHAINS: dict[str, tuple[Callable[[], ReversibleChain], object]] = {
    "additive": (make_chain, "invert"),
    "momentum": (lambda: make_chain(momentum(m=0.9)), "invert"),
    "modes": (lambda: make_chain(choose=True), MIXED),
    "dropout": (lambda: make_chain(dropout=0.3), "invert"),
    "choices": (lambda: make_chain(choose=True), "invert"),
    "exact": (lambda: make_chain(exact=True, dropout=0.3), "invert"),
    "kept bits": (lambda: make_chain(dual_residual(kept_bits=3)), "invert"),
    "kept bits, modes": (lambda: make_chain(dual_residual(kept_bits=8)), MIXED),
    "random signs": (lambda: make_chain(momentum(kept_bits=1, sign="random")), "invert"),
}


def train(chain: nn.Module, call: Callable[..., Any], *inputs: Any) -> tuple[list[Tensor], int]:
    """Return what a second step leaves, to be compared, and its peak beyond weights and inputs."""
    for _ in range(2):
        chain.zero_grad()
        xs = [x.detach().clone().requires_grad_() for x in inputs]
        torch.manual_seed(3)
        with LiveBytesOfReplacedCalls() as live:
            fixed = live.watch([*chain.parameters(), *chain.buffers(), *xs])
            y1, y2 = call(*xs)
            loss = y1.square().mean() + (y1 * y2.sin()).mean()
            del y1, y2
            loss.backward()
    left = [loss.detach(), *(x.grad for x in xs), *(p.grad for p in chain.parameters()), *(b.double() for b in chain.buffers())]
    return left, live.peak(without=fixed)


def worst_error(left: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative error of tensors; the gradient of a bias before a softmax is zero up to rounding."""
    errors = [(a - b).norm() / b.norm().clamp_min(1e-8) for a, b in zip(left, expected, strict=True)]
    return torch.stack(errors).max().item()


def compile_chain(chain: nn.Module, backend: Any = "aot_eager") -> Any:
    return torch.compile(chain, backend=backend, fullgraph=True)


def run(
    chain: ReversibleChain, schedule: object, compiles: bool = True, streams: int = 2, backend: str = "aot_eager"
) -> tuple[list[Tensor], int]:
    chain.schedule = schedule
    torch.manual_seed(2)
    inputs = torch.randn(streams, 64, WIDTH, dtype=torch.float64).unbind()
    return train(chain, compile_chain(chain, backend) if compiles else chain, *inputs)


@pytest.mark.parametrize("name", CHAINS)
def test_gradients_are_those_of_the_stored_chain(name):
    make, schedule = CHAINS[name]
    (left, peak), (expected, stored_peak) = run(make(), schedule), run(make(), "store", compiles=False)
    if make().exact or make().couplings[0].is_exact:
        assert all(map(torch.equal, left, expected))
    else:
        assert worst_error(left, expected) < 1e-9
    assert peak < 0.9 * stored_peak


@pytest.mark.parametrize("exact", [False, True])
def test_the_peak_is_that_of_the_eager_runtime_at_any_depth(exact):
    peaks = []
    for depth in (3, 6):
        chain = make_chain(depth=depth, exact=exact)
        weights = sum(p.nbytes for p in chain.parameters())  # their gradients
        peaks += [run(chain, "invert")[1] - weights]
    assert peaks[1] - peaks[0] < 100  # a number
    assert peaks[1] <= run(chain, "invert", compiles=False)[1] - weights + STREAM_BYTES


def test_backward_calls_no_step_and_no_python_of_ours():
    chain, counter = make_chain(), CompileCounterWithBackend("aot_eager")
    y1, y2 = compile_chain(chain, counter)(*torch.randn(2, 8, WIDTH, dtype=torch.float64, requires_grad=True).unbind())
    loss, files = (y1 + y2).sum(), set[str]()
    sys.setprofile(lambda frame, event, argument: files.add(frame.f_code.co_filename))
    loss.backward()
    sys.setprofile(None)
    assert [step.calls for step in chain.steps] == [1] * 5
    assert files
    assert not any(file.startswith(revzoo.__path__[0]) for file in files)
    assert counter.frame_count == 1


def test_side_inputs_get_their_gradient():
    left, expected = (run(make_chain(), schedule, streams=3)[0] for schedule in ("invert", "store"))
    assert worst_error(left, expected) < 1e-12


def test_bijections_between_steps_and_batch_norm_once():
    def run_images(schedule: str) -> tuple[list[Tensor], int]:
        torch.manual_seed(1)
        parts = [Images(2), Images(2), PixelUnshuffle(2), Images(8), PixelUnshuffle(2), Images(32), Images(32)]
        chain = ReversibleChain(parts).double()
        chain.schedule = schedule
        return train(chain, compile_chain(chain), *torch.randn(2, 2, 2, 16, 16, dtype=torch.float64).unbind())

    (left, peak), (expected, stored_peak) = run_images("invert"), run_images("store")
    assert worst_error(left, expected) < 1e-7
    assert peak < 0.9 * stored_peak


def test_autocast_in_both_runs():
    def run_half(schedule: str) -> list[Tensor]:
        chain = make_chain(exact=True).float()
        chain.schedule = schedule
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16):
            return train(chain, compile_chain(chain), *torch.randn(2, 64, WIDTH).unbind())[0]

    assert all(map(torch.equal, run_half("invert"), run_half("store")))


def test_a_second_run_that_differs_is_an_error(monkeypatch):
    def invert_and_differ(joint: JointGraph, shares_code: bool) -> None:
        invert(joint, shares_code)
        gelus = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)
        assert len(gelus) == 6  # three again
        gelus[-2].target = torch.ops.aten.silu.default  # of the second step: the state before the first is not needed

    monkeypatch.setattr(compiler, "invert", invert_and_differ)
    chain = make_chain(depth=3, exact=True)
    y1, y2 = compile_chain(chain)(*torch.randn(2, 8, WIDTH, dtype=torch.float64, requires_grad=True).unbind())
    with pytest.raises(RuntimeError, match="rebuilt from others than its own states"):
        (y1 + y2).sum().backward()


def test_where_no_backward_is_traced_steps_run_uncompiled():
    chain = make_chain()
    left, peak = train(chain, torch.compile(chain, backend="eager"), *STREAMS)
    expected, eager_peak = train(chain, chain, *STREAMS)
    assert all(map(torch.equal, left, expected))
    assert peak == eager_peak


FAMILIES = ["reformer_mini", "revnet_digits", "rev_bert_mini", "layerwise_digits", "revnext_digits"]
OTHERS = ["irevnet_digits", "rev_vit_digits", "rev_gpt_mini", "rev_mvit_digits", "rev_swin_digits", "rev_roberta_mini"]


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_models_of_the_zoo_are_one_graph(name):
    def train_model(schedule: str) -> list[Tensor]:
        torch.manual_seed(4)
        model = revzoo.create(name, schedule=schedule, dtype=torch.float64)
        model(x := model.example_input(2))  # what forward makes in its first call
        torch.manual_seed(5)
        out = compile_chain(model)(x)
        out.square().mean().backward()
        return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    assert worst_error(train_model("invert"), train_model("store")) < 1e-8


def train_network(network: str, sign: str, schedule: str, backend: str, lengths: Sequence[int] = (64, 64)) -> Any:
    """Return gradients of steps with texts of these lengths, and the peak of the last."""
    torch.manual_seed(4)
    if network == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=64))
    else:
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=2, n_layer=4, vocab_size=64))  # with dropout
    report = revzoo.reversible_(model, kept_bits=1 if sign == "random" else 8, sign=sign)
    report.chains[0].schedule = schedule
    compiled, gradients = compile_chain(model, backend), list[Tensor]()
    for length in lengths:
        model.zero_grad()
        tokens = torch.randint(0, 64, (2, length))
        torch.manual_seed(5)
        with LiveBytesOfReplacedCalls() if backend == "aot_eager" else nullcontext() as live:
            fixed = live and live.watch([*model.parameters(), *model.buffers(), tokens])
            compiled(input_ids=tokens, use_cache=False).logits.square().mean().backward()
        gradients += [p.grad for p in model.parameters()]
    return gradients, live and live.peak(without=fixed)


NETWORKS = [("llama", "fixed"), ("gpt2", "random")]


@pytest.mark.parametrize(("network", "sign"), NETWORKS)
def test_a_reversible_network_is_one_graph_and_keeps_its_bits(network, sign):
    (left, peak), (expected, stored_peak) = (train_network(network, sign, way, "aot_eager") for way in ("invert", "store"))
    assert all(map(torch.equal, left, expected))
    assert peak < 0.6 * stored_peak


needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("network", "sign"), NETWORKS)
def test_inductor_keeps_the_bits_for_texts_of_any_length(network, sign):
    left, expected = (train_network(network, sign, way, "inductor", (64, 48, 80))[0] for way in ("invert", "store"))
    assert all(map(torch.equal, left, expected))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", ["additive", "modes", "choices", "kept bits, modes", "exact"])
def test_inductor_gives_the_gradients_of_the_stored_chain(name):
    make, schedule = CHAINS[name]
    left, expected = (run(make(), way, backend="inductor")[0] for way in (schedule, "store"))
    is_exact = make().exact or make().couplings[0].is_exact
    assert all(map(torch.equal, left, expected)) if is_exact else worst_error(left, expected) < 1e-9


@pytest.mark.slow
@needs_compiler
def test_steps_of_the_same_code_are_one_subroutine(monkeypatch):
    names: list[str] = []
    add = GraphModule.add_submodule
    monkeypatch.setattr(GraphModule, "add_submodule", lambda self, name, m: (names.append(name), add(self, name, m))[1])
    train_network("llama", "fixed", "invert", "inductor", (64,))
    assert len(names) == 2  # the first block's input needs no gradient from there: what its backward reads is less


@pytest.mark.slow
@needs_compiler
def test_labels_that_a_network_reads_twice():
    """Of what is traced, a part may have no use: it has no place among the other operations."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 64}
    model = BertForMaskedLM(BertConfig(**sizes))
    revzoo.reversible_(model)
    tokens = torch.randint(0, 64, (2, 16))
    compile_chain(model, "inductor")(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters())


def test_a_backend_that_traces_no_backward_is_named():
    def run_as_it_is(graph: GraphModule, inputs: Any) -> Any:
        return graph.forward

    chain = make_chain()
    with pytest.warns(UserWarning, match="stores everything"):
        left = train(chain, torch.compile(chain, backend=run_as_it_is), *STREAMS)[0]
    assert worst_error(left, train(chain, chain, *STREAMS)[0]) < 1e-12


@pytest.mark.parametrize("kept_bits", [8, 1])
def test_blocks_compiled_one_by_one_share_a_graph(kept_bits):
    torch.manual_seed(4)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 10, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    revzoo.reversible_(model, kept_bits=kept_bits, sign="random" if kept_bits == 1 else "fixed")
    tokens, counter = torch.randint(0, 64, (2, 16)), CompileCounterWithBackend("aot_eager")

    def differentiate() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(5)
        model(input_ids=tokens, use_cache=False).logits.square().mean().backward()
        return [p.grad for p in model.parameters()]

    expected = differentiate()
    for block in model.model.layers:
        block.compile(backend=counter)
    for _ in range(2):
        assert worst_error(differentiate(), expected) < 1e-4
        assert counter.frame_count == 1
    assert counter.op_count > 40


def test_tiles_of_a_chain_are_compiled_and_what_keeps_results_is_named():
    chain, counter = ReversibleChain([Block().layers for _ in range(4)]).double(), CompileCounterWithBackend("aot_eager")

    def differentiate(call: Callable[..., Any]) -> list[Tensor]:
        y1, y2 = call(*STREAMS)
        return list(torch.autograd.grad((y1 * y2).sum(), list(chain.parameters())))

    chain.tiles = 2
    for _ in range(4):  # in the first steps it is looked at
        assert worst_error(differentiate(torch.compile(chain, backend=counter)), differentiate(chain)) < 1e-12
    assert counter.op_count > 4
    chain.tiles, chain.keep = 1, ("*.1",)
    compiling.warn_of_uncompiled.cache_clear()
    with pytest.warns(UserWarning, match="run uncompiled inside of torch.compile"):
        assert worst_error(differentiate(torch.compile(chain, backend=counter)), differentiate(chain)) < 1e-12


def test_numbers_of_a_chain_are_constants_whatever_was_compiled_before():
    for coupling in (momentum(m=0.9), momentum(m=0.5), momentum(kept_bits=3), momentum(kept_bits=1, sign="random")):
        run(make_chain(coupling, depth=2), "invert")
    assert not torch._dynamo.config.specialize_float
    assert not torch._dynamo.config.specialize_int


@torch.no_grad()
def test_without_gradients_nothing_of_the_inverse_is_in_the_graph():
    codes = list[str]()

    def aot_eager_noting(graph: GraphModule, inputs: Any) -> Any:
        codes.append(graph.code)
        return graph.forward

    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2))
    revzoo.reversible_(model)
    tokens = torch.randint(0, 64, (2, 16))
    expected = model.eval()(input_ids=tokens, use_cache=False).logits
    assert torch.equal(compile_chain(model, aot_eager_noting)(input_ids=tokens, use_cache=False).logits, expected)
    assert len(codes) == 1
    assert "undo" not in codes[0]
