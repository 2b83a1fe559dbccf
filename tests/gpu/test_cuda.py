"""What only a CUDA device shows: its allocator, its random stream, fp16 with a loss scaler, its kernels' determinism."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import revzoo
from revzoo.checkpoint.files import find_not_finite
from revzoo.errors import RecoveryError
from revzoo.runtime import ReversibleChain
from tests.gpu.models import make_transformer

DEVICE = "cuda"
FAMILIES = ("rev_vit_digits", "revnet_digits")
MIXED = ["recompute", "invert", "invert", "store", "selective", "recompute"]


def random_streams() -> list[Tensor]:
    return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_counted_bytes_stand_beside_the_allocators():
    report = revzoo.measure_memory(make_transformer(3), tuple(torch.randn(2, 256, 197, 192, device=DEVICE)))
    assert report.peak_bytes <= report.allocator_peak_bytes <= report.allocator_reserved_bytes


def units(dropout: float) -> list[nn.Module]:
    return [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.Dropout(dropout), nn.GELU()) for _ in range(6)]


def gradients(chain: ReversibleChain, schedule: object) -> list[Tensor]:
    chain.schedule = schedule
    torch.manual_seed(1)
    x = torch.randn(2, 32, 64, device=DEVICE, dtype=next(chain.parameters()).dtype).requires_grad_()
    y1, y2 = chain(*x)
    drawn = random_streams()
    wanted = torch.autograd.grad(y1.square().sum() + y2.sin().sum(), [x, *chain.parameters()])
    assert same(random_streams(), drawn)
    return list(wanted)


@pytest.mark.values
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("schedule", ["invert", "recompute", "selective", MIXED])
def test_dropout_repeats_the_devices_stream_and_leaves_it_as_it_was(schedule, compiled):
    chain = ReversibleChain(units(0.5)).double().to(DEVICE)
    if compiled:
        pytest.importorskip("triton")
        for step in chain.steps:
            step.compile()
    expected = gradients(chain, "store")
    for grad, right in zip(gradients(chain, schedule), expected, strict=True):
        assert (grad - right).norm() <= 1e-12 * right.norm()


def model_gradients(model: revzoo.Model, x: Tensor, schedule: object, fp16: bool = False) -> list[Tensor]:
    model.schedule = schedule
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast(DEVICE, torch.float16, enabled=fp16):
        logits = model(x)
    F.cross_entropy(logits.float(), torch.arange(len(x), device=DEVICE) % 10).mul(64).backward()  # fp16 needs some size
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize(("name", "bits"), [*((name, None) for name in FAMILIES), *(("rev_vit_digits", n) for n in (8, 3, 0))])
def test_exact_gradients_are_bit_identical(name, bits, fp16):
    coupling = [] if bits is None else [f"block.coupling={{type: momentum, gain: 1.0, kept_bits: {bits}}}"]
    overrides = ["block.drop_path.max=0.2", *coupling]
    model = revzoo.create(name, exact=bits is None, overrides=overrides, device=DEVICE)
    x = model.example_input(16)
    expected = model_gradients(model, x, "store", fp16)
    assert all(grad.isfinite().all() and grad.any() for grad in expected)
    for schedule in ("invert", "recompute", ["selective"] * len(model.units)):
        assert same(model_gradients(model, x, schedule, fp16), expected)


def make_exact() -> tuple[ReversibleChain, Callable[[], Tensor]]:
    chain = ReversibleChain([nn.Linear(64, 64) for _ in range(4)], exact=True).to(DEVICE)
    streams = [torch.randn(8, 64, device=DEVICE).requires_grad_() for _ in range(2)]

    def run() -> Tensor:
        y1, y2 = chain(*streams)
        return y1.sum() + y2.sum()

    return chain, run


def test_exact_arithmetic_waits_for_nothing(forbid_waiting):
    _, run = make_exact()
    run().backward()
    with forbid_waiting():
        run().backward()


@pytest.mark.values
def test_exact_arithmetic_raises_in_backward():
    chain, run = make_exact()
    run().backward()
    with torch.no_grad():
        chain.steps[2].bias.fill_(1e4)
    loss = run()
    with pytest.raises(RecoveryError, match=r"states below 256 in magnitude. Received: .* after steps\.2\."):
        loss.backward()


@pytest.mark.values
@pytest.mark.parametrize("name", FAMILIES)
def test_fp16_with_a_loss_scaler_trains_as_the_stored_run_does(name):
    """The first scale overflows, so that one step is skipped; the second is taken."""
    expected, dtypes = train_scaled(name, "store")
    assert dtypes == {torch.float16}
    weights, dtypes = train_scaled(name, "invert")
    assert dtypes == {torch.float16}  # in both runs of f; the streams are float32
    assert same(weights, expected)


def train_scaled(name: str, schedule: str) -> tuple[list[Tensor], set[torch.dtype]]:
    """Return the weights after two steps, and the dtypes that came out of the layers inside reversible steps."""
    torch.manual_seed(2)
    model = revzoo.create(name, schedule=schedule, exact=True, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**40, backoff_factor=2.0**-32)
    images, labels = model.example_input(16), torch.arange(16, device=DEVICE) % 10
    dtypes: set[torch.dtype] = set()
    for layer in (m for step in model.steps for m in step.modules() if isinstance(m, nn.Linear | nn.Conv2d)):
        layer.register_forward_hook(lambda _, inputs, out: dtypes.add(out.dtype))
    before = [p.detach().clone() for p in model.parameters()]
    for taken in (False, True):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**8
        assert same(list(model.parameters()), before) != taken
    return [p.detach() for p in model.parameters()], dtypes


class Counting(nn.Module):
    """A step whose output depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(32, 32), 0

    def forward(self, w: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(w / self.calls).tanh()


@pytest.mark.values
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("schedule", ["invert", "recompute", "selective"])
def test_the_tripwire_names_the_step_in_the_same_backward(schedule, exact):
    chain = ReversibleChain([*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)), Counting()], exact=exact)
    chain.to(DEVICE).schedule = schedule
    y1, y2 = chain(*torch.randn(2, 64, 32, device=DEVICE).unbind())
    with pytest.raises(RecoveryError, match=r"^steps\.3 ran differently the second time"):
        (y1 * y2).sum().backward()


@pytest.mark.values
def test_offloaded_weights_are_checked_beside_buffers_on_the_device():
    buffers = {"mean": torch.ones(2).to(DEVICE), "var": torch.tensor([torch.nan]).to(DEVICE)}
    assert find_not_finite({"weight": torch.tensor([1.0, torch.inf]), **buffers}) == ["weight", "var"]
