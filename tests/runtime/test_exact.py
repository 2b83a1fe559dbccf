"""Exact arithmetic: the range of the grid, when it is looked at, the signs of zeros, the packed bits, and memory."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from revzoo.errors import InputError, RecoveryError
from revzoo.runtime import LiveBytes, ReversibleChain, exact, set_tripwire
from revzoo.runtime.bits import PackedBits, pack, unpack
from revzoo.runtime.coupling import Coupling, additive, dual_residual, leapfrog, midpoint, momentum
from revzoo.runtime.exact import Grid

MODES = ["store", "selective", "recompute", "invert"]
BITS = (0, 1, 3, 7, 8, 9, 15)
COUPLINGS = {
    "additive": additive(),
    "midpoint": midpoint(h=0.3),
    "leapfrog": leapfrog(h=0.7),
    **{f"momentum {bits}": momentum(kept_bits=bits, gain=0.3) for bits in BITS},
    **{f"dual {bits}": dual_residual(alpha=1.0 if bits % 2 else 0.7, kept_bits=bits) for bits in BITS},
}


class Grow(nn.Module):
    """Return a stream times a weight, which a test may set so that the next state leaves the grid."""

    def __init__(self, factor: float = 0.1):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, w):
        return w * self.factor


def chain_that_leaves(at: int, schedule: object, value: float = 1e4) -> ReversibleChain:
    chain = ReversibleChain([Grow(value if i == at else 0.1) for i in range(5)], exact=True)
    chain.schedule = schedule
    return chain


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("value", "received"), [(1e4, "11101.1"), (-1e4, "-11098.9"), (torch.nan, "nan"), (torch.inf, "inf")])
def test_the_step_that_leaves_the_grid_is_named(mode, value, received):
    x = torch.ones(3)
    with pytest.raises(RecoveryError, match=rf"below 256 in .* Received: {received} after steps\.2\. Lower .* exact=False"):
        chain_that_leaves(2, mode, value)(x, x)
    with pytest.raises(RecoveryError, match=r"Received: 256 as an input of the chain\. Lower"), torch.no_grad():
        chain_that_leaves(2, mode)(x, torch.tensor([1.0, 256.0, -3.0]))


@pytest.fixture
def accelerator(monkeypatch):
    """Treat the CPU as a device that is not to be waited for."""
    monkeypatch.setattr(exact, "can_read_now", lambda x: False)
    with set_tripwire(False):  # which raises at once on a CPU
        yield


@pytest.mark.parametrize("schedule", ["invert", ["invert", "store", "recompute", "invert", "invert"]])
def test_on_an_accelerator_backward_raises(schedule, accelerator):
    chain = chain_that_leaves(2, schedule)
    x = torch.ones(3, requires_grad=True)
    y1, y2 = chain(x, x)
    with pytest.raises(RecoveryError, match=r"Received: 11101.1 after steps\.2\. Lower"):
        (y1.sum() + y2.sum()).backward()


def test_on_an_accelerator_a_backward_that_stops_early_raises(accelerator):
    chain = chain_that_leaves(4, "invert")
    y1, y2 = chain(torch.ones(3), torch.ones(3))
    with pytest.raises(RecoveryError, match=r"after steps\.4"):
        torch.autograd.grad(y1.sum() + y2.sum(), chain.steps[3].factor)


@pytest.mark.parametrize(
    "schedule", ["store", "selective", "recompute", ["recompute", "recompute", "store", "store", "invert"]]
)
def test_on_an_accelerator_what_is_not_rebuilt_may_leave_the_grid(schedule, accelerator, gradients):
    """Gradients are those of the stored run, and nothing waits for the device."""
    x = [torch.ones(3, requires_grad=True) for _ in range(2)]
    chain = chain_that_leaves(2, schedule)
    expected = gradients(chain, x, "store")
    assert all(torch.equal(a, b) for a, b in zip(gradients(chain, x, schedule), expected, strict=True))


def test_on_an_accelerator_the_range_is_read_once_and_in_backward_only(accelerator, monkeypatch):
    looks = []
    check_range = exact.Grid._check_range
    monkeypatch.setattr(exact.Grid, "_check_range", lambda *args: (looks.append(args[1]), check_range(*args)))
    x = torch.ones(3, requires_grad=True)
    chain = chain_that_leaves(2, "invert", value=0.5)
    y1, y2 = chain(x, x)
    assert looks == []
    (y1.sum() + y2.sum()).backward(retain_graph=True)
    (y1.sum() + y2.sum()).backward()
    assert looks == [["as an input of the chain"] * 2 + [f"after steps.{i}" for i in range(5)]]


def test_on_an_accelerator_a_forward_without_backward_is_freed_without_the_garbage_collector(accelerator):
    chain = chain_that_leaves(2, "invert")
    gc.disable()
    try:
        y1, y2 = chain(torch.ones(3), torch.ones(3, requires_grad=True))
        node = weakref.ref(y1.grad_fn)
        assert node() is not None
        del y1, y2
        assert node() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("coupling", ["additive", "leapfrog", momentum(kept_bits=3, gain=1.0)])
@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_has_gradients_of_zero(coupling, mode, gradients):
    chain = ReversibleChain([nn.Linear(6, 6) for _ in range(4)], coupling, exact=True)
    grads = gradients(chain, [torch.randn(0, 6).requires_grad_() for _ in range(2)], mode)
    assert [g.shape for g in grads] == [(0, 6), (0, 6), *[(6, 6), (6,)] * 4]
    assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("coupling", ["additive", *(momentum(kept_bits=bits, gain=1.0) for bits in (3, 8))])
def test_dtensors_have_bit_identical_gradients(coupling, mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

    chain = distribute_module(ReversibleChain([nn.Linear(6, 6) for _ in range(4)], coupling, exact=True), mesh)
    for placement in (Shard(0), Replicate()):
        streams = [DTensor.from_local(x, mesh, [placement]) for x in torch.randn(2, 3, 6)]
        grads = []
        for chain.schedule in ("store", "recompute", "invert"):
            y1, y2 = chain(*streams)
            wanted = torch.autograd.grad(y1.sin().sum() + (y2 * y2).sum(), list(chain.parameters()))
            grads.append([grad.full_tensor() for grad in wanted])
        assert all(map(torch.equal, grads[1], grads[0])), placement
        assert all(map(torch.equal, grads[2], grads[0])), placement


def test_random_signs_refuse_dtensors(mesh):
    from torch.distributed.tensor import DTensor, Replicate, distribute_module

    chain = distribute_module(ReversibleChain([nn.Linear(6, 6)], momentum(kept_bits=1, sign="random")), mesh)
    with pytest.raises(InputError, match="states of DTensor. Use sign='fixed'"):
        chain(*(DTensor.from_local(x, mesh, [Replicate()]) for x in torch.randn(2, 3, 6)))


@pytest.fixture
def mesh():
    """Return a mesh of this process alone."""
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class SignOfZero(nn.Module):
    """Return w times a weight, and subtract 1 from what is 0.0 but not from what is -0.0."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(-0.25))

    def forward(self, w):
        return w * self.weight + torch.where((w == 0) & ~torch.signbit(w), -1.0, 0.0)


