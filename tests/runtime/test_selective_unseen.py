"""Mode `selective` with functions that do what no dispatch mode sees: gradients bit-identical to the stored run's.

The last entry of each case says what the second run costs: nothing but cheap operations ("kept"), or as much as in mode
`recompute` ("again"), because something showed that kept outputs cannot be relied on.
"""

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import register_flop_formula

from revzoo.analysis.flops import FlopCounter
from revzoo.runtime import ReversibleChain

B, N, D = 2, 5, 16

Function = Callable[["Pair", Tensor], Tensor]


class Pair(nn.Module):
    """Apply a function that uses two linear layers."""

    def __init__(self, function: Function):
        super().__init__()
        self.function = function
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.cache: Tensor | None = None

    def forward(self, w: Tensor) -> Tensor:
        return self.function(self, w)


class RawTanh(torch.autograd.Function):
    """Fill uninitialised memory through pointers, and save only that."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        source, target = ((ctypes.c_float * x.numel()).from_address(t.data_ptr()) for t in (x, out))
        np.frombuffer(target, dtype=np.float32)[:] = np.tanh(np.frombuffer(source, dtype=np.float32))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return grad * (1 - out * out)


@torch.library.custom_op("revzoo_tests::add_noise", mutates_args=())
def add_noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("revzoo_tests::noisy_product", mutates_args=())
def noisy_product(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y) * torch.rand(())


add_noise.register_autograd(lambda ctx, grad: grad)
noisy_product.register_autograd(
    lambda ctx, grad: (grad @ ctx.saved_tensors[0].T, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)
register_flop_formula(torch.ops.revzoo_tests.noisy_product)(lambda *_, **__: 0)


def read_values(s: Pair, w: Tensor) -> Tensor:
    factor = s.a(w).tolist()[0][0][0]
    return s.b(w).sin() * factor


def read_array(s: Pair, w: Tensor) -> Tensor:
    return s.b(w).sin() * torch.from_numpy(np.tanh(s.a(w).detach().numpy()))


def read_in_a_thread(s: Pair, w: Tensor) -> Tensor:
    h = s.a(w).detach()
    with ThreadPoolExecutor(1) as executor:
        return s.b(w).sin() * executor.submit(lambda: h.sigmoid()).result()


def compute_in_a_thread(s: Pair, w: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as executor:
        h = executor.submit(lambda: s.a(w)).result()
    return s.b(h.sin()).tanh()


def fill_through_pointers(s: Pair, w: Tensor) -> Tensor:
    return RawTanh.apply(s.a(w))


def overwrite_through_an_array(s: Pair, w: Tensor) -> Tensor:
    h = s.a(w)
    view = h.detach().numpy()
    view *= 3
    return s.b(h.sin())


def overwrite_through_a_storage(s: Pair, w: Tensor) -> Tensor:
    h = s.a(w)
    torch.empty(0).set_(h.detach().untyped_storage(), 0, h.shape, h.stride()).mul_(2)
    return s.b(h.sin())


def overwrite_through_data(s: Pair, w: Tensor) -> Tensor:
    h = s.a(w)
    h.data.mul_(2)
    return s.b(h.sin())


def draw_in_a_custom_operation(s: Pair, w: Tensor) -> Tensor:
    return F.dropout(s.b(torch.ops.revzoo_tests.add_noise(s.a(w))).sin(), 0.5)


def draw_in_a_custom_product(s: Pair, w: Tensor) -> Tensor:
    h = torch.ops.revzoo_tests.noisy_product(w.reshape(-1, D), s.a.weight.detach()).view_as(w)
    return F.dropout(s.b(h.sin()), 0.5).sin()


def draw_before_what_is_saved(s: Pair, w: Tensor) -> Tensor:
    u = F.dropout(s.a(w) + 1, 0.5)
    return F.dropout(s.b(w.sin()), 0.5).tanh() + u


def draw_in_attention(s: Pair, w: Tensor) -> Tensor:
    q, kv = s.a(w)[:, None], w[:, None]
    return s.b(F.scaled_dot_product_attention(q, kv, kv, dropout_p=0.3)[:, 0]).sin()


def build_a_cache_like_what_follows(s: Pair, w: Tensor) -> Tensor:
    if s.cache is None:
        s.cache = torch.mm(torch.ones(B * N, D), s.b.weight.detach())
    return (torch.mm(w.reshape(-1, D), s.a.weight) * s.cache).sin().view_as(w)


def build_a_cache_just_before(s: Pair, w: Tensor) -> Tensor:
    """Nothing is called after the last saved tensor that could show that the first run did one product more."""
    x, first, second = w.reshape(-1, D), s.a.weight.sin(), s.b.weight.cos()
    left, right = x.sin(), x.cos().detach()
    if s.cache is None:
        s.cache = torch.mm(right, second.detach())
    return torch.atan2(torch.mm(left, first), s.cache).view_as(w)


def make_sparse(s: Pair, w: Tensor) -> Tensor:
    return torch.sparse.mm(s.a(w).reshape(-1, D).relu().to_sparse(), s.b.weight).view_as(w).sin()


def write_into_a_buffer(s: Pair, w: Tensor) -> Tensor:
    buffer = torch.empty(B * N, D)
    with torch.no_grad():
        torch.mm(w.reshape(-1, D), s.a.weight, out=buffer)
        buffer.addmm_(w.reshape(-1, D), s.b.weight)
    return (w * buffer.view_as(w)).sin()


def change_a_view(s: Pair, w: Tensor) -> Tensor:
    h = s.a(w)
    other = h * 1
    h[..., :4].mul_(2)
    return s.b(h.sin() + other.cos())


def change_in_a_list(s: Pair, w: Tensor) -> Tensor:
    h = [s.a(w), s.b(w)]
    torch._foreach_mul_(h, 3.0)
    return h[0].sin() * h[1].tanh()


def add_what_nothing_needs(s: Pair, w: Tensor) -> Tensor:
    unneeded = (s.a(w) + 1).view(-1, D).view_as(w) * 2
    return s.b(w.sin()).tanh() + unneeded


def gate(s: Pair, w: Tensor) -> Tensor:
    return s.b(w).tanh() * (s.a(w).detach() > 0)


def freeze(s: Pair, w: Tensor) -> Tensor:
    return s.b(s.a(w) + 1) * 2 + w.sin()


def branch(s: Pair, w: Tensor) -> Tensor:
    h = s.a(w)
    return s.b(w.sin() if h.mean() > 0 else w.cos())


def route(s: Pair, w: Tensor) -> Tensor:
    """Send each token to one of two experts."""
    x = w.reshape(-1, D)
    weights = s.a(x).softmax(-1)
    expert = weights.argmax(-1) % 2
    order = expert.argsort(stable=True)
    first, second = x[order].split(torch.bincount(expert, minlength=2).tolist())
    return (torch.empty_like(x).index_copy(0, order, torch.cat([s.b(first).sin(), s.a(second).cos()])) * weights).view_as(w)


def map_over_examples(s: Pair, w: Tensor) -> Tensor:
    return torch.func.vmap(lambda x: s.a(x).sin() @ s.b.weight)(w)


def checkpoint_inside(s: Pair, w: Tensor) -> Tensor:
    return s.b(checkpoint(lambda x: F.dropout(s.a(x), 0.5).sin(), w.tanh(), use_reentrant=False))


def multiply_complex(s: Pair, w: Tensor) -> Tensor:
    z = torch.complex(s.a(w), s.b(w))
    return (z @ z.conj().mT @ z).abs().sin()


CASES: dict[Function, str] = {
    read_values: "kept",
    read_array: "again",
    read_in_a_thread: "again",
    compute_in_a_thread: "kept",  # FlopCounter does not see the other thread either
    fill_through_pointers: "kept",
    overwrite_through_an_array: "again",
    overwrite_through_a_storage: "again",
    overwrite_through_data: "again",
    draw_in_a_custom_operation: "kept",
    draw_in_a_custom_product: "kept",
    draw_before_what_is_saved: "kept",
    draw_in_attention: "kept",
    build_a_cache_like_what_follows: "twice",
    build_a_cache_just_before: "again",
    make_sparse: "kept",
    write_into_a_buffer: "again",
    change_a_view: "again",
    change_in_a_list: "again",
    add_what_nothing_needs: "kept",
    gate: "kept",
    freeze: "kept",
    branch: "kept",
    route: "kept",
    map_over_examples: "kept",
    checkpoint_inside: "kept",
    multiply_complex: "kept",
}


def run(steps: list[nn.Module], mode: str, streams: list[Tensor]) -> tuple[list[Tensor], Tensor, int]:
    """Return gradients, the next random number, and floating-point operations."""
    chain = ReversibleChain(steps)
    chain.schedule = mode
    torch.manual_seed(3)
    with FlopCounter() as counter:
        y1, y2 = chain(*streams)
        wanted = [x for x in (*streams, *chain.parameters()) if x.requires_grad]
        grads = torch.autograd.grad((y1.sin() * y2).sum(), wanted, allow_unused=True)
    return [g for g in grads if g is not None], torch.rand(1), counter.forward + counter.backward


def make_streams() -> list[Tensor]:
    torch.manual_seed(0)
    return [x.requires_grad_() for x in torch.randn(2, B, N, D).unbind()]


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_gradients_are_bit_identical_to_the_stored_ones(function):
    results = {}
    for mode in ("store", "recompute", "selective"):
        torch.manual_seed(1)
        steps = [Pair(function) for _ in range(2)]
        for step in steps:
            step.requires_grad_(function is not freeze)
        for _ in range(3):  # what a step does is learned in the first two
            for step in steps:
                step.cache = None
            results[mode] = run(steps, mode, make_streams())
    (grads, drawn, flops), (expected, expected_drawn, stored_flops) = results["selective"], results["store"]
    assert len(grads) == len(expected) >= 2
    assert any(grad.abs().sum() > 0 for grad in grads)
    assert all(map(torch.equal, grads, expected))
    assert torch.equal(drawn, expected_drawn)
    recomputed_flops = results["recompute"][2]
    assert {
        "kept": flops == stored_flops,
        "again": flops == recomputed_flops,
        "twice": flops > recomputed_flops,  # the first attempt does not count
    }[CASES[function]]


def mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))


@pytest.mark.parametrize("inside", [False, True])
def test_a_weight_that_autocast_has_cast_before(inside):
    """The casts of the first run are not those of the second."""
    torch.manual_seed(1)
    step, streams = mlp(), make_streams()
    chain = ReversibleChain([step, step, mlp(), step])
    results = {}
    for mode in ("store", "selective"):
        chain.schedule = mode
        with FlopCounter() as counter:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y1, y2 = chain(*streams)
                loss = (y1.sin() * y2).sum()
                if inside:
                    grads = torch.autograd.grad(loss, [*streams, *chain.parameters()])
            if not inside:
                grads = torch.autograd.grad(loss, [*streams, *chain.parameters()])
        results[mode] = grads, counter.forward + counter.backward
    assert all(map(torch.equal, results["selective"][0], results["store"][0]))
    assert results["selective"][1] == results["store"][1]


@pytest.fixture
def mesh(tmp_path) -> Iterator[Any]:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.tensor import init_device_mesh

    init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    destroy_process_group()


def test_distributed_tensors_on_one_rank(mesh):
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    torch.manual_seed(1)
    steps = [mlp(), Pair(add_what_nothing_needs), Pair(gate), mlp()]
    distribute_module(nn.ModuleList(steps), mesh)
    results = {}
    for mode in ("store", "selective"):
        streams = [distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_() for x in make_streams()]
        results[mode] = run(steps, mode, streams)
    for grad, expected in zip(results["selective"][0], results["store"][0], strict=True):
        assert torch.equal(grad.full_tensor(), expected.full_tensor())
    assert results["selective"][2] == results["store"][2] > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
def test_a_compiled_function_inside_runs_uncompiled():
    """Also where it has been compiled in another mode before: compiled code writes through pointers."""
    torch.compiler.reset()
    compiled_frames: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled_frames.append(graph.code)
        return graph.forward

    compiled = torch.compile(lambda x, weight: ((x @ weight).sigmoid() * 2 @ weight).tanh(), backend=backend)

    def function(s: Pair, w: Tensor) -> Tensor:
        return s.b(compiled(s.a(w), s.b.weight)).sin()

    torch.manual_seed(1)
    chain, streams = ReversibleChain([Pair(function) for _ in range(2)]), make_streams()
    grads = {}
    for mode in ("store", "selective"):
        chain.schedule = mode
        y1, y2 = chain(*streams)
        grads[mode] = torch.autograd.grad((y1.sin() * y2).sum(), [*streams, *chain.parameters()])
        assert len(compiled_frames) == 1
    assert all(map(torch.equal, grads["selective"], grads["store"]))
    torch.compiler.reset()
