"""What may be around a chain or inside its steps besides plain autograd: gradients of `store`, or an error that says why."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from revzoo.errors import InputError, RecoveryError
from revzoo.runtime import InvertibleLeakyReLU, LayerChain, ReversibleChain, fingerprint
from revzoo.runtime.coupling import momentum
from revzoo.runtime.node import run_node
from tests.runtime.test_complete_gradients import AddsBias

DROPPING = ["invert", ["selective", "recompute", "store", "selective"]]
each_mode = pytest.mark.parametrize("schedule", DROPPING, ids=str)
in_both_arithmetics = pytest.mark.parametrize("exact", [False, True], ids=["float", "exact"])

tracing = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated", "ignore:Converting a tensor")

Run = Callable[[ReversibleChain, list[Tensor]], Any]


class Step(nn.Module):
    """A step made of a function of its layers and its input."""

    def __init__(self, f: Callable[..., Tensor], layers: nn.Module):
        super().__init__()
        self.f, self.layers = f, layers

    def forward(self, w: Tensor, *side: Any) -> Tensor:
        return self.f(self.layers, w, *side)


def mlp(dropout: float = 0.2) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 6))


def chain_of(f: Callable[..., Tensor], exact: bool = False, layers: Callable[[], nn.Module] = mlp) -> ReversibleChain:
    return ReversibleChain([Step(f, layers()) for _ in range(4)], exact=exact).double()


def normalised() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh(), parametrizations.orthogonal(nn.Linear(6, 6)))


def call(layers: nn.Module, w: Tensor) -> Tensor:
    return layers(w)


def make_streams() -> list[Tensor]:
    return [x.requires_grad_() for x in torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))]


def compute_loss(y1: Tensor, y2: Tensor) -> Tensor:
    return (y1.sin() * torch.linspace(0, 1, y1.numel(), dtype=y1.dtype).view(y1.shape)).sum() + (y2 * y2).sum()


def read_gradients(chain: ReversibleChain, streams: list[Tensor]) -> list[Tensor]:
    return [x.grad for x in (*streams, *chain.parameters())]


def backward(chain: ReversibleChain, streams: list[Tensor]) -> list[Tensor]:
    compute_loss(*chain(*streams)).backward()
    return read_gradients(chain, streams)


def compare(chain: ReversibleChain, schedule: Any, run: Run = backward) -> None:
    """Assert that `run` gives the same tensors with the schedule as with everything stored: bit for bit if exact."""

    def run_in(schedule: Any) -> list[Tensor]:
        chain.zero_grad()
        chain.schedule = schedule
        torch.manual_seed(2)
        return [t.detach().clone() for t in run(chain, make_streams())]

    expected, received = run_in("store"), run_in(schedule)
    assert len(expected) > 0
    assert all(t.norm() > 1e-6 for t in expected)
    for a, b in zip(received, expected, strict=True):
        assert torch.equal(a, b) if chain.exact else (a - b).norm() <= 1e-11 * b.norm()


# Other hooks, checkpoints, and Functions that keep or want their tensors in other ways


class KeepsOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.x.cos()


class DifferentiatesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = x.sin()
        return torch.autograd.grad(y, x, grads[0])[0]


def save_inside_on_cpu(layers: nn.Module, w: Tensor) -> Tensor:
    with save_on_cpu():
        return layers(w)


OFFSETS = torch.tensor([0, 1, 3])


def as_jagged(x: Tensor, offsets: Tensor = OFFSETS) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x, offsets)


def catch_exceptions(layers: nn.Module, w: Tensor) -> Tensor:
    try:
        return layers(w).tanh()
    except Exception:  # not what ends a second run
        return w.exp()


INSIDE = {
    "except": catch_exceptions,
    "a draw after what is saved": lambda layers, w: F.rrelu(layers(w), training=True),  # fills it afterwards
    "a draw at the end": lambda layers, w: F.feature_alpha_dropout(layers(w), 0.5, training=True),
    "checkpoint": lambda layers, w: checkpoint(layers, w, use_reentrant=False),
    "reentrant checkpoint": lambda layers, w: checkpoint(layers, w, use_reentrant=True),
    "save_on_cpu": save_inside_on_cpu,
    "ctx.x": lambda layers, w: KeepsOnContext.apply(layers(w)),
    "enable_grad in backward": lambda layers, w: DifferentiatesInBackward.apply(layers(w)),
    "complex numbers": lambda layers, w: torch.fft.ifft(torch.fft.fft(layers(w)) * 1j).real + layers(w),
}


@each_mode
@in_both_arithmetics
@pytest.mark.parametrize("inside", INSIDE)
def test_what_a_step_does_itself(inside, exact, schedule):
    compare(chain_of(INSIDE[inside], exact), schedule)


def forward_with_saved_on_cpu(chain: ReversibleChain, streams: list[Tensor]) -> Tensor:
    with save_on_cpu():
        return compute_loss(*chain(*streams))


def forward_with_cached_weights(chain: ReversibleChain, streams: list[Tensor]) -> Tensor:
    with parametrize.cached():
        return compute_loss(*chain(*streams))


FORWARDS = {
    "checkpoint": lambda chain, streams: compute_loss(*checkpoint(chain, *streams, use_reentrant=False)),
    "reentrant checkpoint": lambda chain, streams: compute_loss(*checkpoint(chain, *streams, use_reentrant=True)),
    "save_on_cpu": forward_with_saved_on_cpu,
    "cached weights": forward_with_cached_weights,
    "jagged streams": lambda chain, streams: compute_loss(*(y.values() for y in chain(*map(as_jagged, streams)))),
    "views of one tensor": lambda chain, streams: compute_loss(*chain(streams[0][0].expand(3, 6), streams[1].flip(0))),
}


@each_mode
@in_both_arithmetics
@pytest.mark.parametrize("forward", FORWARDS)
def test_what_is_around_a_chain(forward, exact, schedule):
    def run(chain, streams):
        FORWARDS[forward](chain, streams).backward()
        return read_gradients(chain, streams)

    compare(chain_of(call, exact, normalised), schedule, run)


@each_mode
@in_both_arithmetics
def test_hooks_on_tensors_and_modules(exact, schedule):
    chain = chain_of(call, exact)
    for step in chain.steps:
        step.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
        step.register_forward_hook(lambda _, args, out: out * 0.5)
        step.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 0.9,))
        step.register_full_backward_hook(lambda _, grads, __: (grads[0] * 1.1,))

    def run(chain, streams):
        together = []
        inputs = [x * 2 for x in streams]
        outputs = chain(*inputs)
        for x in (*inputs, *outputs):
            x.register_hook(lambda g: g * 3)
            x.retain_grad()
        torch.autograd.graph.register_multi_grad_hook(inputs, lambda grads: together.extend(g.clone() for g in grads))
        compute_loss(*outputs).backward()
        assert len(together) == 2
        return [*together, *(x.grad for x in (*streams, *inputs, *outputs, *chain.parameters()))]

    compare(chain, schedule, run)


@contextmanager
def one_thread_and_anomaly_detection() -> Iterator[None]:
    with torch.autograd.set_multithreading_enabled(False), torch.autograd.set_detect_anomaly(True):
        yield


@each_mode
@in_both_arithmetics
@pytest.mark.parametrize("around", [torch.no_grad, torch.enable_grad, torch.inference_mode, one_thread_and_anomaly_detection])
def test_what_is_around_backward(around, exact, schedule):
    def run(chain, streams):
        loss = compute_loss(*chain(*streams))
        with around():
            loss.backward()
        return read_gradients(chain, streams)

    compare(chain_of(call, exact), schedule, run)


# Transforms and tracers


def jvp(chain: ReversibleChain, streams: list[Tensor]) -> list[Tensor]:
    inputs = [x.detach() for x in streams]
    return list(torch.func.jvp(lambda *x: chain(*x), tuple(inputs), tuple(x.cos() for x in inputs))[1])


def dual_numbers(chain: ReversibleChain, streams: list[Tensor]) -> list[Tensor]:
    with forward_ad.dual_level():
        outputs = [forward_ad.unpack_dual(y) for y in chain(*(forward_ad.make_dual(x, x.detach().cos()) for x in streams))]
        compute_loss(*(y.primal for y in outputs)).backward()
    return [*(y.tangent for y in outputs), *(x.grad for x in (*streams, *chain.parameters()))]


def traced(chain: ReversibleChain, streams: list[Tensor]) -> list[Tensor]:
    return backward_of(torch.jit.trace(chain, tuple(torch.ones(2, 2, 6).double())), chain, streams)


def backward_of(module: Callable[..., Any], chain: ReversibleChain, streams: list[Tensor]) -> list[Tensor]:
    compute_loss(*module(*streams)).backward()
    return read_gradients(chain, streams)


@each_mode
@tracing
@pytest.mark.parametrize("run", [jvp, dual_numbers, traced])
def test_forward_mode_derivatives_and_tracers(run, schedule):
    compare(chain_of(call, layers=lambda: mlp(0.0)), schedule, run)


def func_grad(chain: ReversibleChain, streams: list[Tensor]) -> list[Tensor]:
    return list(torch.func.grad(lambda *x: compute_loss(*chain(*x)), (0, 1))(*streams))


def func_hessian(chain: ReversibleChain, streams: list[Tensor]) -> list[Tensor]:
    return [torch.func.hessian(lambda x: compute_loss(*chain(x, x)))(streams[0])]


def vmap(chain: ReversibleChain, streams: list[Tensor]) -> list[Tensor]:
    return backward_of(torch.vmap(lambda *x: chain(*x)), chain, streams)


@pytest.mark.parametrize(
    ("run", "name"), [(func_grad, r"torch\.func\.grad"), (func_hessian, r"torch\.func\.grad"), (vmap, r"torch\.vmap")]
)
def test_everything_is_stored_inside_transforms_of_torch_func(run, name):
    chain = chain_of(call, layers=lambda: mlp(0.0))
    with pytest.warns(UserWarning, match=rf"^Everything is stored inside {name}.* use torch\.autograd\.grad") as warned:
        compare(chain, DROPPING[0], run)
    [said] = [each.filename for each in warned if str(each.message).startswith("Everything")]
    assert Path(said).parent == Path(__file__).parent  # where the chain is called, not in revzoo or torch
    compare(chain, DROPPING[1], run)  # it is said once


@pytest.mark.filterwarnings("ignore:Everything is stored")
def test_nodes_and_layers_are_stored_inside_transforms_of_torch_func():
    stem, layers = mlp(0.0), LayerChain(InvertibleLeakyReLU(slope=0.2), nn.Linear(6, 6))

    def compute(x: Tensor) -> Tensor:
        return layers(run_node(stem, "stem", "recompute", x)).sin().sum()

    x = torch.ones(2, 6, requires_grad=True)
    assert torch.equal(torch.func.grad(compute)(x), torch.autograd.grad(compute(x), x)[0])


def choose_by_cond(layers: nn.Module, w: Tensor) -> Tensor:
    return torch.cond(w.sum() > 0, lambda x: layers(x), lambda x: layers(x).sin(), (w,))


@pytest.mark.parametrize("schedule", ["recompute", "invert"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of the compiler
def test_an_operator_that_traces_its_functions_runs_in_a_step(schedule):
    compare(chain_of(choose_by_cond, layers=lambda: mlp(0.0)), schedule)


def differentiate(layers: nn.Module, w: Tensor) -> Tensor:
    return torch.func.grad(lambda x: layers(x).sum())(w)


@pytest.mark.parametrize(
    ("f", "schedule"),
    [*((differentiate, mode) for mode in ("recompute", "selective", "invert")), (choose_by_cond, "selective")],
)
def test_transforms_and_operators_inside_a_step_that_need_store(f, schedule):
    chain = chain_of(f, layers=lambda: mlp(0.0))
    chain.schedule = schedule
    with pytest.raises(RecoveryError, match=r"^steps\.0 cannot drop .* Set the schedule of steps\.0 to 'store'"):
        chain(*make_streams())


@pytest.mark.filterwarnings("ignore:Everything is stored")
@pytest.mark.parametrize("schedule", ["store", "invert"])
@pytest.mark.parametrize("run", [jvp, dual_numbers, func_grad, vmap])
def test_exact_arithmetic_has_no_derivatives_but_those_of_backward(run, schedule):
    chain = chain_of(call, exact=True)
    chain.schedule = schedule
    with pytest.raises(InputError, match="exact=False"):
        run(chain, make_streams())


@tracing
def test_exact_arithmetic_is_traced_without_gradients():
    chain = chain_of(call, exact=True, layers=lambda: mlp(0.0))
    streams = tuple(x.detach() for x in make_streams())
    with pytest.raises(InputError, match=r"torch\.jit\.trace outside of torch\.no_grad\(\)"):
        torch.jit.trace(chain, streams)
    with torch.no_grad():
        module = torch.jit.trace(chain, streams)
        assert all(map(torch.equal, module(*streams), chain(*streams)))


def test_symbolic_tracing_is_refused_with_the_remedy():
    with pytest.raises(InputError, match=r"Received: Proxy and Proxy\. torch\.fx\.symbolic_trace .* is_leaf_module"):
        torch.fx.symbolic_trace(chain_of(call))


# Other tensors


def test_complex_outputs_are_refused():
    chain = chain_of(lambda layers, w: torch.fft.fft(layers(w)))
    with pytest.raises(
        InputError, match=r"steps\.0 must return a real tensor.* Received: torch\.complex128\. Return its real part"
    ):
        chain(*make_streams())


@each_mode
@in_both_arithmetics
def test_jagged_tensors_inside_a_step_share_the_offsets_of_the_side_input(exact, schedule):
    def attend(layers, w, offsets):
        return layers(as_jagged(w, offsets)).values()

    def run(chain, streams):
        compute_loss(*chain(*streams, OFFSETS)).backward()
        return read_gradients(chain, streams)

    compare(chain_of(attend, exact, lambda: mlp(0.0)), schedule, run)


def test_a_nested_tensor_without_a_shape_inside_a_step_is_refused():
    def pad(layers, w):
        return torch.nested.to_padded_tensor(layers(torch.nested.as_nested_tensor(list(w[None]))).sin(), 0.0)[0]

    with pytest.raises(RecoveryError, match=r"steps\.0 cannot drop .* nested tensor of layout=torch\.strided .* to 'store'"):
        chain_of(pad, layers=lambda: nn.Linear(6, 6))(*make_streams())


def test_an_output_that_a_hook_captured_in_a_second_run_has_no_graph():
    captured = []
    chain = chain_of(call)
    chain.steps[1].register_forward_hook(lambda module, args, out: captured.append(out))
    y1, y2 = chain(*make_streams())
    (y1 * y2).sum().backward()
    with pytest.raises(RecoveryError, match=r"result of the second run of steps\.1 .* before backward"):
        captured[-1].sum().backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_kept_bits_of_jagged_streams_give_the_gradients_of_stored_steps():
    chain = ReversibleChain([mlp(0.0) for _ in range(3)], momentum(kept_bits=4)).double()

    def run(chain, streams):
        offsets = OFFSETS.clone()
        compute_loss(*(y.values() for y in chain(*(as_jagged(x, offsets) for x in streams)))).backward()
        return read_gradients(chain, streams)

    compare(chain, "invert", run)


def test_a_step_may_differentiate_for_a_batch_of_gradients():
    def differentiate(layers, w):
        y = layers(w).tanh()
        rows = torch.autograd.grad(y.sum(0), w, torch.eye(6, dtype=w.dtype), is_grads_batched=True, create_graph=True)[0]
        return rows.sum(0) + y

    fingerprint._make_weights.cache_clear()  # as in a new process: PyTorch draws no numbers inside
    compare(chain_of(differentiate, layers=lambda: nn.Linear(6, 6)), "recompute")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_streams_of_the_strided_layout_are_refused():
    x = torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(1, 6)], dtype=torch.float64)
    with pytest.raises(InputError, match=r"nested tensors of layout=torch\.jagged\. Received: torch\.strided"):
        chain_of(call)(x, x)


@each_mode
def test_a_step_may_return_its_input_or_a_constant(schedule):
    steps = [
        nn.Identity(),
        Step(lambda layers, w: w.view(18).view(3, 6), mlp()),
        Step(lambda layers, w: layers(w).detach(), mlp()),
    ]

    def run(chain, streams):
        compute_loss(*chain(*streams)).backward()
        return [x.grad for x in streams]

    compare(ReversibleChain([*steps, Step(call, mlp())]).double(), schedule, run)


@each_mode
def test_observers_that_move_buffers_are_refused(schedule):
    chain = ReversibleChain([parametrizations.spectral_norm(nn.Linear(6, 6)) for _ in range(4)]).double()
    chain.schedule = schedule
    with pytest.raises(RecoveryError, match=r"steps\.0 changes its 'parametrizations\.weight\.0\._u' in forward.* to 'store'"):
        chain(*make_streams())
    compare(chain.eval(), schedule)


@each_mode
@pytest.mark.parametrize("tied", [False, True])
def test_parametrizations_cached_by_another_call_are_refused(tied, schedule):
    shared = normalised()
    chain = chain_of(call, False, (lambda: shared) if tied else normalised)
    chain.schedule = schedule
    with nullcontext() if tied else parametrize.cached():
        loss = forward_with_cached_weights(chain, make_streams())
        with pytest.raises(RecoveryError, match=r"not on a cache that another call filled \(parametrize\.cached\)"):
            loss.backward()


@each_mode
@in_both_arithmetics
def test_a_batch_without_examples(exact, schedule):
    chain = chain_of(call, exact)
    chain.schedule = schedule
    streams = [torch.zeros(0, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    y1, y2 = chain(*streams)
    (y1.sum() + y2.sum()).backward()
    assert [x.grad.shape for x in streams] == [(0, 6)] * 2
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in chain.parameters())


@each_mode
def test_an_optimizer_inside_backward(schedule):
    def run(chain, streams):
        def step(p):
            with torch.no_grad():
                p -= 0.1 * p.grad

        hooks = [p.register_post_accumulate_grad_hook(step) for p in chain.parameters()]
        before = [p.detach().clone() for p in chain.parameters()]
        try:
            grads = backward(chain, streams)
        finally:
            for hook in hooks:
                hook.remove()
            for p, old in zip(chain.parameters(), before, strict=True):
                p.data.copy_(old)
        return grads

    compare(chain_of(call, layers=mlp), schedule, run)
    chain = ReversibleChain([AddsBias() for _ in range(2)]).double()
    chain.schedule = schedule if isinstance(schedule, str) else "invert"
    message = r"'bias' of steps\.1 was changed in place.* an optimizer inside backward \(register_post_accumulate_grad_hook\)"
    with pytest.raises(RecoveryError, match=message):
        run(chain, make_streams())


@each_mode
def test_parameters_without_a_shape_are_refused(schedule):
    chain = ReversibleChain([nn.LazyLinear(6) for _ in range(4)])
    chain.schedule = schedule
    streams = [x.float() for x in make_streams()]
    message = r"steps\.0 changes its 'weight' in forward.*as lazy ones, need one under torch\.no_grad\(\) first"
    with pytest.raises(RecoveryError, match=message):
        chain(*streams)
    with torch.no_grad():
        chain(*streams)
    compare(chain.double(), schedule)


def test_denormal_numbers_are_flushed_as_in_forward():
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x * 1e-41) * 1e38).tanh()

    torch.manual_seed(0)
    chain = ReversibleChain([Tiny() for _ in range(3)])
    x1, x2 = torch.randn(2, 3, 4).requires_grad_().unbind()
    gradients = []
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush")
    try:
        for mode in ("store", "recompute", "invert"):
            chain.schedule = mode
            torch.set_flush_denormal(True)
            total = sum(y.square().sum() for y in chain(x1, x2))
            torch.set_flush_denormal(mode == "store")
            gradients.append(torch.autograd.grad(total, list(chain.parameters())))
            assert (sys.float_info.min / 2 == 0) == (mode == "store")  # Python's numbers are flushed too
    finally:
        torch.set_flush_denormal(False)
    # Each autocast entered was left: the cache of its casts is otherwise never freed.
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0
    assert all(torch.equal(*pair) for pair in zip(gradients[0], gradients[1], strict=True))
    assert all(torch.allclose(*pair, rtol=1e-4) for pair in zip(gradients[0], gradients[2], strict=True))