@pytest.mark.parametrize("coupling", ["additive", "leapfrog", momentum(kept_bits=3, gain=1.0), dual_residual(kept_bits=2)])
def test_an_f_that_sees_the_sign_of_zero_has_bit_identical_gradients(coupling, gradients):
    chain = ReversibleChain([SignOfZero() for _ in range(6)], coupling, exact=True)
    x = [torch.tensor([0.0, -0.0, 1.0, -1.0, -1e-9, 1e-9, 0.25, -0.25]).requires_grad_() for _ in range(2)]
    expected = gradients(chain, x, "store")
    for mode in MODES[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients(chain, x, mode), expected, strict=True)), mode


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_bit_of_a_state_comes_back(coupling, dtype):
    """From the smallest states to the largest that the grid holds; signs of zero included."""
    chosen, grid = COUPLINGS[coupling], Grid(dtype)
    integers = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
    compared = 0
    for size in (1 / grid.scale, 0.01, 1.0, grid.limit / 4, grid.limit):
        previous, current, out = ((torch.rand(500, dtype=dtype) * 2 - 1) * size for _ in range(3))
        previous[::7], current[::5], out[::3] = 0.0, -0.0, -1e-30
        previous, current = grid.round(previous), grid.round(current)
        following, kept = grid.advance(chosen, previous, current, out, keeps_bits=True)
        rebuilt = grid.invert(chosen, following, current, out, kept, torch.empty_like(previous))
        assert not torch.signbit(following[following == 0]).any()
        inside = following.abs() < grid.limit
        compared += int(inside.sum())
        assert torch.equal(rebuilt[inside].view(integers), previous[inside].view(integers))
    assert compared > 1500


