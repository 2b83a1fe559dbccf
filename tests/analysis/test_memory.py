"""`measure_memory` and `measure_modes`: right to the byte, and without a trace."""

import random

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import revzoo
from revzoo.analysis.fake_tensors import FakeMode
from revzoo.analysis.optimizer_step import count_optimizer
from revzoo.analysis.step_memory import measure_modes
from revzoo.errors import InputError, MissingValueError
from revzoo.runtime import LiveBytes, ReversibleChain
from revzoo.training.optimizer import make_optimizer

A = 512 * 256 * 4  # one activation of the perceptron
W = 256 * 256 * 4


def mlp(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Fork(nn.Module):
    """Take a batch in any form and return outputs in nested ones, some of them without a gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x, extra=None):
        y = self.linear(x if extra is None else x + extra)
        return {"y": y, "more": [y.argmax(), (x, None)]}


def test_perceptron_to_the_byte(perceptron):
    report = revzoo.measure_memory(perceptron, torch.randn(512, 256))
    # Kept: the ReLU's output and the loss. Peak: the ReLU's output and the gradients before and after it; the loss and
    # its gradient are scalars. Unlike y.sum(), the loss has a gradient of its own, which is gone by then.
    assert report.to_dict() == {
        "peak_bytes": 2 * W + A + 3 * A + W + 8,
        "activation_bytes": 3 * A + 8,
        "after_forward_bytes": A + 4,
        "weight_bytes": 2 * W,
        "buffer_bytes": 0,
        "gradient_bytes": 2 * W,
        "optimizer_bytes": 0,
        "update_bytes": 0,
        "batch_bytes": A,
        "other_bytes": None,
        "allocator_peak_bytes": None,
        "allocator_reserved_bytes": None,
    }


def test_the_gradient_of_the_outputs_is_counted():
    model = nn.Linear(256, 1024, bias=False)
    report = revzoo.measure_memory(model, torch.randn(512, 256))
    y = 512 * 1024 * 4
    # The outputs are let go before backward, and their gradient comes then: one of the two is alive at any time.
    assert report.activation_bytes == y + 8
    # This loss keeps the outputs; at the peak of its backward there are their first power, twice that, and the gradient, too.
    assert revzoo.measure_memory(model, torch.randn(512, 256), loss=lambda y: y.square().sum()).activation_bytes == 4 * y + 8
    with pytest.raises(InputError, match=r"A loss is one number with a gradient. Received: a tensor of shape \(512, 1024\)"):
        revzoo.measure_memory(model, torch.randn(512, 256), loss=lambda y: y)


@pytest.mark.parametrize("mode", ["store", "selective", "recompute", "invert"])
def test_fake_meta_and_real_parameters_give_one_report(mode):
    def chain() -> ReversibleChain:
        chain = ReversibleChain([mlp() for _ in range(3)])
        chain.schedule = mode
        return chain

    x = tuple(torch.randn(2, 5, 9, 16).unbind())
    real = revzoo.measure_memory(chain(), x)
    with torch.device("meta"):
        assert revzoo.measure_memory(chain(), x) == real
        assert revzoo.measure_memory(chain(), tuple(torch.randn(2, 5, 9, 16).unbind())) == real
    with FakeTensorMode():
        fake = chain(), tuple(torch.randn(5, 9, 16) for _ in range(2))
    assert revzoo.measure_memory(*fake).to_dict() | {"batch_bytes": real.batch_bytes} == real.to_dict()


def test_frozen_and_tied_parameters_count_once(perceptron):
    perceptron[2].weight = perceptron[0].weight
    report = revzoo.measure_memory(perceptron, torch.randn(512, 256))
    assert (report.weight_bytes, report.gradient_bytes) == (W, W)
    untied = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    untied[0].requires_grad_(False)
    report = revzoo.measure_memory(untied, torch.randn(512, 256))
    assert (report.weight_bytes, report.gradient_bytes) == (2 * W, W)


@pytest.mark.parametrize(("training", "fake"), [(True, False), (False, True)])
def test_the_model_is_left_as_found(convolutions, training, fake):
    convolutions.train(training)
    convolutions[0].weight.grad = torch.full_like(convolutions[0].weight, 7.0)
    x = torch.randn(5, 3, 6, 6, requires_grad=True)
    grads = {name: p.grad for name, p in convolutions.named_parameters()}
    tensors = {name: (id(t), t._version, t.clone()) for name, t in convolutions.state_dict(keep_vars=True).items()}
    random = torch.get_rng_state()
    (measure_modes if fake else revzoo.measure_memory)(convolutions, x)
    after = convolutions.state_dict(keep_vars=True)
    assert tensors.keys() == after.keys()
    for name, (identity, version, value) in tensors.items():
        assert (id(after[name]), after[name]._version) == (identity, version)
        assert torch.equal(after[name], value)
    assert all(p.grad is grads[name] for name, p in convolutions.named_parameters())
    assert torch.equal(convolutions[0].weight.grad, torch.full_like(convolutions[0].weight, 7.0))
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), random)
    assert convolutions.training is training


def test_an_error_inside_the_model_leaves_it_as_found(convolutions):
    mean = convolutions[1].running_mean
    convolutions[5] = nn.Linear(1, 1)  # does not fit
    random = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        revzoo.measure_memory(convolutions, torch.zeros(5, 3, 6, 6))
    assert convolutions[1].running_mean is mean
    assert torch.equal(mean, torch.zeros(8))
    assert torch.equal(torch.get_rng_state(), random)


def test_generators_of_a_model_are_where_they_were():
    """The noise of its next step is the one that it would have drawn, also from streams within an object of its own."""

    class Noise(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.streams = {"torch": torch.Generator(), "rest": [random.Random(1), numpy.random.default_rng(2)]}

        def forward(self, x):
            y = super().forward(x) + torch.rand(4, generator=self.streams["torch"])
            return y * (self.streams["rest"][0].random() + self.streams["rest"][1].random())

    model, untouched = Noise(), Noise()
    untouched.load_state_dict(model.state_dict())
    revzoo.measure_memory(model, torch.ones(2, 4))
    assert torch.equal(model(torch.ones(2, 4)), untouched(torch.ones(2, 4)))


def test_batches_of_every_form_and_nested_outputs():
    model, x = Fork(), torch.randn(3, 4)
    reports = [revzoo.measure_memory(model, batch) for batch in (x, (x,), [x], {"x": x}, {"x": x, "extra": None})]
    assert len(set(reports)) == 1
    assert reports[0].batch_bytes == 48
    assert revzoo.measure_memory(model, (x, torch.randn(3, 4))).batch_bytes == 96


@pytest.mark.parametrize(
    ("make", "bytes_per_weight", "bytes_per_tensor", "update"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4, 0, 0),
        (lambda p: torch.optim.AdamW(p, amsgrad=True, foreach=False), 12, 4, 2 * 4 * 128),
    ],
)
def test_optimizer_state_is_predicted_and_then_counted(make, bytes_per_weight, bytes_per_tensor, update):
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 3)).requires_grad_()
    model[0].bias.requires_grad_(False)
    optimizer, x = make(model.parameters()), torch.randn(2, 16)
    expected = bytes_per_weight * (128 + 24 + 3) + bytes_per_tensor * 3
    predicted = revzoo.measure_memory(model, x, optimizer)
    assert predicted.optimizer_bytes == expected
    assert not optimizer.state
    before = revzoo.measure_memory(model, x)
    left = before.weight_bytes + before.gradient_bytes + before.batch_bytes + 4  # with the loss
    assert predicted.update_bytes == update
    assert predicted.peak_bytes == max(before.peak_bytes, left + update) + expected
    model(x).sum().backward()
    optimizer.step()
    assert revzoo.measure_memory(model, x, optimizer).optimizer_bytes == expected


@pytest.mark.parametrize(
    ("opt", "settings", "copies"),
    [
        ("adamw", {"foreach": True}, "1 of all"),
        ("adamw", {"fused": True}, "none"),
        ("adamw", {}, "2 of the largest"),
        ("radamw", {"foreach": True}, "1 of all"),
        ("muon", {}, "values"),
    ],
)
def test_what_an_update_takes(opt, settings, copies):
    """Foretold without values, and counted in real updates, of which the sixth of RAdam is the first to take most."""
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 16, bias=False), nn.Linear(16, 16, bias=False))
    optimizer = make_optimizer(model, opt, lr=0.1, weight_decay=0.0, **settings)
    taken = count_optimizer(model, optimizer)
    all_bytes, live, most = sum(p.nbytes for p in model.parameters()), LiveBytes(), 0
    live.watch(model.parameters())
    for _ in range(8):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        live.watch([p.grad for p in model.parameters()])
        start = live.now()
        with live:
            optimizer.step()
        most = max(most, live.peak(since=start) - live.alive())
    assert taken.update == most
    expected = {"none": 0, "1 of all": all_bytes, "2 of the largest": 2 * 4 * 64 * 32}
    assert most == expected.get(copies, most)
    assert most > 0 or copies == "none"
    assert taken.state == count_optimizer(model, optimizer).state == state_bytes(optimizer)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    live = LiveBytes()
    return live.size(live.watch(optimizer.state.values()))


def test_on_a_gpu_foreach_is_counted_unless_it_is_turned_off():
    """Without values, so without a GPU."""
    with FakeTensorMode(), torch.device("cuda"):
        model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 16, bias=False))
    weights = 4 * (64 * 32 + 32 * 16)
    assert count_optimizer(model, torch.optim.AdamW(model.parameters())).update == weights
    assert count_optimizer(model, torch.optim.AdamW(model.parameters(), foreach=False)).update == 2 * 4 * 64 * 32
    assert count_optimizer(model, torch.optim.AdamW(model.parameters(), fused=True)).update == 0


def test_an_optimizer_that_cannot_be_predicted_is_refused():
    model = nn.Linear(4, 4)
    with pytest.raises(InputError, match=r"state of LBFGS cannot be predicted .* Measure without the optimizer"):
        revzoo.measure_memory(model, torch.randn(2, 4), torch.optim.LBFGS(model.parameters()))


class Valued(nn.Linear):
    """Compute by the value of its input."""

    def forward(self, x):
        return super().forward(x) if x.mean().item() < 1 else x


def test_a_model_that_asks_for_a_value_is_counted_only_with_values():
    x = torch.zeros(2, 4)
    assert revzoo.measure_memory(Valued(4, 4), x).batch_bytes == 32
    for measure, model in ((measure_modes, Valued(4, 4)), (revzoo.measure_memory, Valued(4, 4, device="meta"))):
        with pytest.raises(MissingValueError, match="without values. Received: a value that the model .Valued. asks"):
            measure(model, x if measure is measure_modes else x.to("meta"))


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (nn.Linear(4, 4), None, "at least one tensor. Received: NoneType"),
        (nn.Linear(4, 4), torch.zeros(0, 4), r"at least one example. Received: \[\(0, 4\)\]"),
        (nn.Linear(4, 4), torch.zeros(2, 4, device="meta"), "Received: a meta or fake batch"),
        (torch.relu, torch.zeros(2), "must be a torch.nn.Module. Received: builtin_function_or_method"),
        (nn.Sequential(nn.LazyLinear(2)), torch.zeros(2, 3), "0.weight has no shape yet. Call the model once"),
        (nn.Embedding(4, 4).requires_grad_(False), torch.tensor([1]), "No parameter of the model requires a gradient"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, batch, message):
    with pytest.raises(InputError, match=message):
        revzoo.measure_memory(model, batch)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("adam", "must be a torch.optim.Optimizer. Received: str"),
        (torch.optim.SGD(nn.Linear(4, 4).parameters()), "parameters that are not the model's"),
    ],
)
def test_an_optimizer_of_something_else_is_refused(optimizer, message):
    with pytest.raises(InputError, match=message):
        revzoo.measure_memory(nn.Linear(4, 4), torch.zeros(2, 4), optimizer)


def test_an_output_without_gradient_is_refused():
    class Detached(nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    with pytest.raises(InputError, match="No output of the model depends on a parameter"):
        revzoo.measure_memory(Detached(4, 4), torch.zeros(2, 4))


def test_every_mode_is_measured_and_the_schedule_restored():
    chain = ReversibleChain([mlp() for _ in range(2)])
    x, optimizer = tuple(torch.randn(2, 5, 9, 16).unbind()), torch.optim.AdamW(chain.parameters())
    reports, current = measure_modes(chain, x, optimizer)
    assert current == "invert"
    for mode, report in reports.items():
        chain.schedule = mode
        assert report == revzoo.measure_memory(chain, x, optimizer)
    assert list(reports) == ["store", "selective", "recompute", "invert"]
    mixed = ["store", "invert"]
    chain.schedule = mixed
    assert measure_modes(chain, x)[1] is None
    assert chain.schedule == mixed


def test_measuring_modes_allocates_nothing():
    with torch.device("meta"):
        chain = ReversibleChain([mlp(4096) for _ in range(4)])
    reports, _ = measure_modes(chain, [torch.empty(64, 4096, device="meta") for _ in range(2)])
    assert reports["store"].weight_bytes == 4 * (2 * 4 * 4096**2 + (2 + 4 + 1) * 4096) * 4


@pytest.mark.parametrize("name", ["rev_vit_digits", "revnet_digits"])
def test_autocast_and_half_precision_count_alike_without_values(name):
    overrides = [f"stages.{i}.depth=1" for i in range(len(revzoo.load_spec(name).stages))]
    model, on_meta = (revzoo.create(name, overrides=overrides, device=device) for device in ("cpu", "meta"))
    x = model.example_input(64)
    full = revzoo.measure_memory(on_meta, x)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = revzoo.measure_memory(on_meta, x)
        assert revzoo.measure_memory(model, x).activation_bytes == mixed.activation_bytes
    assert mixed.weight_bytes == full.weight_bytes
    assert mixed.activation_bytes < full.activation_bytes
    half = revzoo.measure_memory(on_meta.bfloat16(), x.bfloat16())
    assert half.weight_bytes * 2 == full.weight_bytes
    assert half.activation_bytes < full.activation_bytes


def test_buffers_of_a_shared_storage_are_not_copied_larger():
    class Positions(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("positions", torch.arange(1).expand(1000))

    assert revzoo.measure_memory(Positions(), torch.zeros(2, 4)).buffer_bytes == 8


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.detach(),
        lambda x: x.view(2, 12),
        lambda x: torch.ops.aten._unsafe_view(x, (2, 12)),
        lambda x: x[0].t(),
        lambda x: x.transpose(0, 2),
        lambda x: x.permute(2, 0, 1),
        lambda x: x[:, :1].expand(2, 5, 4),
        lambda x: x[:, 1:, ::2],
        lambda x: x.select(1, 2).unsqueeze(0),
        lambda x: x.unbind(1)[-1],
        lambda x: x.split(2, -1)[1],
    ],
)
def test_views_without_values_are_like_others(look):
    real = torch.empty(2, 3, 4)
    expected = look(real)
    with FakeMode() as mode:
        x = mode.from_tensor(real)
        view = look(x)
    assert (type(view), view.fake_mode, view.device) == (FakeTensor, mode, real.device)
    assert (view.shape, view.stride(), view.storage_offset()) == (expected.shape, expected.stride(), expected.storage_offset())
    assert view.untyped_storage() is x.untyped_storage()
