"""Bytes per pixel: each term by hand, and their sum against the count of all bytes in every family of images."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import revzoo
from benchmarks.pixel_terms import Peak, PixelUnit, bytes_per_pixel, count_step
from revzoo.analysis.dry_run import isolated
from revzoo.analysis.twin import build_twin
from revzoo.errors import InputError
from revzoo.runtime import InvertibleLeakyReLU, LayerChain

MODELS = [  # every family of images, and every mode
    ("irevnet_digits", ["stages.0.depth=1", "stages.1.depth=1"], "invert"),
    ("revnet_digits", [f"stages.{i}.depth=1" for i in range(3)], "selective"),
    ("rev_vit_digits", ["stages.0.depth=1"], "invert"),
    ("rev_swin_digits", [], "recompute"),
    ("rev_mvit_digits", ["stages.1.depth=1"], "invert"),
    ("revnext_digits", ["stages.1.depth=1"], "invert"),
    ("layerwise_digits", ["stages.1.depth=1"], "store"),
]
B, SIZE = 2, 6
CHANNEL = B * SIZE * SIZE * 4  # bytes of one channel
LOSS = 8  # bytes of the loss and of its gradient
WEIGHTS = 4 * (8 + 8 + 8 * 8 + 8)


@pytest.fixture
def images() -> Tensor:
    return torch.empty(B, 1, SIZE, SIZE, device="meta")


def convolutions(*between: nn.Module) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(nn.Conv2d(1, 8, 1), *between, nn.Conv2d(8, 8, 1))


def terms(peak: Peak) -> tuple[int, ...]:
    """Return z, g and temporaries in channels. The loss and its gradient, 4 bytes each, are left out."""
    channels = [divmod(each, CHANNEL) for each in terms_of(peak)]
    assert sum(rest for _, rest in channels) in (0, 4, 8)
    return tuple(number for number, _ in channels)


def terms_of(peak: Peak) -> tuple[int, int, int]:
    return peak.hidden_bytes, peak.gradient_bytes, peak.temporary_bytes


class Sums(nn.Module):
    """Keeps nothing for backward."""

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * x
        left, right = y + 1, y + 2
        return left + right


def test_stored_activations_by_hand(images):
    report = bytes_per_pixel(convolutions(nn.ReLU()), images)
    assert {name: (peak.phase, terms(peak)) for name, peak in report.stages.items()} == {
        "0": ("forward", (0, 0, 8)),  # its output, which nobody keeps
        "1": ("backward", (8, 16, 0)),  # the output of ReLU, and the gradients of it and of its input
        "2": ("backward", (8, 16, 0)),
    }
    assert (report.peak_stage, report.counted_bytes) == ("1", 24 * CHANNEL + LOSS)
    assert (report.bytes_per_pixel, report.weight_bytes) == (24 * 4 + LOSS / report.pixels, WEIGHTS)
    assert (report.pixels, report.images, report.size) == (B * SIZE * SIZE, B, (SIZE, SIZE))
    squared = bytes_per_pixel(convolutions(nn.ReLU()), images, loss=lambda y: y.square().sum())
    assert terms(squared.stages["2"]) == (16, 8, 16)  # it also keeps the last output, from which it makes the gradient


def test_temporaries_by_hand(images):
    report = bytes_per_pixel(convolutions(nn.ReLU(), Sums(), Sums()), images)
    assert terms(report.stages["2"]) == (8, 0, 32)  # ReLU's output, and four sums
    assert report.stages["2"].phase == "forward"
    assert terms(report.stages["4"]) == (16, 16, 0)  # and the input of the last convolution


def test_rebuilt_activations_by_hand(images):
    """An inverted layer keeps its output alone, and rebuilds its input: the hook that watches it may not stop that."""
    chain = LayerChain(InvertibleLeakyReLU(), InvertibleLeakyReLU(), InvertibleLeakyReLU())
    report = bytes_per_pixel(convolutions(chain), images)
    assert terms(report.stages["1"]) == (8, 8, 8)  # a state, its gradient, and what is made of it
    assert report.counted_bytes == 24 * CHANNEL + LOSS
    assert report.counted_bytes == revzoo.measure_memory(convolutions(chain), images).activation_bytes
    assert report.stages["1"].unit == "1"
    chain.schedule = "store"
    assert terms(bytes_per_pixel(convolutions(chain), images).stages["1"]) == (24, 16, 0)


@pytest.mark.parametrize(("name", "overrides", "mode"), MODELS)
def test_the_terms_add_up_to_the_count(name, overrides, mode):
    model = revzoo.create(name, overrides=overrides, schedule=mode, device="meta")
    batch = model.example_input(2)
    report = bytes_per_pixel(model, batch)
    counted = revzoo.measure_memory(model, batch).activation_bytes
    assert report.counted_bytes == report.stages[report.peak_stage].total_bytes == counted
    stages = [f"stages.{i}" for i in range(len(model.spec.stages))]
    fuse = [] if model.spec.fuse.type == "none" else ["fuse"]  # which does nothing
    assert list(report.stages) == ["stem", *stages, *fuse, "head"]
    assert {peak.unit for peak in report.stages.values()} <= {*model.units, "split"}
    assert not torch_module._global_forward_pre_hooks


def test_the_terms_of_a_twin_add_up_to_the_count():
    spec = revzoo.load_spec("revnet_38", overrides=["input.size=[16,16]"])
    twin, batch = build_twin(spec), torch.empty(2, 3, 16, 16, device="meta")
    report = bytes_per_pixel(twin, batch)
    assert report.counted_bytes == report.stages[report.peak_stage].total_bytes
    assert report.counted_bytes == revzoo.measure_memory(twin, batch).activation_bytes
    assert list(report.stages) == ["stem", "blocks", "norm", "linear"]
    assert report.stages["blocks"].unit == "blocks.14"  # the last, where the most is kept


@pytest.mark.parametrize("name", ["layerwise_digits", "irevnet_digits"])
def test_every_unit_is_seen_in_forward(name):
    """Also a layer that is called by another method than `forward`, and one that is called in two parts."""
    model = revzoo.create(name)
    units = [PixelUnit(entry.name, entry.module, entry.name) for entry in model.layout() if entry.is_unit]
    with isolated(model, model.example_input(2), fake=True) as batch:
        log, lasting = count_step(model, batch, units)
    assert list(log.find_peaks(lasting)) == list(model.units)


def test_values_that_a_later_node_rebuilds_from_are_hidden_activations():
    """After forward a chain of inverted steps has one pair of streams, and nothing else."""
    model = revzoo.create("rev_vit_digits", device="meta")
    fuse = bytes_per_pixel(model, model.example_input(1)).stages["fuse"]
    pair, statistics = 2 * 16 * 64 * 4, 2 * 16 * 4  # of 16 patches of 64 channels
    assert fuse.phase == "backward"
    assert fuse.hidden_bytes == 2 * pair + statistics  # the pair, and the norm's input, which is both of them joined


def test_a_name_is_enough():
    report = bytes_per_pixel("rev_vit_digits")
    assert (report.images, report.size) == (32, (8, 8))
    _, heads, *lines = str(report).splitlines()
    assert [line.split()[0] for line in (heads, *lines)] == ["stage", "stem", "stages.0", "fuse", "head"]
    assert [float(line.split()[4]) for line in lines[2:]] == pytest.approx([514.0, 394.6])
    row = report.to_dict()
    assert (row["bytes_per_pixel"], row["peak_stage"]) == (report.bytes_per_pixel, "stages.0")


def test_a_single_module_is_its_own_stage(images):
    report = bytes_per_pixel(nn.Conv2d(1, 4, 1, device="meta"), images)
    assert list(report.stages) == ["Conv2d"]
    assert report.counted_bytes == 4 * CHANNEL + LOSS


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        ("rev_bert_mini", None, r"those of images \(B, C, H, W\).*Received: \(32, 64\), torch.int64.*measure_memory"),
        (nn.Conv2d(1, 4, 1), None, r"A Conv2d has no spec that says the size.*torch\.empty\(32, 3, 240, 240"),
        (nn.Conv2d(1, 4, 1), torch.empty(1, 6, 6), r"Received: \(1, 6, 6\)"),
        (nn.ReLU(), torch.empty(2, 1, 6, 6), "No parameter"),
    ],
)
def test_what_has_no_pixels_is_refused(model, batch, message):
    with pytest.raises(InputError, match=message):
        bytes_per_pixel(model, batch)