@pytest.mark.parametrize(("a", "b", "bits"), [(0.0, 1.0, 0), (1.25, -1.0, 0), (1.0, 0.25, 2), (-0.5, -0.125, 3)])
def test_a_step_is_the_recurrence_in_integers(a, b, bits):
    grid, coupling = Grid(torch.float32), Coupling(a, b, 0.5, kept_bits=bits)
    previous, current = (grid.round(torch.randn(200)) for _ in range(2))
    out = torch.randint(-(2**18), 2**18, (200,)) / 2**16  # sums of such terms are exact also in float32
    W, V, F = ((x.double() * 2**16).long() for x in (previous, current, out))
    terms = (F.double() * 0.5 + a * V.double()).round().long()
    following, _ = grid.advance(coupling, previous, current, out)
    assert torch.equal((following.double() * 2**16), (terms + (W >> bits) * (1 if b > 0 else -1)).double())


def count_bytes(packed: PackedBits | Tensor) -> int:
    return sum(field.nbytes for field in (packed.fields if isinstance(packed, PackedBits) else [packed]))


@pytest.mark.parametrize("bits", [1, 3, 8, 12, 15])
def test_bits_are_packed_without_gaps(bits):
    dtype = torch.uint8 if bits <= 8 else torch.int16
    for shape in ((0,), (1,), (7,), (8,), (3, 21), (2, 5, 100)):
        values = torch.randint(0, 2**bits, shape, dtype=dtype)
        packed = pack(values.clone(), bits)
        assert torch.equal(unpack(packed), values)
        assert unpack(packed).dtype == dtype
        assert count_bytes(packed) <= bits * -(-values.numel() // 8)
    values = torch.randint(0, 2**bits, (2, 3, 8), dtype=dtype).transpose(1, 2)
    assert count_bytes(pack(values, bits)) == bits * values.numel() // 8
    assert unpack(pack(values, bits)).stride() == values.stride()


@pytest.mark.parametrize(
    ("coupling", "exact_chain", "peak"),
    [("additive", False, 6), ("additive", True, 6), ("leapfrog", True, 7), (momentum(kept_bits=8, gain=1.0), True, 6.5)],
)
def test_bytes_at_the_peak(coupling, exact_chain, peak):
    """Exact arithmetic takes no more than floating point, and 8 kept bits a quarter of a state."""
    chain = ReversibleChain([nn.Linear(64, 64) for _ in range(4)], coupling, exact_chain)
    x = [torch.randn(512, 64) / 8 for _ in range(2)]
    weights = [torch.ones(512, 64) for _ in range(2)]
    with LiveBytes() as live:
        known = live.watch([*chain.parameters(), *x, *weights])
        outputs = chain(*x)
        known |= live.watch(outputs)
        known |= live.watch(torch.autograd.grad(outputs, list(chain.parameters()), weights))
    assert live.peak(without=known) / x[0].nbytes == peak
