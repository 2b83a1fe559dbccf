"""Noise in rebuilt activations: measured where it is known, against the formulas of the layers, and without a trace."""

import json
import math

import pytest
import torch
from torch import nn

import revzoo
from benchmarks.layer_alpha import measure_alpha
from revzoo.analysis.numerics import measure_angle
from revzoo.errors import InputError
from revzoo.runtime import Coupled, CoupledConv2d, InvertibleBatchNorm2d, InvertibleLeakyReLU, LayerChain, ReversibleChain


def images(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype)


def unit(width, slope=0.2):
    return [CoupledConv2d(width), InvertibleBatchNorm2d(width), InvertibleLeakyReLU(slope)]


class Off(nn.Module):
    """A layer whose inverse is wrong by a tenth of the input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x):
        return x * self.weight

    def inverse(self, y):
        return y / self.weight * 1.1


def test_alpha_of_leaky_relu_depends_on_how_much_is_negative():
    """The general formula of `docs/numerics.md`; the paper's is for halves."""
    x, n = images(8, 16, 32, 32).exp() - 1.5, 0.2
    q, square = (x < 0).double().mean(), x.square()
    Q = square[x < 0].sum() / square.sum()
    assert q > 0.6 > 0.2 > Q
    general = 1 / float((1 - q + q / n**2) * (1 - Q + Q * n**2))
    measured, formula = measure_alpha(InvertibleLeakyReLU(n), x)
    assert formula == pytest.approx(general, rel=1e-6)
    assert measured == pytest.approx(formula, rel=0.02)
    assert measured < 0.7 * 4 / ((1 + n**2) * (1 + 1 / n**2))


def test_alpha_of_batch_norm_with_scales_variances_and_means_of_its_own():
    """The formula of the paper's text holds for centred channels of one variance, the one of its appendix for all."""
    norm, centred = InvertibleBatchNorm2d(6), images(8, 6, 32, 32)
    norm.weight.data.copy_(torch.tensor([3.0, 1.0, 0.3, 1.0, 2.0, 0.1]))
    scale = (norm.weight.abs() + norm.eps_i).detach().square()
    simple = 1 / float(scale.mean() * (1 / scale).mean())
    assert measure_alpha(norm, centred) == (pytest.approx(simple, rel=0.05), pytest.approx(simple, rel=0.05))
    spread = centred / norm.weight.detach().view(1, 6, 1, 1)
    for x, bias in ((spread, 0.0), (centred, 1.0), (spread + images(1, 6, 1, 1), 1.0)):
        nn.init.constant_(norm.bias, bias)
        measured, formula = measure_alpha(norm, x)
        assert measured == pytest.approx(formula, rel=0.05)
        assert measured != pytest.approx(simple, rel=0.1)


def test_alpha_of_a_coupling_that_does_nothing_is_one_and_of_a_growing_one_what_it_amplifies():
    x = images(8, 4, 16, 16)
    zero = CoupledConv2d(4)
    for p in zero.parameters():
        p.data.zero_()
    assert measure_alpha(zero, x) == (pytest.approx(1, rel=1e-9), None)
    # y1 = x1 + 3 x2, y2 = x2, so the variances are 10 and 1, and those of the errors after and before the layer the same.
    triple = nn.Conv2d(2, 2, 1, bias=False)
    triple.weight.data.copy_(3 * torch.eye(2).view(2, 2, 1, 1))
    nothing = nn.Conv2d(2, 2, 1, bias=False)
    nothing.weight.data.zero_()
    measured, _ = measure_alpha(Coupled(triple, nothing), x)
    assert measured == pytest.approx((2 / 11) * (2 / 11), rel=0.05)


def test_an_error_of_known_size_is_found_where_it_is():
    chain = LayerChain(InvertibleLeakyReLU(0.5), Off(), InvertibleLeakyReLU(0.5))
    report = revzoo.measure_numerics(chain, images(4, 8))
    assert [state.name for state in report.states] == ["1", "2"]  # nothing needs the input of the first layer
    assert all(state.of_layer for state in report.states)
    off, last = report.states
    assert off.snr == pytest.approx(100, rel=1e-6)
    assert last.snr > 1e28  # float64
    assert report.worst is off


def test_states_of_steps_and_of_the_layers_inside_them():
    chain = ReversibleChain([nn.Sequential(*unit(4)) for _ in range(3)])
    report = revzoo.measure_numerics(chain, tuple(images(2, 8, 4, 8, 8, dtype=torch.float32)))
    inside = ["0.g", "1", "2"]
    expected = [f"steps.{i}.{name}" for i in range(3) for name in inside]
    for i in (1, 2):  # the input of the first step is not needed
        expected.insert(expected.index(f"steps.{i}.2") + 1, f"steps.{i}")
    assert [state.name for state in report.states] == expected
    assert [state.name for state in report.states if not state.of_layer] == ["steps.1", "steps.2"]
    assert all(1e9 < state.snr < 1e20 for state in report.states)
    for state in report.states:  # within what rounding to single digits explains
        assert state.predicted_snr / 30 < state.snr
    assert 0 < report.angle < 1e-3


def test_layers_in_a_row_amplify_what_their_alphas_predict():
    chain = LayerChain(*(InvertibleLeakyReLU(0.1) if i % 2 else nn.Sequential(*unit(8)[:2]) for i in range(12)))
    report = revzoo.measure_numerics(chain, images(8, 8, 16, 16, dtype=torch.float32))
    assert report.worst.name == "0.0.g"
    assert report.worst.snr < report.states[-1].snr / 1e5
    assert 30 < report.worst.snr / report.worst.predicted_snr < 150  # the error is a tenth of what is predicted


@pytest.mark.parametrize(
    ("slope", "eps_i", "depth", "dtype"),
    [(0.05, 1e-4, 5, torch.float64), (0.1, 0.1, 6, torch.float32), (0.5, 0.1, 14, torch.float32)],
)
def test_the_predicted_noise_is_no_smaller_than_the_measured_and_not_much_larger(slope, eps_i, depth, dtype):
    """At depths where noise has grown by three digits and more; the tripwire allows 32 times the prediction."""
    units = [(CoupledConv2d(8), InvertibleBatchNorm2d(8, eps_i), InvertibleLeakyReLU(slope)) for _ in range(depth)]
    chain = LayerChain(*(layer for unit in units for layer in unit)).to(dtype)
    report = revzoo.measure_numerics(chain, images(4, 8, 8, 8, dtype=dtype))
    ratios = [math.sqrt(state.snr / state.predicted_snr) for state in report.states if state.noise]
    assert len(ratios) > 3 * depth
    assert 1 < min(ratios) <= max(ratios) < 100
    assert report.worst.predicted_snr * torch.finfo(dtype).eps ** 2 < 1e-6


def test_noise_as_large_as_the_signal_is_measured_without_a_warning_or_an_error():
    chain = LayerChain(*(layer for _ in range(10) for layer in unit(4, slope=0.02)))
    report = revzoo.measure_numerics(chain, images(4, 4, 8, 8, dtype=torch.float32))
    assert report.worst.snr < 10
    assert report.worst.predicted_snr < 10
    assert not report.angle < 0.1


def test_what_is_stored_or_kept_is_not_rebuilt():
    chain = LayerChain(*unit(4))
    chain.schedule = "recompute"
    report = revzoo.measure_numerics(chain, images(2, 4, 4, 4, dtype=torch.float32))
    assert report.states == ()
    assert report.worst is None
    assert report.angle == 0
    assert str(report) == "Nothing was rebuilt: no step or layer of the schedule is inverted."
    assert chain.schedule == ["recompute"] * 3


@pytest.mark.parametrize("exact", [False, True])
def test_a_model_of_the_zoo(exact):
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=2"], exact=exact)
    batch = model.example_input(2)
    before, rng = {name: t.clone() for name, t in model.state_dict().items()}, torch.get_rng_state()
    report = revzoo.measure_numerics(model, batch)
    assert [state.name for state in report.states] == ["stages.0.blocks.0.g", "stages.0.blocks.1.f", "stages.0.blocks.1.g"]
    if exact:
        assert all(state.noise == 0 and state.snr == state.predicted_snr == math.inf for state in report.states)
        assert report.angle == 0
        assert str(report) == "3 states rebuilt, bit for bit."
    else:
        assert all(1e11 < state.snr < 1e17 for state in report.states)
        assert 0 < report.angle < 1e-3
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.schedule.count("invert") == 4


def test_precisions_in_the_order_of_their_noise():
    angles, model = {}, revzoo.create("rev_vit_digits", overrides=["stages.0.depth=2"])
    batch = model.example_input(4)
    angles["float32"] = revzoo.measure_numerics(model, batch).angle
    with torch.autocast("cpu", torch.bfloat16):
        angles["autocast"] = revzoo.measure_numerics(model, batch).angle
    angles["float64"] = revzoo.measure_numerics(model.double(), batch.double()).angle
    angles["bfloat16"] = revzoo.measure_numerics(model.bfloat16(), batch.bfloat16()).angle
    assert 0 < angles["float64"] < 1e-10 < angles["float32"] < 1e-3 < 1e-2 < angles["bfloat16"] < 20
    assert angles["autocast"] < angles["bfloat16"]


def test_angles():
    one, other = {"a": torch.tensor([1.0, 0.0]), "b": None}, {"a": torch.tensor([1.0, 1.0]), "b": None}
    assert measure_angle(one, other) == pytest.approx(45)
    assert measure_angle(one, {"a": torch.tensor([3.0, 0.0]), "b": None}) == 0
    assert measure_angle(one, {"a": torch.tensor([-2.0, 0.0]), "b": None}) == pytest.approx(180)
    assert measure_angle(one, {"a": torch.tensor([1.0, 1e-9]), "b": None}) == pytest.approx(math.degrees(1e-9))
    assert measure_angle(one, {"a": torch.zeros(2), "b": torch.tensor([4.0])}) == pytest.approx(90)
    assert math.isnan(measure_angle(one, {"a": torch.zeros(2), "b": None}))
    assert math.isnan(measure_angle(one, {"a": torch.tensor([math.inf, 0.0]), "b": None}))


def test_plain_data_has_no_infinite_numbers():
    model = revzoo.create("rev_vit_digits", overrides=["stages.0.depth=1"], exact=True)
    data = revzoo.measure_numerics(model, model.example_input(2)).to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["states"][0]["snr"] is data["states"][0]["predicted_snr"] is None
    assert data["states"][0]["noise"] == data["angle"] == 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), r"no revzoo\.Model, ReversibleChain or LayerChain in this Linear"),
        (LayerChain(nn.Linear(2, 2)).to("meta"), r"Received: meta or fake parameters"),
        (None, r"must be a torch\.nn\.Module\. Received: NoneType"),
    ],
)
def test_refusals(model, message):
    with pytest.raises(InputError, match=message):
        revzoo.measure_numerics(model, torch.randn(2, 2))
